"""A checkpoint folder seen from its headers: which tensor lies where, in which file.

Owns opening and validating `config.json`, `model*.safetensors` and the optional index. It reads
headers only, keeps no file open, and refuses a folder it cannot trust.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_stream.errors import CheckpointError, HeaderError, MissingTensorError
from mlx_stream.storage.packed_files import check_unfinished, expert_path, record_tensors
from mlx_stream.storage.packed_manifest import PackedManifest, is_packed, read_manifest
from mlx_stream.storage.record_layout import RecordLayout
from mlx_stream.storage.regular_file import open_regular
from mlx_stream.storage.safetensors_header import (
    TensorInfo,
    parse_header,
    read_header,
    read_json_object,
)

__all__ = ["Checkpoint", "FileIdentity", "TensorInfo", "open_checkpoint", "parse_header"]

SHARD_PATTERN = "model*.safetensors"  # what mlx-lm loads
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class FileIdentity:
    """What a file was when its header was read; any later difference means it changed."""

    path: Path
    size: int
    mtime_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> FileIdentity:
        """The identity that `status`, a stat of `path` or of its descriptor, shows."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)

    def matches(self, status: os.stat_result) -> bool:
        """True if `status` (of the path or of an open descriptor) is still the same file."""
        return self == FileIdentity.of(self.path, status)

    def require_local(self) -> None:
        """Nothing here; a file of which only the header was fetched raises HeadersOnlyError."""


@dataclass(frozen=True)
class Checkpoint:
    """Validated positions of every tensor of one checkpoint folder."""

    path: Path
    config: dict[str, Any] = field(repr=False)
    files: tuple[FileIdentity, ...]
    tensors: dict[str, TensorInfo] = field(repr=False)
    packed: PackedManifest | None = field(default=None, repr=False, kw_only=True)

    @cached_property
    def records(self) -> dict[str, RecordLayout]:
        """The records of each packed layer, by its prefix; empty for a plain checkpoint."""
        return {} if self.packed is None else {r.layer: r for r in self.packed.layers}

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, headers and padding left out."""
        return sum(t.nbytes for t in self.tensors.values())


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Read and validate the headers of a checkpoint folder.

    Raises:
        CheckpointError: no folder, no config.json, no shards, unreadable file.
        HeaderError, TruncatedFileError: see `parse_header`; also one name in two shards.
        MissingTensorError: the index names a shard or tensor that is not there.
        PackedLayoutError: a packed folder whose manifest and files disagree.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise CheckpointError(
            "The checkpoint is not a folder.",
            file=folder,
            expected="a folder with config.json and model*.safetensors",
            actual="a file" if folder.exists() else "no such path",
            remedy="pass the folder of a downloaded mlx checkpoint",
        )
    check_unfinished(folder)
    config = read_json_object(folder / "config.json")
    shards = sorted(folder.glob(SHARD_PATTERN))
    if not shards:
        raise CheckpointError(
            "The checkpoint has no weights.",
            file=folder,
            expected=SHARD_PATTERN,
            actual="no matching file",
            remedy="finish the download, or convert the model with mlx_lm.convert",
        )
    files: list[FileIdentity] = []
    tensors: dict[str, TensorInfo] = {}
    for number, shard in enumerate(shards):
        identity, found = _read_shard(shard, number)
        files.append(identity)
        add_tensors(tensors, found, files)
    if (folder / INDEX_NAME).exists():
        index = read_json_object(folder / INDEX_NAME)
        check_index(folder / INDEX_NAME, index, files, tensors)
    packed = read_manifest(folder) if is_packed(folder) else None
    if packed is not None:
        _add_records(folder, packed, files, tensors)
    return Checkpoint(folder, config, tuple(files), tensors, packed=packed)


def _add_records(
    folder: Path,
    packed: PackedManifest,
    files: list[FileIdentity],
    tensors: dict[str, TensorInfo],
) -> None:
    """Add the expert files, and each packed tensor under the name it has in the source."""
    for listed in packed.expert_files:
        path = expert_path(folder, listed.name)
        identity, found = _read_shard(path, len(files))
        files.append(identity)
        layers = [r for r in packed.layers if r.file == listed.name]
        add_tensors(tensors, record_tensors(layers, found, identity.size, path), files)


def _read_shard(path: Path, number: int) -> tuple[FileIdentity, tuple[TensorInfo, ...]]:
    try:
        with open_regular(path) as f:
            # Identity of the descriptor, not of the path: it is these bytes that we parse.
            identity = FileIdentity.of(path, os.fstat(f.fileno()))
            raw = read_header(f, identity.size, path)
    except OSError as error:
        raise CheckpointError(
            "A shard cannot be read.",
            file=path,
            expected="a readable regular file",
            actual=error.strerror or str(error),
            remedy="check permissions and that the download (or its symlink target) is complete",
        ) from error
    return identity, parse_header(raw, identity.size, path, file=number)


def add_tensors(
    tensors: dict[str, TensorInfo],
    found: Sequence[TensorInfo],
    files: Sequence[FileIdentity],
) -> None:
    """Add one shard's tensors to `tensors`. Raises HeaderError for a name already there."""
    for t in found:
        if t.name in tensors:
            raise HeaderError(
                "The same tensor is in two files.",
                file=files[t.file].path,
                tensor=t.name,
                expected=f"only in {files[tensors[t.name].file].path.name}",
                actual=f"also in {files[t.file].path.name}",
                remedy="remove the stale shard left by another version of this checkpoint",
            )
        tensors[t.name] = t


def check_index(
    path: Path,
    index: Mapping[str, Any],
    files: Sequence[FileIdentity],
    tensors: Mapping[str, TensorInfo],
) -> None:
    """The tensors lie where the index says. Raises CheckpointError, MissingTensorError."""
    numbers = {f.path.name: n for n, f in enumerate(files)}
    for name, shard in weight_map(path, index).items():
        info = tensors.get(name)
        if shard not in numbers or info is None or info.file != numbers[shard]:
            _fail_index(path, name, shard, shard in numbers, info, files)


def weight_map(path: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> shard name, every shard a plain file name. Raises CheckpointError."""
    found = index.get("weight_map")
    if not isinstance(found, dict):
        raise CheckpointError(
            "The index has no weight_map.",
            file=path,
            expected="an object: tensor name -> shard name",
            actual=type(found).__name__,
            remedy=f"delete {INDEX_NAME} (it is optional) or download it again",
        )
    for name, shard in found.items():
        if not _is_plain_name(shard):
            raise CheckpointError(
                "The index names a shard outside the checkpoint folder.",
                file=path,
                tensor=name,
                expected="a plain file name",
                actual=repr(shard),
                remedy="do not use this checkpoint unless you trust it; delete its index to go on",
            )
    return found


def _is_plain_name(shard: Any) -> bool:
    return (
        isinstance(shard, str)
        and shard not in ("", ".", "..")
        and not any(c in shard for c in "/\\\0")
    )


def _fail_index(
    path: Path,
    name: str,
    shard: str,
    shard_exists: bool,
    info: TensorInfo | None,
    files: Sequence[FileIdentity],
) -> None:
    if not shard_exists:
        actual = "no such shard in the folder"
    elif info is None:
        actual = "the tensor is in no shard"
    else:
        actual = f"the tensor is in {files[info.file].path.name}"
    raise MissingTensorError(
        f"A tensor listed in {path.name} is not where it should be.",
        file=path.parent / shard,
        tensor=name,
        expected=f"in {shard}",
        actual=actual,
        remedy="finish the download; if the index is from another version, delete it",
    )
