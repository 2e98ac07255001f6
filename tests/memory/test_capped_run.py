"""tools/capped_run.py: limits that hold, a report that adds up, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.checkpoints import cached_checkpoint
from tests.support.watch import ROOT, cgroups_missing
from tools.capped_run import MOUNT, PREFIX, CapError, disk_of

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(cgroups_missing() is not None, reason=str(cgroups_missing())),
]

SCRIPT = str(ROOT / "tools" / "capped_run.py")
READ = "import os, sys; f = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)\n"
READ += "import mmap; b = mmap.mmap(-1, 1 << 20)\nwhile os.readv(f, [b]): pass"


def _start(*args: object, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, "--keep-cache", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def _report(*args: object, code: int = 0) -> dict:
    process = _start(*args)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert _groups(process.pid) == []
    return json.loads(out)


def _groups(pid: int) -> list[Path]:
    """Control groups that the script of this pid has made."""
    return [*MOUNT.glob(f"{PREFIX}{pid}"), *MOUNT.glob(f"*/{PREFIX}{pid}")]


def _disk_of(path: Path) -> str:
    try:
        return disk_of(path)
    except CapError as error:
        pytest.skip(str(error))


def test_our_runtime(tmp_path_factory):
    """The report's parts agree with each other."""
    model = cached_checkpoint(tmp_path_factory, "qwen3_moe")
    _disk_of(model)
    caps = ("--memory", "700MB", "--allowance", "250MB")
    report = _report("--model", model, "--tokens", 64, "--decode", 3, *caps)
    child, group = report["child"], report["group"]
    assert report["exit_code"] == 0
    assert report["limits"]["memory"] == 700_000_000
    assert child["receipt"]["prompt_tokens"] == 64
    assert child["receipt"]["budget_bytes"] == 450_000_000
    assert child["bound"] == child["receipt"]["bound"]
    assert len(child["answer"]) == 3
    assert 0 < child["prefill_seconds"] <= child["ttft_seconds"] < report["wall_seconds"]
    assert child["prefill_read_bytes"] >= child["receipt"]["bytes_read"] * 0.9
    assert 50_000_000 < group["max_usage_bytes"] <= 700_000_000
    assert group["oom_kills"] == 0


def test_disk_is_slowed_down(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(20 << 20))
    _disk_of(path)
    command = ("--", sys.executable, "-c", READ, path)
    report = _report("--model", path, "--memory", 0, "--read-rate", "10MB", *command)
    assert report["wall_seconds"] > 1.5
    assert report["group"]["read_bytes"] >= 20 << 20


def test_memory_is_limited():
    code = "x = bytearray(200 << 20)"
    command = ("--", sys.executable, "-c", code)
    report = _report("--memory", "60MB", "--read-rate", 0, *command, code=1)
    assert report["exit_code"] == -9
    assert report["group"]["oom_kills"] == 1
    assert report["child"] is None


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_it_removes_everything(stop):
    """The command's own children too, which no one waits for."""
    marker = str(3600 + os.getpid() / 1e6)
    sleep = f"sleep {marker} & sleep {marker}"
    process = _start("--memory", "500MB", "--read-rate", 0, "--", "sh", "-c", sleep)
    try:
        deadline = time.monotonic() + 30
        while len(_sleepers(marker)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _groups(process.pid)
        process.send_signal(stop)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert "Traceback" not in err
    assert _groups(process.pid) == []
    assert _sleepers(marker) == []


def _sleepers(marker: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", marker.encode()]:
                found.append(int(folder.name))
    return found


def test_usage_errors():
    process = _start()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--model" in err
