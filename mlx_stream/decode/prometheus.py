"""Decode metrics and the last prefill's receipt as Prometheus text, exposition format 0.0.4.

Serve it as ``text/plain; version=0.0.4; charset=utf-8``. Rates and ratios are the scraper's to
compute; seconds and bytes are the only units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_stream.decode.metrics import DecodeMetrics
from mlx_stream.telemetry import Receipt

__all__ = ["CONTENT_TYPE", "prometheus_text"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "mlx_stream_"
OWN_LABELS = ("path", "quantile", "mode", "bound", "io_mode", "backend")

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float]  # suffix of the family's name, labels, value

# (name, key of DecodeMetrics.as_dict, help)
_COUNTERS = (
    ("decode_tokens_total", "tokens", "Decoded tokens."),
    ("decode_redone_steps_total", "redone", "Steps computed again on the exact path."),
    ("decode_cache_hits_total", "hits", "Routed experts that the cache had."),
    ("decode_cache_misses_total", "misses", "Routed experts that had to be read."),
    ("decode_read_bytes_total", "bytes_read", "Bytes read for experts during decode."),
    ("decode_read_calls_total", "read_calls", "Read system calls during decode."),
    ("decode_stall_seconds_total", "stall_seconds", "Time that decode waited for reads."),
    ("decode_syncs_total", "syncs", "Times the host waited for device results."),
    ("decode_predicted_experts_total", "predicted", "Experts named by lookahead."),
    ("decode_predicted_used_experts_total", "predicted_used", "Of these, those routed to."),
    (
        "decode_predicted_layer_experts_total",
        "routed_in_predicted",
        "Experts routed to in the layers where lookahead ran.",
    ),
    ("decode_wasted_bytes_total", "wasted_bytes", "Bytes read for wrong predictions."),
    (
        "decode_predicted_layer_steps_total",
        "predicted_layer_steps",
        "Layers whose routing was a Prerouter's prediction.",
    ),
    (
        "decode_checked_experts_total",
        "checked_experts",
        "Predicted experts compared with the real router.",
    ),
    ("decode_agreed_experts_total", "agreed_experts", "Of these, those that it also chose."),
    ("decode_waits_avoided_total", "waits_avoided", "Predicted experts read in time."),
    ("decode_dropped_experts_total", "dropped_experts", "Predicted experts left out; 0."),
)
# (name, attribute of Receipt, help)
_GAUGES = (
    ("prefill_tokens", "prompt_tokens", "Tokens of the last prompt."),
    ("prefill_segments", "segments", "Expert passes over the last prompt."),
    ("prefill_read_bytes", "bytes_read", "Bytes read for the last prompt."),
    ("prefill_distinct_expert_bytes", "distinct_expert_bytes", "Bytes of the experts it used."),
    ("prefill_read_calls", "read_calls", "Read system calls of the last prefill."),
    ("prefill_read_seconds", "read_seconds", "Time with a read in flight."),
    ("prefill_compute_seconds", "compute_seconds", "Wall time of the last prefill less stalls."),
    ("prefill_stall_seconds", "stall_seconds", "Time that the last prefill waited for reads."),
    ("prefill_wall_seconds", "wall_seconds", "The whole of the last prefill."),
    ("prefill_peak_bytes", "peak_bytes", "Highest memory use of the last prefill."),
    ("memory_budget_bytes", "budget_bytes", "The memory budget in force."),
)


def prometheus_text(
    metrics: DecodeMetrics | Mapping[str, Any],
    receipt: Receipt | None = None,
    labels: Labels | None = None,
) -> str:
    """One scrape's answer.

    Args:
        metrics: or its :meth:`DecodeMetrics.as_dict`.
        receipt: of the last prefill.
        labels: on every sample, such as ``{"model": "..."}``; values may be any text.

    Raises:
        ValueError: a label name is not valid, or one of ours.
    """
    common = dict(labels or {})
    for name in common:
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in OWN_LABELS:
            raise ValueError(f"{name!r} cannot be a label here")
    data = metrics.as_dict() if isinstance(metrics, DecodeMetrics) else metrics
    lines = _decode_lines(data, common)
    if receipt is not None:
        lines += _receipt_lines(receipt, common)
    return "\n".join(lines) + "\n"


def _decode_lines(data: Mapping[str, Any], common: Labels) -> list[str]:
    lines: list[str] = []
    for name, key, text in _COUNTERS:
        lines += _family(name, "counter", text, [("", {}, data[key])], common)
    lines += _family(
        "decode_path_steps_total",
        "counter",
        "Decode steps by execution path.",
        [("", {"path": path}, steps) for path, steps in sorted(data["paths"].items())],
        common,
    )
    lines += _family(
        "decode_step_seconds",
        "summary",
        "Wall time of a decode step; quantiles over the last ones.",
        [
            # Without steps a quantile is not a number.
            ("", {"quantile": "0.5"}, data["wall_p50"] if data["steps"] else math.nan),
            ("", {"quantile": "0.99"}, data["wall_p99"] if data["steps"] else math.nan),
            ("_sum", {}, data["wall_seconds"]),
            ("_count", {}, data["steps"]),
        ],
        common,
    )
    last = data["last"]
    size = [("", {}, last["cache_bytes"] if last else 0)]
    return lines + _family("decode_cache_bytes", "gauge", "Size of the expert cache.", size, common)


def _receipt_lines(receipt: Receipt, common: Labels) -> list[str]:
    lines: list[str] = []
    for name, attribute, text in _GAUGES:
        lines += _family(name, "gauge", text, [("", {}, getattr(receipt, attribute))], common)
    how = {name: getattr(receipt, name) for name in ("mode", "bound", "io_mode", "backend")}
    return lines + _family(
        "prefill_info", "gauge", "How the last prompt was read.", [("", how, 1)], common
    )


def _family(
    name: str, kind: str, text: str, samples: Iterable[Sample], common: Labels
) -> list[str]:
    full = PREFIX + name
    lines = [f"# HELP {full} {_escape(text)}", f"# TYPE {full} {kind}"]
    for suffix, own, value in samples:
        pairs = {**common, **own}
        inside = ",".join(f'{key}="{_escape(v, quote=True)}"' for key, v in pairs.items())
        lines.append(f"{full}{suffix}{f'{{{inside}}}' if inside else ''} {_number(value)}")
    return lines


def _escape(text: object, *, quote: bool = False) -> str:
    escaped = str(text).replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quote else escaped


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
