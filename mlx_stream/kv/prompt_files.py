"""Prompt caches as files, in mlx-lm's safetensors format, with the tokens that they hold.

mlx-lm loads what it knows the classes of; we load all. A file is untrusted: its header is bounded
and checked before anything of its size is allocated, names in it select nothing (see leaf_state),
and every array must fit what the model makes. Writing is atomic.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_stream.config import format_bytes
from mlx_stream.errors import PromptFileError, ReadError
from mlx_stream.kv.array_file import Stored, array_digest, remove_abandoned, write_arrays
from mlx_stream.kv.leaf_state import class_name, leaf_state, restore_leaf
from mlx_stream.kv.prompt_header import (
    Entries,
    damaged,
    fail,
    read_messages,
    read_prompt_header,
    read_tokens,
)
from mlx_stream.prefill.cache_views import cache_leaves, cache_offset
from mlx_stream.storage.checkpoint import Checkpoint

FORMAT = "1"
SUFFIX = ".safetensors"
SAMPLE_NBYTES = 1 << 16
SPARE_NBYTES = 1 << 20


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a prompt cache belongs to.

    Attributes:
        layers: entries of the prompt cache.
        vocab: token ids; 0 when unknown.
        weights: a hash of file sizes and samples of the weights: another fine-tune differs.
    """

    model_type: str
    layers: int
    vocab: int
    weights: str

    def fields(self) -> dict[str, str]:
        """As a file's metadata has it."""
        return {name: str(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Attributes:
        tokens: the ids in the cache; None in files of mlx-lm, which does not store them.
        messages: the conversation that they are of; None when it was not one.
    """

    cache: list[Any]
    tokens: list[int] | None
    messages: list[dict[str, str]] | None


def weights_fingerprint(checkpoint: Checkpoint) -> str:
    """Hex digest of the sizes and of two samples of every file; independent of names and times.

    Raises:
        ReadError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for identity in checkpoint.files:
        digest.update(identity.size.to_bytes(8, "little"))
        try:
            with identity.path.open("rb") as file:
                for at in (identity.size // 2, max(0, identity.size - SAMPLE_NBYTES)):
                    file.seek(at)
                    digest.update(file.read(SAMPLE_NBYTES))
        except OSError as error:
            raise ReadError(
                "A file of the checkpoint cannot be read.",
                file=identity.path,
                expected="a readable file",
                actual=error.strerror or str(error),
                remedy="check the disk and permissions, then run the same command again",
            ) from error
    return digest.hexdigest()


# --- writing


def save_prompt_file(
    path: Path | str,
    cache: list[Any],
    identity: ModelIdentity,
    *,
    tokens: list[int],
    messages: list[dict[str, str]] | None = None,
    model: str = "",
) -> Path:
    """Write a prompt cache and the `tokens` in it; the suffix is added when missing.

    Args:
        model: where the model was loaded from; mlx_lm.generate compares it with its ``--model``.

    Returns:
        The file's path.

    Raises:
        PromptFileError: no room, or not writable; a file that was there is untouched.
    """
    target = Path(path)
    target = target if target.suffix == SUFFIX else target.with_name(target.name + SUFFIX)
    arrays, scalars = state_entries([leaf_state(layer) for layer in cache])
    about = about_prompt(identity, tokens, model)
    if messages is not None:
        about["messages"] = json.dumps(messages)
    metadata = file_metadata(about, cache, scalars)
    check_room(target, sum(a.nbytes for a in arrays.values()) + len(str(metadata)))
    _write(target, arrays, metadata)
    return target


def about_prompt(identity: ModelIdentity, tokens: list[int] | None, model: str) -> dict[str, str]:
    """What a file says about itself; `tokens` None when it is not known which it holds."""
    about = {"mlx_stream": FORMAT, "model": model, "tokenizer_config": "{}"}
    if tokens is not None:
        about["tokens"] = json.dumps(tokens)
    return about | identity.fields()


def file_metadata(about: dict[str, str], cache: list[Any], scalars: list[Any]) -> dict[str, str]:
    """The metadata of a file, as mlx-lm flattens it."""
    return dict(tree_flatten([about, [class_name(layer) for layer in cache], scalars]))


def state_entries(states: list[Any]) -> tuple[dict[str, Any], list[Any]]:
    """mlx-lm's encoding: scalars become arrays, and a list says what they were.

    Arrays may be in memory or Stored ones.
    """
    arrays: dict[str, Any] = {}
    scalars: list[Any] = [""]  # not empty, or it would vanish when flattened
    for key, value in tree_flatten(states):
        if isinstance(value, mx.array | Stored):
            arrays[key] = value
        elif value is None:
            scalars.append((key, "none"))
            arrays[key] = mx.array([])
        elif isinstance(value, str):
            scalars.append((key, "string"))
            arrays[key] = mx.array([ord(char) for char in value])
        else:
            scalars.append((key, "scalar"))
            arrays[key] = mx.array(value)
    return arrays, scalars


def check_room(target: Path, nbytes: int) -> None:
    """Refuse a file that its disk has no room for. Raises PromptFileError."""
    folder = target.absolute().parent
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise unwritable(target, error.strerror or str(error)) from error
    if free < nbytes + SPARE_NBYTES:
        raise PromptFileError(
            "there is no room for the prompt cache",
            file=target,
            expected=f"{format_bytes(nbytes + SPARE_NBYTES)} free",
            actual=f"{format_bytes(free)} free",
            remedy="free some space, or choose another disk",
        )


def _write(target: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> None:
    """Under a temporary name in the same folder, on the disk, then renamed."""
    try:
        remove_abandoned(target)
        write_arrays(target, arrays, metadata)
    except OSError as error:
        raise unwritable(target, str(error)) from error


def unwritable(target: Path, actual: str) -> PromptFileError:
    """The error for a file that cannot be written."""
    return PromptFileError(
        "the prompt cache cannot be written",
        file=target,
        actual=actual,
        remedy="choose a writable folder",
    )


# --- reading


def load_prompt_file(
    path: Path | str,
    identity: ModelIdentity,
    *,
    fresh: list[Any],
    probed: list[Any],
    max_nbytes: int,
) -> PromptFile:
    """Read a prompt cache of ours or of mlx-lm; everything is in memory when it returns.

    Args:
        fresh: an empty cache of the model; used up.
        probed: the same after a few tokens (see KvSupport).
        max_nbytes: the largest file to read.

    Raises:
        PromptFileError: not readable, damaged, too large, or of another model.
    """
    path = Path(path)
    header = read_prompt_header(path, max_nbytes)
    _check_identity(path, header.about, identity, len(header.classes))
    try:
        arrays = mx.load(str(path), format="safetensors")
        mx.eval(arrays)
    except (RuntimeError, OSError, ValueError) as error:
        raise damaged(path, "arrays that can be read", str(error)) from error
    if not isinstance(arrays, dict) or set(arrays) != header.entries:
        fail(path, "entries", "those of the header", "others: the file changed meanwhile")
    sums = _sums(arrays) if "checksums" in header.about else {}
    reader = Entries(path, arrays, header.scalars)
    cache = [
        None
        if own is None
        else restore_leaf(own, probed[n], header.classes[n], str(n), reader.get, reader.check)
        for n, own in enumerate(fresh)
    ]
    reader.check(not arrays, "entries", "those of this model", f"also {sorted(arrays)[:3]}")
    tokens = read_tokens(path, header.about, identity.vocab)
    held = cache_offset(cache)
    offsets = {leaf.__dict__.get("offset", 0) for leaf in cache_leaves(cache)}
    reader.check(offsets <= {0, held}, "tokens", f"{held} in every layer", sorted(offsets))
    if tokens is not None and held and held != len(tokens):
        fail(path, "tokens", f"{held}, as many as the cache holds", len(tokens))
    if "checksums" in header.about:
        _check_sums(path, header.about["checksums"], sums)
    return PromptFile(cache, tokens, read_messages(path, header.about))


def _sums(arrays: dict[str, mx.array]) -> dict[str, str]:
    return {name: f"{array_digest(array):016x}" for name, array in arrays.items()}


def _check_sums(path: Path, text: str, found: dict[str, str]) -> None:
    """The arrays are those that were written; files of mlx-lm have no checksums."""
    try:
        wanted = json.loads(text)
    except (ValueError, RecursionError):
        wanted = None
    if wanted != found:
        known = wanted if isinstance(wanted, dict) else {}
        names = sorted(name for name in found if known.get(name) != found[name])
        fail(path, "checksums", "the bytes that were written", f"others in {names[:3]}")


def _check_identity(
    path: Path, about: dict[str, str], identity: ModelIdentity, layers: int
) -> None:
    wanted = identity.fields()
    found = [("layers", str(layers))]
    if about.get("mlx_stream", FORMAT) != FORMAT:
        fail(path, "format", FORMAT, about["mlx_stream"])
    if "mlx_stream" in about:
        found += [(name, about.get(name, "nothing")) for name in wanted]
    for name, actual in found:
        if actual != wanted[name]:
            raise PromptFileError(
                f"this prompt cache belongs to another model, or the model changed: {name}",
                file=path,
                expected=wanted[name],
                actual=actual if len(actual) <= 80 else actual[:80] + "...",
                remedy="load the model it was made with, or make the prompt cache again",
            )
