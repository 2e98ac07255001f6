"""What the user may ask of checkpoints of a running prefill. Pure: no mlx here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlx_stream.config import ConfigError


@dataclass(frozen=True)
class KeepOptions:
    """Checkpoints of prompts while they are prefilled.

    Attributes:
        folder: of one prompt at a time; made when missing.
        every: expert layers between checkpoints.
        resume: go on from the checkpoint in the folder; from the beginning if there is none.
    """

    folder: Path
    every: int = 4
    resume: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.every, int) and self.every >= 1):
            raise ConfigError(
                "bad value for checkpoint_every",
                expected="1 or more expert layers",
                actual=repr(self.every),
                remedy="set it to a value in the expected range",
            )
