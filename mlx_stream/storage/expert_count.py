"""E, the number of experts: one number for all tensors of a layer and for the config. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_stream.errors import ExpertCountError
from mlx_stream.storage.checkpoint import Checkpoint, TensorInfo
from mlx_stream.storage.quant_spec import CONVERT

COUNT_KEYS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
TEXT_CONFIGS = ("text_config", "language_config", "llm_config")


def common_count(checkpoint: Checkpoint, tensors: Sequence[TensorInfo]) -> int:
    """The first dimension of all `tensors` of a layer. Raises ExpertCountError if they differ."""
    first = tensors[0]
    for t in tensors:
        if not t.shape or t.shape[0] != first.shape[0]:
            raise ExpertCountError(
                "The expert tensors of a layer disagree on the number of experts.",
                file=checkpoint.files[t.file].path,
                tensor=t.name,
                expected=f"{first.shape[0]} experts, as in {first.name}",
                actual=f"shape {list(t.shape)}",
                remedy=f"download this checkpoint again, or {CONVERT}",
            )
    return first.shape[0]


def check_config_count(checkpoint: Checkpoint, prefix: str, num_experts: int) -> None:
    """Raises ExpertCountError unless the config names this count, or none, for the layer."""
    declared = _declared_counts(checkpoint.config, prefix)
    if declared and all(num_experts != count for _, count in declared):
        raise ExpertCountError(
            "The expert tensors and the config disagree on the number of experts.",
            file=checkpoint.path / "config.json",
            tensor=prefix,
            expected=", ".join(f"{key} = {count}" for key, count in declared),
            actual=f"{num_experts} experts in the tensors",
            remedy="use the config.json that belongs to these weights, or download both again",
        )


def _declared_counts(config: Mapping[str, Any], prefix: str) -> list[tuple[str, int]]:
    """(setting, expert count) pairs the config gives for this layer."""
    counts: list[tuple[str, int]] = []
    number = next((int(s) for s in prefix.split(".") if s.isdigit()), 0)
    nested = [config.get(name) for name in TEXT_CONFIGS]
    for source in (config, *(c for c in nested if isinstance(c, Mapping))):
        for key in COUNT_KEYS:
            value = source.get(key)
            if isinstance(value, list) and len(value) == source.get("num_hidden_layers"):
                value = value[number] if number < len(value) else None
            values = value if isinstance(value, list) else [value]
            counts += [(key, v) for v in values if type(v) is int and v > 0]
    return counts
