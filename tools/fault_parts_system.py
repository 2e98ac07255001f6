"""Faults of the system: calls that fail on demand, and disks that are really small."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

READS = ("preadv", "pread", "read")
WRITES = ("pwrite", "write", "ftruncate", "fsync", "replace")
CHANGES = (*WRITES, "unlink", "mkdir", "create")  # what a read-only disk refuses


class SystemFaults:
    """The n-th use of some system calls under a folder fails. Use it in a with-block.

    Args:
        calls: names of READS or CHANGES; ``read``, ``write`` are those of Python's file objects.
        at: number of the use that fails, from 0; -1 counts only.
        code: of the OSError.
        short: a part of the bytes is moved instead: 0.5 half of them, 0.0 none.
        lasting: all uses behind it fail too.

    Attributes:
        uses: so far. injected: faults so far.
    """

    def __init__(
        self,
        calls: tuple[str, ...],
        under: Path,
        at: int = -1,
        code: int = errno.EIO,
        *,
        short: float | None = None,
        lasting: bool = False,
    ) -> None:
        self._calls, self._under = calls, str(under.resolve())
        self._at, self._code, self._short, self._lasting = at, code, short, lasting
        self._lock, self._stack = threading.Lock(), ExitStack()
        self.uses = self.injected = 0

    def __enter__(self) -> SystemFaults:
        for name in self._calls:
            if name not in ("read", "write", "create"):
                wrapper = getattr(self, f"_{name}", None) or self._plain(name)
                self._stack.enter_context(mock.patch.object(os, name, wrapper))
        opened = self._open_file
        self._stack.enter_context(mock.patch.object(builtins, "open", opened))
        self._stack.enter_context(mock.patch.object(io, "open", opened))
        if "create" in self._calls:
            self._stack.enter_context(mock.patch.object(os, "open", self._os_open))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    _REAL = {  # noqa: RUF012
        name: getattr(os, name)
        for name in (
            *("preadv", "pread", "pwrite", "ftruncate", "fsync"),
            *("replace", "unlink", "mkdir", "open"),
        )
    }
    _REAL_OPEN = staticmethod(builtins.open)

    def inside(self, where: int | str | os.PathLike[str]) -> bool:
        """Whether a descriptor or path is under the folder."""
        try:
            path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else str(where)
        except OSError:
            return False
        return path.startswith(self._under) or os.path.abspath(path).startswith(self._under)

    def due(self, where: Any) -> bool:
        """Count a use; whether this one fails."""
        if not self.inside(where):
            return False
        with self._lock:
            number, self.uses = self.uses, self.uses + 1
            hit = self._at >= 0 and (number >= self._at if self._lasting else number == self._at)
            self.injected += hit
        return hit

    def fail(self) -> None:
        """Raise the OSError."""
        raise OSError(self._code, os.strerror(self._code))

    def _plain(self, name: str) -> Callable[..., Any]:
        real = self._REAL[name]

        def call(where: Any, *args: Any, **options: Any) -> Any:
            if self.due(where):
                self.fail()
            return real(where, *args, **options)

        return call

    def _preadv(self, fd: int, views: list[memoryview], at: int, *flags: int) -> int:
        if not self.due(fd):
            return self._REAL["preadv"](fd, views, at, *flags)
        if self._short is None:
            self.fail()
        wanted = int(sum(len(view) for view in views) * (self._short or 0.0))
        data = self._REAL["pread"](fd, wanted, at) if wanted else b""
        done = 0
        for view in views:
            part = data[done : done + len(view)]
            view[: len(part)] = part
            done += len(part)
        return done

    def _pwrite(self, fd: int, data: Any, at: int) -> int:
        if not self.due(fd):
            return self._REAL["pwrite"](fd, data, at)
        if self._short is None:
            self.fail()
        align = 4096 if len(data) >= 8192 else 1
        half = max(1, int(len(data) * (self._short or 0.0)) // align * align)
        return self._REAL["pwrite"](fd, memoryview(data)[:half], at)

    def _os_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT and self.due(path):
            self.fail()
        return self._REAL["open"](path, flags, *args, **options)

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        if writes and "create" in self._calls and self.due(file):
            self.fail()
        made = self._REAL_OPEN(file, mode, *args, **options)
        wanted = "write" if writes else "read"
        return _File(made, self, file) if wanted in self._calls and self.inside(file) else made


class _File:
    """A file object whose reads and writes may fail."""

    def __init__(self, file: Any, faults: SystemFaults, path: Any) -> None:
        self._file, self._faults, self._path = file, faults, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def read(self, *args: int) -> Any:
        if self._faults.due(self._path):
            if self._faults._short is None:
                self._faults.fail()
            data = self._file.read(*args)
            return data[: int(len(data) * self._faults._short)]
        return self._file.read(*args)

    def write(self, data: Any) -> int:
        if self._faults.due(self._path) and self._faults._short is None:
            self._faults.fail()
        return self._file.write(data)


# --- small disks --------------------------------------------------------------------------------


def no_mounts() -> str:
    """Why no file system can be mounted here; empty if one can."""
    if not os.path.exists("/proc/self/mounts"):
        return "no Linux"
    return "not root" if os.geteuid() else ""


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A tmpfs of that size at `folder`, gone afterwards. Raises OSError if it is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def remount(folder: Path, options: str) -> None:
    """Change a mounted disk: ``ro``, ``rw`` or ``size=N``."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@contextmanager
def plenty_of_room() -> Iterator[None]:
    """The question for free space is answered with a lie, so that the disk itself says no."""
    free = shutil._ntuple_diskusage(1 << 50, 0, 1 << 50)  # type: ignore[attr-defined]
    with mock.patch.object(shutil, "disk_usage", return_value=free):
        yield
