"""Bugs planted in the metal backend's calls of expert_combine and the decode kernels.

As planted_bugs.txt does with the kernels' text: what hands them rows, scores, slots and sums is
replaced, and the comparison with the twin, which passes without the bug, must notice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends import metal, metal_decode
from mlx_stream.backends.kernels.decode import ALIGNMENT
from mlx_stream.backends.mlx_ops import SlotPlanes
from tests.kernel_shim import needs_clang

from .running import TOLERANCE
from .wiring import (
    SMALL,
    Rig,
    decode_error,
    mapped_error,
    prefill_error,
    shared_error,
    stacked_error,
)

pytestmark = needs_clang
F32 = mx.float32

_resident = metal_decode.resident_table
_combine, _decode = metal.combine_metal, metal_decode.decode_mlp_metal
_table, _places, _rows = metal_decode.slot_table, SlotPlanes.places, metal.place_table


def combine_without_previous(y, table, scores, previous=None, **options):
    return _combine(y, table, scores, None, **options)


def combine_with_scores_reversed(y, table, scores, previous=None, **options):
    return _combine(y, table, scores[:, ::-1], previous, **options)


def table_in_reverse(count, resident):
    return _table(count, {count - 1 - i: places for i, places in resident.items()})


def places_of_the_first_slot(planes, position):
    shift = planes.lead // ALIGNMENT * ALIGNMENT
    return {key: at - shift for key, at in _places(planes, position).items()}


def gate_and_up_exchanged(planes, position):
    swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    places = _places(planes, position)
    return {(swap.get(name, name), part): at for (name, part), at in places.items()}


def table_of_another_map(slots):
    return _resident(replace(slots, host_map=np.roll(slots.host_map, 1)))


def places_of_the_first(planes, position):
    return _places(planes, 0)


def decode_without_scores(layer, x, ids, slots, table, scores=None, **options):
    ones = None if scores is None else mx.ones_like(scores)
    return _decode(layer, x, ids, slots, table, ones, **options)


def decode_of_the_first_token(layer, x, ids, slots, table, scores=None, **options):
    return _decode(layer, mx.broadcast_to(x[:1], x.shape), ids, slots, table, scores, **options)


def keep_in_order_of_arrival(self, rows, values):
    start = sum(len(rows) for rows, _ in self._parts)
    self._parts.append((np.arange(start, start + len(rows)), values))
    return values


def places_shifted(rows, tokens, top_k):
    return np.roll(_rows(rows, tokens, top_k), 1, axis=1)


COMPUTATION = metal_decode.MetalDecodeComputation
PLANTED: dict[str, tuple[Any, str, Any, Callable[[Rig], float]]] = {
    "previous dropped": (metal, "combine_metal", combine_without_previous, prefill_error),
    "scores reversed": (metal, "combine_metal", combine_with_scores_reversed, prefill_error),
    "choices shifted": (metal, "place_table", places_shifted, prefill_error),
    "slot order": (metal_decode, "slot_table", table_in_reverse, shared_error),
    "another map": (metal, "resident_table", table_of_another_map, mapped_error),
    "slots of the first expert": (SlotPlanes, "places", places_of_the_first, stacked_error),
    "lead ignored": (SlotPlanes, "places", places_of_the_first_slot, shared_error),
    "gate for up": (SlotPlanes, "places", gate_and_up_exchanged, shared_error),
    "scores dropped": (
        metal_decode,
        "decode_mlp_metal",
        decode_without_scores,
        lambda rig: shared_error(rig, weighted=True),
    ),
    "token 0 for all": (
        metal_decode,
        "decode_mlp_metal",
        decode_of_the_first_token,
        lambda rig: decode_error(rig, replace(SMALL, tokens=3)),
    ),
    "not un-sorted": (
        COMPUTATION,
        "_keep",
        keep_in_order_of_arrival,
        lambda rig: decode_error(rig, SMALL),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_in_a_call_is_caught(rig, monkeypatch, bug):
    owner, name, wrong, compare = PLANTED[bug]
    assert compare(rig) <= TOLERANCE[F32]
    monkeypatch.setattr(owner, name, wrong)
    assert not compare(rig) <= TOLERANCE[F32]  # NaN is caught, too
