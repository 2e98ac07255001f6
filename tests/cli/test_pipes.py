"""Output through pipes: streamed, and quietly stopped when nobody reads to the end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.cli.runner import GENERATE, TIMEOUT, environment


def _start(model: Path, tokens: int, **pipes: int) -> subprocess.Popen[bytes]:
    """A model without a tokenizer has no end token: it goes on for as long as it is asked to."""
    options = ("--model", str(model), "--prompt", "1 2 3", "--max-tokens", str(tokens))
    return subprocess.Popen(
        [*GENERATE, *options], env=environment(), stdout=subprocess.PIPE, **pipes
    )


def test_reader_goes_away_early(bare):
    """As `... | head -c 5` does, with an endless answer."""
    process = _start(bare, -1, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(5)) == 5
        process.stdout.close()
        started = time.monotonic()
        errors = process.stderr.read().decode()
        process.wait(TIMEOUT)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert time.monotonic() - started < 20, "it must stop at its next token"
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors


def test_text_comes_as_it_is_made(bare):
    """Not in one piece at the end: the first tokens are there long before the last."""
    with _start(bare, 400, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.read(3)
        first = time.monotonic()
        words = process.stdout.read().split()
        assert time.monotonic() - first > 0.2
    assert len(words) >= 398
