"""The command line inside this process: quick, with the same parsing and exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from mlx_stream.cli import cli
from mlx_stream.generate import generate
from mlx_stream.terminal import run_command
from tests.support.checkpoints import cached_checkpoint

Result = subprocess.CompletedProcess[str]


@pytest.fixture
def invoke(capsys, monkeypatch) -> Callable[..., Result]:
    """A function that runs a command, by default `python -m mlx_stream.generate`, here."""

    def run(*args: object, command: click.Command = generate) -> Result:
        monkeypatch.setattr(sys, "argv", ["mlx_stream", *map(str, args)])
        capsys.readouterr()
        try:
            run_command(command, "mlx_stream")
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, code, out, err)

    return run


@pytest.fixture
def invoke_cli(invoke) -> Callable[..., Result]:
    """A function that runs `mlx_stream ARGS` here."""
    return lambda *args: invoke(*args, command=cli)


@pytest.fixture(scope="session")
def bare(tmp_path_factory) -> Path:
    """A tiny checkpoint without a tokenizer."""
    return cached_checkpoint(tmp_path_factory, "qwen3_moe")
