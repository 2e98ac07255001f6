"""Packing in tests, and the bytes of single experts by a path of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_stream.packed.pack import PackOptions, PackReport, pack
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer, build_expert_index

SMALL_SHARD = 1  # byte: a file for every layer


def pack_checkpoint(source: Path, target: Path, **options: Any) -> PackReport:
    return pack(source, target, PackOptions(**options))


def index_of(folder: Path) -> ExpertIndex:
    return build_expert_index(open_checkpoint(folder))


def expert_bytes(index: ExpertIndex, layer: ExpertLayer, expert: int) -> dict[Any, bytes]:
    """The expert's tensors by key, read with plain seeks."""
    found = {}
    for t in layer.tensors:
        with open(index.checkpoint.files[t.file].path, "rb") as file:
            file.seek(t.offset + layer.position(expert) * t.stride)
            found[t.key] = file.read(t.nbytes)
    return found


def random_orders(index: ExpertIndex, seed: int = 0) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    return {x.name: rng.permutation(x.num_experts).tolist() for x in index.layers}
