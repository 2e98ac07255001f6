"""The heads in torch: their maths, their warm start and their file.

``logits = W_lin x + W_fc2 gelu(W_fc1 x)``, exact erf GELU, x = MoE input of the owner layer
``[D]``, multi-hot of this token's experts there ``[E]``, multi-hot of the previous token's ``[E]``.
The head of layer N at token t says what layer N + 1 does with token t + 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as fn

from mlx_stream.errors import CheckpointError
from tools.prerouter_training.weights import Base

PARTS = ("fc1", "fc2", "linear_init")


class Heads:
    """Heads by owner layer; all weights are float32 ``[out, in]``.

    Attributes:
        parameters: ``layers.<owner>.<part>.weight`` -> tensor.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = dict(parameters)
        self.owners = tuple(sorted({int(name.split(".")[1]) for name in self.parameters}))

    @classmethod
    def warm_start(cls, base: Base, owners: Iterable[int], width: int, seed: int) -> Heads:
        """Untrained heads: the next layer's router applied to this layer's input."""
        generator = torch.Generator().manual_seed(seed)
        hidden, experts = base.shape.hidden_size, base.shape.num_experts
        inputs = hidden + 2 * experts
        parameters = {}
        for owner in owners:
            router = base.weights[f"model.layers.{owner + 1}.mlp.gate.weight"]  # [E, D]
            bound = 1 / math.sqrt(inputs)
            fc1 = torch.empty(width, inputs).uniform_(-bound, bound, generator=generator)
            parameters |= {
                f"layers.{owner}.fc1.weight": fc1,
                f"layers.{owner}.fc2.weight": torch.zeros(experts, width),
                f"layers.{owner}.linear_init.weight": torch.cat(
                    (router, torch.zeros(experts, 2 * experts)), dim=1
                ),
            }
        return cls(parameters)

    @classmethod
    def load(cls, path: Path) -> Heads:
        """From a file in the published form.

        Raises:
            CheckpointError: a tensor is no head's.
        """
        parameters = {name: tensor.float() for name, tensor in load_file(path).items()}
        for name in parameters:
            words = name.split(".")
            if len(words) != 4 or words[0] != "layers" or words[2] not in PARTS:
                raise CheckpointError(
                    "the heads file has a tensor that belongs to no head",
                    file=path,
                    tensor=name,
                    expected="layers.<owner>.{fc1,fc2,linear_init}.weight",
                    actual=name,
                    remedy="give the file that tools/train_prerouter.py wrote",
                )
        return cls(parameters)

    def of(self, owners: Iterable[int]) -> Heads:
        """Only the heads of these layers."""
        kept = {f"layers.{owner}.{part}.weight" for owner in owners for part in PARTS}
        return Heads({name: self.parameters[name] for name in sorted(kept)})

    def save(self, path: Path) -> None:
        """Write float16 weights in the published form."""
        halves = {n: t.detach().half().contiguous() for n, t in self.parameters.items()}
        save_file(halves, path)

    def logits(self, owner: int, features: torch.Tensor) -> torch.Tensor:
        """``[..., F] -> [..., E]`` for layer owner + 1 and the next token."""
        fc1, fc2, linear = (self.parameters[f"layers.{owner}.{p}.weight"] for p in PARTS)
        return fn.linear(features, linear) + fn.linear(fn.gelu(fn.linear(features, fc1)), fc2)


def multi_hot(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """``[..., K] -> [..., E]`` with K ones."""
    return fn.one_hot(chosen, experts).sum(dim=-2).float()


def head_features(
    x: torch.Tensor, chosen: torch.Tensor, experts: int, since: int = 1
) -> torch.Tensor:
    """``x [B, T, D], chosen [B, T, K] -> [B, T, D + 2E]``.

    Tokens before `since` have no previous one: when a conversation's first prediction is made,
    that is unknown (``first_previous: zeros`` in the spec).
    """
    hot = multi_hot(chosen, experts)
    before = shifted(hot)
    before[:, :since] = 0
    return torch.cat((x.float(), hot, before), dim=-1)


def shifted(values: torch.Tensor) -> torch.Tensor:
    """``[B, T, ...]`` moved on by one token; the first becomes zeros."""
    return torch.cat((torch.zeros_like(values[:, :1]), values[:, :-1]), dim=1)
