"""Tiny checkpoints written by hand or by MLX, and slow reads to compare with."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings

from mlx_stream.storage.checkpoint import Checkpoint, FileIdentity

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
FAST = settings(
    max_examples=60,
    deadline=None,  # the machine may be busy
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ITEMSIZE = {"U8": 1, "BF16": 2, "F16": 2, "U32": 4, "F32": 4, "F8_E4M3": 1, "I64": 8}


def file_bytes(header: dict | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file from any header, valid or not; `length` overrides its length field."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def random_tensor(dtype: str, *shape: int, seed: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    nbytes = int(np.prod(shape)) * ITEMSIZE[dtype]
    return dtype, shape, np.random.default_rng(seed).bytes(nbytes)


def write_shard(path: Path, tensors: Tensors) -> None:
    header, data = {"__metadata__": {"format": "mlx"}}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = entry(dtype, list(shape), len(data), len(data) + len(raw))
        data += raw
    path.write_bytes(file_bytes(header, data))


def write_checkpoint(folder: Path, config: dict, *shards: Tensors) -> Path:
    """Write shards as model.safetensors or model-0000n-of-..., without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for n, tensors in enumerate(shards, 1):
        name = f"model-{n:05}-of-{len(shards):05}" if len(shards) > 1 else "model"
        write_shard(folder / f"{name}.safetensors", tensors)
    return folder


def bf16_glu(prefix: str, experts: int = 4, dims: int = 16, hidden: int = 24) -> Tensors:
    shapes = {"gate_proj": (hidden, dims), "up_proj": (hidden, dims), "down_proj": (dims, hidden)}
    return {
        f"{prefix}.{proj}.weight": random_tensor("BF16", experts, *shape, seed=n)
        for n, (proj, shape) in enumerate(shapes.items())
    }


def affine_glu(
    prefix: str,
    *,
    bits: int = 4,
    group: int = 32,
    experts: int = 4,
    dims: int = 64,
    hidden: int = 96,
) -> Tensors:
    out: Tensors = {}
    shapes = {"gate_proj": (hidden, dims), "up_proj": (hidden, dims), "down_proj": (dims, hidden)}
    for n, (proj, (rows, cols)) in enumerate(shapes.items()):
        words, groups = cols * bits // 32, cols // group
        base = f"{prefix}.{proj}"
        out[f"{base}.weight"] = random_tensor("U32", experts, rows, words, seed=3 * n)
        out[f"{base}.scales"] = random_tensor("BF16", experts, rows, groups, seed=3 * n + 1)
        out[f"{base}.biases"] = random_tensor("BF16", experts, rows, groups, seed=3 * n + 2)
    return out


def plain_checkpoint(folder: Path, sizes: list[int], seed: int = 0) -> Checkpoint:
    """Files of random bytes with no header: enough for the planner and the reader."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for n, size in enumerate(sizes):
        path = folder / f"model-{n}.safetensors"
        path.write_bytes(np.random.default_rng(seed + n).bytes(size))
        files.append(FileIdentity.of(path, os.stat(path)))
    return Checkpoint(folder, {}, tuple(files), {})


def aligned_buffer(nbytes: int, align: int = 4096) -> np.ndarray:
    raw = np.full(nbytes + align, 0xA5, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


def slow_read(path: Path, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as f:
        f.seek(offset)
        return f.read(nbytes)
