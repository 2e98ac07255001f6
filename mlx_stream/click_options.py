"""Groups of click options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Command = Callable[..., Any]
Option = Callable[[Command], Command]


def add_options(options: Sequence[Option]) -> Option:
    """A decorator that adds the options; ``--help`` shows them in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
