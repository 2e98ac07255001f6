"""The CUDA kernels' own sources, run on the CPU shim, against numpy."""

import hashlib
import shutil

import numpy as np
import pytest

from mlx_stream.backends.kernels.grouped_cuda import (
    CudaActivation,
    Projection,
    build_tiles,
    cuda_activation,
    cuda_kernel_source,
    row_tile,
    why_not,
)
from mlx_stream.backends.kernels.source import load_kernel
from mlx_stream.storage.quant_spec import QuantSpec
from tests.backends.cuda.cases import TOLERANCE, Case, combine_case, down_case, mutated, up_case
from tests.kernel_shim.compiler import find_compiler

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="running kernels on the CPU needs clang >= 17"
)

SPECS = [
    QuantSpec("affine", 4, 32),
    QuantSpec("affine", 4, 64),
    QuantSpec("affine", 4, 128),
    QuantSpec("affine", 8, 32),
    QuantSpec("affine", 8, 64),
    QuantSpec("affine", 8, 128),
    QuantSpec("mxfp4", 4, 32),
]
A4, A8, FP4 = SPECS[1], SPECS[4], SPECS[6]
GATED = [
    CudaActivation(0, True),
    CudaActivation(1, True, limit=1.5),
    CudaActivation(2, True, limit=1.5),
    CudaActivation(3, True, limit=1.5, alpha=1.702),
    CudaActivation(4, True),
]
PLAIN = [CudaActivation(number, False) for number in (16, 17, 18, 19, 20, 21)]


def check(case: Case, dtype: str) -> None:
    error, findings = case.run()
    assert not findings, "\n".join(map(str, findings))
    assert error <= TOLERANCE[dtype]


def named(spec: QuantSpec) -> str:
    return f"{spec.mode}{spec.bits}g{spec.group_size}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS, ids=named)
def test_up(spec, dtype):
    """Experts with no row, one row, and one row more than a tile; n no multiple of a strip."""
    k = 160 if spec.group_size == 32 else 192 if spec.group_size == 64 else 256
    check(up_case(dtype, spec, k=k, n=72, counts=(0, 1, 17, 0, 16), tile=16), dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", [A4, A8, FP4], ids=named)
def test_down(spec, dtype):
    case = down_case(dtype, spec, k=192, n=152, counts=(3, 0, 33), tile=32, bias=spec is FP4)
    check(case, dtype)


@pytest.mark.parametrize("activation", GATED, ids=lambda a: str(a.number))
def test_gated_activations(activation):
    case = up_case(
        "float16", A4, k=64, n=72, counts=(5, 9), tile=16, activation=activation, bias=True
    )
    check(case, "float16")


@pytest.mark.parametrize("activation", PLAIN, ids=lambda a: str(a.number))
def test_plain_activations(activation):
    """The two-matrix form, one strip of columns beside the other."""
    case = up_case(
        "bfloat16", A4, k=64, n=136, counts=(5, 9), tile=16, activation=activation, bias=True
    )
    check(case, "bfloat16")


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 129])
def test_large_tiles(rows):
    check(up_case("bfloat16", FP4, k=96, n=64, counts=(rows, 2), tile=64), "bfloat16")


@pytest.mark.parametrize("k", [32, 64, 96, 128, 320])
def test_every_number_of_steps(k):
    """Fewer steps than buffers, as many, more, and a last one that is half full."""
    check(down_case("float16", FP4, k=k, n=8, counts=(4,), tile=16), "float16")
    check(down_case("float16", SPECS[3], k=k, n=8, counts=(4,), tile=16), "float16")


def test_many_experts():
    counts = np.zeros(512, int)
    counts[[0, 7, 255, 511]] = 1, 2, 3, 1
    check(up_case("float16", A4, k=64, n=8, counts=counts, tile=16), "float16")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("topk", "add"), [(1, False), (4, True), (10, True), (8, False)])
def test_combine(dtype, topk, add):
    check(combine_case(dtype, tokens=21, topk=topk, dims=40, add=add), dtype)


def test_results_do_not_depend_on_the_schedule():
    case = up_case("bfloat16", A4, k=128, n=72, counts=(20, 3), tile=16)
    errors = {case.run(order="shuffled", seed=seed)[0] for seed in range(3)}
    errors |= {case.run(order=order)[0] for order in ("fifo", "reverse")}
    assert len(errors) == 1


UP, DOWN = ("moe_up", A4), ("moe_down", A4)
BUGS = {
    "dropped barrier": (UP, "      __syncthreads();\n", "", "race"),
    "copy not waited for": (UP, "cp_async_wait<stages - 2>", "cp_async_wait<stages - 1>", "uninit"),
    "last buffer not filled": (
        UP,
        "const bool more = k + stages - 1 < steps;",
        "const bool more = k + stages < steps;",
        "values",
    ),
    "constants into the buffer in use": (
        UP,
        "store_constants(constants, cs + next * c_words)",
        "store_constants(constants, cs + now * c_words)",
        "race",
    ),
    "no row guard on store": (UP, "          if (r >= rows) continue;\n", "", "out-of-bounds"),
    "no row guard on load": (
        UP,
        "r < rows ? tokens[row0 + r] : -1",
        "tokens[row0 + r]",
        "out-of-bounds",
    ),
    "no column guard on store": (UP, "      if (col >= N) continue;\n", "", "out-of-bounds"),
    "no row guard on weights": (UP, "min(STRIP, N - first)", "STRIP", "out-of-bounds"),
    "wrong scale group": (UP, "+ k / GS;", "+ k / GS / 2;", "values"),
    "wrong expert offset": (UP, "size_t(e) * N + first", "size_t(e + 1) / 2 * N + first", "values"),
    "wrong x swizzle": (UP, "c = (4 * kk + t) ^ (r % 2 * 4)", "c = 4 * kk + t", "values"),
    "fragments paired wrongly": (
        UP,
        "a[1] = __byte_perm(x.x, x.z, 0x7632)",
        "a[1] = __byte_perm(x.x, x.z, 0x5432)",
        "values",
    ),
    "strips swapped": (UP, "upper ? strips[1].s : strips[0].s", "strips[0].s", "values"),
    "sign lost": (("moe_up", FP4), "(nibbles & 0x00080008u) << 12", "0u", "values"),
    "scale off by two": (("moe_up", FP4), "(scale) << 23", "(scale + 1u) << 23", "values"),
    "bytes swapped": (("moe_up", A8), "words.x : words.y", "words.y : words.x", "values"),
    "rows not put in their places": (
        DOWN,
        "size_t(places[row0 + r])",
        "size_t(row0 + r)",
        "values",
    ),
    "off-by-one tile": (
        DOWN,
        "row0 = tiles[4 * blockIdx.y + 1]",
        "row0 = tiles[4 * blockIdx.y + 1] + 1",
        "out-of-bounds",
    ),
    "second strip not moved": (DOWN, "col0 + STRIP * strip +", "col0 +", "unwritten"),
    "grid not guarded": (
        ("moe_combine", None),
        "if (i >= static_cast<long long>(places_shape[0]) * CHUNKS) return;",
        "",
        "out-of-bounds",
    ),
    "empty place not skipped": (
        ("moe_combine", None),
        "if (place < 0) continue;",
        "",
        "out-of-bounds",
    ),
}


def bug_case(kernel: str, spec: QuantSpec | None) -> Case:
    """The shapes of the tests above, small."""
    if kernel == "moe_combine":
        return combine_case("float16", tokens=21, topk=4, dims=40, add=True)
    make = up_case if kernel == "moe_up" else down_case
    return make("float16", spec, k=256, n=72, counts=(3, 0, 17), tile=16)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_caught(name):
    """By the checker, or by the values where the code is well-formed but wrong."""
    (kernel, spec), old, new, caught = BUGS[name]
    case = bug_case(kernel, spec)
    error, findings = case.run(mutated(kernel, old, new))
    if caught == "values":
        assert not error <= 5 * TOLERANCE["float16"]
    else:
        assert any(f.kind.startswith(caught) for f in findings), findings


def test_tiles_never_straddle_experts():
    counts = np.array([0, 5, 16, 17, 0, 40])
    for tile in (16, 32, 64):
        tiles = build_tiles(counts, tile)
        ends = np.cumsum(counts)
        rows = np.concatenate([np.arange(first, first + n) for _, first, n, _ in tiles])
        assert (rows == np.arange(counts.sum())).all(), "every row once, in order"
        assert all(0 < n <= tile for n in tiles[:, 2])
        assert all(
            ends[e] - counts[e] <= first and first + n <= ends[e] for e, first, n, _ in tiles
        )
    assert build_tiles(np.zeros(4, int), 16).shape == (0, 4)


def test_the_row_tile_follows_the_rows_an_expert_has():
    assert [row_tile(rows, 1) for rows in (0, 1, 24, 25, 48, 49, 1000)] == [
        16,
        16,
        16,
        32,
        32,
        64,
        64,
    ]


@pytest.mark.parametrize(
    ("dtype", "spec", "k", "n", "reason"),
    [
        ("float32", A4, 128, 64, "float32"),
        ("float16", QuantSpec("affine", 3, 64), 128, 64, "3-bit affine"),
        ("float16", QuantSpec("nvfp4", 4, 16), 128, 64, "nvfp4"),
        ("float16", QuantSpec("none", 16, 0), 128, 64, "none"),
        ("float16", A4, 96, 64, "multiple"),
        ("float16", A4, 128, 68, "multiple"),
        ("float16", A4, 128, 72, None),
        ("bfloat16", FP4, 2880, 2880, None),
    ],
)
def test_what_is_not_supported_has_a_reason(dtype, spec, k, n, reason):
    found = why_not(dtype, Projection(spec, k, n, False))
    assert found is None if reason is None else reason in found


def test_every_activation_of_mlx_lm_is_known_or_refused():
    import mlx.nn as nn
    from mlx_lm.models.activations import SwigluOAI
    from mlx_lm.models.switch_layers import SwiGLU

    assert cuda_activation(SwiGLU()) == CudaActivation(0, True)
    assert cuda_activation(SwigluOAI()) == CudaActivation(3, True, 7.0, 1.702)
    assert cuda_activation(nn.GELU(approx="precise")) == CudaActivation(16, False)
    assert cuda_activation(nn.ReLU2()) == CudaActivation(21, False)
    assert cuda_activation(nn.Softplus()) is None


def test_a_kernels_name_changes_with_its_text():
    """MLX keeps compiled kernels on disk; some versions look them up by name alone."""
    for name in ("moe_up", "moe_down", "moe_combine"):
        source = load_kernel(name, "cuda")
        digest = hashlib.sha256(f"{source.header}\0{source.body}".encode()).hexdigest()
        assert cuda_kernel_source(name).name == f"{name}_{digest[:10]}"


def test_a_kernel_compiles_for_a_gpu():
    from tools.build_cuda import MAIN, compile_variant, find_nvcc

    nvcc = find_nvcc()
    if nvcc is None or shutil.which(nvcc) is None:
        pytest.skip("no nvcc")
    usage = compile_variant(MAIN, "sm_90a", nvcc)
    assert usage.spill_nbytes == 0
    assert usage.shared_nbytes <= 48 << 10
    assert usage.registers <= 168, "three blocks of 128 threads must fit a multiprocessor"
