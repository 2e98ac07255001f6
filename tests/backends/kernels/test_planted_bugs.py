"""Bugs planted in the real kernels: each must be caught by the comparisons or by the checker.

planted_bugs.txt lists them: edits of a kernel's text, each with the case that runs as the
comparison tests do, and what must notice: a kind of finding of the checker, or ``values``, a
difference to the twin above the tolerance. The unedited kernels pass every case (first test).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.kernels.decode import decode_mlp_metal, slot_table
from mlx_stream.backends.kernels.grouped import combine_metal, grouped_mlp_metal

from .running import (
    TOLERANCE,
    UNQUANTIZED,
    ShimRunner,
    as_float32,
    error,
    make_layer,
    packed_slots,
    routed_rows,
    substitute,
    tokens_of,
)
from .test_decode_kernels import Case as DecodeCase
from .test_decode_kernels import decode_layer, expected, scenario

F32 = mx.float32
COUNTS = (33, 0, 1, 20)
DEFAULT = SwiGLU()


def grouped(packing, dims, activation=DEFAULT, tile_rows=32) -> Callable[[ShimRunner], float]:
    """A case of the tiled kernels: its error, with the runner given."""

    def run_case(run: ShimRunner) -> float:
        layer = make_layer(packing, len(COUNTS), dims, activation, F32, bias=True)
        x = tokens_of(12, dims[0], F32)
        rows, ids = routed_rows(COUNTS, tokens=12)
        places = np.random.default_rng(5).permutation(len(ids))
        y = grouped_mlp_metal(
            layer.module, layer.planes, x, rows, ids, places=places, tile_rows=tile_rows, run=run
        )
        return error(y[mx.array(places)], layer.twin(x, rows, ids))

    return run_case


def combine(run: ShimRunner) -> float:
    """A case of the weighted sum: absent rows, a previous sum."""
    rng = np.random.default_rng(0)
    y, scores, before = (rng.random(s, dtype=np.float32) for s in ((5, 40), (4, 3), (4, 40)))
    table = np.array([[0, -1, 2], [4, 3, -1], [-1, -1, -1], [1, 0, 4]], np.int32)
    out = combine_metal(mx.array(y), table, mx.array(scores), mx.array(before), run=run)
    padded = np.concatenate([y, np.zeros((1, 40), np.float32)])  # -1 is the last row
    return error(out, mx.array(before + (padded[table] * scores[..., None]).sum(axis=1)))


def decode(packing, dims) -> Callable[[ShimRunner], float]:
    """A case of the decode kernels."""
    return lambda run: _decode(DecodeCase(packing, F32, dims, bias=True), run)


def _decode(case: DecodeCase, run: ShimRunner) -> float:
    layer, choices, scores = scenario(case)
    end = (int(choices[0, 0]), ("down_proj", "weight"))
    words, places = packed_slots(layer, range(case.experts), last=end)
    x, table = tokens_of(2, case.dims[0], F32), slot_table(case.experts, places)
    y = decode_mlp_metal(
        decode_layer(layer, F32),
        x,
        mx.array(choices),
        words,
        mx.array(table),
        mx.array(scores),
        run=run,
    )
    return error(y, expected(layer, x, choices, scores))


def decode_absent(run: ShimRunner) -> float:
    """A case of the decode kernels where an expert is missing: an error of 0 if it is NaN."""
    case = DecodeCase(("mxfp4", 4, 32), F32, (32, 32), activation=SwigluOAI(), combined=False)
    layer, _, _ = scenario(case)
    choices = np.array([[0, 1, 5]], np.int32)
    words, places = packed_slots(layer, [0, 1])
    y = decode_mlp_metal(
        decode_layer(layer, F32),
        tokens_of(1, 32, F32),
        mx.array(choices),
        words,
        mx.array(slot_table(6, places)),
        run=run,
    )
    absent = np.isnan(as_float32(y)).all(axis=-1)
    return float((absent != [[False, False, True]]).sum())


CASES = {
    "affine4": grouped(("affine", 4, 32), (96, 160)),
    "affine8": grouped(("affine", 8, 64), (64, 64)),
    "mxfp4": grouped(("mxfp4", 4, 32), (96, 32), SwigluOAI(1.702, 0.6)),
    "mxfp8": grouped(("mxfp8", 8, 32), (32, 64)),
    "nvfp4": grouped(("nvfp4", 4, 16), (48, 80)),
    "plain": grouped(UNQUANTIZED, (37, 29)),
    "aligned": grouped(UNQUANTIZED, (36, 44)),
    "tall": grouped(("affine", 4, 32), (64, 64), tile_rows=64),
    "small": grouped(("affine", 4, 32), (64, 64), tile_rows=16),
    "combine": combine,
    "decode": decode(("affine", 4, 32), (288, 96)),
    "odd rows": decode(UNQUANTIZED, (37, 29)),
    "absent": decode_absent,
}


@dataclass(frozen=True)
class Bug:
    """What was planted where, and what must notice."""

    kernel: str
    case: str
    caught_by: str  # a kind of finding, or "values"
    what: str
    old: str
    new: str

    @classmethod
    def parse(cls, entry: str) -> Bug:
        """An entry of planted_bugs.txt."""
        title, *lines = entry.splitlines()
        old = "\n".join(line[2:] for line in lines if line.startswith("- "))
        new = "\n".join(line[2:] for line in lines if line.startswith("+ "))
        return cls(*title.split(" | "), old, new)


_, *ENTRIES = Path(__file__).with_name("planted_bugs.txt").read_text().split("\n@ ")
BUGS = [Bug.parse(entry) for entry in ENTRIES]


@pytest.mark.parametrize("name", CASES)
def test_unedited_kernels_pass(name):
    run = ShimRunner()
    assert CASES[name](run) <= TOLERANCE[F32]
    assert run.findings == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: f"{b.kernel}: {b.what}")
def test_planted_bug_is_caught(bug):
    run = ShimRunner(edit=substitute(bug.kernel, bug.old, bug.new))
    difference = CASES[bug.case](run)
    caught = {finding.kind for finding in run.findings}
    if not difference <= TOLERANCE[F32]:  # NaN is caught, too
        caught.add("values")
    assert bug.caught_by in caught


def test_every_kernel_has_planted_bugs():
    kernels = {path.stem for path in Path(__file__).parents[3].glob("metal/*.metal")}
    assert {bug.kernel for bug in BUGS} == kernels
