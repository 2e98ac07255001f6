"""Help texts: reachable, with examples, and no warnings from `python -m`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mlx_stream
from tests.cli.runner import COMMAND, GENERATE, environment, run


@pytest.mark.parametrize(
    ("command", "args", "words"),
    [
        (GENERATE, ["--help"], ["Usage: python -m mlx_stream.generate", "--memory-budget"]),
        (COMMAND, ["--help"], ["generate", "plan", "info"]),
        (COMMAND, ["plan", "--help"], ["--prompt-tokens"]),
        (COMMAND, ["info", "-h"], ["expert layers"]),
    ],
)
def test_help_shows_examples(command, args, words):
    result = run(*args, command=command)
    assert result.returncode == 0
    assert result.stderr == ""  # runpy warns here when a package imports its own submodule early
    for word in [*words, "Examples:\n"]:
        assert word in result.stdout


def test_help_needs_no_model_libraries():
    """Help must come at once: nothing heavy may be imported for it."""
    code = (
        "import sys, mlx_stream.cli\n"
        "heavy = {'mlx.core', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_installed_command_and_version():
    result = run("--version", command=COMMAND)
    assert result.stdout.strip().endswith(mlx_stream.__version__)
    entry = "from importlib.metadata import entry_points as e;"
    entry += "print(e(group='console_scripts', name='mlx_stream')['mlx_stream'].value)"
    found = run("-c", entry, command=(sys.executable,))
    assert found.stdout.strip() == "mlx_stream.cli:main"
