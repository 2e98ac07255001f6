"""What one tiny family is, and the config keys most families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HIDDEN, EXPERT_HIDDEN, EXPERTS, VOCAB = 128, 64, 8, 160
ALL_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4", "none")

# Keys that mean the same in most families; expert counts are named family by family.
BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_HIDDEN,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@dataclass(frozen=True)
class FamilyCase:
    """One family; `wraps_at` is the prompt length from which its window or chunk caches wrap."""

    name: str
    config: dict[str, Any]
    tags: frozenset[str] = frozenset()
    max_prompt: int = 256  # longer prompts run, but take long on a CPU
    wraps_at: int | None = None
    quantizable: tuple[str, ...] = ALL_MODES
    notes: str = ""


def case(
    name: str,
    config: dict[str, Any],
    *tags: str,
    base: dict[str, Any] = BASE,
    **fields: Any,
) -> FamilyCase:
    """A family whose config is `base` with `config` on top; `name` is its mlx-lm module."""
    return FamilyCase(name, {"model_type": name} | base | config, frozenset(tags), **fields)
