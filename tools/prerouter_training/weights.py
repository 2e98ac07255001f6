"""The weights that training sees: those of the deployed checkpoint, dequantized, and frozen.

Reads an mlx-lm ``qwen3_moe`` folder (affine quantization or float) without mlx. Its torch twin is
``tools/train_demo_model.py``; a folder of another family is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from mlx_stream.errors import CapabilityError, CheckpointError
from tools.train_demo_model import Shape

FAMILY = "qwen3_moe"


@dataclass(frozen=True)
class Base:
    """A frozen model.

    Attributes:
        shape: of the checkpoint, its own number of experts a token included.
        weights: float32 by mlx-lm name; experts are stacked.
        experts: for each layer ``[E, D, 2F]`` (gate and up) and ``[E, F, D]`` in `dtype`.
        embedding: ``[V, D]`` in `dtype`, also the output head.
        dtype: of matrix products.
    """

    shape: Shape
    weights: dict[str, torch.Tensor]
    experts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    embedding: torch.Tensor
    dtype: torch.dtype

    def layer(self, number: int) -> dict[str, torch.Tensor]:
        """Weights of one layer, named without their prefix."""
        prefix = f"model.layers.{number}."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.weights.items()
            if name.startswith(prefix) and "switch_mlp" not in name
        }


def load_base(folder: Path, dtype: torch.dtype = torch.float32) -> Base:
    """The checkpoint in `folder`, dequantized.

    Raises:
        CapabilityError: it is of a family without a torch twin here.
        CheckpointError: its quantization is not affine 4 or 8 bits.
    """
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != FAMILY or not config.get("tie_word_embeddings"):
        raise CapabilityError(
            "this trainer has no torch twin of the model",
            file=folder / "config.json",
            expected=f"model_type {FAMILY} with tied embeddings",
            actual=config.get("model_type"),
            remedy="write its forward pass beside tools/prerouter_training/model.py",
        )
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        stored |= load_file(path)
    shape = Shape(**{f.name: config[f.name] for f in fields(Shape) if f.name in config})
    return assemble(shape, dequantized(stored, config.get("quantization", {}), folder), dtype)


def assemble(shape: Shape, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Base:
    """A base of float32 weights."""
    experts = []
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.switch_mlp."
        gate, up, down = (
            weights[f"{prefix}{n}_proj.weight"].to(dtype) for n in ("gate", "up", "down")
        )
        gate_up = torch.cat((gate, up), dim=1).transpose(1, 2)
        experts.append((gate_up, down.transpose(1, 2)))
    embedding = weights["model.embed_tokens.weight"].to(dtype)
    return Base(shape, weights, tuple(experts), embedding, dtype)


def dequantized(
    stored: dict[str, torch.Tensor], quantization: dict[str, Any], folder: Path
) -> dict[str, torch.Tensor]:
    """Float32 weights of a quantized folder's tensors; float tensors are only cast."""
    weights = {}
    for name, tensor in stored.items():
        path = name.rsplit(".", 1)[0]
        if name.endswith((".scales", ".biases")):
            continue
        if f"{path}.scales" not in stored:
            weights[name] = tensor.float()
            continue
        how = quantization.get(path, quantization)
        bits, group = how.get("bits"), how.get("group_size")
        if bits not in (4, 8) or quantization.get("mode", "affine") != "affine":
            raise CheckpointError(
                "a tensor is quantized in a way that the trainer cannot read",
                file=folder,
                tensor=name,
                expected="affine, 4 or 8 bits",
                actual=how,
                remedy="quantize the checkpoint with mlx-lm's affine mode",
            )
        scales, biases = stored[f"{path}.scales"], stored[f"{path}.biases"]
        weights[name] = dequantize(tensor, scales, biases, bits, group)
    return weights


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, bits: int, group: int
) -> torch.Tensor:
    """``uint32 [..., A] -> float32 [..., A * 32 / bits]``, as ``mx.dequantize`` (affine)."""
    raw = np.ascontiguousarray(packed.numpy()).view(np.uint8)  # little-endian words
    if bits == 4:
        raw = np.stack((raw & 15, raw >> 4), axis=-1).reshape(*raw.shape[:-1], -1)
    q = torch.from_numpy(raw.astype(np.float32)).unflatten(-1, (-1, group))
    return (q * scales.float()[..., None] + biases.float()[..., None]).flatten(-2)
