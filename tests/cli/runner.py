"""The command line as a subprocess, the way a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

GENERATE = (sys.executable, "-m", "mlx_stream.generate")
COMMAND = (sys.executable, "-m", "mlx_stream")
TIMEOUT = 120  # seconds; a busy machine needs ten for the imports alone


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, and a plain, wide terminal."""
    return os.environ | {"NO_COLOR": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"} | changes


def run(
    *args: str | Path,
    command: tuple[str, ...] = GENERATE,
    stdin: str = "",
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run to the end; never raises for an exit code."""
    return subprocess.run(
        [*command, *map(str, args)],
        input=stdin,
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def assert_failed(result: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    """The command said what is wrong, without a traceback and without output."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
