"""Phase 1: heads imitate the next layer's router, one token ahead. Only heads are trained.

The loss is the cross-entropy with the true router's whole distribution. A second, binary one for
each expert's membership in the top K made recall and perplexity worse (docs/prerouter.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tools.prerouter_training.heads import Heads, head_features
from tools.prerouter_training.model import Student, forward
from tools.prerouter_training.weights import Base


@dataclass
class Seen:
    """What one pass of the base showed, by layer: MoE input, router logits, experts."""

    x: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)

    def __call__(
        self, layer: int, x: torch.Tensor, logits: torch.Tensor, own: torch.Tensor
    ) -> None:
        """As the probe of a pass."""
        self.x[layer], self.logits[layer], self.chosen[layer] = x, logits, own


def look(base: Base, top_k: int, ids: torch.Tensor) -> Seen:
    """Run the base, routed by itself, over ``ids [B, T]``."""
    seen = Seen()
    with torch.no_grad():
        forward(Student(base, top_k), ids, probe=seen)
    return seen


def imitation_loss(heads: Heads, seen: Seen, experts: int) -> torch.Tensor:
    """Mean over owners, tokens and batch."""
    losses = []
    for owner in heads.owners:
        features = head_features(seen.x[owner], seen.chosen[owner], experts)
        guess = heads.logits(owner, features[:, :-1])  # of the next token
        losses.append(router_loss(guess, seen.logits[owner + 1][:, 1:]))
    return torch.stack(losses).mean()


def router_loss(guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicted logits ``[..., E]`` with the true ones' distribution."""
    return -(target.softmax(dim=-1) * guess.log_softmax(dim=-1)).sum(dim=-1).mean()
