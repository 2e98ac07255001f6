"""Packing in tests, and the bytes of single experts by a path of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlx_stream.packed.folder_lock import LOCK_NAME
from mlx_stream.packed.pack import PackOptions, PackReport, pack
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer, build_expert_index
from mlx_stream.storage.record_layout import RECORD_ALIGN

SMALL_SHARD = 1  # byte: a file for every layer
SMALL = {"shard_nbytes": SMALL_SHARD, "piece_nbytes": 2 * RECORD_ALIGN}


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


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, by name."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != LOCK_NAME}


def final_names(folder: Path) -> set[str]:
    """Those a user sees; none where the folder is not made yet."""
    if not folder.exists():
        return set()
    return {p.name for p in folder.iterdir() if not p.name.startswith(".")}


def random_orders(index: ExpertIndex, seed: int = 0) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    return {x.name: rng.permutation(x.num_experts).tolist() for x in index.layers}
