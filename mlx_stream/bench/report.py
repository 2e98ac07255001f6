"""Results for people and for programs: a table, one JSON line, a CSV."""

from __future__ import annotations

import csv
import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil
from rich.table import Table

from mlx_stream import __version__
from mlx_stream.bench.arms import CHUNK_MAJOR, LAYER_MAJOR
from mlx_stream.bench.results import Result
from mlx_stream.config import format_bytes


def machine() -> str:
    """This machine in a few words."""
    memory = format_bytes(psutil.virtual_memory().total)
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory}, {platform.system()}"


def table(results: Sequence[Result]) -> Table:
    """One row an arm."""
    shown = Table(title="median of all rounds (fastest - slowest)", title_justify="left")
    for name, justify in (
        ("order", "left"),
        ("tokens", "right"),
        ("chunk", "right"),
        ("budget, reads", "left"),
        ("seconds", "right"),
        ("tok/s", "right"),
        ("forecast", "right"),
        ("read", "right"),
        ("passes", "right"),
        ("peak", "right"),
    ):
        shown.add_column(name, justify=justify)  # type: ignore[arg-type]
    for result in results:
        shown.add_row(*_row(result))
    return shown


def _row(result: Result) -> list[str]:
    arm, run, (low, high) = result.arm, result.first, result.spread
    forecast = "" if run.forecast_seconds is None else f"{run.forecast_seconds:.2f} s"
    tokens = f"{arm.tokens}+{arm.new_tokens}" if arm.new_tokens else str(arm.tokens)
    reads = f"{format_bytes(arm.setting.budget)}, {run.io_mode}"
    hit = f", {run.hit_rate:.0%} hits" if run.hit_rate is not None else ""
    return [
        arm.order + hit,
        tokens,
        str(arm.chunk),
        reads,
        f"{result.median:.2f} ({low:.2f}-{high:.2f})",
        f"{result.tokens_per_second:.0f}"
        if result.tokens_per_second >= 10
        else f"{result.tokens_per_second:.2f}",
        forecast,
        format_bytes(run.bytes_read),
        f"{result.passes:.2f}",
        format_bytes(max(r.peak_bytes for r in result.runs)),
    ]


def findings(results: Sequence[Result]) -> list[str]:
    """What the figures say, in sentences."""
    said = []
    ours = {(r.arm.tokens, r.arm.setting): r for r in results if r.arm.order == LAYER_MAJOR}
    for other in results:
        mine = ours.get((other.arm.tokens, other.arm.setting))
        if mine is None or other.arm.order == LAYER_MAJOR:
            continue
        ratio = other.median / max(mine.median, 1e-9)
        if other.arm.order == CHUNK_MAJOR:
            said.append(
                f"{other.arm.tokens} tokens: chunk by chunk of {other.arm.chunk} reads the experts "
                f"{other.passes:.1f} times and takes {ratio:.2f}x as long as layer by layer "
                f"({mine.passes:.1f} times)"
            )
        elif other.arm.order == "stock mlx-lm":
            said.append(
                f"{other.arm.tokens} tokens: stock mlx-lm, all in memory, takes {ratio:.1f}x as "
                "long"
            )
    return said


def as_json(results: Sequence[Result], model: str) -> str:
    """One line."""
    return json.dumps(
        {
            "model": model,
            "machine": machine(),
            "version": __version__,
            "date": datetime.date.today().isoformat(),
            "results": [r.as_dict() for r in results],
        }
    )


def append_csv(path: Path, results: Sequence[Result], model: str) -> None:
    """Add the results to a CSV, with a header when it is new.

    Raises:
        OSError: it cannot be written.
    """
    rows = [
        {
            "date": datetime.date.today().isoformat(),
            "version": __version__,
            "machine": machine(),
            "model": model,
            **r.as_dict(),
        }
        for r in results
    ]
    new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        if new:
            writer.writeheader()
        writer.writerows(rows)
