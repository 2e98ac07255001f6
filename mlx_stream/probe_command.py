"""``mlx_stream probe``: how fast this machine reads and computes, kept for forecasts."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from mlx_stream.config import BACKENDS, format_bytes, parse_bytes

if TYPE_CHECKING:
    from mlx_stream.planner.machine_profile import ComputeRate, MachineProfile, ReadRate

EXAMPLES = """
\b
Examples:
  mlx_stream probe
  mlx_stream probe --folder /Volumes/models
  mlx_stream probe --read-only ~/models/qwen3/model-00001-of-00004.safetensors
  mlx_stream probe --seconds 30 --json > machine.json

Nothing else should run meanwhile. A scratch file is written and removed again, unless --read-only
names a file to read instead. The profile is kept in the user's cache folder.
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measure the disk of this folder.  [default: here]",
)
@click.option(
    "--read-only",
    "read_only",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read this file, of 64 MiB or more; write nothing.",
)
@click.option("--scratch", default="1GB", show_default=True, help="Size of the scratch file.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    help="About how long to read, and how long to compute (at least three rounds of it).",
)
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
@click.option("--save/--no-save", default=True, show_default=True, help="Keep the profile.")
def probe(
    folder: Path | None,
    read_only: Path | None,
    scratch: str,
    seconds: float,
    backend: str,
    as_json: bool,
    save: bool,
) -> None:
    """Measure how fast this machine reads and computes, for forecasts."""
    from mlx_stream.planner.machine_profile import default_profile_path
    from mlx_stream.storage.read_probe import scratch_file

    if folder is not None and read_only is not None:
        raise click.UsageError("--folder and --read-only exclude each other.")
    nbytes = parse_bytes(scratch)
    console = Console(stderr=as_json)
    status = Console(stderr=True)
    with _status(status, "writing the scratch file") as say:
        place = nullcontext(read_only) if read_only else scratch_file(folder or Path(), nbytes)
        with place as file:
            assert file is not None
            reads = _reads(file, seconds, say)
            computes, name, cost = _computes(backend, file, seconds, say)
    profile = make_profile(reads, computes, name, cost)
    if save:
        profile.save(default_profile_path())
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(profile)))
        return
    _show(console, profile)
    if save:
        console.print(f"kept in {default_profile_path()}", highlight=False, soft_wrap=True)


def make_profile(
    reads: Sequence[ReadRate], computes: Sequence[ComputeRate], backend: str, overlap_cost: float
) -> MachineProfile:
    """Rates with the name of this machine and the time."""
    from mlx_stream.planner.machine_profile import VERSION, MachineProfile

    return MachineProfile(
        version=VERSION,
        machine=f"{platform.node()}, {platform.platform()}, {platform.machine()}",
        backend=backend,
        io_mode=reads[0].io_mode,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        reads=tuple(reads),
        computes=tuple(computes),
        overlap_cost=overlap_cost,
    )


@contextmanager
def _status(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, nothing elsewhere; yields what changes its text."""
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update


def _reads(file: Path, seconds: float, say: Callable[[str], None]) -> list[ReadRate]:
    from mlx_stream.storage import read_probe

    arms = 2 * len(read_probe.SIZES) * len(read_probe.DEPTHS)
    return read_probe.probe_reads(
        file,
        seconds=seconds / arms,
        progress=lambda done, of: say(f"reading: {done} of {of}"),
    )


def _computes(
    backend: str, file: Path, seconds: float, say: Callable[[str], None]
) -> tuple[list[ComputeRate], str, float]:
    """The rates, the backend's name, and what overlapping with reads costs."""
    from mlx_stream.backends.select import select_backend
    from mlx_stream.compute_probe import probe_compute
    from mlx_stream.overlap_probe import probe_overlap

    chosen = select_backend(backend)
    try:
        rates = probe_compute(
            chosen,
            seconds=seconds,
            progress=lambda done, of: say(f"computing on {chosen.name}: {done} of {of}"),
        )
        say("reading and computing at once")
        return rates, chosen.name, probe_overlap(chosen, file, seconds / 5)
    finally:
        chosen.close()


def _show(console: Console, profile: MachineProfile) -> None:
    console.print(f"{profile.machine}, backend {profile.backend}", highlight=False)
    table = Table(
        "request", "order", "in flight", "rate", "IOPS", "p50", "p99", title=profile.io_mode
    )
    for r in profile.reads:
        table.add_row(
            f"{r.nbytes / 1024:.0f} KiB",
            r.order,
            str(r.depth),
            f"{format_bytes(r.bytes_per_second)}/s",
            f"{r.iops:.0f}",
            _time(r.p50_seconds),
            _time(r.p99_seconds),
        )
    console.print(table)
    table = Table(
        "work", "format", "size", "rows", "rate", "+-", title=f"backend {profile.backend}"
    )
    for c in profile.computes:
        size = " x ".join(map(str, c.dims))
        rate = f"{c.flops_per_second / 1e9:.2f} G{_UNITS.get(c.format, 'FLOP')}/s"
        table.add_row(c.kind, c.format, size, str(c.rows), rate, f"{c.spread:.0%}")
    console.print(table)
    console.print(
        f"reading and computing at once lose {profile.overlap_cost:.0%} of the shorter one's time"
    )


_UNITS = {"copy": "B", "elementwise": "values"}


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
