"""What accompanies a prefill besides computing it: eviction of its cache, and its checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream.backends.base import Backend
from mlx_stream.kv.caches import KvSupport, QuantizingKVCache
from mlx_stream.kv.evict import SpillingKVCache
from mlx_stream.kv.evictor import DiskEvictor, QuantizingEvictor
from mlx_stream.kv.leaf_state import class_name
from mlx_stream.kv.prompt_files import ModelIdentity, about_prompt, weights_fingerprint
from mlx_stream.loader import LoadedModel
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.prefill.cache_views import cache_leaves, cache_offset
from mlx_stream.prefill.hooks import PrefillHooks
from mlx_stream.prefill.schedule import PrefillPlan, Segment
from mlx_stream.resume.keeper import PrefillKeeper
from mlx_stream.resume.options import KeepOptions
from mlx_stream.resume.restore import KeeperModel
from mlx_stream.storage.expert_index import ExpertIndex

KV_FILE = "prompt-kv.safetensors"


def identify(
    model: Any, index: ExpertIndex, top_k: int, adapter: str | None = None
) -> ModelIdentity:
    """What files of this model's prompts are marked with.

    Args:
        top_k: experts a token that they are made with.
        adapter: fingerprint of the one that they are made with.
    """
    checkpoint = index.checkpoint
    shape = model_shape(checkpoint.config, index)
    weights = weights_fingerprint(checkpoint)
    if top_k != shape.top_k:
        weights += f", {top_k} experts a token"
    if adapter is not None:
        weights += f", adapter {adapter}"
    return ModelIdentity(
        model_type=str(checkpoint.config.get("model_type", "unknown")),
        layers=len(make_prompt_cache(model)),
        vocab=shape.vocab,
        weights=weights,
    )


class RunHooks(PrefillHooks):
    """The hooks of one run. :meth:`finish` when the prompt is through, :meth:`close` always.

    Errors are those of the parts: KvCacheError, PromptFileError, ResumeError, CapabilityError.
    """

    def __init__(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any],
        loaded: LoadedModel,
        backend: Backend,
        keep: KeepOptions | None,
        *,
        adapter: str | None = None,
    ) -> None:
        self._plan, self._cache = plan, cache
        self._disk: DiskEvictor | None = None
        self._quantizer: QuantizingEvictor | None = None
        self._keeper: PrefillKeeper | None = None
        disk = plan.kv_evict == "disk"
        identity = None
        if disk or keep is not None:
            identity = identify(loaded.model, loaded.index, loaded.shape.top_k, adapter)
        if plan.kv_evict == "quantize":
            self._quantizer = QuantizingEvictor()
        if disk:
            assert identity is not None
            assert plan.kv_dir is not None
            tokens = None if cache_offset(cache) else [int(t) for t in ids]
            about = about_prompt(identity, tokens, str(loaded.index.checkpoint.path))
            self._disk = DiskEvictor(Path(plan.kv_dir) / KV_FILE, about, plan.kv_stored)
        if keep is not None:
            assert identity is not None
            self._keeper = PrefillKeeper(
                keep,
                plan,
                _keeper_model(loaded, backend),
                _fingerprints(plan, ids, cache, loaded, backend) | identity.fields(),
                restored=self._restored,
            )

    # --- hooks

    def begin(self, cache: list[Any]) -> tuple[int, int]:
        """See PrefillHooks."""
        for hook in (self._quantizer, self._disk):
            if hook is not None:
                hook.begin(cache)
        return (0, 0) if self._keeper is None else self._keeper.begin(cache)

    def enter_chunk(self, number: int, chunk: int, views: list[Any]) -> list[Any]:
        """See PrefillHooks."""
        return views if self._keeper is None else self._keeper.enter_chunk(number, chunk, views)

    def meeting(self, number: int, segment: Segment, layer: int, cache: list[Any]) -> None:
        """See PrefillHooks. Checkpoints first: what is evicted would have to be read again."""
        for hook in (self._keeper, self._quantizer, self._disk):
            if hook is not None:
                hook.meeting(number, segment, layer, cache)

    def end_segment(self, number: int, segment: Segment, cache: list[Any]) -> None:
        """See PrefillHooks."""
        for hook in (self._keeper, self._quantizer, self._disk):
            if hook is not None:
                hook.end_segment(number, segment, cache)

    def _restored(self, entry: Any, through: bool) -> None:
        for leaf in cache_leaves(entry) if self._disk is not None else ():
            if isinstance(leaf, SpillingKVCache):
                self._disk.take(leaf, earlier=not through)

    # --- the end

    def finish(self) -> None:
        """The prompt is through, and its staging is free: bring evicted caches back."""
        if self._disk is not None:
            self._disk.finish(self._cache, load=not self._plan.kv_layered)
        if self._keeper is not None:
            self._keeper.finish()

    def close(self) -> None:
        """Release everything; a checkpoint stays, half an evicted cache does not."""
        if self._quantizer is not None:
            self._quantizer.close(self._cache)
        if self._disk is not None:
            self._disk.close()
        if self._keeper is not None:
            self._keeper.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """What did not go as usual."""
        return () if self._keeper is None else tuple(self._keeper.notes)

    @property
    def resumed_layers(self) -> int:
        """Expert layers that a checkpoint spared, over all segments."""
        return 0 if self._keeper is None else self._keeper.resumed_layers


def _keeper_model(loaded: LoadedModel, backend: Backend) -> KeeperModel:
    model = loaded.model
    return KeeperModel(
        model,
        loaded.shape.model_type,
        loaded.streamed,
        loaded.slot,
        backend.compute_scope,
        lambda: make_prompt_cache(model),
        KvSupport(model, loaded.slot, backend.compute_scope).probed(),
    )


def _fingerprints(
    plan: PrefillPlan, ids: np.ndarray, cache: list[Any], loaded: LoadedModel, backend: Backend
) -> dict[str, str]:
    """What besides the model decides the numbers in a checkpoint."""
    tokens = np.ascontiguousarray(ids, dtype=np.int64).tobytes()
    cuts = repr([(s.start, s.stop, s.chunks) for s in plan.segments]).encode()
    count = sum(len(s.chunks) for s in plan.segments)
    kinds = {_kind(leaf) for leaf in cache_leaves(cache)}
    evict = ", quantized after each layer" if plan.kv_evict == "quantize" else ""
    return {
        "tokens": f"{len(ids)} tokens, {_hash(tokens)}",
        "chunks": f"{count} chunks in {len(plan.segments)} segment(s), {_hash(cuts)}",
        "caches": ", ".join(sorted(kinds)) + evict,
        "activations": f"{loaded.dtype} on {backend.name}",
        "mlx": f"{_version('mlx')}, mlx_lm {_version('mlx-lm')}",
    }


def _kind(leaf: Any) -> str:
    if isinstance(leaf, QuantizingKVCache):
        of = leaf.options
        return f"KVCache of {of.kv_bits} bits/{of.kv_group_size} from {of.quantized_kv_start}"
    size = leaf.__dict__.get("max_size", leaf.__dict__.get("chunk_size"))
    return class_name(leaf) + ("" if size is None else f"({size})")


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
