"""What one token costs a model: FLOPs and bytes of every layer, from headers and config alone.

Pure. A multiply-add is two FLOPs. Resident matrices outside experts and embeddings count
2 * parameters per token; the vocabulary projection counts for the prompt's last token only. Small
tensors (norms, convolutions) and softmax are not counted; latent attention counts as it is run,
with whole keys and values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_stream.planner.cost_model import TokenWork
from mlx_stream.planner.model_shape import ModelShape, model_shape
from mlx_stream.storage.checkpoint import TensorInfo
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer
from mlx_stream.storage.quant_spec import QuantConfig, QuantSpec

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_NO_LINEAR = re.compile(r"(^|\.)(embed\w*|wte|wpe|word_embeddings|tok_embeddings|conv\w*)\.")
_PACKED = ("U32", "U8")
_MATRICES = {"glu": 3, "mlp": 2}


@dataclass(frozen=True)
class LinearCost:
    """A resident matrix ``[out, in]``."""

    name: str
    format: str
    in_dims: int
    out_dims: int

    @property
    def flops_per_token(self) -> float:
        """Two per parameter."""
        return 2.0 * self.in_dims * self.out_dims


@dataclass(frozen=True)
class ExpertCost:
    """The routed experts of a layer: ``num`` MLPs of ``dims -> hidden -> dims``."""

    num: int
    dims: int
    hidden: int
    matrices: int
    format: str
    expert_nbytes: int
    tensor_nbytes: tuple[int, ...]  # of one expert, tensor by tensor

    @property
    def flops_per_row(self) -> float:
        """Of one token in one expert."""
        return 2.0 * self.matrices * self.dims * self.hidden


@dataclass(frozen=True)
class AttentionCost:
    """One attention layer.

    Attributes:
        pair_flops: per (query, key) pair, all heads.
        window: keys a query sees at most; None for all.
    """

    pair_flops: float
    head_dim: int
    window: int | None


@dataclass(frozen=True)
class LayerCost:
    """Everything from one expert layer's end to the next one's, experts last.

    Attributes:
        experts: None after the last expert layer.
        depth: decoder layers it covers, for the elementwise cost.
    """

    linears: tuple[LinearCost, ...]
    attention: tuple[AttentionCost, ...]
    experts: ExpertCost | None
    depth: int


@dataclass(frozen=True)
class ModelCosts:
    """A model's work, in the order it is done.

    Attributes:
        layers: one for each expert layer, then one for what follows.
        head: the vocabulary projection, None when it is the embedding.
        elementwise: values per token and layer that norms, rotary embeddings and routers pass over.
        nbytes: W, bytes of all routed experts.
    """

    layers: tuple[LayerCost, ...]
    head: LinearCost | None
    top_k: int
    elementwise: float
    nbytes: int

    @cached_property
    def routed_flops(self) -> float:
        """Per token, in routed experts."""
        return sum(self.top_k * x.experts.flops_per_row for x in self.layers if x.experts)

    @cached_property
    def dense_flops(self) -> float:
        """Per token, in resident matrices."""
        return sum(linear.flops_per_token for layer in self.layers for linear in layer.linears)

    def attention_flops(self, start: int, stop: int) -> float:
        """Of queries `start` to `stop`, causal: the quadratic part."""
        return sum(
            a.pair_flops * pairs(start, stop, a.window) for x in self.layers for a in x.attention
        )

    def token_work(self) -> TokenWork:
        """The same for the cost model's formulas; full attention in all layers."""
        pair = sum(a.pair_flops for x in self.layers for a in x.attention)
        return TokenWork(self.routed_flops + self.dense_flops, self.routed_flops, pair)


def pairs(start: int, stop: int, window: int | None = None) -> float:
    """(query, key) pairs of the queries at positions `start` to `stop`, each sees itself."""

    def until(n: int) -> float:
        if window is None or n <= window:
            return n * (n + 1) / 2
        return window * (window + 1) / 2 + float(n - window) * window

    return until(stop) - until(start)


def elementwise_values(hidden: int, heads: int, kv_heads: int, head_dim: int, experts: int) -> int:
    """Values per token that the elementwise work of a decoder layer passes over, roughly.

    Two norms and two sums of the hidden state, norm, rotation and transposes of queries and keys,
    softmax and selection of the router. Measured and used with the same weights.
    """
    return 4 * hidden + 3 * (heads + 2 * kv_heads) * head_dim + 4 * experts


def model_costs(index: ExpertIndex, config: dict[str, Any]) -> ModelCosts:
    """Costs of a checkpoint.

    Args:
        config: of the checkpoint; nested text_config included.
    """
    shape = model_shape(config, index)
    quant = QuantConfig.of(config, index.checkpoint.path / "config.json")
    by_layer, head = _linears(index, quant, shape)
    flat = {**config, **(config.get("text_config") or {})}
    numbers = [_layer_number(layer.name, layer.index) for layer in index.layers]
    total = max([shape.layers, *(n + 1 for n in numbers), *(n + 1 for n in by_layer if n >= 0)])
    layers, start = [], 0
    for number, experts in zip([*numbers, total - 1], [*index.layers, None], strict=True):
        span = range(start, number + 1)
        found = [x for n in (*((-1,) if start == 0 else ()), *span) for x in by_layer.get(n, ())]
        attention = [a for n in span if (a := _attention(flat, shape, n)) is not None]
        cost = None if experts is None else _expert_cost(experts)
        layers.append(LayerCost(tuple(found), tuple(attention), cost, len(span)))
        start = max(start, number + 1)
    most = max(layer.num_experts for layer in index.layers)
    values = elementwise_values(shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, most)
    return ModelCosts(tuple(layers), head, shape.top_k, float(values * shape.streams), index.nbytes)


def _layer_number(name: str, default: int) -> int:
    match = _LAYER.search(name + ".")
    return int(match.group(1)) if match else default


def _expert_cost(layer: ExpertLayer) -> ExpertCost:
    return ExpertCost(
        num=layer.num_experts,
        dims=layer.input_dims,
        hidden=layer.hidden_dims,
        matrices=_MATRICES[layer.kind],
        format=layer.quant[0][1].name,
        expert_nbytes=layer.expert_nbytes,
        tensor_nbytes=tuple(t.nbytes for t in layer.tensors),
    )


def _attention(config: Mapping[str, Any], shape: ModelShape, layer: int) -> AttentionCost | None:
    """One layer's attention; None for a recurrent layer."""
    kinds = config.get("layer_types")
    kind = kinds[layer] if isinstance(kinds, list) and layer < len(kinds) else "full_attention"
    if not isinstance(kind, str) or "linear" in kind or "mamba" in kind or layer >= shape.layers:
        return None
    window = config.get("sliding_window") if "sliding" in kind else None
    key = value = shape.head_dim
    if config.get("kv_lora_rank"):
        key = config.get("qk_nope_head_dim", key) + config.get("qk_rope_head_dim", 0)
        value = config.get("v_head_dim", value)
    flops = 2.0 * shape.heads * (key + value)
    return AttentionCost(flops, key, window if isinstance(window, int) and window > 0 else None)


# --- resident matrices


def _linears(
    index: ExpertIndex, quant: QuantConfig, shape: ModelShape
) -> tuple[dict[int, list[LinearCost]], LinearCost | None]:
    """Matrices by decoder layer (-1: outside of any), and the vocabulary projection."""
    tensors = index.checkpoint.tensors
    by_layer: dict[int, list[LinearCost]] = {}
    head = None
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        if name in index.tensor_names or path == name or len(tensor.shape) not in (2, 3):
            continue
        if _NO_LINEAR.search(name):
            continue
        cost = _linear(path, tensor, tensors.get(f"{path}.scales"), quant, shape)
        number = _layer_number(name, -1)
        if number < 0 and cost.out_dims >= shape.vocab > 0:
            head = cost
        else:
            by_layer.setdefault(number, []).append(cost)
    return by_layer, head


def _linear(
    path: str,
    tensor: TensorInfo,
    scales: TensorInfo | None,
    quant: QuantConfig,
    shape: ModelShape,
) -> LinearCost:
    *rows, words = tensor.shape
    if scales is None or tensor.dtype not in _PACKED:
        spec = QuantSpec("none", 8 * tensor.nbytes // math.prod(tensor.shape), 0)
        return LinearCost(path, spec.name, words, math.prod(rows))
    packed = words * (32 if tensor.dtype == "U32" else 8)
    spec = _packing(packed, scales.shape[-1], quant, path, shape)
    return LinearCost(path, spec.name, packed // spec.bits, math.prod(rows))


def _packing(
    packed: int, groups: int, quant: QuantConfig, path: str, shape: ModelShape
) -> QuantSpec:
    """Of `packed` bits and `groups` scales a row: what the config says, if the sizes agree."""
    own = quant.entry((path,))
    for entry in (own if isinstance(own, dict) else {}, quant.entries):
        bits, size = entry.get("bits"), entry.get("group_size")
        if isinstance(bits, int) and isinstance(size, int) and bits * size * groups == packed:
            return QuantSpec(
                str(entry.get("mode", quant.entries.get("mode", "affine"))), bits, size
            )
    fitting = [b for b in (4, 8, 6, 5, 3, 2) if packed % (b * groups) == 0]
    wide = [b for b in fitting if packed // b == shape.hidden]
    bits = (wide or fitting or [4])[0]
    return QuantSpec("affine", bits, packed // bits // groups)
