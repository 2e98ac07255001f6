"""Plans: every byte once, planes whole and apart, ops within their limits."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given

from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer, ExpertTensor, QuantSpec
from mlx_stream.storage.read_plan import PLANE_ALIGN, plan_group, slot_capacity

from .builders import FAST
from .layouts import FILE_NBYTES, execute_in_python, layouts, tensor

SIZES = [FILE_NBYTES, FILE_NBYTES]
SPEC = (("gate_proj", QuantSpec("none", 16, 0)),)


def layer_of(*tensors: ExpertTensor, experts: int = 8) -> ExpertLayer:
    return ExpertLayer(0, "layer", "glu", experts, tensors, SPEC)


def check_plan(plan, layer, align, max_op_nbytes):
    """Everything the contract says about the numbers of a plan, computed the slow way."""
    reads = [(op.file, op.offset, op.offset + op.nbytes) for op in plan.ops]
    assert reads == sorted(reads)
    for op in plan.ops:
        assert 0 < op.nbytes <= max_op_nbytes
        assert 1 <= len(op.parts) <= 1024
        assert op.offset % align == 0
        assert all(n > 0 and n % align == 0 and o % align == 0 for o, n in op.parts)
    for (f1, _, end), (f2, begin, _) in pairwise(reads):
        assert f1 != f2 or end <= begin  # no block is read twice
    filled = sorted((o, o + n) for op in plan.ops for o, n in op.parts)
    assert all(a[1] <= b[0] for a, b in pairwise(filled))
    assert filled[-1][1] <= plan.slot_nbytes
    assert plan.slot_nbytes % align == 0
    assert plan.payload_nbytes == len(plan.experts) * layer.expert_nbytes
    assert plan.read_nbytes == sum(min(e, SIZES[f]) - b for f, b, e in reads)
    assert plan.read_nbytes >= plan.payload_nbytes
    assert [p.key for p in plan.planes] == [t.key for t in layer.tensors]
    places = sorted((o, o + p.nbytes) for p in plan.planes for o in p.offsets)
    assert all(a[1] <= b[0] for a, b in pairwise(places))
    assert places[-1][1] <= plan.slot_nbytes
    if align == 1:
        assert plan.read_nbytes == plan.payload_nbytes
        assert all(p.contiguous and p.offsets[0] % PLANE_ALIGN == 0 for p in plan.planes)
    else:
        for p, t in zip(plan.planes, layer.tensors, strict=True):
            for e, o in zip(plan.experts, p.offsets, strict=True):
                assert (o - t.offset - e * t.stride) % align == 0


@FAST
@given(layouts())
def test_plans_of_random_layouts(layout):
    layer, experts, align, limit = layout
    plan = plan_group(layer, experts, align=align, max_op_nbytes=limit, file_sizes=SIZES)
    check_plan(plan, layer, align, limit)
    assert plan == plan_group(layer, experts, align=align, max_op_nbytes=limit, file_sizes=SIZES)


@FAST
@given(layouts())
def test_plans_bring_the_bytes_of_every_expert(layout):
    """The plan carried out by a trivial interpreter, on files whose bytes say where they are."""
    layer, experts, align, limit = layout
    plan = plan_group(layer, experts, align=align, max_op_nbytes=limit, file_sizes=SIZES)
    slot = execute_in_python(plan)
    for plane, t in zip(plan.planes, layer.tensors, strict=True):
        for e, o in zip(experts, plane.offsets, strict=True):
            begin = t.offset + e * t.stride
            expected = [(t.file, begin + i) for i in range(t.nbytes)]
            assert slot[o : o + t.nbytes] == expected


@FAST
@given(layouts())
def test_slot_capacity_holds_every_group_of_that_size(layout):
    layer, experts, align, _ = layout
    other = replace(layer, index=1, tensors=layer.tensors[:1])
    capacity = slot_capacity(ExpertIndex(None, (other, layer)), len(experts), align)
    first = range(len(experts))
    needed = [
        plan_group(one, chosen, align=align, file_sizes=SIZES).slot_nbytes
        for one in (other, layer)
        for chosen in (experts, first)
    ]
    assert max(needed) <= capacity
    assert capacity % align == 0
    if align == 1:
        assert capacity == max(needed)


def test_consecutive_experts_are_one_read():
    layer = layer_of(tensor("weight", offset=1000, nbytes=600))
    for align, ops in ((1, [(1600, 1800)]), (512, [(1536, 2048)]), (4096, [(0, 4096)])):
        plan = plan_group(layer, [1, 2, 3], align=align, file_sizes=SIZES)
        assert [(op.offset, op.nbytes) for op in plan.ops] == ops
        assert plan.planes[0].contiguous


def test_neighbours_are_merged_not_read_twice():
    # Experts 0 and 2 touch the blocks 0..1 and 1..3: one region of four blocks.
    layer = layer_of(tensor("weight", offset=100, nbytes=700))
    plan = plan_group(layer, [0, 2], align=512, file_sizes=SIZES)
    assert [(op.offset, op.nbytes) for op in plan.ops] == [(0, 2560)]
    assert plan.planes[0].offsets == (100, 1500)
    assert not plan.planes[0].contiguous


def test_a_record_is_scattered_by_one_op():
    """Packed layout: weight, scales and biases of one expert adjacent, experts 4096 apart."""
    sizes = {"weight": 2048, "scales": 256, "biases": 256}
    at, tensors = 4096, []
    for part, nbytes in sizes.items():
        tensors.append(tensor(part, offset=at, nbytes=nbytes, stride=4096))
        at += nbytes
    plan = plan_group(layer_of(*tensors), [2, 3], align=1, file_sizes=SIZES)
    assert [op.offset for op in plan.ops] == [12288, 16384]
    assert plan.ops[0].parts == ((0, 2048), (4096, 256), (4608, 256))
    assert plan.ops[1].parts == ((2048, 2048), (4352, 256), (4864, 256))
    direct = plan_group(layer_of(*tensors), [2, 3], align=512, file_sizes=SIZES)
    assert [(op.offset, op.nbytes) for op in direct.ops] == [(12288, 2560), (16384, 2560)]


def test_no_op_has_more_parts_than_one_call_takes():
    tensors = [tensor("weight", 0, 1, 2), tensor("scales", 1, 1, 2)]
    layer = layer_of(*tensors, experts=3000)
    plan = plan_group(layer, range(3000), align=1, file_sizes=SIZES)
    assert [len(op.parts) for op in plan.ops] == [1024] * 5 + [880]


def test_ops_are_cut_at_multiples_of_align():
    layer = layer_of(tensor("weight", offset=10, nbytes=5000))
    plan = plan_group(layer, [0, 1], align=512, max_op_nbytes=4000, file_sizes=SIZES)
    assert [(op.offset, op.nbytes) for op in plan.ops] == [(0, 3584), (3584, 3584), (7168, 3072)]


def test_the_last_block_may_pass_the_end_of_the_file():
    layer = layer_of(tensor("weight", offset=1000, nbytes=100), experts=1)
    plan = plan_group(layer, [0], align=4096, file_sizes=[1100])
    assert (plan.ops[0].offset, plan.ops[0].nbytes, plan.slot_nbytes) == (0, 4096, 4096)
    assert plan.read_nbytes == 1100


def test_halves_with_a_common_scalar_read_it_for_both():
    """A fused gate_up has one global_scale per expert: both halves get it."""
    gate, up = tensor("weight", 64, 4), replace(tensor("weight", 64, 4), key=("up_proj", "weight"))
    for align, offsets in ((1, [(0, 4), (64, 68)]), (512, [(64, 68), (64, 68)])):
        plan = plan_group(layer_of(gate, up), [0, 1], align=align, file_sizes=SIZES)
        assert [p.offsets for p in plan.planes] == offsets


@pytest.mark.parametrize("experts", [[], [1, 1], [2, 1], [-1], [8], [0, 8]])
def test_bad_experts(experts):
    with pytest.raises(ValueError, match="experts"):
        plan_group(layer_of(tensor("weight", 0, 10)), experts, align=1, file_sizes=SIZES)


@pytest.mark.parametrize(("align", "limit"), [(0, 8), (3, 8), (-1, 8), (512, 511)])
def test_bad_alignment(align, limit):
    layer = layer_of(tensor("weight", 0, 10))
    with pytest.raises(ValueError, match="align"):
        plan_group(layer, [0], align=align, max_op_nbytes=limit, file_sizes=SIZES)


def test_plan_past_the_end_of_the_file():
    with pytest.raises(ValueError, match="past the end"):
        plan_group(layer_of(tensor("weight", 5000, 10)), [0], align=1, file_sizes=[5000])


def test_bad_group_size():
    with pytest.raises(ValueError, match="group_size"):
        slot_capacity(ExpertIndex(None, (layer_of(tensor("weight", 0, 1)),)), 0, 1)
