"""The training tools where the extra ``train`` is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
HIDDEN = """
import runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("tool", ["train_prerouter.py", "train_recovery_lora.py"])
def test_one_line_says_what_to_install(tool: str) -> None:
    command = [sys.executable, "-c", HIDDEN, str(TOOLS / tool), "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    line = "these tools need the extra 'train': pip install -e '.[train]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", line)
