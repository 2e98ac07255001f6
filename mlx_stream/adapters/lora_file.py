"""Adapter files, checked before any byte is used. Read as untrusted input.

Two forms are read. The published one is a safetensors file of ``<module path>.lora_A`` ``[r, in]``
and ``.lora_B`` ``[out, r]``; its scale, alpha / r, is not in the file. mlx-lm's is a folder with
``adapter_config.json``, which has the scale, and ``adapters.safetensors`` of ``<module
path>.lora_a`` ``[in, r]`` and ``.lora_b`` ``[r, out]``. Any other key is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_stream.errors import AdapterError
from mlx_stream.storage.regular_file import open_regular
from mlx_stream.storage.safetensors_header import (
    TensorInfo,
    parse_header,
    read_header,
)

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapters.safetensors"
MAX_CONFIG_NBYTES = 1 << 20
MAX_RANK = 4096
_NAMES = {False: ("lora_A", "lora_B"), True: ("lora_a", "lora_b")}  # by `transposed`
_DTYPES = ("F16", "BF16", "F32")
_EXPERTS = re.compile(r"\.(switch_mlp|switch_glu|experts(\.\d+)?)\.")
_REMEDY = "take the adapter that belongs to this model"


@dataclass(frozen=True)
class LowRank:
    """Where one module's two matrices lie, and their shape as ``[out, in]`` of rank r."""

    a: TensorInfo
    b: TensorInfo
    inputs: int
    outputs: int
    rank: int


@dataclass(frozen=True)
class AdapterFile:
    """A checked adapter file.

    Attributes:
        path: of the safetensors file.
        pairs: by module path.
        scale: what the low-rank product is multiplied by.
        transposed: mlx-lm's orientation.
        fingerprint: of the file's bytes and the scale.
    """

    path: Path
    pairs: Mapping[str, LowRank]
    scale: float
    transposed: bool
    fingerprint: str


def open_adapter(path: Path, scale: float | None = None, rank: int | None = None) -> AdapterFile:
    """Check an adapter.

    Args:
        path: a safetensors file in the published form, or a folder in mlx-lm's.
        scale: alpha / r of a published one; must be None for mlx-lm's, which says it itself.
        rank: r of every pair, where it is known: a scale that was made with another r is wrong.

    Raises:
        AdapterError: missing, no regular file, of another form or rank, for routed experts, or
            without a scale.
        CheckpointError: it is no sound safetensors file.
    """
    if not path.exists():
        _fail(path, "cannot be read", "a safetensors file, or a folder of mlx-lm", "no such file")
    transposed = path.is_dir()
    if transposed:
        if scale is not None:
            _fail(path, "says its scale itself", "no other scale", scale)
        scale, path = _config_scale(path / CONFIG_NAME), path / WEIGHTS_NAME
    if scale is None:
        _fail(
            path,
            "does not say its scale",
            "alpha / r from a prerouter.json beside it, or given",
            "none",
            "pass --adapter-scale (2 for the published adapters)",
        )
    if not 0 < abs(scale) <= 1e4:  # NaN and huge whole numbers fail here too
        _fail(path, "has a bad scale", "a finite number other than 0, at most 1e4", scale)
    pairs = _pairs(path, _header(path), transposed)
    if rank is not None:
        _check_ranks(path, pairs, rank)
    return AdapterFile(path, pairs, float(scale), transposed, _fingerprint(path, scale))


def _config_scale(path: Path) -> float:
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_CONFIG_NBYTES + 1)
        config: Any = json.loads(raw.decode("utf-8")) if len(raw) <= MAX_CONFIG_NBYTES else None
    except (OSError, ValueError, RecursionError) as error:
        _fail(path, "cannot be read", "a JSON object", str(error)[:200])
    if not isinstance(config, dict):
        _fail(path, "is no adapter's config", "a JSON object", type(config).__name__)
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        _fail(path, "is of another kind", "fine_tune_type lora", repr(kind)[:40])
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        _fail(path, "has no scale", "a number at lora_parameters.scale", repr(scale)[:40])
    return scale


def _header(path: Path) -> tuple[TensorInfo, ...]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            raw = read_header(file, size, path)
    except OSError as error:
        _fail(path, "cannot be read", "a safetensors file", error.strerror or str(error))
    return parse_header(raw, size, path)


def _pairs(path: Path, header: Sequence[TensorInfo], transposed: bool) -> dict[str, LowRank]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    names = _NAMES[transposed]
    for info in header:
        module, _, side = info.name.rpartition(".")
        if side not in names or not module:
            _fail(path, "has another key", " or ".join(f"<path>.{n}" for n in names), info.name)
        if _EXPERTS.search(f".{module}."):
            refuse_routed(path, module)
        if info.dtype not in _DTYPES:
            _fail(path, "has an unknown dtype", ", ".join(_DTYPES), f"{info.name}: {info.dtype}")
        sides.setdefault(module, {})[side] = info
    if not sides:
        _fail(path, "is empty", "at least one pair of matrices", "none")
    return {module: _pair(path, module, found, transposed) for module, found in sides.items()}


def _pair(path: Path, module: str, found: dict[str, TensorInfo], transposed: bool) -> LowRank:
    first, second = _NAMES[transposed]
    if len(found) != 2:
        missing = first if second in found else second
        _fail(path, "lacks half of a pair", f"{module}.{missing}", f"only {next(iter(found))}")
    a, b = found[first], found[second]
    if len(a.shape) == len(b.shape) == 2:
        in_a, in_b = (a.shape, b.shape) if not transposed else (a.shape[::-1], b.shape[::-1])
        if in_a[0] == in_b[1] and 0 < in_a[0] <= MAX_RANK and in_a[1] and in_b[0]:
            return LowRank(a, b, in_a[1], in_b[0], in_a[0])
    form = "[in, r] and [r, out]" if transposed else "[r, in] and [out, r]"
    _fail(path, "has a pair that does not fit", form, f"{module}: {a.shape} and {b.shape}")


def _check_ranks(path: Path, pairs: Mapping[str, LowRank], rank: int) -> None:
    for module, pair in pairs.items():
        if pair.rank != rank:
            raise AdapterError(
                "the adapter is of another rank than its spec says",
                file=path,
                tensor=module,
                expected=f"rank {rank} (lora.rank of the Prerouter's spec)",
                actual=f"rank {pair.rank}",
                remedy="correct lora.rank in the spec, take the file that belongs to it, or run "
                "with --prerouter off",
            )


def refuse_routed(path: Path, module: str) -> NoReturn:
    """Raise the error for an adapter on routed experts: those are streamed as they are."""
    _fail(
        path,
        "adapts routed experts",
        "attention, linear attention and shared experts only",
        module,
        "train it without the routed experts",
    )


def _fingerprint(path: Path, scale: float) -> str:
    digest = hashlib.blake2b(repr(float(scale)).encode(), digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fail(
    path: Path, problem: str, expected: object, actual: object, remedy: str = _REMEDY
) -> NoReturn:
    shown = str(actual)
    raise AdapterError(
        f"the adapter {problem}",
        file=path,
        expected=expected,
        actual=shown if len(shown) <= 200 else f"{shown[:200]}...",
        remedy=remedy,
    )
