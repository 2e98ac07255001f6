"""All three phases, killed with SIGKILL and resumed: the loss curve is the undisturbed one."""

# ruff: noqa: E402 -- what needs torch is imported after asking for it
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="training needs the extra 'train'")

from mlx_stream.hub import demo_path

ROOT = Path(__file__).resolve().parents[2]
TINY = "--steps 8 --rows 2 --window 24 --eval-every 4 --save-every 2 --validation-tokens 256"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A small prepared text with the demo model's tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(demo_path() / "tokenizer.json", folder)
    rng = np.random.default_rng(0)
    for name, count in (("train", 4000), ("heldout", 600), ("excerpt", 300)):
        rng.integers(0, 4096, count).astype(np.uint16).tofile(folder / f"{name}.bin")
    return folder


def command(script, data, out, *more):
    options = ["--checkpoint", demo_path(), "--data", data, "--out", out, *TINY.split(), *more]
    return [sys.executable, str(ROOT / "tools" / script), *map(str, options)]


def run(*args):
    done = subprocess.run(command(*args), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(row) for row in (args[2] / "curve.jsonl").read_text().splitlines()]


def killed(*args):
    """Start, and kill once the first checkpoint is there."""
    process = subprocess.Popen(
        command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    deadline = time.monotonic() + 120
    while not (args[2] / "curve.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (args[2] / "report.json").exists(), "it was through before it was killed"
    return len((args[2] / "curve.jsonl").read_text().splitlines())


def test_every_phase_goes_on_where_it_was_killed(data, tmp_path):
    lora = "train_recovery_lora.py"
    phases = {
        "one": ("train_prerouter.py", ()),
        "two": (lora, ("--phase", 2, "--from", tmp_path / "one", "--train-heads")),
        "three": (lora, ("--phase", 3, "--from", tmp_path / "two", "--prompt", 8, "--reuse", 2)),
    }
    for name, (script, more) in phases.items():
        whole = run(script, data, tmp_path / name, *more)
        rows = killed(script, data, tmp_path / f"{name}_killed", *more)
        resumed = run(script, data, tmp_path / f"{name}_killed", *more, "--resume")
        assert resumed == whole
        assert rows < len(whole)  # it really was killed on the way
        files = [f.name for f in (tmp_path / name).glob("*.safetensors")]
        assert files
        for file in files:
            other = tmp_path / f"{name}_killed" / file
            assert other.read_bytes() == (tmp_path / name / file).read_bytes()


def test_a_checkpoint_of_other_settings_is_refused(data, tmp_path):
    run("train_prerouter.py", data, tmp_path / "one")
    more = ("--resume", "--seed", 2)
    done = subprocess.run(
        command("train_prerouter.py", data, tmp_path / "one", *more), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "other settings" in done.stderr
