"""An outside watcher of a child's memory: what the kernel says, not what the child believes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import capped_run
from tools.capped_run import Limits, Usage, capped_group

__all__ = ["Report", "Watch", "cgroups_missing", "prompts_command", "run_watched"]

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.05
TIMEOUT = 300.0


@dataclass(frozen=True)
class Report:
    """What a watched child did.

    Attributes:
        peak_rss: bytes; the kernel's own high-water mark, which misses nothing between samples.
        peak_anonymous: bytes of memory that no file backs, the highest sample.
        usage: the control group's counts, when the child ran inside one.
    """

    exit_code: int
    out: str
    err: str
    peak_rss: int
    peak_anonymous: int
    usage: Usage | None

    @property
    def result(self) -> dict[str, Any]:
        """The child's last line as JSON."""
        return json.loads(self.out.splitlines()[-1])


class Watch(threading.Thread):
    """Samples a process until it ends or `stop`."""

    def __init__(self, pid: int) -> None:
        super().__init__(name=f"watch-{pid}", daemon=True)
        self._folder = Path("/proc", str(pid))
        self._ended = threading.Event()
        self.peak_rss = 0
        self.peak_anonymous = 0
        self.samples = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            status = _fields(self._folder / "status")
            if not status.get("VmRSS"):
                return  # gone, or a zombie
            rollup = _fields(self._folder / "smaps_rollup")
            self.peak_rss = max(self.peak_rss, status["VmHWM"], status["VmRSS"])
            self.peak_anonymous = max(self.peak_anonymous, rollup.get("Anonymous", 0))
            self.samples += 1

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()


def _fields(path: Path) -> dict[str, int]:
    """Bytes of every "Name: N kB" line; empty when the process is gone."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


def run_watched(command: Sequence[str], *, limit: int | None = None) -> Report:
    """Run a command to its end and watch it; under a hard memory limit when one is given.

    A limit needs control groups (see `cgroups_missing`); the page cache counts towards it.
    """
    if limit is None:
        return _run(command, None)
    with capped_group(Limits(memory=limit)) as group:
        return _run(command, group)


def _run(command: Sequence[str], group: capped_run.CappedGroup | None) -> Report:
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=None if group is None else group.join,
    ) as child:
        watch = Watch(child.pid)
        watch.start()
        try:
            out, err = child.communicate(timeout=TIMEOUT)
        finally:
            child.kill()
            watch.stop()
    usage = None if group is None else group.usage()
    return Report(child.returncode, out, err, watch.peak_rss, watch.peak_anonymous, usage)


def cgroups_missing() -> str | None:
    """Why a memory limit cannot be set here; None when it can."""
    return capped_run.why_not()


def prompts_command(
    model: Path, *, tokens: int, decode: int, budget: int, prompts: int = 1
) -> list[str]:
    """A child that prefills and decodes with our runtime, and prints the receipt as JSON."""
    script = str(Path(capped_run.__file__).resolve())
    options: dict[str, object] = {"model": model, "tokens": tokens, "decode": decode}
    options |= {"budget": budget, "prompts": prompts}
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, script, "--worker", *flags]
