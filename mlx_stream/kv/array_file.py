"""A safetensors file that grows array by array: data first, header last.

The header's room is left free at the front and padded with blanks, as the format allows. So a
prompt's keys and values go to disk layer by layer and are one valid file at the end, without being
written twice. The file has a temporary name until :meth:`ArrayFile.finish` renames it. Errors are
the operating system's; who asked for the file says what they mean.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import xxhash

from mlx_stream.backends.file_dtypes import FILE_NAMES

BLOCK = 4096
SLAB_NBYTES = 8 << 20  # written at once: bounds the copy of an array that is not contiguous
TEMPORARY = ".tmp.safetensors"
CHECKSUMS = "0.checksums"  # in the metadata: xxh3-64 of every array, by name
_serial = itertools.count()


@dataclass(frozen=True)
class Stored:
    """Where an array lies in a file, from the start of its data."""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: mx.Dtype
    digest: int  # xxh3-64 of the bytes


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a finished file (its data first, then its header)."""

    nbytes: int
    digest: str


class ArrayFile:
    """One file being written; :meth:`read` works until :meth:`close`, renamed or not.

    Args:
        target: the name in the end; what is there stays until then.
        room: bytes that the header will need at most.

    Raises:
        OSError: from every method but close.
    """

    def __init__(self, target: Path, room: int) -> None:
        self.target = target
        self.nbytes = 0  # of data
        self._room = -(-(room + 8) // BLOCK) * BLOCK - 8
        mark = f"{os.getpid()}-{next(_serial)}"
        self._temporary = target.with_name(f".{target.stem}.{mark}{TEMPORARY}")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says that somebody writes it
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, array: mx.array) -> Stored:
        """Append an array; nothing of it is held afterwards."""
        start, digest = self.nbytes, xxhash.xxh3_64()
        for slab in _slabs(array) if array.size else ():
            raw = memoryview(slab.reshape(-1).view(mx.uint8))
            self._hash.update(raw)
            digest.update(raw)
            self._write(raw, 8 + self._room + self.nbytes)
            self.nbytes += raw.nbytes
        shape = tuple(array.shape)
        return Stored(start, array.nbytes, shape, array.dtype, digest.intdigest())

    def read(self, stored: Stored) -> mx.array:
        """An array of this file, into memory."""
        raw = np.empty(stored.nbytes, dtype=np.uint8)
        view, at = memoryview(raw), 8 + self._room + stored.start
        while len(view):
            got = os.preadv(self._fd, [view], at)
            if got == 0:
                raise OSError(f"{self.target} ends before its data does")
            view, at = view[got:], at + got
        if xxhash.xxh3_64_intdigest(raw) != stored.digest:
            raise OSError(errno.EIO, "other bytes than were written")
        if not stored.nbytes:
            return mx.zeros(stored.shape, dtype=stored.dtype)
        return mx.array(raw).view(stored.dtype).reshape(stored.shape)

    def finish(self, entries: dict[str, Stored], metadata: dict[str, str]) -> FileSum:
        """Write the header, and give the file its name once it is on the disk."""
        sums = {name: f"{at.digest:016x}" for name, at in entries.items()}
        header: dict[str, object] = {"__metadata__": metadata | {CHECKSUMS: json.dumps(sums)}}
        for name, at in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
            offsets = [at.start, at.start + at.nbytes]
            header[name] = {
                "dtype": FILE_NAMES[at.dtype],
                "shape": list(at.shape),
                "data_offsets": offsets,
            }
        text = json.dumps(header).encode()
        assert len(text) <= self._room, "the header does not fit the room left for it"
        raw = self._room.to_bytes(8, "little") + text.ljust(self._room)
        self._hash.update(raw)
        self._write(memoryview(raw), 0)
        os.fsync(self._fd)
        os.replace(self._temporary, self.target)
        return FileSum(len(raw) + self.nbytes, self._hash.hexdigest())

    def _write(self, raw: memoryview, at: int) -> None:
        while len(raw):
            done = os.pwrite(self._fd, raw, at)
            raw, at = raw[done:], at + done

    def close(self) -> None:
        """Close it, and remove it if it was not finished; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._temporary.unlink(missing_ok=True)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def remove_abandoned(target: Path) -> None:
    """Remove what killed processes left of a file of this name. Raises OSError."""
    for path in target.parent.glob(f".{target.stem}.*{TEMPORARY}"):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # another process is at it
        finally:
            os.close(file)


def write_arrays(target: Path, arrays: dict[str, mx.array], metadata: dict[str, str]) -> FileSum:
    """Write a file at once; nothing is left behind when that fails. Raises OSError."""
    names = sum(len(name) for name in arrays)
    room = 320 * len(arrays) + 2 * names + len(json.dumps(metadata)) + 256
    file = ArrayFile(target, room)
    try:
        return file.finish({name: file.add(array) for name, array in arrays.items()}, metadata)
    finally:
        file.close()


def array_digest(array: mx.array) -> int:
    """What :meth:`ArrayFile.add` says of an array."""
    digest = xxhash.xxh3_64()
    for slab in _slabs(array) if array.size else ():
        digest.update(memoryview(slab.reshape(-1).view(mx.uint8)))
    return digest.intdigest()


def file_sum(path: Path) -> FileSum:
    """Size and checksum of a file as :meth:`ArrayFile.finish` says. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = min(8 + int.from_bytes(file.read(8), "little"), size)
        file.seek(start)
        while block := file.read(SLAB_NBYTES):
            digest.update(block)
        file.seek(0)
        digest.update(file.read(start))
    return FileSum(size, digest.hexdigest())


def _slabs(array: mx.array) -> Iterator[mx.array]:
    """The array in order, in parts of at most SLAB_NBYTES where its shape allows."""
    if array.ndim == 0 or array.nbytes <= SLAB_NBYTES:
        yield array
        return
    rows = SLAB_NBYTES * array.shape[0] // array.nbytes
    if rows == 0 and array.ndim > 1:
        for part in range(array.shape[0]):
            yield from _slabs(array[part])
        return
    step = max(1, rows)
    for start in range(0, array.shape[0], step):
        yield array[start : start + step]
