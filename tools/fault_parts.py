"""What every part of the fault suite shares: the count of rounds and how they end.

A round is one fault and what followed. It ends in exactly one way: survived (the result is that of
an undisturbed run, perhaps after running again), refused (a typed error that says what to do, and
nothing is touched), lost, wrong, or a traceback.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mlx_stream.config import ConfigError
from mlx_stream.errors import MlxStreamError

TYPED = (MlxStreamError, ConfigError)
MOST_NOTES = 8


class LostError(AssertionError):
    """Something that was finished, or the user's own, is gone."""


class WrongError(AssertionError):
    """A result that is not that of an undisturbed run, or damage that nobody noticed."""


@dataclass
class Tally:
    """The rounds of one kind of fault.

    Attributes:
        injected: faults that really happened.
        survived, refused, lost, wrong, tracebacks: how the rounds ended; they add up to `rounds`.
        typed: typed errors on the way, those of rounds that then recovered too.
        skipped: why nothing was done.
    """

    kind: str
    rounds: int = 0
    injected: int = 0
    survived: int = 0
    refused: int = 0
    lost: int = 0
    wrong: int = 0
    tracebacks: int = 0
    typed: int = 0
    seconds: float = 0.0
    skipped: str = ""
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def round(self, what: object = "") -> Iterator[Round]:
        """One round: it survived unless the block raises or calls `refused`."""
        self.rounds += 1
        current = Round(self)
        try:
            yield current
        except LostError as error:
            self.lost += 1
            self._note(f"LOST {what}: {error}")
        except WrongError as error:
            self.wrong += 1
            self._note(f"WRONG {what}: {error}")
        except Exception:
            self.tracebacks += 1
            self._note(f"TRACEBACK {what}: {traceback.format_exc()[-1500:]}")
        else:
            self.refused += current.was_refused
            self.survived += not current.was_refused

    def _note(self, text: str) -> None:
        if len(self.notes) < MOST_NOTES:
            self.notes.append(text)

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing wrong, no traceback."""
        return not (self.lost or self.wrong or self.tracebacks)


class Round:
    """How one round goes."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self.was_refused = False
        self.read_only = False  # what cannot be removed may lie there until the next run

    def inject(self, count: int = 1) -> None:
        """That many faults happened."""
        self._tally.injected += count

    def error(self, error: Exception | None) -> None:
        """A typed error on the way; it must say what to do."""
        if error is not None:
            self._tally.typed += 1
            if not getattr(error, "remedy", None) and isinstance(error, MlxStreamError):
                raise WrongError(f"an error without advice: {error}")

    def refused(self, error: Exception) -> None:
        """A typed error is how it ends."""
        self.error(error)
        self.was_refused = True


def caught(call: Callable[[], Any]) -> Exception | None:
    """The typed error of a call, or None; everything else passes."""
    try:
        call()
    except TYPED as error:
        return error
    return None


@contextmanager
def timed(tally: Tally) -> Iterator[None]:
    """Adds the block's time to the tally."""
    started = time.monotonic()
    try:
        yield
    finally:
        tally.seconds += time.monotonic() - started
