"""Damage for checkpoints, reads that fail on demand, and proof that nothing is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.prefill.cache_views import cache_leaves
from mlx_stream.storage.reader import Reader

Header = dict[str, Any]
OUR_THREADS = ("mlx-stream-", "cpu-worker-")
SETTLE_SECONDS = 5.0  # threads and descriptors of a failed load may take a moment to go


# --- checkpoints


def copy_checkpoint(source: Path, out: Path, *, index: bool = True) -> Path:
    """A copy that a test may damage; without `index` the optional index.json is left out."""
    shutil.copytree(source, out)
    if not index:
        (out / "model.safetensors.index.json").unlink(missing_ok=True)
    return out


def shards(folder: Path) -> list[Path]:
    """The shards of a checkpoint, in order."""
    return sorted(folder.glob("model*.safetensors"))


def read_header(shard: Path) -> tuple[Header, bytes]:
    """The header of a shard, and its data."""
    raw = shard.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def edit_header(shard: Path, edit: Callable[[Header], None]) -> None:
    """Rewrite a shard with a changed header and the same data."""
    header, data = read_header(shard)
    edit(header)
    text = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(text)) + text + data)


def find_tensor(folder: Path, ending: str) -> tuple[Path, str]:
    """Shard and full name of the first tensor whose name ends so."""
    for shard in shards(folder):
        for name in sorted(read_header(shard)[0]):
            if name.endswith(ending):
                return shard, name
    raise LookupError(f"no tensor {ending} in {folder}")


def last_tensor(shard: Path) -> str:
    """The tensor at the end of a shard's data."""
    header, _ = read_header(shard)
    header.pop("__metadata__", None)
    return max(header, key=lambda name: header[name]["data_offsets"][1])


def edit_config(folder: Path, **changes: Any) -> None:
    """Replace keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by_rename(path: Path) -> None:
    """Another file under the same name, with the same bytes, as a new download would leave."""
    other = path.with_name(path.name + ".new")
    shutil.copyfile(path, other)
    os.replace(other, path)


def modify_in_place(path: Path) -> None:
    """Change the last byte; the size and the inode stay."""
    before = path.stat().st_mtime_ns
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 0xFF]))
    # Two writes within one tick of the kernel's clock would share a time stamp.
    os.utime(path, ns=(before + 10**6, before + 10**6))


def shorten(path: Path) -> None:
    """Cut a file to half its size, in place."""
    os.truncate(path, path.stat().st_size // 2)


# --- reads


class FailingReads:
    """A reader's fault hook: answers EIO while armed, after letting `skip` more reads pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._skip = -1
        self._times = 0
        self.calls = 0
        self.failed: list[tuple[int, int]] = []  # (file index, offset)

    def arm(self, *, skip: int = 0, times: int = 10**9) -> None:
        """Fail `times` reads after the next `skip`."""
        with self._lock:
            self._skip, self._times = skip, times

    def disarm(self) -> None:
        """Let every read pass."""
        with self._lock:
            self._times = 0

    def __call__(self, file: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self.calls += 1
            if self._times == 0:
                return
            if self._skip > 0:
                self._skip -= 1
                return
            self._times -= 1
            self.failed.append((file, offset))
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def install_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, int, int], None]) -> None:
    """Runtimes loaded from now on read through `fault`."""
    monkeypatch.setattr("mlx_stream.engine.Reader", partial(Reader, fault=fault))


# --- prompt caches


def cache_contents(cache: list[Any]) -> list[dict[str, Any]]:
    """A deep copy of everything a prompt cache holds, for comparison."""
    return [{k: _copied(v) for k, v in leaf.__dict__.items()} for leaf in cache_leaves(cache)]


def assert_same_contents(cache: list[Any], before: list[dict[str, Any]]) -> None:
    """The cache holds exactly what it held: same attributes, offsets, shapes and values."""
    now = cache_contents(cache)
    assert len(now) == len(before)
    for a, b in zip(now, before, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_equal(a[key], b[key], err_msg=key)


def _copied(value: Any) -> Any:
    if isinstance(value, mx.array):
        return np.array(value.astype(mx.float32), copy=True)
    if isinstance(value, list | tuple):
        return [_copied(v) for v in value]
    return value


# --- nothing left behind


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Turn a hang into a failure. Main thread only."""

    def expired(*_: object) -> None:
        raise AssertionError(f"still running after {seconds} s")

    previous = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def our_threads() -> list[str]:
    """Names of live reader and worker threads."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(OUR_THREADS))


def open_files(folder: Path | None = None) -> list[str]:
    """Files this process has open, those under `folder` only if given."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith(str(folder) if folder else "/") and not target.startswith("/dev/"):
            found.append(target)
    return sorted(found)


@dataclass
class Caught:
    """What a `fails` block raised, without the frames that would keep its arrays alive."""

    error: Any = None


@contextmanager
def fails(kind: type[BaseException], seconds: float = 60.0) -> Iterator[Caught]:
    """The block raises `kind` within `seconds`, and leaves no thread of ours and no file open."""
    caught = Caught()
    with nothing_left(seconds):
        try:
            yield caught
        except kind as error:
            link: BaseException | None = error
            while link is not None:
                traceback.clear_frames(link.__traceback__)
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
            caught.error = error
    if caught.error is None:
        pytest.fail(f"{kind.__name__} was not raised")


@contextmanager
def nothing_left(seconds: float = 60.0) -> Iterator[None]:
    """The block may take `seconds`, and leaves no thread of ours and no file open."""
    threads, files = our_threads(), open_files()
    with time_limit(seconds):
        yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        gc.collect()
        if our_threads() == threads and not set(open_files()) - set(files):
            return
        time.sleep(0.05)
    assert our_threads() == threads
    assert open_files() == files
