"""The student: the frozen base with its layers routed by heads, and a LoRA, in one parallel pass.

Layer N's routing of token t follows from head N - 1 at token t - 1, which is known once layer
N - 1 is done for all tokens. So a whole sequence runs layer by layer: no loop over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional as fn

from tools.prerouter_training.heads import Heads, head_features, shifted
from tools.prerouter_training.lora import Lora
from tools.prerouter_training.weights import Base
from tools.train_demo_model import attention, expert_slots, grouped

Probe = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True)
class Student:
    """What runs.

    Attributes:
        top_k: experts a token in every layer.
        heads: None routes every layer by itself.
        consumers: layers that a head routes.
        feature: the experts that a head is fed: ``executed`` or ``teacher``, as in the spec.
        lora: None runs the base as it is.
        runners_up: experts after the K predicted ones that the loss reaches too, in training.
    """

    base: Base
    top_k: int
    heads: Heads | None = None
    consumers: tuple[int, ...] = ()
    feature: str = "executed"
    lora: Lora | None = None
    runners_up: int = 0


def forward(
    student: Student, ids: torch.Tensor, *, predict_from: int = 1, probe: Probe | None = None
) -> torch.Tensor:
    """Final hidden states ``[B, T, D]`` of ``ids [B, T]``.

    Args:
        predict_from: tokens before this one are routed by the layers themselves, as a prompt is.
            At least 1: nothing predicts the first token.
        probe: called with a layer, its MoE input ``[B, T, D]``, its router's logits ``[B, T, E]``
            and its own experts ``[B, T, K]``.
    """
    base, s = student.base, student.base.shape
    predicted: torch.Tensor | None = None  # logits [B, T, E] for the layer that comes
    known = torch.arange(ids.shape[1]) >= max(1, predict_from)  # [T]
    h = fn.embedding(ids, base.weights["model.embed_tokens.weight"])
    for layer in range(s.num_hidden_layers):
        w = base.layer(layer)
        if student.lora is not None:
            w = student.lora.effective(f"model.layers.{layer}.", w)
        h = h + attention(norm(h, w["input_layernorm.weight"], s.rms_norm_eps).to(base.dtype), w, s)
        x = norm(h, w["post_attention_layernorm.weight"], s.rms_norm_eps)
        logits = fn.linear(x, w["mlp.gate.weight"])
        own = logits.topk(student.top_k, dim=-1).indices
        if probe is not None:
            probe(layer, x, logits, own)
        used, runners_up = logits, 0
        if predicted is not None and layer in student.consumers:
            used = torch.where(known[:, None], predicted, logits)
            runners_up = student.runners_up
        y, chosen = routed_experts(x, used, student.top_k, base.experts[layer], runners_up)
        h = h + y
        if student.heads is not None and layer + 1 in student.consumers:
            fed = own if student.feature == "teacher" else chosen
            features = head_features(x, fed, s.num_experts, max(1, predict_from))
            predicted = shifted(student.heads.logits(layer, features))
    return norm(h, base.weights["model.norm.weight"], s.rms_norm_eps)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis."""
    return fn.rms_norm(x, weight.shape, weight, eps)


def select(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax, the K largest, their weights divided by their sum: ``[..., E] -> 2 x [..., K]``."""
    scores, chosen = logits.softmax(dim=-1).topk(top_k, dim=-1)
    return scores / scores.sum(dim=-1, keepdim=True), chosen


def routed_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    experts: tuple[torch.Tensor, torch.Tensor],
    runners_up: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the experts that the logits choose, and those experts.

    With `runners_up` the logits learn as if the next best experts took part as well: so a choice
    that another expert would have served better is seen to be one.

    x: [B, T, D]; logits: [B, T, E]; experts: [E, D, 2F] and [E, F, D] in the dtype of products.
    """
    scores, chosen = select(logits, top_k)
    flat = x.flatten(0, 1).to(experts[0].dtype)
    rows = (scores.flatten(0, 1), chosen.flatten(0, 1))
    if not runners_up:
        y = FrozenMix.apply(flat, *rows, *experts)
    else:
        wide = logits.topk(top_k + runners_up, dim=-1).indices.flatten(0, 1)  # the K come first
        smooth = logits.flatten(0, 1).gather(1, wide).softmax(dim=-1)
        with torch.no_grad():
            others = expert_outputs(flat, wide[:, top_k:], *experts).y
        y = FrozenMix.apply(flat, *rows, *experts, smooth, others)
    return y.view_as(x).float(), chosen


class Outputs(NamedTuple):
    """Of T tokens' K experts, and what they were computed from, sorted by expert."""

    y: torch.Tensor  # [T, K, D]
    pre: torch.Tensor  # [R, 2F]
    slots: torch.Tensor  # [T K] -> R
    source: torch.Tensor  # [R] -> T
    counts: list[int]


def expert_outputs(
    x: torch.Tensor, chosen: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> Outputs:
    """x: [T, D]; chosen: [T, K]. Rows are sorted by expert: each is one product over a slice."""
    tokens, k = chosen.shape
    slots, counts = expert_slots(chosen, gate_up.shape[0])
    source = slots.new_zeros(sum(counts))  # padding reads token 0 and weighs nothing
    source[slots] = torch.arange(tokens * k) // k
    pre = grouped(x[source], gate_up, counts)
    g, u = pre.chunk(2, dim=-1)
    y = grouped(fn.silu(g) * u, down, counts)[slots].view(tokens, k, -1)
    return Outputs(y, pre, slots, source, counts)


class FrozenMix(torch.autograd.Function):
    """The experts' weighted sum, with gradients of its input and of the weights only.

    With `smooth` the weights are constants, and the gradient goes to `smooth`, as if it weighed
    the K outputs and the others (a straight-through estimate, Bengio et al. 2013).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        smooth: torch.Tensor | None = None,
        others: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [T, D]; scores, chosen: [T, K]; smooth: [T, K + N]; others: [T, N, D] -> [T, D]."""
        y, pre, slots, source, ctx.counts = expert_outputs(x, chosen, gate_up, down)
        ctx.save_for_backward(scores, slots, source, gate_up, down, pre, y, others)
        return torch.bmm(scores.to(x.dtype)[:, None], y)[:, 0]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        """Gradients of x, and of scores or smooth."""
        scores, slots, source, gate_up, down, pre, y, others = ctx.saved_tensors
        tokens, k = scores.shape
        weight = dy.new_zeros(len(source)).index_copy_(0, slots, scores.flatten().to(dy.dtype))
        g, u = pre.chunk(2, dim=-1)
        d_hidden = grouped(dy[source] * weight[:, None], down.transpose(1, 2), ctx.counts)
        d_gate = torch.ops.aten.silu_backward(d_hidden * u, g)
        d_pre = torch.cat((d_gate, d_hidden * fn.silu(g)), dim=-1)
        dx = grouped(d_pre, gate_up.transpose(1, 2), ctx.counts)[slots].view(tokens, k, -1)
        seen = y if others is None else torch.cat((y, others), dim=1)
        d_scores = torch.bmm(seen, dy[:, :, None])[..., 0].to(scores.dtype)
        none = (None, None, None)
        tail = (d_scores,) if others is not None else (None,)
        return dx.sum(dim=1), (None if others is not None else d_scores), *none, *tail, None
