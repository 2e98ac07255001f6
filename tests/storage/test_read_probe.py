"""The probe of reads: it reports what a disk of known speed does, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

from mlx_stream.errors import MlxStreamError, ReadError
from mlx_stream.storage import read_probe
from mlx_stream.storage.read_probe import KIB, LEAST_NBYTES, MIB, probe_reads, scratch_file


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Large enough; its bytes do not matter."""
    path = tmp_path_factory.mktemp("probe") / "file"
    with path.open("wb") as out:
        out.truncate(LEAST_NBYTES + 12345)
    return path


@pytest.mark.parametrize(("size", "depth"), [(256 * KIB, 1), (MIB, 4)])
@pytest.mark.parametrize("order", ["sequential", "random"])
def test_a_throttled_arm_reports_the_throttle(file, order, size, depth):
    """30 MB/s: far below any disk, so that nothing else decides."""
    (rate,) = probe_reads(
        file, sizes=(size,), depths=(depth,), orders=(order,), seconds=0.8, throttle="30MB/s"
    )
    # Never faster; a busy machine may be slower.
    assert 30e6 * 0.3 < rate.bytes_per_second < 30e6 * 1.15
    assert rate.iops == pytest.approx(rate.bytes_per_second / size)
    assert "throttled to 30.00 MB/s" in rate.io_mode
    assert 0 < rate.p50_seconds <= rate.p99_seconds


def test_latency_is_seen_by_single_requests(file):
    (rate,) = probe_reads(
        file, sizes=(16 * KIB,), depths=(1,), orders=("random",), seconds=0.2, throttle="1GB/s:20ms"
    )
    assert rate.p50_seconds >= 0.02
    assert rate.iops <= 50


def test_every_combination_is_measured_once_and_told(file):
    told = []
    rates = probe_reads(
        file,
        sizes=(16 * KIB, MIB),
        depths=(1, 3),
        seconds=0.001,
        progress=lambda *at: told.append(at),
    )
    arms = [(r.order, r.nbytes, r.depth) for r in rates]
    assert len(set(arms)) == len(arms) == 8
    assert told == [(n, 8) for n in range(1, 9)]


def test_requests_larger_than_the_file_are_left_out(file):
    assert probe_reads(file, sizes=(1 << 40,), seconds=0.001) == []


def test_threads_and_files_are_given_back(file):
    gc.collect()  # files that other tests held
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    probe_reads(file, sizes=(MIB,), depths=(2,), seconds=0.001)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_buffered_reads_say_so(file):
    (rate, *_) = probe_reads(file, io="buffered", sizes=(MIB,), depths=(1,), seconds=0.001)
    assert rate.io_mode == "buffered"


def test_a_small_file_is_refused(tmp_path):
    (tmp_path / "small").write_bytes(bytes(MIB))
    with pytest.raises(ReadError, match="too small"):
        probe_reads(tmp_path / "small")


# --- the scratch file


def test_the_scratch_file_is_there_and_then_is_not(tmp_path):
    nbytes = 3 * MIB + 5
    with scratch_file(tmp_path, nbytes) as path:
        assert path.parent == tmp_path
        assert path.stat().st_size == nbytes
        data = path.read_bytes()
        assert len(set(data[:4096])) > 200, "random, or a disk may compress it"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ReadError("x"), OSError("disk")])
def test_it_goes_whatever_happens(tmp_path, error):
    with pytest.raises((KeyboardInterrupt, MlxStreamError)), scratch_file(tmp_path, MIB):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_it_is_written(tmp_path, monkeypatch):
    def interrupt(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt), scratch_file(tmp_path, MIB):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(read_probe.shutil, "disk_usage", lambda folder: SimpleNamespace(free=MIB))
    with pytest.raises(MlxStreamError, match="read-only"), scratch_file(tmp_path, MIB):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(MlxStreamError, match="scratch file"), scratch_file(tmp_path / "no", MIB):
        pass
