"""The time to the first token of a plan on a measured machine.

Pure: costs (model_costs.py) over rates (machine_profile.py) give seconds for each layer's attention
and for each read group; then the groups go through the staging ring as the engine sends them. In
stream mode reads run ahead across layers as far as the slots allow. In union mode a layer's reads
begin when its routing is known. Loading the resident weights comes before and is not included; nor
is attention to tokens that were in the cache before the prompt, which a plan does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mlx_stream.config import format_bytes
from mlx_stream.planner.compute_times import (
    chunk_seconds,
    copy_seconds,
    head_seconds,
    stream_groups,
    union_groups,
)
from mlx_stream.planner.machine_profile import MachineProfile
from mlx_stream.planner.model_costs import ModelCosts, model_costs
from mlx_stream.planner.ring_times import (
    Group,
    Phase,
    compute_seconds,
    read_seconds,
    ring_seconds,
)
from mlx_stream.prefill.schedule import PrefillPlan, Segment, cut_segments
from mlx_stream.storage.expert_index import ExpertIndex

LEAST_SPREAD = 0.1  # what two runs of one prompt differ by on a quiet machine
MOST_TOKENS = 1 << 20
BALANCED = 0.8  # the smaller of reads and computing over the larger: neither waits for long


@dataclass(frozen=True)
class Forecast:
    """Seconds of one prefill.

    Attributes:
        ttft_seconds: from the call to the first token's logits; loading not included.
        low, high: the range that the spread of the measured rates gives.
        read_seconds, compute_seconds: each if the other took no time; the forecast lies between
            the larger of them and their sum.
        bound: ``"read"`` or ``"compute"``.
        break_even_tokens: prompt length from which computing takes as long as reading all experts
            once; infinite beyond MOST_TOKENS.
        read_nbytes: expert bytes that are read.
        advice: what would make it faster.
    """

    prompt_tokens: int
    ttft_seconds: float
    low: float
    high: float
    read_seconds: float
    compute_seconds: float
    bound: str
    break_even_tokens: float
    read_nbytes: float
    advice: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens over the forecast."""
        return self.prompt_tokens / self.ttft_seconds

    def __str__(self) -> str:
        lines = [
            f"first token after about {self.ttft_seconds:.2f} s ({self.low:.2f} to {self.high:.2f})"
            f", {self.tokens_per_second:.0f} tok/s, {self.bound}-bound; loading not included",
            f"  reads {self.read_seconds:.2f} s for {format_bytes(self.read_nbytes)}, computing "
            f"{self.compute_seconds:.2f} s",
            *(f"  {line}" for line in self.advice),
        ]
        return "\n".join(lines)


def forecast_for(
    index: ExpertIndex, config: dict[str, Any], plan: PrefillPlan, profile: MachineProfile
) -> Forecast:
    """The forecast of a plan, from the checkpoint's headers and config.

    Raises:
        ProfileError: the profile lacks reads or computing.
    """
    return forecast(plan, model_costs(index, config), profile)


def forecast(plan: PrefillPlan, costs: ModelCosts, profile: MachineProfile) -> Forecast:
    """The forecast of a plan for a model whose costs are known. Same inputs, same forecast."""
    phases = list(plan_phases(plan, costs, profile))
    read, compute = read_seconds(phases), compute_seconds(phases)
    ahead, cost = plan.mode == "stream", profile.overlap_cost
    ttft = ring_seconds(phases, plan.slots, ahead=ahead, overlap_cost=cost)
    spread = max(LEAST_SPREAD, profile.spread("experts"), profile.spread("linear"))
    result = Forecast(
        prompt_tokens=plan.prompt_tokens,
        ttft_seconds=ttft,
        low=ttft / (1 + spread),
        high=ttft * (1 + spread),
        read_seconds=read,
        compute_seconds=compute,
        bound="read" if read > compute else "compute",
        break_even_tokens=break_even_tokens(plan, costs, profile),
        read_nbytes=sum(g.nbytes for p in phases for g in p.groups),
        advice=(),
    )
    return replace(result, advice=tuple(_advice(plan, result)))


def plan_phases(plan: PrefillPlan, costs: ModelCosts, profile: MachineProfile) -> Iterator[Phase]:
    """Every layer of every segment in the order of execution, then the vocabulary projection."""
    for segment in plan.segments:
        yield from _segment_phases(plan, segment, costs, profile)
    yield Phase(head_seconds(costs, profile), ())


def _segment_phases(
    plan: PrefillPlan, segment: Segment, costs: ModelCosts, profile: MachineProfile
) -> Iterator[Phase]:
    kept = plan.memory.expert_cache / max(1, len(plan.layers))
    for number, layer in enumerate(costs.layers):
        before = sum(
            chunk_seconds(layer, costs.elementwise, a, b, profile) for a, b in segment.chunks
        )
        if layer.experts is None:
            yield Phase(before, ())
            continue
        arguments = segment.tokens, costs.top_k, profile
        if plan.mode == "union":
            groups = union_groups(layer.experts, plan.group_size, *arguments)
        else:
            counts = [b - a for a, b in plan.layers[number].groups]
            groups = stream_groups(layer.experts, counts, *arguments)
        copying = copy_seconds(layer.experts, costs.top_k, kept, profile) / len(groups)
        yield Phase(before, tuple(_slower(g, copying) for g in groups))


def _slower(group: Group, seconds: float) -> Group:
    return replace(group, compute_seconds=group.compute_seconds + seconds)


def break_even_tokens(plan: PrefillPlan, costs: ModelCosts, profile: MachineProfile) -> float:
    """N*: the prompt length from which computing takes as long as reading every expert once.

    With the plan's chunks and groups; short prompts compute at lower rates, so this is found by
    search and not from one rate as in cost_model.break_even.
    """

    def excess(tokens: int) -> float:
        segments = cut_segments(tokens, tokens, plan.chunk_tokens)
        trial = replace(plan, prompt_tokens=tokens, mode="stream", segments=segments)
        phases = list(plan_phases(trial, costs, profile))
        return compute_seconds(phases) - read_seconds(phases)

    low, high = 0, 1
    while excess(high) < 0:
        low, high = high, 2 * high
        if high > MOST_TOKENS:
            return math.inf
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return float(high)


def _advice(plan: PrefillPlan, found: Forecast) -> Iterator[str]:
    """What would make it faster, most effective first."""
    if len(plan.segments) > 1:
        once = found.read_seconds / len(plan.segments)
        yield (
            f"the experts are read {len(plan.segments)} times: a larger memory_budget would save "
            f"up to {found.read_seconds - once:.1f} s of reads"
        )
    waits = found.ttft_seconds - max(found.read_seconds, found.compute_seconds)
    if waits > 0.1 * found.ttft_seconds:
        staging = format_bytes(plan.memory.staging)
        cause = f"reads run ahead by {plan.slots} staging slots of together {staging}"
        if plan.mode == "union":
            cause = "reads wait for the routing"
        yield f"{waits:.1f} s are neither hidden behind reads nor behind computing: {cause}"
    if found.bound == "read":
        more = found.break_even_tokens
        until = f"about {more:.0f} tokens" if math.isfinite(more) else "any length"
        yield f"bound by the disk: prompts up to {until} would take hardly longer"
    elif found.read_seconds < BALANCED * found.compute_seconds:
        enough = found.read_seconds / found.compute_seconds
        share = f"{enough:.0%}" if enough >= 0.01 else "less than 1%"
        yield f"bound by computing: a disk of {share} of this speed would do"
