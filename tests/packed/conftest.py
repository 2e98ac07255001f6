"""Packed copies of the tiny checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packed.building import pack_checkpoint


@pytest.fixture
def packed(tmp_path) -> Callable[..., Path]:
    """``packed(folder, **options) -> folder``, a fresh one at every call."""
    made: list[Path] = []

    def make(source: Path, **options: Any) -> Path:
        made.append(tmp_path / f"packed-{len(made)}")
        pack_checkpoint(source, made[-1], **options)
        return made[-1]

    return make
