"""Converted packings in tests, and every tensor of a folder by a path of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_stream.convert.options import Conversion
from mlx_stream.convert.source import open_converted
from mlx_stream.packed.pack import PackOptions, PackReport, pack
from mlx_stream.storage.checkpoint import open_checkpoint


def convert(
    source: Path, target: Path, asked: Conversion | None = None, **options: Any
) -> PackReport:
    """Pack with a conversion; without `asked` only names and shapes change."""
    conversion = asked or Conversion()
    opened = PackOptions(open=lambda path: open_converted(path, conversion), **options)
    return pack(source, target, opened)


def tensors_of(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of each tensor of a checkpoint folder, packed or plain."""
    checkpoint = open_checkpoint(folder)
    raw = [np.fromfile(f.path, np.uint8) for f in checkpoint.files]
    found = {}
    for t in checkpoint.tensors.values():
        data = raw[t.file]
        if t.stride is None:
            value = data[t.offset : t.offset + t.nbytes].tobytes()
        else:
            each = t.nbytes // t.shape[0]
            owner = t.name.rpartition(".")[0].rpartition(".")[0]
            places = [checkpoint.records[owner].position(e) for e in range(t.shape[0])]
            value = b"".join(data[t.offset + p * t.stride :][:each].tobytes() for p in places)
        found[t.name] = (t.shape, value)
    return found


def stock_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """The same of a model as mlx-lm loads it: the reference."""
    model, _ = load_model(folder)
    return model_tensors(model)


def model_tensors(model: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    found = {}
    for name, value in tree_flatten(model.parameters()):
        flat = mx.contiguous(value).reshape(-1)
        found[name] = (tuple(value.shape), np.array(flat.view(mx.uint8)).tobytes())
    return found


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
