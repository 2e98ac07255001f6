"""What the command line shows: a progress bar on stderr, errors without tracebacks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from mlx_stream.config import ConfigError
from mlx_stream.errors import MlxStreamError
from mlx_stream.prefill.schedule import PrefillProgress

NO_MLX = (
    "mlx is not installed\n"
    "  what to do: pip install 'mlx-stream[cpu]', or 'mlx-stream[cuda13]' for an NVIDIA GPU"
)
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class PrefillBar:
    """A progress bar fed by prefill: layers done, GB/s read, time left. Silent off a terminal."""

    def __init__(self, *, enabled: bool = True) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("prefill"),
            BarColumn(),
            TextColumn("layer {task.completed:.0f}/{task.total:.0f}  {task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task("prefill", total=1, rate="")

    def __enter__(self) -> PrefillBar:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def update(self, at: PrefillProgress) -> None:
        """Show where a prefill stands; stops the bar after the last layer."""
        total = at.layers * at.segments
        done = at.segment * at.layers + at.layer
        rate = at.bytes_read / 1e9 / max(at.seconds, 1e-9)
        self._bar.update(self._task, completed=done, total=total, rate=f"{rate:.2f} GB/s")
        if done >= total:
            self._bar.stop()


@contextmanager
def friendly_errors() -> Iterator[None]:
    """Turn errors into one message on stderr and an exit code; a bug keeps its traceback."""
    try:
        yield
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        _exit(EXIT_INTERRUPTED)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()} (--help shows the options)", err=True)
        _exit(EXIT_USAGE)
    except ConfigError as error:
        click.echo(f"error: {error}", err=True)
        _exit(EXIT_USAGE)
    except MlxStreamError as error:
        click.echo(f"error: {error}", err=True)
        _exit(EXIT_ERROR)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "mlx":
            raise
        click.echo(f"error: {NO_MLX}", err=True)
        _exit(EXIT_ERROR)
    except BrokenPipeError:
        # The reader of our output went away; stdout must not be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(EXIT_ERROR)


def _exit(code: int) -> None:
    raise SystemExit(code)


def run_command(command: click.Command, prog_name: str) -> None:
    """Run a click command with our error handling."""
    with friendly_errors():
        run: Callable[..., object] = command.main
        run(prog_name=prog_name, standalone_mode=False)
