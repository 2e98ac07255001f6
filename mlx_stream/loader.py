"""Load an mlx-lm model with its resident weights in memory and its experts on disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_tokenizer

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.config import StreamConfig, parse_throttle
from mlx_stream.errors import ReadError, UnsupportedModelError
from mlx_stream.experts.combine_probe import probe_combination
from mlx_stream.experts.streamed_experts import (
    ExecutorSlot,
    StreamedExperts,
    install_streamed_experts,
)
from mlx_stream.lazy_model import load_lazy
from mlx_stream.packed_model import packed_arguments
from mlx_stream.planner.fit import DIRECT_ALIGN, Traits, require_room
from mlx_stream.planner.group_size import GroupSize, wanted_group
from mlx_stream.planner.machine_profile import ProfileError, load_default
from mlx_stream.planner.model_shape import ModelShape, model_shape
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.packed_manifest import MANIFEST_NAME, is_packed

log = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tiktoken.model")


@dataclass
class LoadedModel:
    """A model ready to stream.

    Attributes:
        index: the expert layers that the model uses, in execution order.
        combined_layers: layers whose weighted sum happens inside the stream.
        resident_nbytes: bytes of the weights in memory, as held.
        dtype: of the activations.
    """

    model: nn.Module
    config: dict[str, Any]
    index: ExpertIndex
    streamed: list[StreamedExperts]
    slot: ExecutorSlot
    combined_layers: int
    resident_nbytes: int
    dtype: mx.Dtype
    shape: ModelShape

    def traits(
        self, config: StreamConfig, *, scratch: int, align: int, decode_tokens: int
    ) -> Traits:
        """What planning must know besides the checkpoint."""
        return Traits(
            itemsize=self.dtype.size,
            resident=self.resident_nbytes,
            scratch=scratch,
            align=align,
            combined=self.combined_layers == len(self.streamed),
            decode_tokens=decode_tokens,
            union_tokens=config.union_tokens,
            group=_group_size(self.index, config, align),
        )


def _group_size(index: ExpertIndex, config: StreamConfig, align: int) -> GroupSize | None:
    """By the saved profile, if there is one that can be read: no prompt depends on it."""
    try:
        profile = load_default()
    except ProfileError as error:
        log.warning("read groups have the default size. %s", error)
        profile = None
    if profile is not None and config.throttle is not None:
        profile = profile.with_reads_at_most(parse_throttle(config.throttle)[0])
    return wanted_group(
        index, profile, asked=config.group_size, align=align, depth=config.reader_threads
    )


def load_streamed_model(
    index: ExpertIndex,
    backend: Backend,
    budget: MemoryBudget,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Build the model lazily, swap the switch layers, then evaluate what stays resident.

    Raises:
        BudgetError: the budget fits no prompt, however short; nothing was evaluated.
        ReadError: a resident weight cannot be read.
        UnsupportedModelError: mlx-lm cannot build this model.
        MissingTensorError: the model needs a tensor the checkpoint lacks.
    """
    path = index.checkpoint.path
    extra = packed_arguments(index.checkpoint, trust_remote_code)
    model, config = load_lazy(path, trust_remote_code, **extra)
    slot = ExecutorSlot()
    streamed = install_streamed_experts(model, index, slot)
    _cast(model, backend.compute_dtype)
    nbytes = sum(p.nbytes for _, p in tree_flatten(model.parameters()))
    used = replace(index, layers=tuple(s.mlp.layer for s in streamed))
    shape = model_shape(config, used)
    dtype = backend.compute_dtype or _float_dtype(model)
    scratch = backend.scratch_nbytes([s.mlp for s in streamed])
    require_room(used, shape, Traits(dtype.size, nbytes, scratch, DIRECT_ALIGN), budget.total)
    budget.reserve("resident weights", nbytes)
    _read_resident(model, path)
    model.eval()
    combined = probe_combination(model, streamed, slot, hidden=shape.hidden, dtype=dtype)
    return LoadedModel(model, config, used, streamed, slot, combined, nbytes, dtype, shape)


def load_draft_model(
    path: Path,
    backend: Backend,
    budget: MemoryBudget,
    *,
    vocab: int,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A small model that is held in memory whole, under the budget.

    Raises:
        BudgetError: its weights do not fit; nothing was evaluated.
        UnsupportedModelError: mlx-lm cannot build it, or its vocabulary is another one.
        ReadError: a weight cannot be read.
    """
    _check_not_packed(path)
    model, config = load_lazy(path, trust_remote_code)
    own = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if own != vocab:
        raise UnsupportedModelError(
            "the draft model has another vocabulary",
            file=path / "config.json",
            expected=f"vocab_size {vocab}",
            actual=own,
            remedy="choose a smaller model of the same family",
        )
    _cast(model, backend.compute_dtype)
    budget.reserve("draft model", sum(p.nbytes for _, p in tree_flatten(model.parameters())))
    try:
        _read_resident(model, path)
    except BaseException:
        budget.release("draft model")
        raise
    model.eval()
    return model


def _check_not_packed(path: Path) -> None:
    if is_packed(path):
        raise UnsupportedModelError(
            "a packed folder cannot be a draft model: it is made for streaming",
            file=path,
            expected="a checkpoint that mlx_lm loads whole",
            actual=MANIFEST_NAME,
            remedy="pass the folder that it was packed from",
        )


def _read_resident(model: nn.Module, path: Path) -> None:
    """Evaluate module by module, so that the files' own dtypes exist for one module at a time."""
    for name, module in model.named_modules():
        try:
            mx.eval([p for p in module.values() if isinstance(p, mx.array)])
        except RuntimeError as error:
            raise ReadError(
                "the resident weights cannot be read",
                file=path,
                tensor=name,
                expected="the bytes that the headers promise",
                actual=str(error),
                remedy="check the disk, and do not change a checkpoint while it is in use",
            ) from error
    mx.eval(model.parameters())


def _cast(model: nn.Module, dtype: mx.Dtype | None) -> None:
    """Cast floating parameters lazily, module by module; packed weights and uint8 scales stay."""
    if dtype is None:
        return
    for _, module in model.named_modules():
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                module[name] = value.astype(dtype)


def _float_dtype(model: nn.Module) -> mx.Dtype:
    """The dtype activations will have: that of most floating values."""
    sizes: dict[mx.Dtype, int] = {}
    for _, p in tree_flatten(model.parameters()):
        if mx.issubdtype(p.dtype, mx.floating):
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.size
    return max(sizes, key=lambda d: sizes[d]) if sizes else mx.float32


def load_tokenizer_if_any(
    path: Path, config: dict[str, Any], trust_remote_code: bool = False
) -> Any | None:
    """mlx-lm's TokenizerWrapper, or None for a folder without tokenizer files."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(
        path,
        {"trust_remote_code": trust_remote_code},
        eos_token_ids=config.get("eos_token_id"),
    )
