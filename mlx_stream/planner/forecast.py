"""The time to the first token of a plan on a measured machine.

Pure: costs (model_costs.py) over rates (machine_profile.py) give seconds for every layer's attention
and for every read group; then the groups go through the staging ring as the engine sends them. In
stream mode reads run ahead across layers as far as the slots allow. In union mode a layer's reads
begin when its routing is known. Loading the resident weights comes before and is not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mlx_stream.config import format_bytes
from mlx_stream.planner.compute_times import (
    chunk_seconds,
    expert_seconds,
    group_compute_seconds,
    head_seconds,
)
from mlx_stream.planner.machine_profile import MachineProfile
from mlx_stream.planner.model_costs import ModelCosts, model_costs
from mlx_stream.planner.read_volume import expected_unused
from mlx_stream.planner.ring_times import Group, Phase, ring_seconds
from mlx_stream.prefill.schedule import PrefillPlan, Segment
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.read_plan import MAX_OP_NBYTES

LEAST_SPREAD = 0.1  # of a forecast: what two runs of one prompt differ by on a quiet machine
MOST_TOKENS = 1 << 20
BALANCED = 0.8  # reads over compute, from which both count as bounding


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
            once; infinite when it never does.
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
    phases = [p for s in plan.segments for p in _segment_phases(plan, s, costs, profile)]
    phases.append(Phase(head_seconds(costs, profile), ()))
    read = sum(g.read_seconds for p in phases for g in p.groups)
    compute = sum(p.before_seconds + sum(g.compute_seconds for g in p.groups) for p in phases)
    ahead = plan.mode == "stream"
    busy = _reading_share(plan, profile)
    ttft = ring_seconds(phases, plan.slots, ahead=ahead, compute_share_of_read=busy)
    spread = _spread(profile)
    nearly = max(read, compute)
    return Forecast(
        prompt_tokens=plan.prompt_tokens,
        ttft_seconds=ttft,
        low=max(nearly, ttft) * (1 - spread),
        high=min(read + compute, ttft) * (1 + spread),
        read_seconds=read,
        compute_seconds=compute,
        bound="read" if read > compute else "compute",
        break_even_tokens=break_even_tokens(plan, costs, profile),
        read_nbytes=sum(g.nbytes for p in phases for g in p.groups),
        advice=_advice(plan, read, compute, break_even_tokens(plan, costs, profile)),
    )
