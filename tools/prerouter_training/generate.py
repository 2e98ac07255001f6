"""The student writes: prompts run with the layers' own routing, what follows with predictions.

Token by token with a key-value cache, many rows at once; the same numbers as model.forward gives
for the whole sequence (a test compares them).
"""

from __future__ import annotations

import torch
from torch.nn import functional as fn

from tools.prerouter_training.heads import multi_hot
from tools.prerouter_training.model import Student, norm, select


class Writer:
    """Decoding state of B sequences.

    Args:
        length: tokens that there is room for.
    """

    def __init__(self, student: Student, rows: int, length: int) -> None:
        self._student, self._position = student, 0
        s, base = student.base.shape, student.base
        self._layers = []
        for layer in range(s.num_hidden_layers):
            w = base.layer(layer)
            if student.lora is not None:
                w = student.lora.effective(f"model.layers.{layer}.", w)
            attention = {n: t.to(base.dtype) for n, t in w.items() if n.startswith("self_attn")}
            self._layers.append(w | attention)
        size = (s.num_hidden_layers, 2, rows, s.num_key_value_heads, length, s.head_dim)
        self._kept = torch.zeros(size, dtype=base.dtype)
        self._predicted: dict[int, torch.Tensor] = {}  # consumer -> logits [B, E] of this token
        self._previous: dict[int, torch.Tensor] = {}  # owner -> multi-hot [B, E] of the last token

    def step(self, ids: torch.Tensor, *, predicted: bool) -> torch.Tensor:
        """Logits ``[B, V]`` after one more token ``[B]``.

        Args:
            predicted: route the consumer layers by what the last step's heads said.
        """
        student, base = self._student, self._student.base
        eps = base.shape.rms_norm_eps
        coming: dict[int, torch.Tensor] = {}
        h = fn.embedding(ids, base.weights["model.embed_tokens.weight"])[:, None]  # [B, 1, D]
        for layer, w in enumerate(self._layers):
            h = h + self._attend(layer, norm(h, w["input_layernorm.weight"], eps))
            x = norm(h, w["post_attention_layernorm.weight"], eps)
            own = fn.linear(x, w["mlp.gate.weight"])
            guess = self._predicted.get(layer) if predicted else None
            used = own if guess is None else guess[:, None]
            y, chosen = every_expert(x[:, 0], used[:, 0], student.top_k, base.experts[layer])
            h = h + y[:, None]
            if student.heads is not None and layer + 1 in student.consumers:
                fed = (
                    chosen
                    if student.feature == "executed"
                    else own[:, 0].topk(student.top_k).indices
                )
                hot = multi_hot(fed, base.shape.num_experts)
                before = self._previous[layer] if predicted else torch.zeros_like(hot)
                features = torch.cat((x[:, 0], hot, before), dim=-1)
                coming[layer + 1] = student.heads.logits(layer, features)
                self._previous[layer] = hot
        self._predicted = coming
        self._position += 1
        h = norm(h[:, 0], base.weights["model.norm.weight"], eps)
        return (h.to(base.dtype) @ base.embedding.T).float()

    def _attend(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """x: [B, 1, D]; keys and values of this position are kept."""
        s, w, t = self._student.base.shape, self._layers[layer], self._position
        x = x.to(self._student.base.dtype)

        def heads(name: str) -> torch.Tensor:
            y = fn.linear(x, w[f"self_attn.{name}_proj.weight"])
            y = y.view(x.shape[0], 1, -1, s.head_dim)
            if name != "v":
                y = norm(y, w[f"self_attn.{name}_norm.weight"], s.rms_norm_eps)
            y = y.transpose(1, 2)  # [B, H, 1, head_dim]
            return y if name == "v" else rotated(y, t, s.rope_theta)

        self._kept[layer, 0, :, :, t : t + 1] = heads("k")
        self._kept[layer, 1, :, :, t : t + 1] = heads("v")
        q = heads("q")
        k, v = (
            kept[:, :, : t + 1].repeat_interleave(q.shape[1] // kept.shape[1], dim=1)
            for kept in self._kept[layer]
        )
        y = fn.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).reshape(x.shape[0], 1, -1)
        return fn.linear(y, w["self_attn.o_proj.weight"]).float()


def every_expert(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    experts: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As model.routed_experts, for few rows: all experts compute all of them, in two products.

    x: [B, D]; logits: [B, E]; experts: [E, D, 2F] and [E, F, D].
    """
    gate_up, down = experts
    scores, chosen = select(logits, top_k)
    weight = torch.zeros_like(logits).scatter_(1, chosen, scores)  # [B, E]
    g, u = (x.to(gate_up.dtype).expand(len(gate_up), -1, -1) @ gate_up).chunk(2, dim=-1)
    h = fn.silu(g) * u * weight.T[..., None].to(g.dtype)  # [E, B, F]
    return torch.einsum("ebf,efd->bd", h, down).float(), chosen


def rotated(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one position, halves. x: [B, H, 1, head_dim]."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float32) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def write(
    student: Student,
    prompts: torch.Tensor,
    tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> torch.Tensor:
    """``prompts [B, P] -> [B, P + tokens]``, sampled from the student."""
    rows, length = prompts.shape
    writer = Writer(student, rows, length + tokens)
    ids = [prompts[:, n] for n in range(length)]
    for n in range(length + tokens - 1):
        logits = writer.step(ids[n], predicted=n >= length)
        if n >= length - 1:
            chances = (logits / temperature).softmax(dim=-1)
            ids.append(torch.multinomial(chances, 1, generator=generator)[:, 0])
    return torch.stack(ids, dim=1)
