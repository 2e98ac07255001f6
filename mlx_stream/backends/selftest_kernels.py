"""The self-test of the Metal kernels that are chosen apart: the weighted sum, and decoding.

As in selftest.py, each is compared with a float32 reference and timed against what runs without it;
`mlx_stream doctor` keeps the gains under the names by which the backend looks them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import Backend, ChunkInput, LayerComputation
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.backends.mlx_ops import Combine, MlxLayerComputation, combine_ops
from mlx_stream.backends.selftest import (
    CASES,
    TOLERANCE,
    Case,
    CaseResult,
    filled_slots,
    largest_error,
    make_bench,
    median_seconds,
)


def run_kernel_selftest(backend: Backend, rounds: int = 3) -> Iterator[CaseResult]:
    """The combine kernel, then the decode kernels in every format, at real sizes.

    Nothing for a backend that has no such kernels.
    """
    if not isinstance(backend, MetalBackend):
        return
    yield combine_case(backend, tokens=512, top_k=8, dims=2048, rounds=rounds)
    for case in CASES:
        case = replace(case, experts=16, dims=2048, hidden=768, tokens=1, top_k=8)
        yield decode_case(backend, case, rounds)


def decode_case(backend: MetalBackend, case: Case, rounds: int = 3) -> CaseResult:
    """A step of decoding; every expert in a slot of its own, as the cache keeps them."""
    bench = make_bench(case, backend.compute_dtype or mx.float16)
    chunk = ChunkInput(bench.x, bench.ids, None)
    used = np.unique(bench.ids).tolist()
    with filled_slots(backend, bench, [[expert] for expert in used]) as records:

        def step(stock: bool) -> mx.array:
            layer_run: LayerComputation = (
                MlxLayerComputation(bench.mlp, [chunk])
                if stock
                else backend.begin_decode(bench.mlp, chunk)
            )
            layer_run.add(records).wait()
            (y,) = layer_run.outputs()
            mx.eval(y)
            return y

        error = largest_error(step(stock=False), bench.reference())
        seconds = median_seconds(partial(step, stock=False), rounds)
        stock = median_seconds(partial(step, stock=True), rounds)
    name, tolerance = f"decode {bench.name}", TOLERANCE[bench.x.dtype]
    return CaseResult(name, error, tolerance, seconds, stock, kernel="decode")


def combine_case(
    backend: MetalBackend, *, tokens: int, top_k: int, dims: int, rounds: int = 3
) -> CaseResult:
    """The weighted sum of a read group with half of the choices, onto the sum of the others."""
    dtype = backend.compute_dtype or mx.float16
    rng = np.random.default_rng(0)
    rows = rng.permutation(tokens * top_k)[: tokens * top_k // 2]
    values = mx.random.normal((len(rows), dims), key=mx.random.key(1)).astype(dtype)
    scores = mx.random.uniform(shape=(tokens, top_k), key=mx.random.key(2)).astype(dtype)
    before = mx.random.normal((tokens, dims), key=mx.random.key(3))
    mx.eval(values, scores, before)

    def total(combine: Combine, previous: mx.array) -> mx.array:
        y = combine(values, rows, scores, previous, previous.dtype)
        mx.eval(y)
        return y

    wide = np.zeros((tokens * top_k, dims), np.float32)
    wide[rows] = np.array(values.astype(mx.float32))
    weights = np.array(scores.astype(mx.float32))
    expected = np.array(before) + np.einsum("tkd,tk->td", wide.reshape(tokens, top_k, -1), weights)
    error = largest_error(total(backend.combine, before), expected)
    seconds = median_seconds(lambda: total(backend.combine, before), rounds)
    narrow = before.astype(dtype)  # what the stock sum adds to
    stock = median_seconds(lambda: total(combine_ops, narrow), rounds)
    return CaseResult("combine", error, TOLERANCE[mx.float32], seconds, stock, kernel="combine")
