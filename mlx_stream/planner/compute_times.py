"""Seconds of the parts of a prefill: a chunk of attention, a group of experts, the reads.

Pure: costs over rates. The same interpolation serves the probe, which takes the elementwise cost as
what a measured block needs beyond its matrices and attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlx_stream.planner.machine_profile import (
    COPY,
    ELEMENTWISE,
    MachineProfile,
    attention_format,
)
from mlx_stream.planner.model_costs import (
    AttentionCost,
    ExpertCost,
    LayerCost,
    LinearCost,
    ModelCosts,
    pairs,
)
from mlx_stream.planner.read_volume import expected_unused
from mlx_stream.planner.ring_times import Group
from mlx_stream.storage.read_plan import MAX_OP_NBYTES

ALIGN = 4096  # of cache-bypassing reads
SEQUENTIAL = 0.9  # share of experts read, from which skipping the others changes nothing
SEED_NBYTES, SEED_SETS = 48 << 20, 2  # as decode/seed.py: what a layer's experts may cost to keep


def linear_seconds(linear: LinearCost, rows: int, profile: MachineProfile) -> float:
    """One resident matrix on `rows` tokens."""
    speed = profile.flops("linear", rows, linear.format, (linear.in_dims, linear.out_dims))
    return rows * linear.flops_per_token / speed


def attention_seconds(
    attention: AttentionCost, start: int, stop: int, profile: MachineProfile
) -> float:
    """Queries `start` to `stop` over all keys that they see."""
    rows, window = stop - start, attention.window
    context = stop if window is None else min(stop, window + rows)
    speed = profile.flops("attention", rows, attention_format(rows, attention.head_dim), (context,))
    return attention.pair_flops * pairs(start, stop, window) / speed


def elementwise_seconds(values: float, depth: int, rows: int, profile: MachineProfile) -> float:
    """Norms, rotations, routing and sums of `depth` decoder layers."""
    if depth == 0 or values == 0:
        return 0.0
    speed = profile.flops("overhead", rows, ELEMENTWISE, (max(1, round(values)),))
    return rows * values * depth / speed


def chunk_seconds(
    layer: LayerCost, elementwise: float, start: int, stop: int, profile: MachineProfile
) -> float:
    """Everything of a layer but its routed experts, on one chunk."""
    rows = stop - start
    return (
        sum(linear_seconds(x, rows, profile) for x in layer.linears)
        + sum(attention_seconds(a, start, stop, profile) for a in layer.attention)
        + elementwise_seconds(elementwise, layer.depth, rows, profile)
    )


def head_seconds(costs: ModelCosts, profile: MachineProfile) -> float:
    """The vocabulary projection of the last token."""
    return 0.0 if costs.head is None else linear_seconds(costs.head, 1, profile)


def expert_seconds(experts: ExpertCost, rows: float, profile: MachineProfile) -> float:
    """One expert on `rows` rows."""
    if rows <= 0:
        return 0.0
    speed = profile.flops("experts", rows, experts.format, (experts.dims, experts.hidden))
    return rows * experts.flops_per_row / speed


def copy_seconds(
    experts: ExpertCost, top_k: int, layer_nbytes: float, profile: MachineProfile
) -> float:
    """Keeping a layer's share of the decode cache while it streams by."""
    most = max(SEED_SETS * top_k * experts.expert_nbytes, SEED_NBYTES)
    nbytes = min(layer_nbytes, most, experts.num * experts.expert_nbytes)
    if not profile.has("overhead", COPY):
        return 0.0
    return nbytes / profile.flops("overhead", 1, COPY)


def stream_groups(
    experts: ExpertCost, counts: Sequence[int], tokens: int, top_k: int, profile: MachineProfile
) -> list[Group]:
    """Groups of so many experts each, all of them read in file order.

    Args:
        counts: experts of each group.
        tokens: of the segment.
    """
    used = experts.num - expected_unused(experts.num, top_k, tokens)
    share = used / experts.num
    rows = tokens * top_k / used
    each = share * expert_seconds(experts, rows, profile)
    return [_group(experts, n, n, n * each, "sequential", profile) for n in counts]


def union_groups(
    experts: ExpertCost, group_size: int, tokens: int, top_k: int, profile: MachineProfile
) -> list[Group]:
    """Only the experts that uniform routing is expected to use, `group_size` at a time."""
    used = experts.num - expected_unused(experts.num, top_k, tokens)
    share = used / experts.num
    run = min(float(group_size), 1 / (1 - share) if share < 1 else experts.num)
    order = "sequential" if share >= SEQUENTIAL else "random"
    each = expert_seconds(experts, tokens * top_k / used, profile)
    groups, left = [], used
    while left > 1e-9:
        count = min(float(group_size), left)
        groups.append(_group(experts, count, run, count * each, order, profile))
        left -= count
    return groups


def _group(
    experts: ExpertCost,
    count: float,
    run: float,
    compute: float,
    order: str,
    profile: MachineProfile,
) -> Group:
    """`count` experts in runs of `run` neighbours: one request a tensor and run."""
    nbytes = seconds = 0.0
    for each in experts.tensor_nbytes:
        request = min(run * each, MAX_OP_NBYTES)
        read = count * each + count / run * ALIGN
        nbytes += read
        seconds += read / profile.read_bandwidth(request, order=order)
    return Group(nbytes, seconds, compute)
