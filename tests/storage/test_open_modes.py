"""Cache-bypassing modes: what the system grants is found out and reported."""

from __future__ import annotations

import errno
import os
import sys
import types

import numpy as np
import pytest

from mlx_stream.storage import open_modes
from mlx_stream.storage.open_modes import find_alignment, open_file
from mlx_stream.storage.reader import Reader

from .builders import aligned_buffer, plain_checkpoint
from .test_reader import block_op

REFUSED = "buffered (refused O_DIRECT: EINVAL)"
linux = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="needs O_DIRECT")


@pytest.fixture
def checkpoint(tmp_path):
    return plain_checkpoint(tmp_path / "m", [20_000, 20_000])


def refuse_open(monkeypatch, only: str = "") -> None:
    real = os.open

    def fake(path, flags, *args):
        if flags & os.O_DIRECT and only in str(path):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", fake)


def demand_alignment(monkeypatch, align: int | None) -> None:
    """preadv as a device with this alignment behaves; None refuses everything."""
    real = os.preadv

    def fake(fd, buffers, offset):
        if align is None or offset % align or any(len(b) % align for b in buffers):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fake)


def read_all(checkpoint, r) -> bytes:
    buffer = aligned_buffer(5 * 4096)
    r.submit([block_op(0, blocks=5, file=1)], buffer).wait(10)
    return buffer[:20_000].tobytes()


@linux
@pytest.mark.parametrize(("align", "found"), [(1, 512), (512, 512), (4096, 4096), (8192, None)])
def test_alignment_is_found_by_trial(checkpoint, monkeypatch, align, found):
    demand_alignment(monkeypatch, align)
    fd = os.open(checkpoint.files[0].path, os.O_RDONLY)
    assert find_alignment(fd) == found
    os.close(fd)


def test_alignment_of_memory_counts_too(checkpoint, monkeypatch):
    real = os.preadv

    def fake(fd, buffers, offset):
        if any(np.frombuffer(b, np.uint8).ctypes.data % 4096 for b in buffers):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", fake)
    fd = os.open(checkpoint.files[0].path, os.O_RDONLY)
    assert find_alignment(fd) == 4096
    os.close(fd)


def test_short_files_get_the_safe_alignment(tmp_path):
    for size in (0, 1, 511, 1023):
        (tmp_path / "f").write_bytes(b"x" * size)
        fd = os.open(tmp_path / "f", os.O_RDONLY)
        assert find_alignment(fd) == 4096
        os.close(fd)


def test_other_errors_of_a_trial_are_not_hidden(checkpoint, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output"):
        open_file(checkpoint.files[0].path, "direct")
    assert len(os.listdir("/dev/fd")) == before


@linux
@pytest.mark.parametrize("only", ["", "model-1"])
def test_file_system_without_o_direct(checkpoint, monkeypatch, only):
    refuse_open(monkeypatch, only)
    before = len(os.listdir("/dev/fd"))
    with Reader(checkpoint) as r:
        assert (r.io_mode, r.align) == (REFUSED, 1)
        assert read_all(checkpoint, r) == checkpoint.files[1].path.read_bytes()
    assert len(os.listdir("/dev/fd")) == before


@linux
def test_o_direct_that_opens_but_does_not_read(checkpoint, monkeypatch):
    demand_alignment(monkeypatch, None)
    with Reader(checkpoint) as r:
        monkeypatch.undo()
        assert (r.io_mode, r.align) == (REFUSED, 1)
        assert read_all(checkpoint, r) == checkpoint.files[1].path.read_bytes()


@linux
def test_the_coarsest_file_decides(checkpoint, monkeypatch):
    real = open_modes.find_alignment
    found = iter([512, 4096])
    monkeypatch.setattr(open_modes, "find_alignment", lambda fd: real(fd) and next(found))
    with Reader(checkpoint) as r:
        assert r.align == 4096


def test_buffered_on_request(checkpoint):
    with Reader(checkpoint, io="buffered") as r:
        assert (r.io_mode, r.align) == ("buffered", 1)


@pytest.mark.parametrize("refused", [False, True])
def test_macos(checkpoint, monkeypatch, refused):
    """The branch that Linux cannot run: the right two commands, and their refusal reported."""
    calls = []

    def fcntl(fd, command, value):
        if refused:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl")
        calls.append((command, value))

    monkeypatch.setattr(open_modes.sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "fcntl", types.SimpleNamespace(fcntl=fcntl))
    with Reader(checkpoint) as r:
        monkeypatch.undo()
        mode = "buffered (refused F_NOCACHE: ENOTTY)" if refused else "F_NOCACHE"
        assert (r.io_mode, r.align) == (mode, 1)
        assert read_all(checkpoint, r) == checkpoint.files[1].path.read_bytes()
    assert calls == ([] if refused else [(48, 1), (45, 0)] * 2)
