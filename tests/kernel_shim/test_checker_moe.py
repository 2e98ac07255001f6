"""Deliberate bugs in a whole kernel: the checker names each, whatever the values come to."""

import pytest

from . import needs_clang, run_on_cpu
from .support import edited, moe_case

pytestmark = needs_clang
SYNC = "threadgroup_barrier(mem_flags::mem_threadgroup);  // BARRIER_"
SIMD_SYNC = "simdgroup_barrier(mem_flags::mem_threadgroup);    // BARRIER_"

# (what is wrong, text, its replacement, kind of finding)
METAL_BUGS = [
    ("no barrier before staging", SYNC + "A", "", "race"),
    ("no barrier after staging", SYNC + "B", "", "race"),
    ("barrier orders no memory", SYNC + "B", "threadgroup_barrier(mem_flags::mem_none);", "race"),
    ("barrier orders device memory only", SYNC + "A",
     "threadgroup_barrier(mem_flags::mem_device);", "race"),
    ("simdgroup barrier for a threadgroup's", SYNC + "B",
     "simdgroup_barrier(mem_flags::mem_threadgroup);", "race"),
    ("no simdgroup barrier before reading", SIMD_SYNC + "C", "", "race"),
    ("no simdgroup barrier before the next", SIMD_SYNC + "D", "", "race"),
    ("simdgroup barrier orders no memory", SIMD_SYNC + "C",
     "simdgroup_barrier(mem_flags::mem_none);", "race"),
    ("row guard dropped on the store", "if (rr < rows) y", "y", "out-of-bounds"),
    ("row guard dropped on the load",
     "r < rows ? x[size_t(row0 + r) * K + k0 + c + i] : T(0)",
     "x[size_t(row0 + r) * K + k0 + c + i]", "out-of-bounds"),
    ("expert offset twice", "(size_t(e) * N + col0) * K / 8", "(size_t(e) * N * 2 + col0) * K / 8",
     "out-of-bounds"),
    ("row stride too small", "Ws[BN * LD]", "Ws[BN * BK]", "out-of-bounds"),
    ("half of X staged", "for (int i = 0; i < 8; i++)\n      Xs",
     "for (int i = 0; i < 7; i++)\n      Xs", "uninitialised"),
    ("barrier in divergent flow", SYNC + "B",
     "if (lid < 64) threadgroup_barrier(mem_flags::mem_threadgroup);", "divergence"),
    ("one thread returns early", "const int col0", "if (lid == 5) return; const int col0",
     "divergence"),
    ("seven lanes at a simdgroup barrier", "const int e = tile_expert",
     "if (lane < 7) simdgroup_barrier(mem_flags::mem_none); const int e = tile_expert",
     "divergence"),
    ("half a simdgroup multiplies", "multiply_tile<T, LD>(Xs, Ws, ga",
     "if (lane < 16) multiply_tile<T, LD>(Xs, Ws, ga", "divergence"),
    ("all tiles write column 0", "const int col0 = tg.x * BN;", "const int col0 = 0;",
     "double-write"),
    ("last row of a tile not written", "if (rr < rows) y", "if (rr < rows - 1) y", "unwritten"),
    ("too much threadgroup memory", "float Cs[4][64]", "float Cs[100][64]", "threadgroup-memory"),
    ("simdgroup's scratch shared", "Cs[sgi], 8", "Cs[0], 8", "race"),
]  # fmt: skip
CUDA_BUGS = [
    ("no barrier before staging", "__syncthreads();  // A", "", "race"),
    ("no barrier after staging", "__syncthreads();  // B", "", "race"),
    ("a warp's barrier for a block's", "__syncthreads();  // B", "__syncwarp();", "race"),
    ("no wait for cp.async", "cp_async_wait<0>();", "", "uninitialised"),
    ("wait lets the last group pass", "cp_async_wait<0>();", "cp_async_wait<1>();",
     "uninitialised"),
    ("cp.async not committed", "cp_async_commit();", "", "uninitialised"),
    ("row guard dropped on the load", "valid ? r : 0", "r", None),
    ("cp.async at an odd address", "&Xs[r * LD + c], &x", "&Xs[r * LD + c + 1], &x", "misaligned"),
    ("ldmatrix at an odd address", "k + lane / 16 * 8]", "k + lane / 16 * 8 + 1]", "misaligned"),
    ("row guard dropped on the store", "if (rr < rows) y", "y", "out-of-bounds"),
    ("padding of a row dropped", "T Ws[32 * LD],", "T Ws[32 * 32],", "out-of-bounds"),
    ("more than 48 KiB of static memory", "T Xs[32 * LD];", "T Xs[800 * LD];",
     "threadgroup-memory"),
    ("some lanes skip the matrix product", "mma_m16n8k16<T>(ga[j], a, b);",
     "if (lane > 3) mma_m16n8k16<T>(ga[j], a, b);", "divergence"),
]  # fmt: skip


@pytest.mark.parametrize("bug", METAL_BUGS, ids=lambda bug: bug[0])
def test_bug_in_metal(bug):
    _, old, new, kind = bug
    case = moe_case("metal", "float32")
    _, findings = run_on_cpu(edited(case.source, old, new), case.launch, case.inputs)
    assert kind in {finding.kind for finding in findings}, [*map(str, findings)]


@pytest.mark.parametrize("bug", CUDA_BUGS, ids=lambda bug: bug[0])
def test_bug_in_cuda(bug):
    _, old, new, kind = bug
    case = moe_case("cuda", "float16")
    _, findings = run_on_cpu(edited(case.source, old, new), case.launch, case.inputs)
    kinds = {finding.kind for finding in findings}
    # cp.async of zero bytes touches nothing, so its source address is free.
    assert kind in kinds if kind else not kinds, [*map(str, findings)]


BARRIERS = {"A": SYNC + "A", "B": SYNC + "B", "C": SIMD_SYNC + "C", "D": SIMD_SYNC + "D"}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_values_alone_show_a_missing_barrier_in_some_shuffled_order(barrier):
    """Without the checker; fifo and reverse miss barrier A, a wrong memory flag all three miss."""
    case = moe_case("metal", "float32")
    source = edited(case.source, BARRIERS[barrier], "")
    errors = []
    for seed in range(3):
        (y,), _ = run_on_cpu(source, case.launch, case.inputs, check=False, seed=seed)
        errors.append(not case.error(y) <= 1e-4)  # a NaN is an error too
    assert any(errors)
