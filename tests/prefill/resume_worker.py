"""A process that prefills with checkpoints and is killed on the way; tests/prefill/test_resume.py.

``python -m tests.prefill.resume_worker JOB.json``: the job names model, prompt, folder, and when to
send itself SIGKILL: some milliseconds after a layer, or in the middle of the n-th write.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.prefill.schedule import PrefillProgress
from mlx_stream.resume.options import KeepOptions

STREAM = {"memory_budget": 1 << 30, "chunk_tokens": 16, "backend": "cpu", "union_tokens": 0}


def die() -> None:
    """As kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_write(number: int) -> None:
    """Die half way through the n-th write, or before the n-th rename or sync, counted together."""
    left = [number]

    def due() -> bool:
        left[0] -= 1
        return left[0] < 0

    def pwrite(fd: int, data: Any, at: int, _call: Any = os.pwrite) -> int:
        if due():
            _call(fd, data[: len(data) // 2], at)
            die()
        return _call(fd, data, at)

    def before(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if due():
                die()
            return call(*args)

        return wrapped

    os.pwrite = pwrite
    os.replace, os.fsync = before(os.replace), before(os.fsync)


def main(path: str) -> None:
    """Run the job; exits with 0 only if it was not killed."""
    job = json.loads(Path(path).read_text())
    engine = Engine(Path(job["model"]), StreamConfig(**STREAM, throttle=job.get("throttle")))
    engine.runner.keep = KeepOptions(Path(job["folder"]), job["every"], job["resume"])
    kv = PLAIN if job.get("kv_dir") is None else KvOptions(kv_evict="disk", kv_dir=job["kv_dir"])
    if "write" in job:
        die_in_write(job["write"])

    def progress(state: PrefillProgress) -> None:
        if state.layer == job.get("layer"):
            threading.Timer(job["delay"], die).start()

    engine.prefill(job["prompt"], kv=kv, progress=progress)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
