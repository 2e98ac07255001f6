"""The packed layout against the plain one, and packing against a plain copy.

Groups: every layer's experts in groups of 1, 2, 4, 8 and 16, read by the Reader alone into two
slots in turn, and by whole prefills; the layouts alternate so that a noisy machine hits both.
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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mlx_stream.packed.checking import open_files
from mlx_stream.packed.output_file import OutputFile
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.read_plan import plan_group
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.slot_memory import allocate_slot

GROUPS = (1, 2, 4, 8, 16)
MIB = 1 << 20


class GroupArm:
    """Reads all experts of an index in groups of one size, into two slots in turn."""

    def __init__(self, index: ExpertIndex, group: int, io: str, verify: str) -> None:
        self.reader = Reader(index.checkpoint, io=io, verify=verify)
        sizes = self.reader.file_sizes
        self.plans = [
            plan_group(
                layer,
                layer.experts_at(range(e, min(e + group, layer.num_experts))),
                align=self.reader.align,
                file_sizes=sizes,
            )
            for layer in index.layers
            for e in range(0, layer.num_experts, group)
        ]
        nbytes = max(p.slot_nbytes for p in self.plans)
        self.slots = [allocate_slot(nbytes) for _ in range(2)]
        for slot in self.slots:
            slot[:] = 0

    def seconds(self) -> float:
        """One pass."""
        tickets: list[Ticket | None] = [None, None]
        began = time.perf_counter()
        for n, plan in enumerate(self.plans):
            if (ticket := tickets[n % 2]) is not None:
                ticket.wait()
            tickets[n % 2] = self.reader.submit(plan.ops, self.slots[n % 2], plan.checks)
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


def reader_table(plain: Path, packed: Path, rounds: int, io: str, verify: str) -> list[dict]:
    """Reader alone."""
    indexes = {name: build_expert_index(open_checkpoint(p)) for name, p in both(plain, packed)}
    arms = {(n, g): GroupArm(i, g, io, verify) for n, i in indexes.items() for g in GROUPS}
    took = alternate({k: a.seconds for k, a in arms.items()}, rounds)
    nbytes = indexes["plain"].nbytes
    rows = []
    for (name, group), times in took.items():
        arm = arms[name, group]
        rate = nbytes / statistics.median(times) / 1e9
        rows.append({"layout": name, "group": group, "gbs": round(rate, 3), "calls": arm.calls})
        arm.reader.close()
    return rows


def both(plain: Path, packed: Path) -> list[tuple[str, Path]]:
    return [("plain", plain), ("packed", packed)]


def prefill_table(plain: Path, packed: Path, rounds: int, tokens: int) -> list[dict]:
    """Whole prefills, by group size; the last row is the plan's own group."""
    from mlx_stream.config import StreamConfig
    from mlx_stream.engine import Engine
    from mlx_stream.prefill.schedule import cut_groups
    from mlx_stream.storage.read_plan import slot_capacity

    config = StreamConfig(memory_budget=4 << 30, backend="cpu", union_tokens=0)
    engines = {name: Engine(p, config) for name, p in both(plain, packed)}
    ids = [(7 * n) % 1000 for n in range(tokens)]

    def run(name: str, group: int | None) -> float:
        engine = engines[name]
        plan = engine.plan(tokens)
        if group is not None:
            size = slot_capacity(engine.index, group, engine.reader.align)
            layers = tuple(
                replace(read, groups=cut_groups(layer.num_experts, group))
                for read, layer in zip(plan.layers, engine.index.layers, strict=True)
            )
            plan = replace(plan, group_size=group, layers=layers, slot_nbytes=size)
            plan = replace(plan, slots=max(2, min(64, (256 * MIB) // size)))
        import numpy as np

        began = time.perf_counter()
        engine.run_plan(plan, np.array(ids))
        return time.perf_counter() - began

    keys = [(n, g) for n in engines for g in (*GROUPS, None)]
    took = alternate({k: (lambda k=k: run(*k)) for k in keys}, rounds)
    for engine in engines.values():
        engine.close()
    return [
        {"layout": n, "group": g or "plan", "seconds": round(statistics.median(t), 3)}
        for (n, g), t in took.items()
    ]


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


def show(rows: list[dict], value: str) -> None:
    click.echo(f"{'experts a group':>16}" + "".join(f"{n:>12}" for n in ("plain", "packed")))
    for group in dict.fromkeys(r["group"] for r in rows):
        cells = [r[value] for r in rows if r["group"] == group]
        click.echo(f"{group:>16}" + "".join(f"{c:>12}" for c in cells))


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("."))
@click.option("--rounds", default=5)
@click.option("--tokens", default=0, help="Prefill this many tokens for the end-to-end table.")
@click.option("--io", type=click.Choice(["direct", "buffered"]), default="direct")
@click.option("--verify", type=click.Choice(["off", "first", "always"]), default="first")
def main(model: Path, folder: Path, rounds: int, tokens: int, io: str, verify: str) -> None:
    """Measure packing, and reads in both layouts."""
    scratch = Path(tempfile.mkdtemp(prefix="packed-bench-", dir=folder))
    try:
        result: dict[str, Any] = {"bench": "packed", "pack": pack_table(model, scratch, rounds, io)}
        click.echo(json.dumps(result["pack"]))
        packed = scratch / "packed"
        result["reader"] = reader_table(model, packed, rounds, io, verify)
        click.echo("reader alone, GB/s")
        show(result["reader"], "gbs")
        click.echo("read calls of one pass")
        show(result["reader"], "calls")
        if tokens:
            result["prefill"] = prefill_table(model, packed, rounds, tokens)
            click.echo(f"prefill of {tokens} tokens, seconds")
            show(result["prefill"], "seconds")
        result["machine"] = f"{platform.system()} {platform.machine()} {os.cpu_count()} cpu"
        click.echo(json.dumps(result))
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
