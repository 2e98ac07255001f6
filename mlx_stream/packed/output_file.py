"""Writing a file of known size so that its name never leads to half of it.

The file grows under a temporary name, bypasses the page cache where the system allows it, and takes
its own name when every byte is on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from mlx_stream.errors import PackError
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.record_layout import round_up

TEMPORARY = ".partial"
WRITE_ALIGN = 4096


def temporary_name(name: str) -> str:
    """Hidden, and no pattern for weights finds it."""
    return f".{name}{TEMPORARY}"


class OutputFile:
    """One file that is written from start to end by one thread of its own.

    Use it in a with-block: without `commit` nothing is left behind.

    Args:
        nbytes: of the whole file.
        io: 'direct' bypasses the page cache.
    """

    def __init__(self, path: Path, nbytes: int, *, io: IoChoice = "direct") -> None:
        self._path = path
        self._partial = path.with_name(temporary_name(path.name))
        self._nbytes = nbytes
        self._pending: Future[None] | None = None
        self._committed = False
        with _told(path, nbytes):
            self._fd, self.direct = _create(self._partial, io)
            try:
                os.ftruncate(self._fd, round_up(nbytes, WRITE_ALIGN))
            except BaseException:
                os.close(self._fd)
                _remove(self._partial)
                raise
        self._thread = ThreadPoolExecutor(1, "mlx_stream-writer")

    def write(self, at: int, data: np.ndarray) -> None:
        """Begin to write; the bytes must stay until the next call or `commit`."""
        self._settle()
        self._pending = self._thread.submit(self._write, at, data)

    def commit(self) -> None:
        """Everything is on the disk under the file's own name when it returns."""
        self._settle()
        with _told(self._path, self._nbytes):
            os.ftruncate(self._fd, self._nbytes)
            os.fsync(self._fd)
            os.replace(self._partial, self._path)
            sync_folder(self._path.parent)
        self._committed = True

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True)
        with contextlib.suppress(OSError):  # what matters was synced, or has its own error
            os.close(self._fd)
        if not self._committed:
            _remove(self._partial)

    def _settle(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            with _told(self._path, self._nbytes):
                pending.result()

    def _write(self, at: int, data: np.ndarray) -> None:
        if self.direct and data.nbytes % WRITE_ALIGN:
            # The file's end: what is too much is cut off in commit.
            whole = data.nbytes // WRITE_ALIGN * WRITE_ALIGN
            if whole:
                write_all(self._fd, data[:whole], at)
            tail = aligned_copy(data[whole:])
            write_all(self._fd, tail, at + whole)
            return
        write_all(self._fd, data, at)


def write_all(fd: int, data: np.ndarray, at: int) -> None:
    """Every byte, however many calls that takes. Raises OSError."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                count = os.pwrite(fd, rest, at + done)
            if count <= 0:
                raise OSError(errno.EIO, "a write made no progress")
            done += count


def aligned_copy(data: np.ndarray) -> np.ndarray:
    """The bytes and zeros up to WRITE_ALIGN, at an aligned address."""
    size = round_up(data.nbytes, WRITE_ALIGN)
    memory = np.zeros(size + WRITE_ALIGN, np.uint8)
    start = -memory.ctypes.data % WRITE_ALIGN
    memory[start : start + data.nbytes] = data
    return memory[start : start + size]


def write_whole(path: Path, data: bytes) -> None:
    """A small file, replaced whole or left alone. Raises PackError."""
    partial = path.with_name(temporary_name(path.name))
    with _told(path, len(data)):
        try:
            fd, _ = _create(partial, "buffered")
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            _remove(partial)
            raise
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Names that were changed in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        with contextlib.suppress(OSError):  # some file systems refuse; then there is no way
            os.fsync(fd)
    finally:
        os.close(fd)


def _remove(partial: Path) -> None:
    """A temporary file; on a disk that became read-only the next run does it."""
    with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)


def _create(path: Path, io: IoChoice) -> tuple[int, bool]:
    """``(descriptor, direct)`` of a new file; never what a link there leads to. Raises OSError."""
    path.unlink(missing_ok=True)  # what a killed process left, or somebody's link
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    if io == "direct" and hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs of older kernels, network shares
                raise
        path.unlink(missing_ok=True)  # some systems make the file before they refuse
    fd = os.open(path, flags, 0o666)
    if io == "direct" and sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, 48, 1)  # F_NOCACHE
    return fd, False


@contextlib.contextmanager
def _told(path: Path, nbytes: int):  # noqa: ANN202
    """OSErrors of writing become PackErrors that say what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise PackError(
            "the disk is full" if full else "a file cannot be written",
            file=path,
            expected=f"room for {nbytes} bytes" if full else "a writable folder on a sound disk",
            actual=error.strerror or str(error),
            remedy="free some space and run the same command again: finished files are kept"
            if full
            else "check permissions and the disk, then run the same command again",
        ) from error
