"""What a benchmark measured: one run, and the runs of an arm together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_stream.bench.arms import Arm


@dataclass(frozen=True)
class Run:
    """One run of an arm. Bytes and calls come from the reader.

    Attributes:
        wall_seconds: of the prompt; of all new tokens in the decode arm.
        bytes_read, read_calls: of the run.
        expert_bytes: of all experts of the model, so bytes over this is the number of passes.
        peak_bytes: MLX allocations and slots, highest sum.
        io_mode: what the system granted.
        forecast_seconds: what the plan had promised, or None without a machine profile.
        hit_rate: of the decode arm, else None.
        note: why a run is not what was asked for.
    """

    arm: Arm
    wall_seconds: float
    bytes_read: int
    read_calls: int
    expert_bytes: int
    peak_bytes: int
    io_mode: str
    backend: str
    forecast_seconds: float | None = None
    hit_rate: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Result:
    """The runs of one arm."""

    arm: Arm
    runs: tuple[Run, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(r.wall_seconds for r in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """Fastest and slowest, seconds."""
        walls = [r.wall_seconds for r in self.runs]
        return min(walls), max(walls)

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens, or new ones in the decode arm, over the median."""
        return (self.arm.new_tokens or self.arm.tokens) / max(self.median, 1e-9)

    @property
    def first(self) -> Run:
        """For what is the same in every run."""
        return self.runs[0]

    @property
    def passes(self) -> float:
        """Bytes read over the bytes of all experts."""
        return self.first.bytes_read / max(1, self.first.expert_bytes)

    def as_dict(self) -> dict[str, object]:
        """Flat, for JSON and CSV."""
        arm, run, (low, high) = self.arm, self.first, self.spread
        return {
            "order": arm.order,
            "tokens": arm.tokens,
            "chunk": arm.chunk,
            "new_tokens": arm.new_tokens,
            "budget_bytes": arm.setting.budget,
            "io_mode": run.io_mode,
            "throttle": arm.setting.throttle or "",
            "backend": run.backend,
            "rounds": len(self.runs),
            "seconds_median": round(self.median, 4),
            "seconds_min": round(low, 4),
            "seconds_max": round(high, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "bytes_read": run.bytes_read,
            "passes": round(self.passes, 4),
            "read_calls": run.read_calls,
            "peak_bytes": max(r.peak_bytes for r in self.runs),
            "forecast_seconds": _rounded(run.forecast_seconds),
            "hit_rate": _rounded(run.hit_rate),
            "note": run.note,
        }


def _rounded(value: float | None) -> float | str:
    return "" if value is None else round(value, 4)


def collect(runs: Sequence[Run]) -> list[Result]:
    """Runs by arm, in the order of their first run."""
    by_arm: dict[Arm, list[Run]] = {}
    for run in runs:
        by_arm.setdefault(run.arm, []).append(run)
    return [Result(arm, tuple(found)) for arm, found in by_arm.items()]
