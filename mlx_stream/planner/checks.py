"""Argument checks of the planner's formulas: one typed error that names the value."""

from __future__ import annotations

import math

from mlx_stream.config import ConfigError


def positive(**values: float) -> None:
    """Refuse values that are not finite and above zero.

    Raises:
        ConfigError: names the first such value.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise _bad(name, "a finite number above 0", value)


def not_negative(**values: float) -> None:
    """Refuse values that are not finite or below zero.

    Raises:
        ConfigError: names the first such value.
    """
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise _bad(name, "a finite number, 0 or more", value)


def between(low: float, high: float, **values: float) -> None:
    """Refuse values outside ``[low, high]``.

    Raises:
        ConfigError: names the first such value.
    """
    for name, value in values.items():
        if not low <= value <= high:
            raise _bad(name, f"a number from {low:g} to {high:g}", value)


def _bad(name: str, expected: str, value: float) -> ConfigError:
    return ConfigError(
        f"{name} cannot be used in the cost model",
        expected=expected,
        actual=repr(value),
        remedy=f"pass another {name}",
    )
