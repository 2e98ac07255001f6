"""The resident tensors of a packed folder against their checksums, before the model is loaded.

MLX reads these tensors by itself and checks nothing. Each is read here once, in parts of bounded
size; what was read lies in the page cache, from where MLX takes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, NoReturn

import xxhash

from mlx_stream.errors import DamagedRecordError, ReadError
from mlx_stream.storage.checkpoint import Checkpoint, open_checkpoint
from mlx_stream.storage.packed_manifest import PackedFile
from mlx_stream.storage.record_check import VerifyChoice
from mlx_stream.storage.safetensors_header import (
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    TensorInfo,
    parse_header,
)

SLAB_NBYTES = 8 << 20  # read at once


def open_checked(path: Path | str, verify: VerifyChoice) -> Checkpoint:
    """A checkpoint whose resident tensors are as they were packed; 'off' does not look.

    Raises:
        CheckpointError, ReadError: see open_checkpoint and check_resident.
    """
    checkpoint = open_checkpoint(path)
    if verify != "off":
        check_resident(checkpoint)
    return checkpoint


def check_resident(checkpoint: Checkpoint) -> int:
    """Compare every resident tensor; returns the bytes read, 0 for a plain checkpoint.

    Raises:
        DamagedRecordError: a header or tensor has other bytes than were packed.
        ReadError: a file cannot be read.
    """
    if checkpoint.packed is None:
        return 0
    paths = {f.path.name: f.path for f in checkpoint.files}
    nbytes = 0
    for file in checkpoint.packed.resident_files:
        path = paths.get(file.name, checkpoint.path / file.name)
        try:
            nbytes += _check_file(path, file)
        except OSError as error:
            raise ReadError(
                "A file of the checkpoint cannot be read.",
                file=path,
                expected="a readable file",
                actual=error.strerror or str(error),
                remedy="check the disk and permissions, or run mlx_stream repair",
            ) from error
    return nbytes


def _check_file(path: Path, file: PackedFile) -> int:
    with open(path, "rb") as opened:
        size = opened.seek(0, 2)
        opened.seek(0)
        if size != file.size or file.header_nbytes > MAX_HEADER_NBYTES + LENGTH_NBYTES:
            _damaged(path, "header", f"{file.size} bytes", f"{size} bytes")
        header = opened.read(file.header_nbytes)
        _compare(path, "header", file.digest, xxhash.xxh3_64_intdigest(header))
        known = dict(file.tensors)
        for t in parse_header(header, size, path):
            _compare(path, t.name, known.get(t.name, -1), _digest(opened, t))
    return size


def _digest(file: BinaryIO, t: TensorInfo) -> int:
    digest, left = xxhash.xxh3_64(), t.nbytes
    file.seek(t.offset)
    while left:
        part = file.read(min(left, SLAB_NBYTES))
        if not part:
            raise OSError(f"the file ends within {t.name}")
        digest.update(part)
        left -= len(part)
    return digest.intdigest()


def _compare(path: Path, part: str, expected: int, found: int) -> None:
    if found != expected:
        _damaged(path, part, f"xxh3-64 {max(expected, 0):016x}", f"{found:016x}")


def _damaged(path: Path, part: str, expected: str, actual: str) -> NoReturn:
    raise DamagedRecordError(
        "Resident weights are damaged.",
        file=path,
        tensor=part,
        expected=expected,
        actual=actual,
        remedy="mlx_stream repair FOLDER --source CHECKPOINT writes them anew; check the disk",
    )
