"""Each kind of finding, alone, in a kernel of a few lines."""

import numpy as np
import pytest

from . import CompileError, Finding, NotMetalError, check_types, needs_clang, run_on_cpu
from .support import inline_kernel, launch

pytestmark = needs_clang
X = np.arange(64, dtype=np.float32)
I = "const uint i = thread_position_in_grid.x; "  # noqa: E741
STAGE = I + "threadgroup float s[64]; "
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "


def findings(body: str, threads: int = 64, **options) -> list[Finding]:
    keep = {k: options.pop(k) for k in ("header", "language") if k in options}
    run = launch(threads, [((64,), "float32")], **options)
    return run_on_cpu(inline_kernel(body, **keep), run, [X])[1]


# kind, words of the message, body
CASES = [
    ("out-of-bounds", "input x: byte offset 256", I + "y[i] = x[i + 1];"),
    ("out-of-bounds", "input x: byte offset -4", I + "y[i] = x[int(i) - 1];"),
    ("out-of-bounds", "write, output y", I + "y[i + 1] = x[i]; if (i == 0) y[0] = 0;"),
    ("out-of-bounds", "far from every buffer", I + "y[i] = x[i * 100000];"),
    ("out-of-bounds", "threadgroup array s", STAGE + "s[i + 1] = x[i]; y[i] = x[i];"),
    ("out-of-bounds", "declared size", I + "float t[4]; t[i % 5] = x[i]; y[i] = t[i % 4];"),
    ("uninitialised", "threadgroup array s", STAGE + "y[i] = s[i] + x[i];"),
    ("uninitialised", "output", I + "y[i] += x[i];"),
    ("race", "read after write", STAGE + "s[i] = x[i]; y[i] = s[63 - i];"),
    ("race", "write after read",
     STAGE + "s[i] = x[i]; " + BARRIER + "y[i] = s[63 - i]; s[i] = 0;"),
    ("race", "write after write", STAGE + "s[i] = x[i]; s[63 - i] = x[i]; y[i] = 0;"),
    ("race", "read after write",
     STAGE + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];"),
    ("race", "read after write", STAGE + "s[i] = x[i]; y[i] = simd_sum(x[i]) + s[i ^ 1];"),
    ("race", "read after write",  # a simdgroup's barrier does not reach the other simdgroup
     STAGE + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 32];"),
    ("divergence", "different threadgroup_barrier",
     I + "if (i < 32) { y[i] = 1; " + BARRIER + "} else { " + BARRIER + "y[i] = 2; }"),
    ("divergence", "have returned", I + "if (i < 60) { " + BARRIER + "} y[i] = x[i];"),
    ("divergence", "7 of 32 lanes",
     I + "if (i < 7) simdgroup_barrier(mem_flags::mem_none); y[i] = x[i];"),
    ("divergence", "different simdgroup operations",
     I + "if (i % 2) y[i] = simd_sum(x[i]); else y[i] = simd_max(x[i]) + 1.f;"),
    ("unwritten", "4 of 256 output bytes never written, the first at byte 12",
     I + "if (i != 3) y[i] = x[i];"),
    ("double-write", "output y", I + "y[i / 2] = x[i]; y[32 + i / 2] = 0;"),
    ("write-to-input", "input x", I + "((device float*)x)[i] = 0; y[i] = 0;"),
    ("threadgroup-memory", "limit is 32768",
     I + "threadgroup float s[8193]; s[i] = x[i]; y[i] = s[i];"),
    ("threadgroup-memory", "32784 bytes with array b",
     I + "threadgroup float a[8192]; threadgroup float b[4]; a[i] = b[i % 4] = 0; y[i] = 0;"),
    ("shuffle", "beyond the simdgroup", I + "y[i] = simd_shuffle(x[i], 40);"),
    ("shuffle", "inactive", I + "if (i % 32 < 16) y[i] = simd_shuffle(x[i], 20); else y[i] = 0;"),
    ("misaligned", "16 bytes", I + "y[i] = (*(device const float4*)(x + (i & 31) + 1)).x;"),
    ("shift", "width of the type", I + "y[i] = float(1u << (i + 1));"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "words", "body"), CASES, ids=[f"{k} {w}" for k, w, _ in CASES])
def test_finding(kind, words, body):
    found = findings(body)
    assert any(f.kind == kind and words in f.message for f in found), [*map(str, found)]


# Right kernels that a cruder checker would blame.
RIGHT = {
    "own slot needs no barrier": STAGE + "s[i] = x[i]; y[i] = s[i];",
    "barrier": STAGE + "s[i] = x[i]; " + BARRIER + "y[i] = s[63 - i];",
    "both flags": STAGE + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device | "
    "mem_flags::mem_threadgroup); y[i] = s[63 - i];",
    "simdgroup barrier inside a simdgroup": STAGE
    + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[i ^ 1];",
    "many readers, barrier, writer": STAGE
    + f"s[i] = x[i]; {BARRIER} y[i] = s[0] + s[1]; {BARRIER} s[63 - i] = y[i];",
    "reduction of the active lanes": I + "if (i % 32 < 10) y[i] = simd_sum(x[i]); else y[i] = 0;",
    "a loop with barriers": STAGE
    + f"float t = 0; for (int k = 0; k < 3; k++) {{ s[i] = x[i] + k; {BARRIER} t += s[63 - i]; "
    f"{BARRIER} }} y[i] = t;",
    "unaligned packed load": I + "y[i] = (*(device const packed_float2*)(x + i % 63)).x;",
    "table": I + "y[i] = TABLE[i % 4];",
}


@pytest.mark.parametrize("name", RIGHT)
def test_no_finding(name):
    table = "constant float TABLE[4] = {1, 2, 3, 4};\n"
    assert not findings(RIGHT[name], header=table)


def test_filled_outputs_may_stay_unwritten_and_be_read():
    assert not findings(I + "if (i < 3) y[i] += x[i];", init_value=1.0)


def test_memory_limit_of_another_chip():
    body = I + "threadgroup float s[8193]; s[i] = x[i]; y[i] = s[i];"
    run = launch(64, [((64,), "float32")])
    assert not run_on_cpu(inline_kernel(body), run, [X], memory_limit=64 << 10)[1]


def test_a_deep_stack_is_reported():
    body = I + "thread float big[34000]; for (int k = 0; k < 34000; k++) big[k] = x[i]; "
    body += "thread volatile float* p = big; y[i] = p[(i * 7919) % 34000];"
    assert "stack" in {finding.kind for finding in findings(body, threads=1)}


def test_without_the_checker_only_divergence_is_found():
    run = launch(64, [((64,), "float32")])
    racy = inline_kernel(STAGE + "s[i] = x[i]; y[i] = s[63 - i];")
    assert not run_on_cpu(racy, run, [X], check=False)[1]
    stuck = inline_kernel(I + "if (i < 60) { " + BARRIER + "} y[i] = x[i];")
    assert run_on_cpu(stuck, run, [X], check=False)[1][0].kind == "divergence"


def test_the_order_decides_which_interleaving_is_seen():
    """Thread 0 reads what thread 63 wrote, if that one ran before: in reverse, or by chance."""
    source = inline_kernel(STAGE + "s[i] = x[i]; y[i] = s[63 - i];")
    run = launch(64, [((64,), "float32")], group=64)

    def outputs(order, seed=0):
        return run_on_cpu(source, run, [X], check=False, order=order, seed=seed)[0][0]

    fifo, reverse = outputs("fifo"), outputs("reverse")
    assert np.isnan(fifo[0])
    assert fifo[63] == 0
    assert reverse[0] == 63
    assert np.isnan(reverse[63])
    assert any(not np.array_equal(outputs("shuffled", s), fifo, equal_nan=True) for s in range(3))
    np.testing.assert_array_equal(outputs("shuffled", 5), outputs("shuffled", 5))


def test_findings_are_counted_not_repeated():
    (found,) = findings(STAGE + "y[i] = s[i] + x[i];")
    assert found.times == 64


# ---- what the compiler refuses

COPY = "template <typename T> METAL_FUNC T first(threadgroup const T* p) { return p[0]; }\n"


def test_device_passed_for_threadgroup_is_a_type_error():
    with pytest.raises(CompileError, match="first"):
        findings(I + "y[i] = first(x);", header=COPY)


def test_small_inputs_are_constant():
    """MLX passes fewer than 8 elements as `constant`, so a helper taking `device` breaks."""
    header = "METAL_FUNC float first(const device float* p) { return p[0]; }\n"
    source = inline_kernel(I + "y[i] = first(x);", header=header)
    run = launch(64, [((64,), "float32")])
    check_types(source, run, [X[:8]])
    with pytest.raises(CompileError, match="first"):
        check_types(source, run, [X[:7]])


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ("threadgroup float s[64];", "y[0] = 0;", "outside the kernel body"),
        ("float f(uint i = thread_index_in_simdgroup);", "y[0] = 0;", "MLX provides"),
        ("", "double d = 1; y[0] = d;", "double"),
        ("", "y[0] = std::sqrt(x[0]);", "standard library"),
        ('#include "other.h"', "y[0] = 0;", "include path"),
        ("", "goto end; end: y[0] = 0;", "goto"),
        ("", "threadgroup float s[2] = {1, 2}; y[0] = s[0];", "automatic variable"),
        ("", "y[0] = exp(1);", "float, half or bfloat"),
        ("", "y[0] = min(thread_index_in_simdgroup, 1);", "no matching function"),
        ("", "y[0] = erf(x[0]);", "erf"),
        ("", "simdgroup_matrix<half, 8, 8> m; simdgroup_load(m, x); y[0] = 0;", "not convert"),
    ],
)  # fmt: skip
def test_text_a_mac_would_refuse(header, body, message):
    with pytest.raises((CompileError, NotMetalError), match=message):
        findings(body, header=header + "\n")
