"""What a layer's cache is made of, in the order in which mlx-lm's files have it.

A file names cache classes, but no class is ever looked up by that name: it must be the class that
the model itself uses at this place, or the quantized or rotating form of its plain cache. Classes
that mlx-lm cannot restore (deepseek_v41's) go by the names of their attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_stream.kv.caches import QuantizingKVCache
from mlx_stream.kv.evict import SpillingKVCache
from mlx_stream.kv.options import KV_BITS, KV_GROUP_SIZES

Get = Callable[[str], Any]
Check = Callable[[bool, str, object, object], None]

_KV = ("keys", "values")
_TOKENS = 2  # their axis in keys and values [B, H, T, D]


def class_name(cache: Any) -> str:
    """mlx-lm's name for the class of a layer's cache."""
    if isinstance(cache, QuantizingKVCache):
        return "QuantizedKVCache" if cache.quantized else "KVCache"
    return "KVCache" if isinstance(cache, SpillingKVCache) else type(cache).__name__


def leaf_state(cache: Any) -> Any:
    """A tree of arrays and scalars, as mlx-lm's `state`, without unused room at the end."""
    name = class_name(cache)
    if isinstance(cache, CacheList):
        return [(leaf_state(c), class_name(c)) for c in cache.caches]
    if name == "KVCache":
        return (*_used(cache), cache.offset)
    if name == "QuantizedKVCache":
        return (*_used(cache), cache.offset, cache.group_size, cache.bits)
    if isinstance(cache, RotatingKVCache | ChunkedKVCache | ArraysCache):
        return cache.state
    return {key: value for key, value in vars(cache).items() if _storable(value)}


def _used(cache: Any) -> tuple[Any, Any]:
    return (None, None) if cache.empty() else cache.keys_and_values()


def _storable(value: object) -> bool:
    return value is None or isinstance(value, mx.array | bool | int | float | str)


def restore_leaf(own: Any, probed: Any, name: str, at: str, get: Get, check: Check) -> Any:
    """A layer's cache from a file.

    Args:
        own: a fresh cache of the model at this place; may be used up.
        probed: the same after a few tokens: what shapes and dtypes have to be.
        name: the class that the file names.
        at: prefix of the layer's entries.
        get: an entry of the file: array, scalar or None; may be asked for once.
        check: ``check(ok, what, expected, actual)`` raises PromptFileError.
    """
    allowed = [type(own).__name__]
    if type(own) is KVCache:
        allowed += ["QuantizedKVCache", "RotatingKVCache"]
    check(name in allowed, f"class of layer {at}", " or ".join(allowed), name)
    if isinstance(own, CacheList):
        parts = []
        for n, part in enumerate(own.caches):
            named = get(f"{at}.{n}.1")
            check(isinstance(named, str), f"class of layer {at}.{n}", "a name", named)
            parts.append(restore_leaf(part, probed.caches[n], named, f"{at}.{n}.0", get, check))
        own.caches = tuple(parts)
        return own
    restore = _RESTORERS.get(name, _restore_attributes)
    return restore(own, probed, at, get, check)


def _restore_plain(own: Any, probed: Any, at: str, get: Get, check: Check) -> KVCache:
    cache = KVCache()
    cache.keys, cache.values, cache.offset = get(f"{at}.0"), get(f"{at}.1"), get(f"{at}.2")
    _check_offset(cache.offset, at, check)
    if cache.keys is None:
        check(cache.values is None and cache.offset == 0, f"layer {at}", "nothing", "a part")
        return cache
    for kind in _KV:
        value, example = getattr(cache, kind), getattr(probed, kind)
        setattr(cache, kind, like(value, example, at, check, _TOKENS))
        _check_rows(getattr(cache, kind), cache.offset, at, check)
    return cache


def _restore_quantized(own: Any, probed: Any, at: str, get: Get, check: Check) -> QuantizedKVCache:
    group, bits = get(f"{at}.3"), get(f"{at}.4")
    check(type(bits) is int and bits in KV_BITS, f"bits of layer {at}", KV_BITS, bits)
    check(
        type(group) is int and group in KV_GROUP_SIZES,
        f"group size of layer {at}",
        KV_GROUP_SIZES,
        group,
    )
    cache = QuantizedKVCache(group, bits)
    cache.offset = get(f"{at}.2")
    _check_offset(cache.offset, at, check)
    for n, kind in enumerate(_KV):
        plain = getattr(probed, kind)
        check(plain.shape[-1] % group == 0, f"layer {at}", f"whole groups of {group}", plain.shape)
        expected = mx.quantize(mx.zeros(plain.shape, plain.dtype), group_size=group, bits=bits)
        parts = [
            like(get(f"{at}.{n}.{part}"), example, at, check, _TOKENS)
            for part, example in enumerate(expected)
        ]
        for part in parts:
            _check_rows(part, cache.offset, at, check)
        setattr(cache, kind, tuple(parts))
    return cache


def _restore_rotating(own: Any, probed: Any, at: str, get: Get, check: Check) -> RotatingKVCache:
    values = [get(f"{at}.{n}") for n in range(6)]
    keep, size = values[3:5]
    if isinstance(own, RotatingKVCache):
        same = (keep, size) == (own.keep, own.max_size)
        check(same, f"window of layer {at}", (own.keep, own.max_size), (keep, size))
    whole = all(type(v) is int for v in values[2:])
    check(whole and 0 <= keep < size, f"window of layer {at}", "keep < size", values[2:])
    cache = RotatingKVCache(size, keep)
    cache.keys, cache.values, cache.offset, cache._idx = *values[:3], values[5]
    _check_offset(cache.offset, at, check)
    if cache.keys is None:
        check(cache.values is None and cache.offset == 0, f"layer {at}", "nothing", "a part")
        return cache
    for kind in _KV:
        value, example = getattr(cache, kind), getattr(probed, kind)
        setattr(cache, kind, like(value, example, at, check, _TOKENS))
        _check_rows(getattr(cache, kind), min(cache.offset, size), at, check)
    rows = cache.keys.shape[_TOKENS]
    check(cache.values.shape[_TOKENS] == rows, f"layer {at}", f"{rows} rows", cache.values.shape)
    check(0 <= cache._idx <= rows, f"window of layer {at}", f"0 to {rows}", cache._idx)
    return cache


def _restore_chunked(own: Any, probed: Any, at: str, get: Get, check: Check) -> ChunkedKVCache:
    keys, values, offset, size, start = (get(f"{at}.{n}") for n in range(5))
    check(size == own.chunk_size, f"chunk of layer {at}", own.chunk_size, size)
    _check_offset(offset, at, check)
    check(type(start) is int and 0 <= start <= offset, f"start of layer {at}", "a start", start)
    own.offset, own.start_position = offset, start
    if keys is not None:
        own.keys = like(keys, probed.keys, at, check, _TOKENS)
        own.values = like(values, probed.values, at, check, _TOKENS)
        for part in (own.keys, own.values):
            _check_rows(part, offset - start, at, check)
    return own


def _restore_arrays(own: Any, probed: Any, at: str, get: Get, check: Check) -> ArraysCache:
    own.cache = [
        like(get(f"{at}.0.{n}"), example, at, check) for n, example in enumerate(probed.cache)
    ]
    for n in (1, 2):
        batch = get(f"{at}.{n}")
        check(batch is None, f"layer {at}", "one prompt", "a batch of prompts")
    return own


def _restore_attributes(own: Any, probed: Any, at: str, get: Get, check: Check) -> Any:
    for key, fresh in list(vars(own).items()):
        if not _storable(fresh):
            continue
        value, example = get(f"{at}.{key}"), vars(probed)[key]
        if fresh is None or isinstance(example, mx.array):
            value = like(value, example, at, check)
        elif key == "offset":
            _check_offset(value, at, check)
        else:
            same = type(value) is type(fresh) and value == fresh
            check(same, f"{key} of layer {at}", fresh, value)
        vars(own)[key] = value
    return own


_RESTORERS: dict[str, Callable[..., Any]] = {
    "KVCache": _restore_plain,
    "QuantizedKVCache": _restore_quantized,
    "RotatingKVCache": _restore_rotating,
    "ChunkedKVCache": _restore_chunked,
    "ArraysCache": _restore_arrays,
}


def like(
    value: Any, example: mx.array | None, at: str, check: Check, free: int | None = None
) -> mx.array | None:
    """An entry that must fit an example: same axes but for `free` (None: any one); floats cast."""
    if value is None:
        return None
    check(isinstance(value, mx.array), f"layer {at}", "an array", type(value).__name__)
    if example is None:
        return value  # nothing of the kind after a few tokens
    shape, wanted = tuple(value.shape), tuple(example.shape)
    fits = len(shape) == len(wanted)
    other = [n for n in range(len(wanted)) if fits and shape[n] != wanted[n]]
    fits = fits and len(other) <= 1 and 0 not in other and (free is None or other in ([], [free]))
    check(fits, f"shape of layer {at}", f"{list(wanted)} but for one axis", list(shape))
    floats = [mx.issubdtype(a.dtype, mx.floating) for a in (value, example)]
    check(
        all(floats) or value.dtype == example.dtype,
        f"dtype of layer {at}",
        example.dtype,
        value.dtype,
    )
    return value.astype(example.dtype)


def _check_offset(offset: Any, at: str, check: Check) -> None:
    check(type(offset) is int and offset >= 0, f"offset of layer {at}", "0 or more", offset)


def _check_rows(value: Any, tokens: int, at: str, check: Check) -> None:
    check(value is not None, f"layer {at}", "an array", None)
    rows = value.shape[_TOKENS]
    check(rows >= tokens, f"tokens of layer {at}", f"{tokens} or more", rows)
