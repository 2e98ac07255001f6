"""The packed layout against the plain one, and packing against a plain copy.

Groups: every layer's experts in groups of 1, 2, 4, 8, 16 and of the whole layer (two slots, two
layers), read by the Reader alone, and by whole prefills. Arms alternate so that noise hits all of
them; each has --staging bytes of slots, touched before the clock starts.
Packing: the packer, and a copy of the same bytes by the same reader and writer (same blocks, same
I/O mode, flushed to the disk), in turn. Prints tables and one JSON line.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.experts.staging import StagingRing
from mlx_stream.packed.checking import open_files
from mlx_stream.packed.output_file import OutputFile
from mlx_stream.prefill.schedule import PrefillPlan, cut_groups
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.read_plan import plan_group, slot_capacity
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.slot_memory import allocate_slot

WHOLE = "whole"
LAYOUTS = ("plain", "packed")
GROUPS = (1, 2, 4, 8, 16, WHOLE)
COMPARED = 8  # experts of the groups that are compared with whole layers
MIB = 1 << 20
MOST_SLOTS = 64

Group = int | str  # experts of a read group, WHOLE, or "plan"
Times = dict[tuple[str, Group], list[float]]


def group_size(index: ExpertIndex, group: Group) -> int:
    """Experts of a read group."""
    return max(layer.num_experts for layer in index.layers) if group == WHOLE else int(group)


def slot_count(group: Group, slot_nbytes: int, staging: int) -> int:
    """Slots of an arm: what `staging` bytes hold; two for whole layers."""
    return 2 if group == WHOLE else max(2, min(MOST_SLOTS, staging // slot_nbytes))


class GroupArm:
    """Reads all experts of an index in groups of one size, into slots in turn."""

    def __init__(self, index: ExpertIndex, group: Group, staging: int, options: Any) -> None:
        self.reader = Reader(index.checkpoint, **options)
        sizes, size = self.reader.file_sizes, group_size(index, group)
        self.plans = [
            plan_group(
                layer,
                layer.experts_at(range(e, min(e + size, layer.num_experts))),
                align=self.reader.align,
                file_sizes=sizes,
            )
            for layer in index.layers
            for e in range(0, layer.num_experts, size)
        ]
        self.slot_nbytes = max(p.slot_nbytes for p in self.plans)
        self.count = slot_count(group, self.slot_nbytes, staging)

    def seconds(self, memory: np.ndarray) -> float:
        """One pass, into slots at the beginning of `memory`."""
        slots = memory[: self.count * self.slot_nbytes].reshape(self.count, -1)
        tickets: list[Ticket | None] = [None] * self.count
        began = time.perf_counter()
        for n, plan in enumerate(self.plans):
            if (ticket := tickets[n % self.count]) is not None:
                ticket.wait()
            slot = slots[n % self.count]
            tickets[n % self.count] = self.reader.submit(plan.ops, slot, plan.checks)
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()
        return time.perf_counter() - began

    @property
    def calls(self) -> int:
        """Read calls of one pass."""
        return sum(len(p.ops) for p in self.plans)


def alternate(arms: dict[Any, Callable[[], float]], rounds: int) -> dict[Any, list[float]]:
    took: dict[Any, list[float]] = {name: [] for name in arms}
    for r in range(rounds):
        names = list(arms)
        for name in names if r % 2 else reversed(names):
            took[name].append(arms[name]())
    return took


def reader_table(
    plain: Path, packed: Path, groups: Sequence[Group], rounds: int, staging: int, options: Any
) -> tuple[list[dict], Times]:
    """Reader alone."""
    folders = zip(LAYOUTS, (plain, packed), strict=True)
    indexes = {name: build_expert_index(open_checkpoint(p)) for name, p in folders}
    arms = {(n, g): GroupArm(i, g, staging, options) for n, i in indexes.items() for g in groups}
    memory = allocate_slot(max(a.count * a.slot_nbytes for a in arms.values()))
    memory[:] = 0  # page faults belong to no arm
    took = alternate({k: partial(a.seconds, memory) for k, a in arms.items()}, rounds)
    nbytes = indexes["plain"].nbytes
    rows = []
    for (name, group), times in took.items():
        arm = arms[name, group]
        rates = [nbytes / t / 1e9 for t in times]
        rows.append(row(name, group, rates) | {"calls": arm.calls, "slots": arm.count})
        arm.reader.close()
    return rows, took


def row(layout: str, group: Group, values: list[float]) -> dict:
    """Median and range of one arm."""
    found = {"median": statistics.median(values), "low": min(values), "high": max(values)}
    return {"layout": layout, "group": group} | {k: round(v, 3) for k, v in found.items()}


def plan_for(engine: Engine, tokens: int, group: Group, staging: int) -> PrefillPlan:
    """The engine's own plan, reading all experts; other read groups unless `group` is "plan"."""
    plan = replace(engine.plan(tokens), mode="stream")
    if group == "plan":
        return plan
    size = group_size(engine.index, group)
    slot_nbytes = slot_capacity(engine.index, size, engine.reader.align)
    layers = tuple(
        replace(read, groups=cut_groups(layer.num_experts, size))
        for read, layer in zip(plan.layers, engine.index.layers, strict=True)
    )
    slots = slot_count(group, slot_nbytes, staging)
    return replace(plan, group_size=size, layers=layers, slot_nbytes=slot_nbytes, slots=slots)


def prefill_seconds(engine: Engine, plan: PrefillPlan, ids: np.ndarray) -> float:
    """One prefill into staging that was touched before."""
    ring = StagingRing(engine.backend, engine.reader, plan.slot_nbytes, plan.slots)
    for slot in ring._slots:
        slot.buffer.array[:] = 0
    began = time.perf_counter()
    engine.run_plan(plan, ids, ring=ring)
    return time.perf_counter() - began


def prefill_table(
    plain: Path,
    packed: Path,
    groups: Sequence[Group],
    rounds: int,
    staging: int,
    tokens: int,
    options: Any,
) -> tuple[list[dict], Times]:
    """Whole prefills, by group size; the last row is the plan's own group."""
    config = StreamConfig(memory_budget=4 << 30, backend="cpu", union_tokens=0, **options)
    engines = {name: Engine(p, config) for name, p in zip(LAYOUTS, (plain, packed), strict=True)}
    ids = np.array([(7 * n) % 1000 for n in range(tokens)])
    arms = {}
    for name, engine in engines.items():
        engine.prefill(ids)  # checksums of first reads belong to no arm
        for group in (*groups, "plan"):
            plan = plan_for(engine, tokens, group, staging)
            arms[name, group] = partial(prefill_seconds, engine, plan, ids)
    took = alternate(arms, rounds)
    for engine in engines.values():
        engine.close()
    return [row(n, g, t) for (n, g), t in took.items()], took


def against_whole(took: Times, layout: str) -> dict:
    """Round by round, what whole layers took over what groups of COMPARED took."""
    pairs = zip(took[layout, WHOLE], took[layout, COMPARED], strict=True)
    return row(layout, COMPARED, [whole / grouped for whole, grouped in pairs])


def copy(source: Path, target: Path, io: str) -> float:
    """The same bytes, reader, writer, block size and flush as the packer, without packing."""
    began = time.perf_counter()
    shards = sorted(source.glob("model*.safetensors"))
    target.mkdir()
    with open_files(source, shards, io) as pieces:
        for number, shard in enumerate(shards):
            size = shard.stat().st_size
            with OutputFile(target / shard.name, size, io=io) as output:
                for piece in pieces.read(number, size):
                    output.write(piece.at, piece.data)
                output.commit()
    return time.perf_counter() - began


PACK = """
import resource, sys
from pathlib import Path
from mlx_stream.packed.pack import PackOptions, pack
report = pack(Path(sys.argv[1]), Path(sys.argv[2]), PackOptions(io=sys.argv[3]))
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(report.nbytes, report.seconds, peak, "mlx" in sys.modules)
"""


def pack_table(plain: Path, scratch: Path, rounds: int, io: str) -> dict[str, Any]:
    """Packing and copying in turn; packing in a process of its own, for its peak memory."""
    packs, copies, peaks, nbytes = [], [], [], 0
    for _ in range(rounds):
        for target in (scratch / "packed", scratch / "copy"):
            shutil.rmtree(target, ignore_errors=True)
        copies.append(copy(plain, scratch / "copy", io))
        shutil.rmtree(scratch / "copy")
        command = [sys.executable, "-c", PACK, str(plain), str(scratch / "packed"), io]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        nbytes, seconds, peak = int(out[0]), float(out[1]), int(out[2])
        assert out[3] == "False", "packing needs no mlx"
        packs.append(seconds)
        peaks.append(peak)
    ratio = [c / p for c, p in zip(copies, packs, strict=True)]
    return {
        "gb": round(nbytes / 1e9, 3),
        "pack_mb_s": round(nbytes / 1e6 / statistics.median(packs)),
        "copy_mb_s": round(nbytes / 1e6 / statistics.median(copies)),
        "pack_over_copy": round(statistics.median(ratio), 3),
        "peak_mb": round(max(peaks) / 1e6),
    }


def show(rows: list[dict], cell: Callable[[dict], str]) -> None:
    """A markdown table: group sizes down, layouts across."""
    click.echo("| experts a group | plain | packed |\n|---|---|---|")
    for group in dict.fromkeys(r["group"] for r in rows):
        cells = [cell(r) for r in rows if r["group"] == group]
        click.echo(f"| {group} | {' | '.join(cells)} |")


def spread(r: dict) -> str:
    return f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})"


def report_groups(result: dict[str, Any], name: str, table: tuple[list[dict], Times]) -> None:
    """Print a table and the ratios; keep both in `result`."""
    rows, took = table
    show(rows, spread)
    result[name] = rows
    for layout in LAYOUTS:
        if not {(layout, WHOLE), (layout, COMPARED)} <= set(took):
            continue
        ratio = result[f"{name}_{layout}_whole_over_{COMPARED}"] = against_whole(took, layout)
        click.echo(f"{layout}: whole layers / groups of {COMPARED}: {spread(ratio)}")


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("."))
@click.option(
    "--packed",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The packed model, if there is one; packing is not measured then.",
)
@click.option("--groups", default=",".join(map(str, GROUPS)), help="Which to measure.")
@click.option("--rounds", default=5)
@click.option("--tokens", default=0, help="Prefill this many tokens for the end-to-end table.")
@click.option("--staging", default=512, help="MiB of slots of an arm; two slots at least.")
@click.option("--io", type=click.Choice(["direct", "buffered"]), default="direct")
@click.option("--verify", type=click.Choice(["off", "first", "always"]), default="first")
def main(
    model: Path,
    folder: Path,
    packed: Path | None,
    groups: str,
    rounds: int,
    tokens: int,
    staging: int,
    io: str,
    verify: str,
) -> None:
    """Measure packing, and reads in both layouts."""
    scratch = Path(tempfile.mkdtemp(prefix="packed-bench-", dir=folder))
    options = {"io": io, "verify": verify}
    try:
        result: dict[str, Any] = {"bench": "packed", "load": os.getloadavg()[0]}
        if packed is None:
            result["pack"] = pack_table(model, scratch, rounds, io)
            click.echo(json.dumps(result["pack"]))
            packed = scratch / "packed"
        sizes = [g if g == WHOLE else int(g) for g in groups.split(",")]
        arms = (model, packed, sizes, rounds, staging * MIB)
        click.echo("reader alone, GB/s: median (range)")
        report_groups(result, "reader", reader_table(*arms, options))
        click.echo("read calls of one pass, and slots")
        show(result["reader"], lambda r: f"{r['calls']}, {r['slots']}")
        if tokens:
            click.echo(f"prefill of {tokens} tokens, seconds: median (range)")
            report_groups(result, "prefill", prefill_table(*arms, tokens, options))
        result["machine"] = f"{platform.system()} {platform.machine()} {os.cpu_count()} cpu"
        click.echo(json.dumps(result))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
