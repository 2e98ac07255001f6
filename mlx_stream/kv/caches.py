"""Prompt caches that follow KvOptions, and the check that a model can use them.

mlx-lm quantizes after every chunk: a layer whose cache holds `quantized_kv_start` tokens or more
then has quantized keys and values when the next chunk comes. Layer-major prefill runs the same
chunks in another order, so the rule lives in the layer's cache: before it takes more tokens it
quantizes what it holds, if that is enough. The results are those of mlx-lm with
``prefill_step_size`` equal to the plan's chunk_tokens, chunk by chunk; another chunk size gives
other roundings, in mlx-lm too. The last prompt token is a chunk of its own, so a layer is
quantized before the prompt reaches the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_stream.errors import KvCacheError
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts, set_executor
from mlx_stream.kv.evict import make_spilling, show_plain
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.prefill.cache_views import cache_leaves

PROBE_TOKENS = 9
NEVER = 1 << 62  # tokens


class QuantizingKVCache(KVCache):
    """A KVCache that turns into a QuantizedKVCache once it holds enough tokens.

    All state is in ``__dict__``, which cache views and the QuantizedKVCache made by
    :func:`settle` share.
    """

    only_appends = True

    def __init__(self, options: KvOptions) -> None:
        super().__init__()
        self.options = options

    @property
    def quantized(self) -> bool:
        """Whether keys and values are quantized; only then there is an attribute `bits`."""
        return "bits" in self.__dict__

    @property
    def due(self) -> bool:
        """Whether it has to be quantized before more tokens come."""
        return self.enough and not self.__dict__.get("waits", False)

    @property
    def enough(self) -> bool:
        """Whether it holds unquantized tokens, and enough of them."""
        enough = self.keys is not None and self.offset >= self.options.quantized_kv_start
        return enough and not self.quantized

    def quantize(self) -> None:
        """Replace keys and values by their quantized form, lazily; the offset stays."""
        options = self.options
        made = KVCache.to_quantized(self, group_size=options.kv_group_size, bits=options.kv_bits)
        self.__dict__.update(
            keys=made.keys, values=made.values, group_size=made.group_size, bits=made.bits
        )

    def _kind(self) -> Any:
        return QuantizedKVCache if self.quantized else KVCache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Take ``[B, H, C, D]`` keys and values; returns all so far, quantized or not."""
        if self.due:
            self.quantize()
        return self._kind().update_and_fetch(self, keys, values)

    def keys_and_values(self) -> Any:
        """Keys and values up to the offset."""
        return self._kind().keys_and_values(self)

    @property
    def state(self) -> Any:
        """What mlx-lm saves."""
        return self._kind().state.fget(self)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._kind().nbytes.fget(self)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """As stock mlx-lm asks for it; what is quantized already stays as it is."""
        if self.quantized:
            return _settled(self)
        return super().to_quantized(group_size=group_size, bits=bits)


def _settled(cache: QuantizingKVCache) -> QuantizedKVCache:
    """The same state under mlx-lm's class; the two share it."""
    plain = QuantizedKVCache(cache.options.kv_group_size, cache.options.kv_bits)
    plain.__dict__ = cache.__dict__
    return plain


def settle(cache: list[Any]) -> None:
    """After a prefill: quantize what is due, layer by layer, and show mlx-lm's own classes."""
    for n, layer in enumerate(cache):
        if isinstance(layer, QuantizingKVCache):
            if layer.due:
                layer.quantize()
                mx.eval(layer.keys, layer.values)
            if layer.quantized:
                cache[n] = _settled(layer)
    show_plain(cache)


def adopt(cache: list[Any], options: KvOptions) -> list[Any]:
    """Make a prompt cache follow the options from now on; changed in place, and returned.

    Raises:
        KvCacheError: it already follows others.
    """
    for layer in cache_leaves(cache):
        _check_layer(layer, options)
    if options.kv_bits is not None:
        for n, layer in enumerate(cache):
            if type(layer) is KVCache:
                cache[n] = made = QuantizingKVCache(options)
                made.__dict__ = layer.__dict__
                made.options = options
            elif isinstance(layer, QuantizingKVCache):
                layer.options = options
    if options.kv_evict == "disk":
        make_spilling(cache)
    return cache


def _check_layer(layer: Any, options: KvOptions) -> None:
    bits, group = layer.__dict__.get("bits"), layer.__dict__.get("group_size")
    asked = (options.kv_bits, options.kv_group_size)
    if None not in (options.kv_bits, bits) and (bits, group) != asked:
        raise KvCacheError(
            "the prompt cache is quantized otherwise",
            expected=f"kv_bits {options.kv_bits}, kv_group_size {options.kv_group_size}",
            actual=f"kv_bits {bits}, kv_group_size {group}",
            remedy="pass the options that the cache was made with, or none",
        )
    if options.max_kv_size is not None:
        size = getattr(layer, "max_size", None)
        if size != options.max_kv_size:
            raise KvCacheError(
                "the prompt cache has another size limit",
                expected=f"max_kv_size {options.max_kv_size}",
                actual="no limit" if size is None else f"max_kv_size {size}",
                remedy="pass the options that the cache was made with, or none",
            )


class _NoExperts:
    """An executor whose experts answer zero: nothing is read."""

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> mx.array:
        return mx.zeros((*indices.shape, experts.mlp.layer.input_dims), dtype=x.dtype)


class KvSupport:
    """Makes the caches of one model, after finding out what the model can do with them.

    Args:
        scope: what must be active while the model runs.
    """

    def __init__(
        self,
        model: nn.Module,
        slot: ExecutorSlot,
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._slot = slot
        self._scope = scope
        self._checked: set[KvOptions] = set()
        self._probed: list[Any] | None = None

    def prepare(self, cache: list[Any] | None, options: KvOptions = PLAIN) -> list[Any]:
        """A cache to prefill into: a new one, or the given one, following the options.

        Raises:
            KvCacheError: see :meth:`require`; or the cache follows other options.
        """
        self.require(options)
        if cache is not None:
            return adopt(cache, options)
        return adopt(make_prompt_cache(self._model, options.max_kv_size), options)

    def planned(self, options: KvOptions) -> KvOptions:
        """What the memory plan may count on: less than asked where some layers stay as they are."""
        if options.kv_bits is None or all(type(c) is KVCache for c in self._fresh()):
            return options
        never = replace(options, quantized_kv_start=NEVER)
        return PLAIN if options.kv_evict == "keep" else never

    def probed(self) -> list[Any]:
        """A prompt cache of 9 tokens, right in shapes and dtypes, not in values; do not change."""
        if self._probed is None:
            self._probed = self._fresh()
            self._run(self._probed, PROBE_TOKENS)
        return self._probed

    def require(self, options: KvOptions) -> None:
        """Refuse what the model cannot do, before any expert is read.

        mlx-lm ignores a size limit where the model makes its own caches, and fails on quantized
        keys and values in the middle of an answer, or leaves them as they are.

        Raises:
            KvCacheError: the model cannot do it.
        """
        asked = replace(options, quantized_kv_start=0)
        if options.plain or asked in self._checked:
            return
        kinds = sorted({type(c).__name__ for c in cache_leaves(self._fresh())})
        if options.max_kv_size is not None and hasattr(self._model, "make_cache"):
            raise _unsupported("max_kv_size", "only plain KV caches", ", ".join(kinds))
        if options.kv_bits is not None:
            self._require_quantizable(options, kinds)
        if options.kv_evict == "disk":
            self._require_evictable(kinds)
        self._checked.add(asked)

    def _require_evictable(self, kinds: list[str]) -> None:
        """Plain caches go to the disk; what stays must not grow with the prompt."""
        leaves = list(cache_leaves(self._fresh()))
        known = (KVCache, RotatingKVCache, ChunkedKVCache, ArraysCache)
        if not any(type(c) is KVCache for c in leaves) or any(type(c) not in known for c in leaves):
            wanted = "plain KV caches, besides windows and recurrent states"
            raise _unsupported("kv_evict", wanted, ", ".join(kinds))

    @property
    def window(self) -> int:
        """Tokens that the largest window or attention chunk keeps; 0 where there is none."""
        sizes = [0]
        for leaf in cache_leaves(self._fresh()):
            sizes += [getattr(leaf, "max_size", 0), getattr(leaf, "chunk_size", 0)]
        return max(sizes)

    def _require_quantizable(self, options: KvOptions, kinds: list[str]) -> None:
        fresh = self._fresh()
        windows = any(isinstance(c, RotatingKVCache) for c in cache_leaves(fresh))
        if windows or not any(type(c) is KVCache for c in fresh):
            wanted = "layers with a plain KV cache, and no sliding windows"
            raise _unsupported("kv_bits", wanted, ", ".join(kinds))
        cache = adopt(fresh, replace(options, quantized_kv_start=0))
        try:
            for tokens in (2, 1, 2):
                self._run(cache, tokens)
        except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
            wanted = "attention that takes quantized keys and values in groups of this size"
            actual = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise _unsupported("kv_bits", wanted, actual, " or change kv_group_size") from error

    def _run(self, cache: list[Any], tokens: int) -> None:
        restore = set_executor(self._slot, _NoExperts())
        try:
            with self._scope():
                mx.eval(self._model(mx.zeros((1, tokens), dtype=mx.uint32), cache=cache))
        finally:
            restore()

    def _fresh(self) -> list[Any]:
        return make_prompt_cache(self._model)


def _unsupported(option: str, expected: str, actual: str, more: str = "") -> KvCacheError:
    return KvCacheError(
        f"this model cannot run with {option}",
        expected=expected,
        actual=actual,
        remedy=f"leave it out{more}",
    )
