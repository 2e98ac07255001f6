"""The metal backend calls expert_combine and the decode kernels right, against the plain-ops twin.

What the kernels compute is tested elsewhere; here it is which rows, scores, slots and sums they
are handed: slots anywhere and shared or not, experts in any order and over any calls.
"""

import weakref
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.kernels.activations import kernel_activation
from mlx_stream.backends.metal_decode import decode_layer
from mlx_stream.backends.mlx_ops import MlxLayerComputation
from mlx_stream.backends.selftest import filled_slots, make_bench
from mlx_stream.storage.read_plan import plan_group
from tests.kernel_shim import needs_clang

from .running import TOLERANCE, as_float32, error
from .wiring import (
    SMALL,
    chunk_of,
    decode_error,
    fill,
    mapped_error,
    outputs,
    prefill_error,
    shared_error,
    shuffled_slots,
    stacked_error,
    stacked_slots,
)

pytestmark = needs_clang
F32, BF16 = mx.float32, mx.bfloat16


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_weighted_prefill_through_combine(rig, dtype):
    assert prefill_error(rig, dtype) <= TOLERANCE[dtype]
    assert rig.run.launches == {"expert_gate_up": 3, "expert_down": 3, "expert_combine": 3}
    assert rig.backend.choices["selftest combine"].path == "combine"


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weighted"])
@pytest.mark.parametrize("parts", [1, 2])
def test_decode_from_slots_of_their_own(rig, tokens, weighted, parts):
    case = replace(SMALL, tokens=tokens)
    assert decode_error(rig, case, weighted=weighted, parts=parts) <= TOLERANCE[F32]
    launches = rig.run.launches
    experts = len(np.unique(make_bench(case, F32).ids))
    assert launches["expert_decode_up"] == launches["expert_decode_down"] == experts
    assert launches["expert_combine"] == weighted
    assert not launches["expert_gate_up"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weighted"])
def test_shuffled_slots_of_one_memory_are_one_launch(rig, seed, tokens, weighted):
    assert shared_error(rig, tokens=tokens, weighted=weighted, seed=seed) <= TOLERANCE[F32]
    assert rig.run.launches == {"expert_decode_up": 1, "expert_decode_down": 1}


def test_slots_of_stacked_planes_are_one_launch(rig):
    assert stacked_error(rig) <= TOLERANCE[F32]
    assert rig.run.launches == {"expert_decode_up": 1, "expert_decode_down": 1}


@pytest.mark.parametrize("tokens", [1, 3])
def test_mapped_slots_are_one_launch(rig, tokens):
    assert mapped_error(rig, replace(SMALL, tokens=tokens)) <= TOLERANCE[F32]
    assert rig.run.launches == {"expert_decode_up": 1, "expert_decode_down": 1}
    assert rig.backend.choices["selftest decode"].path == "decode"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"bits": 3}, "3 bits"),
        ({"tokens": 9}, "9 tokens"),
        ({"mode": "none", "bits": 32, "group_size": 0, "dims": 61, "hidden": 21}, "16 bytes"),
    ],
)
def test_mapped_slots_without_a_kernel_are_stock_operations(rig, changes, word):
    assert mapped_error(rig, replace(SMALL, **changes)) <= TOLERANCE[F32]
    assert rig.run.launches == {}
    choice = rig.backend.choices["selftest decode"]
    assert (choice.path, word in choice.reason) == ("stock decode", True)


def test_a_changed_map_is_seen(rig):
    """The table on the device follows the map: other slots, and an absent expert is loud."""
    bench = make_bench(SMALL, F32)
    slots = shuffled_slots(bench)
    moved = dict(zip(slots, reversed(slots.values()), strict=True))
    first, *others = bench.ids[0].tolist()
    for places in (slots, moved, {e: slots[e] for e in others}):
        stacked = stacked_slots(bench, places, 9)
        y = rig.backend.mapped_mlp(bench.mlp, stacked, bench.x, mx.array(bench.ids))
        want = bench.reference()
        want[:, [i for i, e in enumerate(bench.ids[0].tolist()) if e not in places]] = np.nan
        np.testing.assert_allclose(as_float32(y), want, rtol=1e-3, atol=1e-4)
    assert first not in places
    alive = weakref.ref(stacked)
    del stacked
    assert alive() is None, "the backend keeps the memory of slots that are gone"


@pytest.mark.parametrize("tokens", [2, 9])
def test_stacked_planes_by_other_kernels(rig, tokens):
    """Planes without a known memory: stock operations, recorded; many tokens: grouped kernels."""
    assert stacked_error(rig, known=False, tokens=tokens) <= TOLERANCE[F32]
    assert not rig.run.launches["expert_decode_up"]
    if tokens == 2:
        choice = rig.backend.choices["selftest decode"]
        assert (choice.path, "not known" in choice.reason) == ("stock decode", True)
    else:
        assert rig.run.launches["expert_gate_up"] == 1


@pytest.mark.parametrize(
    ("mode", "bits", "group"),
    [("affine", 8, 64), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16), ("none", 16, 0)],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_decode_in_other_formats(rig, mode, bits, group, dtype):
    case = replace(SMALL, mode=mode, bits=bits, group_size=group, hidden=64)
    assert decode_error(rig, case, dtype=dtype) <= TOLERANCE[dtype]
    assert rig.run.launches["expert_decode_down"] == SMALL.top_k


def test_an_unsupported_format_decodes_by_stock_operations_and_says_so(rig):
    assert decode_error(rig, replace(SMALL, bits=3)) == 0
    assert rig.run.launches == {}
    choice = rig.backend.choices["selftest decode"]
    assert choice.path == "stock decode"
    assert "no kernel for affine weights of 3 bits" in choice.reason


def test_many_tokens_are_a_layer_as_any_other(rig):
    assert decode_error(rig, replace(SMALL, tokens=9)) <= TOLERANCE[F32]
    assert not rig.run.launches["expert_decode_up"]
    assert rig.run.launches["expert_gate_up"] == SMALL.experts
    assert "selftest decode" not in rig.backend.choices


@pytest.mark.parametrize(
    ("forced", "verified", "path", "word"),
    [
        ("stock", {}, "stock decode", "MLX_STREAM_KERNELS=stock"),
        ("auto", {}, "stock decode", "run mlx_stream doctor"),
        ("auto", {"decode affine 4-bit g32": 0.8}, "stock decode", "0.80x"),
        ("auto", {"decode affine 4-bit g32": 1.5}, "decode", "1.50x"),
        ("auto", {"affine 4-bit g32": 1.5}, "stock decode", "run mlx_stream doctor"),
    ],
)
def test_the_choice_is_doctors_or_forced(rig, forced, verified, path, word):
    rig.backend._forced, rig.backend._verified = forced, verified
    assert decode_error(rig, SMALL) <= TOLERANCE[F32]
    choice = rig.backend.choices["selftest decode"]
    assert choice.path == path
    assert word in choice.reason
    assert bool(rig.run.launches) == (path == "decode")


def test_combine_is_chosen_apart_from_the_grouped_kernels(rig):
    """Verified by doctor or not; a stock layer has no entry for it, and leaves none behind."""
    assert prefill_error(rig) <= TOLERANCE[F32]
    rig.backend._forced, rig.backend._verified = "auto", {"affine 4-bit g32": 2.0}
    rig.run.launches.clear()
    assert prefill_error(rig) <= TOLERANCE[F32]
    assert rig.run.launches == {"expert_gate_up": 3, "expert_down": 3}
    choice = rig.backend.choices["selftest combine"]
    assert (choice.path, "run mlx_stream doctor" in choice.reason) == ("stock combine", True)
    rig.backend._verified = {}
    assert prefill_error(rig) == 0
    assert set(rig.backend.choices) == {"selftest"}


def test_float_tensors_of_several_types_have_no_kernel():
    """The decode kernels are compiled for one type of the checkpoint's floats."""
    mlp = make_bench(SMALL, F32).mlp
    first, *rest = (t for t in mlp.layer.tensors if t.dtype == "F32")
    tensors = tuple(replace(t, dtype="BF16") if t is first else t for t in mlp.layer.tensors)
    assert rest
    activation = kernel_activation(mlp.module.activation)
    assert decode_layer(mlp, F32, activation)[0] is not None
    mixed = replace(mlp, layer=replace(mlp.layer, tensors=tensors))
    layer, reason = decode_layer(mixed, F32, activation)
    assert layer is None
    assert "BF16 and F32" in reason


def test_records_that_kernels_cannot_read_go_to_stock_operations(rig):
    """Reads that need alignment leave tensors wherever the file has them; recorded, and right."""
    bench = make_bench(SMALL, F32)
    shifted = tuple(replace(t, offset=t.offset + 4) for t in bench.mlp.layer.tensors)
    mlp = replace(bench.mlp, layer=replace(bench.mlp.layer, tensors=shifted))
    image = b"????" + bench.image + bytes(512)
    chunk = chunk_of(bench, weighted=True)
    records, buffers = [], []
    for expert in np.unique(bench.ids).tolist():
        read = plan_group(mlp.layer, [expert], align=512, file_sizes=(len(image),))
        buffers.append(rig.backend.allocate(read.slot_nbytes, 512))
        fill(image, read, buffers[-1].array)
        records.append(rig.backend.publish(mlp, read, buffers[-1]))
    y = outputs(rig.backend.begin_decode(mlp, chunk), [records])
    assert error(y, outputs(MlxLayerComputation(mlp, [chunk]), [records])) <= TOLERANCE[F32]
    assert not rig.run.launches["expert_decode_up"]
    choice = rig.backend.choices["selftest decode"]
    assert choice.path == "stock decode"
    assert "16 bytes" in choice.reason


def test_an_expert_that_was_never_added_is_an_error(rig):
    bench = make_bench(SMALL, F32)
    with filled_slots(rig.backend, bench, [[int(bench.ids[0, 0])]]) as records:
        computation = rig.backend.begin_decode(bench.mlp, chunk_of(bench, weighted=False))
        computation.add(records).wait()
        with pytest.raises(AssertionError, match="never added"):
            computation.outputs()
