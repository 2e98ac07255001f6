"""How many experts a read group has: as few as are read at full speed, from measured read rates.

Pure: same index and rates, same size. Small groups let computing begin early and spend staging on
many slots, so the smallest good one is taken. Two things bound it from below. Requests: a packed
group is one run of bytes, a plain one a run for each tensor, and short requests are slow.
Computing: every group is handed to threads and waited for, which few experts do not repay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlx_stream.planner.machine_profile import READER_DEPTH, MachineProfile, interpolate
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer
from mlx_stream.storage.read_plan import plan_group

NEAR = 0.95  # of the best rate; what is left is within the noise of a probe
# Computing alone took 15 times as long with groups of 1, 5 times with 4: docs/group_sizes.md.
LEAST_EXPERTS = 8
MOST_GROUP_NBYTES = 128 << 20  # so that staging holds four: two that compute, two that are read

ASKED, PROBE, DEFAULT, MEMORY = "asked", "probe", "default", "memory"


@dataclass(frozen=True)
class GroupSize:
    """Experts of a read group, and why so many, as in PrefillPlan.group_source."""

    experts: int
    source: str


@dataclass(frozen=True)
class ReadRates:
    """What a disk sustains by request size: ``(bytes of a request, bytes a second)``, ascending.

    A longer request is never taken for slower than a shorter one: it could be cut.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, profile: MachineProfile, depth: int) -> ReadRates:
        """Sequential rates with `depth` requests in flight.

        Raises:
            ProfileError: the profile has no reads.
        """
        best, points = 0.0, []
        for nbytes in sorted({r.nbytes for r in profile.reads}):
            best = max(best, profile.read_bandwidth(nbytes, depth))
            points.append((nbytes, best))
        if not points:
            profile.read_bandwidth(1, depth)  # raises
        return cls(tuple(points))

    @property
    def best(self) -> float:
        """Bytes a second of the fastest requests."""
        return self.points[-1][1]

    def seconds(self, nbytes: int) -> float:
        """One request's share of the time."""
        # Below the shortest that was measured, requests take as long as that one.
        counted = max(nbytes, self.points[0][0])
        return counted / interpolate(self.points, counted)


def group_size_for(index: ExpertIndex, rates: ReadRates, *, align: int) -> GroupSize:
    """The smallest of 1, 2, 4, 8, ... experts, or the whole layer, that is read at full speed.

    That is NEAR of the best that any of these sizes gives, in every layer. At least LEAST_EXPERTS;
    at most MOST_GROUP_NBYTES, or one expert.

    Args:
        align: as of `plan_group`.
    """
    sizes = tuple(f.size for f in index.checkpoint.files)
    forms = {_form(layer): layer for layer in index.layers}.values()
    largest = max(layer.expert_nbytes for layer in index.layers)
    experts = max(layer.num_experts for layer in index.layers)
    most = max(1, min(experts, MOST_GROUP_NBYTES // largest))
    tried = [n for n in _doubling(most, experts) if n >= min(LEAST_EXPERTS, most)] or [most]
    shares = {n: [read_share(x, n, rates, align, sizes) for x in forms] for n in tried}
    enough = [NEAR * max(of_form) for of_form in zip(*shares.values(), strict=True)]
    good = (n for n in tried if all(s >= e for s, e in zip(shares[n], enough, strict=True)))
    return GroupSize(next(good, tried[-1]), PROBE)


def wanted_group(
    index: ExpertIndex,
    profile: MachineProfile | None,
    *,
    asked: int | None,
    align: int,
    depth: int = READER_DEPTH,
) -> GroupSize | None:
    """The size asked for; else the one for a machine's reads; None where neither is known.

    Raises:
        ProfileError: the profile has no reads.
    """
    if asked is not None:
        return GroupSize(asked, ASKED)
    if profile is None:
        return None
    return group_size_for(index, ReadRates.of(profile, depth), align=align)


def sizes_to_try(
    index: ExpertIndex, wanted: GroupSize | None, default_nbytes: int
) -> Iterator[GroupSize]:
    """What was asked for, alone; or the wanted size and its halves, down to single experts.

    Args:
        default_nbytes: of a group where no size is wanted.
    """
    if wanted is None:
        largest = max(layer.expert_nbytes for layer in index.layers)
        wanted = GroupSize(max(1, default_nbytes // largest), DEFAULT)
    experts = max(layer.num_experts for layer in index.layers)
    size = GroupSize(min(experts, wanted.experts), wanted.source)
    yield size
    while size.source != ASKED and size.experts > 1:
        size = GroupSize(size.experts // 2, MEMORY)
        yield size


def read_share(
    layer: ExpertLayer, size: int, rates: ReadRates, align: int, file_sizes: tuple[int, ...]
) -> float:
    """Rate of reading `size` neighbours of a layer, 1.0 for the disk's best without any padding.

    The padding of packed records is not counted: no group size avoids it.
    """
    ids = layer.experts_at(range(min(size, layer.num_experts)))
    read = plan_group(layer, ids, align=align, file_sizes=file_sizes)
    nbytes = read.read_nbytes if layer.record is not None else read.payload_nbytes
    return nbytes / rates.best / sum(rates.seconds(op.nbytes) for op in read.ops)


def _doubling(most: int, experts: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`, and the whole layer if that is no more."""
    size = 1
    while size <= min(most, experts - 1):
        yield size
        size *= 2
    if experts <= most:
        yield experts


def _form(layer: ExpertLayer) -> tuple[object, ...]:
    """Layers with equal ones are read alike."""
    record = None if layer.record is None else layer.record.nbytes
    return layer.num_experts, record, tuple((t.nbytes, t.stride) for t in layer.tensors)
