"""The small files beside the weights: config, tokenizer, chat template, model code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_stream.errors import PackError
from mlx_stream.packed.digests import digest_bytes
from mlx_stream.packed.output_file import write_whole
from mlx_stream.packed.source import SideFile
from mlx_stream.storage.checkpoint import INDEX_NAME
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME, PackedFile

PATTERNS = (
    "*.json",
    "*.jsonl",
    "*.txt",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.py",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "prerouter*.safetensors",
    "lora*.safetensors",
)
LEFT_OUT = (MANIFEST_NAME, JOURNAL_NAME, INDEX_NAME)  # the index names tensors that are elsewhere
MAX_NBYTES = 256 << 20


def side_files(folder: Path) -> list[Path]:
    """Those to copy, by name. Raises PackError for one that is too large to be what it seems."""
    found = []
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        name = entry.name
        wanted = any(fnmatchcase(name, pattern) for pattern in PATTERNS)
        if not wanted or name in LEFT_OUT or name.startswith("."):
            continue
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise PackError(
                "a file beside the weights leads nowhere",
                file=entry.path,
                expected="a file",
                actual=f"a link to {os.readlink(entry.path)}",
                remedy="finish the download, or remove the link",
            )
        if not entry.is_file():
            continue
        if entry.stat().st_size > MAX_NBYTES:
            raise PackError(
                "a file beside the weights is too large to be copied",
                file=entry.path,
                expected=f"at most {MAX_NBYTES} bytes",
                actual=entry.stat().st_size,
                remedy="move it out of the folder",
            )
        found.append(folder / name)
    return found


def copy_side_files(files: Sequence[SideFile], target: Path) -> list[PackedFile]:
    """Write them; each is replaced whole. Raises PackError."""
    return [copy_side_file(file, target) for file in files]


def copy_side_file(file: SideFile, target: Path) -> PackedFile:
    """Write one. Raises PackError."""
    data = side_bytes(file)
    write_whole(target / file.name, data)
    return PackedFile(file.name, len(data), digest_bytes(data))


def side_bytes(file: SideFile) -> bytes:
    """What a file holds, or is to hold. Raises PackError if it cannot be read."""
    path = file.path
    if path is None:
        return file.data
    try:
        size, data = path.stat().st_size, path.read_bytes()
    except OSError as error:
        raise PackError(
            "a file beside the weights cannot be read",
            file=path,
            actual=error.strerror or str(error),
            remedy="check its permissions, or move it out of the folder",
        ) from error
    if len(data) != size:
        raise PackError(
            "a file beside the weights was not read to its end",
            file=path,
            expected=f"{size} bytes",
            actual=f"{len(data)} bytes",
            remedy="check the disk, and that nothing writes the file, then run the command again",
        )
    return data
