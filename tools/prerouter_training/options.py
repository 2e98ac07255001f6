"""The options that all phases share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from mlx_stream.click_options import add_options
from mlx_stream.errors import MlxStreamError
from tools.prerouter_training.schedule import Schedule

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@dataclass(frozen=True)
class PhaseFlags:
    """Their values; those of :meth:`settings` decide the loss curve.

    Attributes:
        checkpoint: the deployed folder.
        data: what ``tools/train_demo_model.py prepare`` wrote.
        window, rows: tokens of a window, windows of a batch.
        validation_tokens: of the held-out text that early stopping looks at.
    """

    checkpoint: Path
    data: Path
    out: Path
    name: str
    steps: int
    learning_rate: float
    window: int
    rows: int
    seed: int
    eval_every: int
    save_every: int
    patience: int
    validation_tokens: int
    threads: int
    resume: bool

    @classmethod
    def of(cls, values: dict[str, Any]) -> PhaseFlags:
        """From click's values; also sets torch's threads."""
        import torch

        flags = cls(**{f.name: values[f.name] for f in fields(cls)})
        torch.set_num_threads(flags.threads)
        return flags

    def schedule(self) -> Schedule:
        """The run's schedule."""
        return Schedule(
            self.steps,
            self.learning_rate,
            warmup=min(20, self.steps),
            eval_every=self.eval_every,
            save_every=self.save_every,
            patience=self.patience,
        )

    def settings(self) -> dict[str, Any]:
        """What the loss curve depends on, besides the schedule and the phase's own options."""
        return {"window": self.window, "rows": self.rows, "seed": self.seed}


def phase_options(*, steps: int, learning_rate: float) -> Callable[[Any], Any]:
    """A decorator with the shared options; the arguments are defaults."""

    def number(name: str, default: int, text: str) -> Any:
        return click.option(
            name, type=click.IntRange(1), default=default, show_default=True, help=text
        )

    return add_options(
        (
            click.option("--checkpoint", type=_FOLDER, required=True, help="The deployed folder."),
            click.option("--data", type=_FOLDER, required=True, help="Prepared text."),
            click.option("--out", type=click.Path(path_type=Path), required=True),
            click.option("--name", default="prerouter", show_default=True, help="In the spec."),
            number("--steps", steps, "Optimizer steps at most."),
            click.option("--learning-rate", type=float, default=learning_rate, show_default=True),
            number("--window", 256, "Tokens of a window."),
            number("--rows", 8, "Windows of a batch."),
            click.option("--seed", type=int, default=1, show_default=True),
            number("--eval-every", 60, "Steps between held-out scores."),
            number("--save-every", 20, "Steps between checkpoints."),
            number("--patience", 4, "Scores without a better one before stopping."),
            number("--validation-tokens", 16384, "Held-out tokens of a score."),
            number("--threads", 1, "Of torch."),
            click.option("--resume", is_flag=True, help="Go on from OUT's checkpoint."),
        )
    )


def layer_list(text: str, least: int, most: int) -> tuple[int, ...]:
    """``"1-3,5" -> (1, 2, 3, 5)``.

    Raises:
        MlxStreamError: not of this form, or a layer outside `least`..`most`.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.strip().isdigit() and last.strip().isdigit()):
            found = set()
            break
        found.update(range(int(first), int(last) + 1))
    if not found or min(found) < least or max(found) > most:
        raise MlxStreamError(
            "bad list of layers", expected=f"such as 2-4,6, from {least} to {most}", actual=text
        )
    return tuple(sorted(found))


def plain_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Errors of ours end the program with their text instead of a traceback."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except MlxStreamError as error:
            raise click.ClickException(str(error)) from error

    return run
