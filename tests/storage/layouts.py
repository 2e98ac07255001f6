"""Random expert layouts inside two files of FILE_NBYTES, and a trivial interpreter of plans."""

from __future__ import annotations

from hypothesis import strategies as st

from mlx_stream.storage.expert_index import ExpertLayer, ExpertTensor, QuantSpec
from mlx_stream.storage.read_plan import GroupRead

FILE_NBYTES = 60_001  # odd, so that the last block is cut
PARTS = [
    (proj, part)
    for proj in ("gate_proj", "up_proj", "down_proj")
    for part in ("weight", "scales", "biases")
]


def tensor(
    part: str, offset: int, nbytes: int, stride: int | None = None, file: int = 0
) -> ExpertTensor:
    return ExpertTensor(
        ("gate_proj", part), part, file, "U8", (nbytes,), offset, stride or nbytes, nbytes
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ExpertLayer, list[int], int, int]:
    """(layer, experts, align, max_op_nbytes): stacked tensors or records, with and without gaps."""
    experts = draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 1500), min_size=1, max_size=len(PARTS)))
    gaps = st.sampled_from([0, 0, 0, 1, 7, 511, 512, 3000])
    place = _records if draw(st.booleans()) else _stacked
    tensors = place(draw, sizes, experts, gaps)
    layer = ExpertLayer(
        0, "layer", "glu", experts, tuple(tensors), (("gate_proj", QuantSpec("none", 16, 0)),)
    )
    chosen = draw(st.sets(st.integers(0, experts - 1), min_size=1))
    align = draw(st.sampled_from([1, 512, 4096]))
    limit = draw(st.sampled_from([4096, 5000, 8192, 8 << 20]))
    return layer, sorted(chosen), align, limit


def _stacked(
    draw: st.DrawFn, sizes: list[int], experts: int, gaps: st.SearchStrategy[int]
) -> list[ExpertTensor]:
    """One tensor after the other, experts adjacent; split over two files, in any order."""
    ends, tensors = [0, 0], []
    for key, size in zip(draw(st.permutations(PARTS)), sizes, strict=False):
        file = draw(st.integers(0, 1))
        begin = ends[file] + draw(gaps)
        size = min(size, (FILE_NBYTES - begin) // experts)
        if size < 1:
            continue
        if draw(st.integers(0, 9)) == 0:  # end exactly at the end of the file
            begin = FILE_NBYTES - size * experts
        tensors.append(ExpertTensor(key, "t", file, "U8", (size,), begin, size, size))
        ends[file] = begin + size * experts
    return tensors


def _records(
    draw: st.DrawFn, sizes: list[int], experts: int, gaps: st.SearchStrategy[int]
) -> list[ExpertTensor]:
    """All tensors of one expert together, then the next expert."""
    begin, pad, file = draw(gaps), draw(gaps), draw(st.integers(0, 1))
    room = (FILE_NBYTES - begin) // experts - pad
    while sum(sizes) > room:
        sizes = [max(1, s // 2) for s in sizes]
    stride, tensors = sum(sizes) + pad, []
    for key, size in zip(draw(st.permutations(PARTS)), sizes, strict=False):
        tensors.append(ExpertTensor(key, "t", file, "U8", (size,), begin, stride, size))
        begin += size
    return tensors


def execute_in_python(plan: GroupRead) -> list[tuple[int, int] | None]:
    """The slot after the plan: for each byte the (file, offset) it came from."""
    slot: list[tuple[int, int] | None] = [None] * plan.slot_nbytes
    for op in plan.ops:
        at = op.offset
        for offset, nbytes in op.parts:
            slot[offset : offset + nbytes] = [(op.file, at + i) for i in range(nbytes)]
            at += nbytes
    return slot
