"""Adapters for tests: random, in both forms, and stock mlx-lm with one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
RANK, SCALE = 4, 2.0
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]  # path -> A [r, in], B [out, r]


def shapes(model: nn.Module, wanted: Callable[[str], bool]) -> dict[str, tuple[int, int]]:
    """``[out, in]`` of the linear layers of a stock model, by path."""
    found = {}
    for path, module in model.named_modules():
        if type(module) in (nn.Linear, nn.QuantizedLinear) and wanted(path):
            out, inputs = module.weight.shape
            quantized = isinstance(module, nn.QuantizedLinear)
            found[path] = (out, inputs * 32 // module.bits if quantized else inputs)
    return found


def random_pairs(shapes: Mapping[str, tuple[int, int]], seed: int, size: float = 1.0) -> Pairs:
    """Deltas of about `size` times a layer's weights."""
    rng = np.random.default_rng(seed)
    pairs = {}
    for path, (out, inputs) in shapes.items():
        a = rng.standard_normal((RANK, inputs), np.float32) / inputs**0.5
        pairs[path] = a, rng.standard_normal((out, RANK), np.float32) * size / RANK**0.5
    return pairs


def publish(path: Path, pairs: Pairs) -> Path:
    """A file in the published form, float16."""
    arrays = {}
    for module, (a, b) in pairs.items():
        arrays |= {f"{module}.lora_A": mx.array(a), f"{module}.lora_B": mx.array(b)}
    mx.save_safetensors(str(path), {name: v.astype(mx.float16) for name, v in arrays.items()})
    return path


def save_mlx(folder: Path, pairs: Pairs, layers: int, scale: float = SCALE) -> Path:
    """A folder in mlx-lm's form, float16."""
    keys = sorted({module.split(".layers.")[-1].partition(".")[2] for module in pairs})
    parameters = {"rank": RANK, "scale": scale, "dropout": 0.0, "keys": keys}
    config = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    arrays: dict[str, Any] = {}
    for module, (a, b) in pairs.items():
        arrays |= {f"{module}.lora_a": mx.array(a.T), f"{module}.lora_b": mx.array(b.T)}
    halves = {name: mx.contiguous(v.astype(mx.float16)) for name, v in arrays.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), halves)
    return folder
