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
from rich.box import SIMPLE
from rich.table import Table

from mlx_stream import __version__
from mlx_stream.bench.arms import CHUNK_MAJOR, COMPUTE_ONLY, LAYER_MAJOR, READ_ONLY
from mlx_stream.bench.results import Result
from mlx_stream.config import format_bytes


def machine() -> str:
    """This machine in a few words."""
    memory = format_bytes(psutil.virtual_memory().total)
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory}, {platform.system()}"


def table(results: Sequence[Result]) -> Table:
    """One row an arm; the setting is in the title when all arms share it."""
    settings = dict.fromkeys(r.arm.setting for r in results)
    one = f"; budget, reads: {next(iter(settings))}" if len(settings) == 1 else ""
    shown = Table(title=f"seconds: median of all rounds{one}", title_justify="left", box=SIMPLE)
    columns = ["order", "tokens", "seconds", "spread", "tok/s", "forecast", "read", "passes"]
    for name in (*columns, "peak memory"):
        shown.add_column(name, justify="left" if name == "order" else "right", no_wrap=True)
    if not one:
        shown.add_column("budget, reads", no_wrap=True)
    last = None
    for result in results:
        if last is not None and result.arm.tokens != last:
            shown.add_section()
        last = result.arm.tokens
        shown.add_row(*_row(result), *(() if one else (str(result.arm.setting),)))
    return shown


def _row(result: Result) -> list[str]:
    arm, run, (low, high) = result.arm, result.first, result.spread
    order = arm.order
    if order == CHUNK_MAJOR:
        order = f"{order}, {arm.chunk} a chunk"
    if run.hit_rate is not None:
        order = f"{order}, {run.hit_rate:.0%} hits"
    speed = result.tokens_per_second
    halves = arm.order in (READ_ONLY, COMPUTE_ONLY)
    return [
        order,
        f"{arm.tokens} +{arm.new_tokens}" if arm.new_tokens else str(arm.tokens),
        f"{result.median:.2f}",
        f"{low:.2f}-{high:.2f}",
        "" if halves else f"{speed:.0f}" if speed >= 10 else f"{speed:.2f}",
        "" if run.forecast_seconds is None else f"{run.forecast_seconds:.2f}",
        format_bytes(run.bytes_read) if run.bytes_read else "-",
        f"{result.passes:.2f}" if run.bytes_read else "-",
        format_bytes(max(r.peak_bytes for r in result.runs)) if run.peak_bytes else "-",
    ]


def findings(results: Sequence[Result]) -> list[str]:
    """What the figures say, in sentences."""
    said = [f"{r.arm}: {r.first.note}" for r in results if r.first.note]
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
