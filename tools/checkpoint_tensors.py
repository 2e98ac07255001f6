"""What a random checkpoint contains: every tensor of a lazy mlx-lm model, and its bytes by chunks.

Nothing larger than a chunk, and no large parameter, is ever evaluated. Weights are normal noise, or
uniformly random codes under matching scales, with a deviation of 1/sqrt(fan_in); norms, biases and
other small parameters are the module's own initial values, slightly perturbed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils

CHUNK_ELEMENTS = 1 << 22  # of a chunk: 4 MiB of packed codes, at most 16 MiB of floats
POOL_BYTES = 24 << 20  # random bytes every chunk is cut from, at its own offset, under its own key
INIT_LIMIT = 1 << 20  # parameters up to this many elements start from the module's own init
GROUP_OF_MODE = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
FP4_RMS = 2.926  # of a uniformly random E2M1 code
FP8_RMS = 0.598  # of a uniformly random E4M3 code whose top exponent bit is cleared
FP8_MASK = 0xBF  # clears that bit, so that no code is NaN
SAFETENSORS_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}


@dataclass(frozen=True)
class Quant:
    """How to quantize; `overrides` are (regex on the module path, parameters or False)."""

    mode: str = "affine"  # or mxfp4, mxfp8, nvfp4, none
    bits: int | None = None
    group_size: int | None = None
    overrides: tuple[tuple[str, dict[str, Any] | bool], ...] = ()  # first match wins
    global_scale: bool = False  # nvfp4 only: one float32 scale an expert

    def __post_init__(self) -> None:
        if self.mode == "none" and self.overrides:
            raise ValueError("overrides need a quantization mode: end them with ('.*', False)")

    def params(self, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Complete {group_size, bits, mode}, with `override` on top."""
        override = dict(override or {})
        mode = override.get("mode", self.mode)
        if mode not in GROUP_OF_MODE:
            modes = ", ".join([*GROUP_OF_MODE, "none"])
            raise ValueError(f"unknown quantization mode {mode!r}: expected one of {modes}")
        group_size, bits = GROUP_OF_MODE[mode]
        if mode == self.mode:
            group_size, bits = self.group_size or group_size, self.bits or bits
        return {"group_size": group_size, "bits": bits, "mode": mode} | override


@dataclass(frozen=True)
class Noise:
    """Random bytes. Tensors with one `key` see one stream, so scales and biases stay paired.

    With a `table`, each element is one of its 65536 entries; without, raw bytes under `mask`.
    """

    key: str
    table: np.ndarray | None = None
    mask: int = 0xFF


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; `source` is its noise, or its bytes when it is small and special."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: Noise | bytes


# ---- building: the model, its dtypes and its quantization, all lazy


def build_model(config: dict[str, Any], quant: Quant, dtype: mx.Dtype) -> tuple[nn.Module, dict]:
    """The lazy mlx-lm model, cast and quantized as `mlx_lm.convert` does, and its saved config."""
    config = copy.deepcopy(config)
    if "model_type" not in config:
        raise ValueError("the config has no 'model_type'")
    model_class, args_class = mlx_lm_utils._get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    castable = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and castable(path) else value

    model.update(tree_map_with_path(cast, model.parameters()))
    if quant.mode == "none":
        return model, config
    params, refused = quant.params(), {}
    own = getattr(model, "quant_predicate", None) or (lambda *_: True)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        for pattern, override in quant.overrides:
            if re.search(pattern, path):
                if isinstance(override, bool):
                    refused.update({} if override else {path: False})
                    return override
                return quant.params(override)
        return own(path, module)

    with contextlib.redirect_stdout(io.StringIO()):
        model, config = mlx_lm_utils.quantize_model(
            model, config, **params, global_scale=quant.global_scale, quant_predicate=predicate
        )
    config["quantization"].update(refused)
    return model, config


def plan_tensors(model: nn.Module, seed: int) -> list[Tensor]:
    """Every tensor of the model with the source of its bytes; evaluates only small parameters."""
    modules = dict(model.named_modules())
    parameters = tree_flatten(model.parameters())
    untied = any("lm_head" in name for name, _ in parameters)
    plan = []
    for name, array in parameters:
        parent, _, leaf = name.rpartition(".")
        module = modules.get(parent)
        if leaf in ("weight", "scales", "biases", "global_scale") and "scales" in (module or ()):
            source = _quantized_source(parent, leaf, module, array, untied)
        else:
            source = _plain_source(name, module, array, seed, untied)
        dtype = SAFETENSORS_DTYPES[array.dtype]
        plan.append(Tensor(name, dtype, tuple(array.shape), array.nbytes, source))
    return plan


def _deviation(module: nn.Module | None, fan_in: int, untied: bool) -> float:
    """1/sqrt(fan_in), but 1 for input embeddings: smaller ones drown in what attention adds, which
    makes all tokens alike and routing narrow. Tied ones must stay small for the logits."""
    embedding = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    return 1.0 if embedding and untied else fan_in**-0.5


def _quantized_source(
    path: str, leaf: str, module: nn.Module, array: mx.array, untied: bool
) -> Noise:
    """Uniformly random codes under scales that give the weights their deviation."""
    if leaf == "weight":
        return Noise(f"{path}.weight", mask=FP8_MASK if module.mode == "mxfp8" else 0xFF)
    fan_in = module.scales.shape[-1] * module.group_size
    mode = "nvfp4 global" if module.get("global_scale") is not None else module.mode
    target = _deviation(module, fan_in, untied)
    key = "global_scale" if leaf == "global_scale" else "scales"  # biases go with the scales
    return Noise(f"{path}.{key}", _scale_table(leaf, mode, module.bits, target, array.dtype))


@lru_cache(maxsize=256)
def _scale_table(leaf: str, mode: str, bits: int, target: float, dtype: mx.Dtype) -> np.ndarray:
    spread = 0.75 + 0.5 * _uniform_table()
    if mode == "affine":
        levels = 2**bits - 1
        deviation = math.sqrt((4**bits - 1) / 12)  # of uniformly random codes
        scales = target / deviation * spread
        biases = -scales * (levels / 2 + 0.05 * _normal_table())
        return _stored(scales if leaf == "scales" else biases, dtype)
    if leaf == "global_scale":
        return _stored(target / FP4_RMS * 2688 / 256 * spread, dtype)
    if mode in ("nvfp4", "nvfp4 global"):
        wanted = (target / FP4_RMS if mode == "nvfp4" else 256.0) * spread
        values = np.array(mx.from_fp8(mx.arange(1, 127, dtype=mx.uint8), mx.float32))
        return (1 + np.searchsorted((values[1:] + values[:-1]) / 2, wanted)).astype(np.uint8)
    rms = FP4_RMS if mode == "mxfp4" else FP8_RMS
    exponent = 127 + np.round(np.log2(target / rms) + _uniform_table() - 0.5)
    return exponent.astype(np.uint8)


def _plain_source(
    name: str, module: nn.Module | None, array: mx.array, seed: int, untied: bool
) -> Noise | bytes:
    """Normal noise for matrices; the module's own init, slightly perturbed, for the rest."""
    floating = mx.issubdtype(array.dtype, mx.floating)
    init = np.array(array.astype(mx.float32)) if array.size <= INIT_LIMIT else None
    if not floating:
        if init is None:
            raise ValueError(f"{name}: {array.dtype} tensor of {array.size} elements has no rule")
        return np.array(array).tobytes()
    constant = init is not None and init.size > 0 and np.ptp(init) == 0
    zeros = constant and init.flat[0] == 0
    if array.ndim >= 2 and (init is None or zeros or (name.endswith("weight") and not constant)):
        conv = isinstance(module, nn.Conv1d | nn.Conv2d)
        fan_in = math.prod(array.shape[1:]) if conv else array.shape[-1]
        return Noise(name, _normal_stored(_deviation(module, fan_in, untied), array.dtype))
    if init is None:
        raise ValueError(f"{name}: vector of {array.size} elements is larger than {INIT_LIMIT}")
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return _stored(init + 0.1 * rng.standard_normal(init.shape), array.dtype).tobytes()


def _stored(values: np.ndarray, dtype: mx.Dtype = mx.float32) -> np.ndarray:
    """`values` in the bytes of `dtype` (bfloat16 as uint16)."""
    cast = mx.array(values.astype(np.float32)).astype(dtype)
    return np.array(cast.view(mx.uint16) if dtype == mx.bfloat16 else cast)


@lru_cache(maxsize=64)
def _normal_stored(deviation: float, dtype: mx.Dtype) -> np.ndarray:
    return _stored(_normal_table() * deviation, dtype)


@lru_cache(maxsize=1)
def _normal_table() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal(1 << 16)
    return (values - values.mean()) / values.std()


@lru_cache(maxsize=1)
def _uniform_table() -> np.ndarray:
    return np.random.default_rng(1).permutation(np.linspace(0, 1, 1 << 16))


# ---- bytes: noise in chunks


@lru_cache(maxsize=2)
def _pool(seed: int, nbytes: int) -> np.ndarray:
    return np.random.SFC64(seed).random_raw(nbytes // 8)


def pool_bytes(plan: Sequence[Tensor]) -> int:
    """Size of the random pool that `chunks` cuts from: smaller for tiny models, to build fast."""
    return min(POOL_BYTES, max(1 << 16, 4 * max(t.nbytes for t in plan) // 8 * 8))


def chunks(tensor: Tensor, seed: int, pool_bytes: int) -> Iterator[bytes | np.ndarray]:
    """The tensor's bytes in order, at most CHUNK_ELEMENTS elements at a time."""
    source = tensor.source
    if isinstance(source, bytes):
        yield source
        return
    pool = _pool(seed, pool_bytes)
    itemsize = 1 if source.table is None else source.table.itemsize
    width = 1 if source.table is None else 2  # random bytes an element
    total = tensor.nbytes // itemsize
    for index, start in enumerate(range(0, total, CHUNK_ELEMENTS)):
        count = min(CHUNK_ELEMENTS, total - start)
        words = -(-count * width // 8)
        digest = blake2b(f"{seed}/{source.key}/{index}".encode(), digest_size=16).digest()
        offset, key = struct.unpack("<QQ", digest)
        offset %= len(pool) - words + 1
        raw = pool[offset : offset + words] ^ np.uint64(key)
        if source.table is not None:
            yield source.table[raw.view(np.uint16)[:count]]
        elif source.mask != 0xFF:
            yield raw.view(np.uint8)[:count] & np.uint8(source.mask)
        else:
            yield raw.view(np.uint8)[:count]
