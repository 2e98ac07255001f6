"""The Recovery LoRA in torch: ``y = W x + s B (A x)`` on attention projections, never on experts.

Trained through effective weights ``W + s B A``, which is the same map; kept and written unmerged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mlx_stream.errors import CheckpointError
from tools.prerouter_training.weights import Base

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Lora:
    """Low-rank pairs by module path.

    Attributes:
        parameters: ``<path>.lora_A`` ``[r, in]`` and ``<path>.lora_B`` ``[out, r]``, float32.
        alpha, rank: the scale is alpha / rank.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], alpha: float, rank: int) -> None:
        self.parameters = dict(parameters)
        self.alpha, self.rank = alpha, rank

    @classmethod
    def fresh(cls, base: Base, alpha: float, rank: int, seed: int) -> Lora:
        """Pairs whose product is zero, on q, k, v and o of every layer."""
        generator = torch.Generator().manual_seed(seed)
        parameters = {}
        for layer in range(base.shape.num_hidden_layers):
            for projection in PROJECTIONS:
                path = f"model.layers.{layer}.self_attn.{projection}"
                out, inputs = base.weights[f"{path}.weight"].shape
                bound = 1 / math.sqrt(inputs)
                a = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
                parameters |= {f"{path}.lora_A": a, f"{path}.lora_B": torch.zeros(out, rank)}
        return cls(parameters, alpha, rank)

    @classmethod
    def load(cls, path: Path, alpha: float, rank: int) -> Lora:
        """From a file in the published form.

        Raises:
            CheckpointError: a key of another form, or another rank.
        """
        parameters = {name: tensor.float() for name, tensor in load_file(path).items()}
        for name, tensor in parameters.items():
            side = {"lora_A": 0, "lora_B": 1}.get(name.rsplit(".", 1)[-1])
            if side is None or tensor.shape[side] != rank:
                raise CheckpointError(
                    "the adapter is not of the expected form",
                    file=path,
                    tensor=name,
                    expected=f"<path>.lora_A [{rank}, in] or <path>.lora_B [out, {rank}]",
                    actual=list(tensor.shape),
                    remedy="give the file that tools/train_recovery_lora.py wrote",
                )
        return cls(parameters, alpha, rank)

    def save(self, path: Path) -> None:
        """Write float16 pairs in the published form."""
        save_file({n: t.detach().half().contiguous() for n, t in self.parameters.items()}, path)

    def effective(self, prefix: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A layer's weights with the low-rank products added.

        Args:
            prefix: of the layer, with its dot.
            weights: its own, named without the prefix.
        """
        found = dict(weights)
        for name, weight in weights.items():
            path = prefix + name.removesuffix(".weight")
            if f"{path}.lora_A" in self.parameters:
                a, b = (self.parameters[f"{path}.lora_{side}"] for side in "AB")
                found[name] = weight + (self.alpha / self.rank) * (b @ a)
        return found
