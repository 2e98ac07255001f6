"""Everything that can go wrong with disks and processes, on purpose, and what became of it.

Kills, full and failing disks, flipped bits, clocks that jump, folders that cannot be written, two
processes at one folder, hostile files. Prints one table; exits with 1 when anything was lost,
wrong, or ended in a traceback. What needs root (small disks) is skipped without it.

\b
Examples:
  python tools/fault_suite.py
  python tools/fault_suite.py --rounds 20 --only kill-pack --only flip-record
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.hub import demo_path  # noqa: E402
from tools import (  # noqa: E402
    fault_parts_disks,
    fault_parts_flips,
    fault_parts_fuzz,
    fault_parts_hostile,
    fault_parts_kept,
    fault_parts_kills,
    fault_parts_races,
    fault_parts_reads,
    fault_parts_subjects,
)
from tools.fault_parts import Tally, timed  # noqa: E402
from tools.fault_parts_models import Workplace  # noqa: E402

Kind = Callable[[Workplace, Tally], None]
KINDS: dict[str, Kind] = {
    "kill-pack": fault_parts_kills.kill_pack,
    "kill-prefill": fault_parts_kills.kill_prefill,
    "kill-resume": fault_parts_kills.kill_resume,
    **{f"write-{s}": fault_parts_disks.at_every_write(s) for s in fault_parts_subjects.SUBJECTS},
    **{f"full-{s}": fault_parts_disks.on_a_small_disk(s) for s in fault_parts_subjects.SUBJECTS},
    **{
        f"read-only-from-{s}": fault_parts_disks.read_only_from(s)
        for s in fault_parts_subjects.SUBJECTS
    },
    "read-only-folder": fault_parts_disks.read_only_folders,
    **{f"read-{s}": fault_parts_reads.at_every_read(s) for s in fault_parts_reads.SUBJECTS},
    **fault_parts_flips.KINDS,
    **fault_parts_kept.KINDS,
    **fault_parts_races.KINDS,
    **fault_parts_hostile.KINDS,
    **fault_parts_fuzz.KINDS,
}
_FILE = click.Path(path_type=Path)
COLUMNS = ("rounds", "injected", "survived", "refused", "typed", "lost", "wrong", "tracebacks")


def run_kinds(place: Workplace, kinds: list[str]) -> list[Tally]:
    """One tally for each kind; a kind that breaks down counts as a traceback."""
    tallies = []
    for kind in kinds:
        tallies.append(tally := Tally(kind))
        with timed(tally):
            rounds = tally.rounds
            try:
                KINDS[kind](place, tally)
            except Exception as error:  # the suite itself: never silent
                tally.rounds = max(tally.rounds, rounds + 1)
                tally.tracebacks += 1
                tally.notes.append(f"the kind broke down: {type(error).__name__}: {error}")
        place.say(line(tally))
        for note in tally.notes:
            place.say(f"  {note}")
    return tallies


def line(tally: Tally) -> str:
    """One line of progress."""
    numbers = ", ".join(f"{name} {getattr(tally, name)}" for name in COLUMNS)
    return f"{tally.kind}: {tally.skipped or numbers} ({tally.seconds:.0f} s)"


def table(tallies: list[Tally]) -> str:
    """Markdown: a line for each kind, and their sum."""
    total = Tally("all", **{name: sum(getattr(t, name) for t in tallies) for name in COLUMNS})
    total.seconds = sum(t.seconds for t in tallies)
    lines = [
        "| kind | " + " | ".join(COLUMNS) + " | seconds |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for t in [*tallies, total]:
        cells = [str(getattr(t, name)) for name in COLUMNS] + [f"{t.seconds:.0f}"]
        if t.skipped:
            cells = [f"skipped: {t.skipped}", *[""] * len(COLUMNS)]
        lines.append(f"| {t.kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def joined(files: Sequence[Path]) -> list[Tally]:
    """The counts of several runs, summed by kind, in the order of KINDS."""
    total: dict[str, Tally] = {}
    for one in (Tally(**kind) for file in files for kind in json.loads(file.read_text())["kinds"]):
        found = total.setdefault(one.kind, Tally(one.kind, skipped=one.skipped))
        for name in (*COLUMNS, "seconds"):
            setattr(found, name, getattr(found, name) + getattr(one, name))
    return sorted(total.values(), key=lambda tally: list(KINDS).index(tally.kind))


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(KINDS)), help="Only this kind.")
@click.option("--model", default="demo", show_default=True, help="Another one: 'demo', a folder.")
@click.option("--quick", is_flag=True, help="A few places of all those that could fail.")
@click.option("--places", type=click.IntRange(min=1), help="At most so many places of each kind.")
@click.option("--json", "json_file", type=_FILE, help="Write the counts there.")
@click.option("--show", multiple=True, type=_FILE, help="Only print such files as one table.")
def main(
    rounds: int,
    seed: int,
    only: tuple[str, ...],
    model: str,
    quick: bool,
    places: int | None,
    json_file: Path | None,
    show: tuple[Path, ...],
) -> None:
    """See above."""
    if show:
        return click.echo(table(joined(show)))
    extra = demo_path() if model == "demo" else Path(model)
    with tempfile.TemporaryDirectory(prefix="fault-suite-") as root:
        place = Workplace(Path(root), rounds, seed, extra, quick)
        place.places = places or place.places
        place.say = lambda text: click.echo(text, err=True)
        try:
            tallies = run_kinds(place, list(only) or list(KINDS))
        finally:
            place.close()
    click.echo(table(tallies))
    if json_file is not None:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"
        content = {"machine": machine, "rounds": rounds, "seed": seed}
        content["kinds"] = [asdict(t) for t in tallies]
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    if not all(t.sound for t in tallies):
        sys.exit(1)


if __name__ == "__main__":
    main()
