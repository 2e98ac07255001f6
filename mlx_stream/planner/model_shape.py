"""What the planner needs to know of a model, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_stream.storage.expert_index import ExpertIndex

_TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
    "num_selected_experts",
    "top_k",
    "experts_per_token",
)
_LAYER_KEYS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
# What mlx-lm's prompt caches hold and configs do not say.
_DECOMPRESSED = ("deepseek_v2",)  # full keys and values in spite of a latent rank
_ATTENTIONS_PER_LAYER = {"longcat_flash": 2, "longcat_flash_ngram": 2}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model; unknown values are taken on the large side.

    Attributes:
        kv_values: KV-cache values per token, all layers.
        attention_values: the widest per-token activation inside a layer, in values.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    top_k: int
    streams: int
    kv_values: int
    attention_values: int
    full_masks: bool


def model_shape(config: dict[str, Any], index: ExpertIndex) -> ModelShape:
    """Read the shape from a config (nested text_config included) and the expert index."""
    cfg = {**config, **(config.get("text_config") or {})}
    first = index.layers[0]
    hidden = _number(cfg, ("hidden_size", "d_model", "n_embd"), first.input_dims)
    layers = _number(cfg, _LAYER_KEYS, len(index.layers))
    heads = _number(cfg, ("num_attention_heads", "n_heads", "n_head"), max(1, hidden // 128))
    kv_heads = _number(cfg, ("num_key_value_heads", "num_kv_heads"), heads)
    head_dim = _number(cfg, ("head_dim",), max(1, hidden // heads))
    latent = _number(cfg, ("kv_lora_rank",), 0)
    if latent:
        rope = _number(cfg, ("qk_rope_head_dim",), 64)
        nope = _number(cfg, ("qk_nope_head_dim",), head_dim)
        value = _number(cfg, ("v_head_dim",), head_dim)
        compressed = cfg.get("model_type") not in _DECOMPRESSED
        kv_values = layers * (latent + rope if compressed else heads * (nope + rope + value))
        attention = heads * (2 * (nope + rope) + 2 * value)
    else:
        kv_values = layers * 2 * kv_heads * head_dim
        attention = head_dim * (4 * heads + 4 * kv_heads)
    kv_values *= _ATTENTIONS_PER_LAYER.get(str(cfg.get("model_type")), 1)
    kv_values += layers * _indexer_values(cfg)
    dense = _number(cfg, ("intermediate_size", "ffn_hidden_size"), 0)
    return ModelShape(
        model_type=str(config.get("model_type", "unknown")),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=_number(cfg, ("vocab_size", "num_vocab"), 0),
        top_k=min(_number(cfg, _TOP_K_KEYS, 8), first.num_experts),
        streams=max(1, _number(cfg, ("hc_mult", "num_residual_streams"), 1)),
        kv_values=kv_values,
        attention_values=max(attention, 3 * dense) + 2 * hidden,
        full_masks=bool(latent),
    )


def _indexer_values(config: dict[str, Any]) -> int:
    """Cached values per token and layer of a sparse attention's indexer."""
    sparse = config.get("sparse_attention_config") or {}
    own = _number(config, ("index_head_dim",), 0)
    return 2 * max(own, _number(sparse, ("sparse_index_dim",), 0))


def _number(config: dict[str, Any], keys: tuple[str, ...], default: int) -> int:
    """The first of `keys` that is set; lists (per-layer values) count with their largest."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, list | tuple):
            numbers = [v for v in value if isinstance(v, int)]
            if numbers:
                return max(numbers)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return default
