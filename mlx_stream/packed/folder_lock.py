"""One packer at a time in a folder: a lock file that the system frees when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlx_stream.errors import PackError

LOCK_NAME = ".pack.lock"
TRIES = 10


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock.

    A holder that was killed leaves the file, but not the lock on it.

    Raises:
        PackError: another process has it (which one is said), or the folder is not writable.
    """
    path = folder / LOCK_NAME
    fd = _take(path)
    try:
        yield
    finally:
        # Unlinked while it is held: whoever opened it meanwhile sees that it is not the name's.
        with suppress(OSError):  # a disk that became read-only: a lock file left is no lock
            path.unlink(missing_ok=True)
        os.close(fd)


def _take(path: Path) -> int:
    for _ in range(TRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _unlockable(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(fd, path):
                with suppress(OSError):  # a full disk: the lock holds, only its note is missing
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except BlockingIOError as error:
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip()
            os.close(fd)
            raise PackError(
                "another process works on this folder",
                file=path.parent,
                expected="nobody else",
                actual=f"process {holder or 'unknown'} holds {path.name}",
                remedy="wait until it has ended; if it is not yours, choose another folder",
            ) from error
        except OSError as error:
            os.close(fd)
            raise _unlockable(path, error) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    raise PackError(
        "the folder's lock changes all the time",
        file=path,
        remedy="let one process at a time work on the folder",
    )


def _unlockable(path: Path, error: OSError) -> PackError:
    return PackError(
        "the folder cannot be locked",
        file=path,
        expected="a writable folder, on a disk that has locks",
        actual=error.strerror or str(error),
        remedy="choose another folder, or change its permissions",
    )


def _is_named(fd: int, path: Path) -> bool:
    """Whether the path still leads to the file that was locked."""
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (found.st_ino, found.st_dev) == (mine.st_ino, mine.st_dev)
