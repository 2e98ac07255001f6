"""What decode cost, token by token: counted in the engine, shown by the terminal and by scrapers.

Owns no clock and reads nothing: whoever decodes fills in a StepMetrics. Memory is bounded.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from dataclasses import dataclass, field

from mlx_stream.config import format_bytes

HISTORY_STEPS = 4096


@dataclass(frozen=True)
class StepMetrics:
    """One decode step, which moves on by one token or a few.

    Plain Python numbers. An expert is counted once for each layer that routed to it.

    Attributes:
        path: the execution path, such as ``"exact"`` or ``"hot"``.
        tokens: that the step computed.
        hits: routed experts that the cache had when the layer asked; one whose predicted read had
            been started counts, although the layer may have waited for it.
        misses: routed experts whose read the layer had to start.
        bytes_read: returned by the system for expert reads, padding and predictions included.
        read_calls: preadv calls.
        stall_seconds: time the compute thread waited for reads.
        syncs: times the host waited for device results (router outputs, sampled token).
        predicted: experts named by lookahead, in the layers where it ran.
        predicted_used: of these, those that the router then chose.
        routed_in_predicted: experts that the router chose in the layers where lookahead ran.
        wasted_bytes: read for predicted experts that the router then did not choose.
        redone: steps computed again on the exact path, because an expert was missing.
        predicted_layer_steps: layers whose routing was a Prerouter's prediction.
        checked_experts: predicted experts that were compared with the real router, in every
            so many steps.
        agreed_experts: of these, those that the real router also chose.
        waits_avoided: predicted experts whose read, begun ahead, was over when their layer came.
        dropped_experts: experts that a predicted layer left out. Must be 0.
        cache_bytes: held by the expert cache after the step.
        wall_seconds: the whole step.
    """

    path: str
    tokens: int = 1
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    read_calls: int = 0
    stall_seconds: float = 0.0
    syncs: int = 0
    predicted: int = 0
    predicted_used: int = 0
    routed_in_predicted: int = 0
    wasted_bytes: int = 0
    redone: int = 0
    predicted_layer_steps: int = 0
    checked_experts: int = 0
    agreed_experts: int = 0
    waits_avoided: int = 0
    dropped_experts: int = 0
    cache_bytes: int = 0
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class DecodeTotals:
    """Sums over all steps, and ratios of them; 0.0 where nothing was counted.

    `paths` maps an execution path to its steps; the rest as in :class:`StepMetrics`.
    """

    steps: int = 0
    tokens: int = 0
    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    read_calls: int = 0
    stall_seconds: float = 0.0
    syncs: int = 0
    predicted: int = 0
    predicted_used: int = 0
    routed_in_predicted: int = 0
    wasted_bytes: int = 0
    redone: int = 0
    predicted_layer_steps: int = 0
    checked_experts: int = 0
    agreed_experts: int = 0
    waits_avoided: int = 0
    dropped_experts: int = 0
    wall_seconds: float = 0.0
    paths: dict[str, int] = field(default_factory=dict)

    def plus(self, step: StepMetrics) -> DecodeTotals:
        """The totals with one step more."""
        sums = {name: getattr(self, name) + getattr(step, name) for name in _SUMMED}
        paths = self.paths | {step.path: self.paths.get(step.path, 0) + 1}
        return DecodeTotals(steps=self.steps + 1, paths=paths, **sums)

    @property
    def hit_rate(self) -> float:
        """Share of routed experts that the cache had."""
        return _ratio(self.hits, self.hits + self.misses)

    @property
    def bytes_per_token(self) -> float:
        """Bytes read for one token."""
        return _ratio(self.bytes_read, self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Over the wall time of the steps; what the caller does between them does not count."""
        return _ratio(self.tokens, self.wall_seconds)

    @property
    def stall_share(self) -> float:
        """Share of the wall time spent waiting for reads."""
        return _ratio(self.stall_seconds, self.wall_seconds)

    @property
    def prediction_recall(self) -> float:
        """Of the experts routed in layers where lookahead ran, the share that it had named."""
        return _ratio(self.predicted_used, self.routed_in_predicted)

    @property
    def prediction_precision(self) -> float:
        """Of the experts that lookahead named, the share that was routed to."""
        return _ratio(self.predicted_used, self.predicted)

    @property
    def wasted_share(self) -> float:
        """Share of the bytes read that wrong predictions cost."""
        return _ratio(self.wasted_bytes, self.bytes_read)

    @property
    def agreement(self) -> float:
        """Share of the checked predicted experts that the real router also chose."""
        return _ratio(self.agreed_experts, self.checked_experts)

    @property
    def syncs_per_token(self) -> float:
        """Host waits for the device, for one token."""
        return _ratio(self.syncs, self.tokens)


_SUMMED = tuple(
    f.name for f in dataclasses.fields(DecodeTotals) if f.name not in ("steps", "paths")
)
_RATIOS = tuple(name for name, v in vars(DecodeTotals).items() if isinstance(v, property))


class DecodeMetrics:
    """All steps as sums, the last ones one by one. May be read while another thread adds.

    Args:
        history: steps kept for percentiles.
        prerouter: whether routing is predicted, and why; for people.
    """

    def __init__(self, history: int = HISTORY_STEPS, *, prerouter: str = "off") -> None:
        self.prerouter = prerouter
        self._lock = threading.Lock()
        self._totals = DecodeTotals()
        self._history: deque[StepMetrics] = deque(maxlen=history)

    def add(self, step: StepMetrics) -> None:
        """Count one decode step."""
        with self._lock:
            self._totals = self._totals.plus(step)
            self._history.append(step)

    @property
    def totals(self) -> DecodeTotals:
        """Sums over all steps."""
        return self._totals

    @property
    def last(self) -> StepMetrics | None:
        """The newest step."""
        with self._lock:
            return self._history[-1] if self._history else None

    @property
    def history(self) -> tuple[StepMetrics, ...]:
        """The newest steps, oldest first."""
        with self._lock:
            return tuple(self._history)

    @property
    def wall_p50(self) -> float:
        """Median seconds of a step over the history."""
        return self.wall_percentile(50)

    @property
    def wall_p99(self) -> float:
        """Seconds that 99% of the history's steps did not exceed."""
        return self.wall_percentile(99)

    def wall_percentile(self, percent: float) -> float:
        """Nearest-rank percentile of the history's wall seconds; 0.0 without steps."""
        return _percentile(self.history, percent)

    def as_dict(self) -> dict[str, object]:
        """Totals, derived values and the last step, JSON-ready."""
        with self._lock:
            totals, history = self._totals, tuple(self._history)
        data = dataclasses.asdict(totals) | {name: getattr(totals, name) for name in _RATIOS}
        return data | {
            "wall_p50": _percentile(history, 50),
            "wall_p99": _percentile(history, 99),
            "history_steps": len(history),
            "prerouter": self.prerouter,
            "last": dataclasses.asdict(history[-1]) if history else None,
        }

    def summary(self) -> str:
        """One line for a terminal."""
        t = self.totals
        if not t.tokens:
            return "decode 0 tokens"
        parts = [
            f"decode {t.tokens} tokens in {t.wall_seconds:.2f} s ({t.tokens_per_second:.1f} tok/s)",
            f"hits {t.hit_rate:.0%}, {format_bytes(t.bytes_per_token)}/token",
            f"stall {t.stall_share:.0%}",
            f"p50 {self.wall_p50 * 1e3:.1f} ms, p99 {self.wall_p99 * 1e3:.1f} ms",
        ]
        if t.predicted:
            parts.insert(2, f"predicted {t.prediction_recall:.0%}, wasted {t.wasted_share:.0%}")
        return " | ".join(parts)

    def table(self) -> str:
        """Lines of name and value for ``--stats``."""
        t = self.totals
        by_path = ", ".join(f"{path} {steps}" for path, steps in sorted(t.paths.items())) or "none"
        rows = [
            ("tokens", f"{t.tokens}"),
            ("steps", f"{t.steps} ({by_path}), {t.redone} redone"),
            ("speed", f"{t.tokens_per_second:.2f} tok/s over {t.wall_seconds:.2f} s"),
            ("step", f"p50 {self.wall_p50 * 1e3:.2f} ms, p99 {self.wall_p99 * 1e3:.2f} ms"),
            ("stall", f"{t.stall_seconds:.2f} s, {t.stall_share:.1%} of the time"),
            ("cache", f"{t.hits} hits, {t.misses} misses, hit rate {t.hit_rate:.1%}"),
            ("cache size", format_bytes(self.last.cache_bytes if self.last else 0)),
            ("read", f"{format_bytes(t.bytes_read)} in {t.read_calls} calls"),
            ("read per token", format_bytes(t.bytes_per_token)),
            ("syncs per token", f"{t.syncs_per_token:.2f}"),
            ("predicted", f"{t.predicted} experts, {t.predicted_used} used"),
            ("recall", f"{t.prediction_recall:.1%} of {t.routed_in_predicted} routed"),
            ("precision", f"{t.prediction_precision:.1%}"),
            ("wasted", f"{format_bytes(t.wasted_bytes)}, {t.wasted_share:.1%} of the bytes"),
            ("prerouter", self.prerouter),
        ]
        if t.predicted_layer_steps:
            rows += [
                ("prerouted", f"{t.predicted_layer_steps} layer-steps"),
                ("agreement", f"{t.agreement:.1%} of {t.checked_experts} checked experts"),
                ("waits avoided", f"{t.waits_avoided}"),
                ("dropped", f"{t.dropped_experts} experts"),
            ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _percentile(history: tuple[StepMetrics, ...], percent: float) -> float:
    if not history:
        return 0.0
    walls = sorted(step.wall_seconds for step in history)
    rank = -(-len(walls) * percent // 100)  # ceiling
    return walls[min(len(walls), max(1, int(rank))) - 1]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
