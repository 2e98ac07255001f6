"""How close the Reader comes to the disk: plain O_DIRECT loop against planned, threaded reads.

All arms read the same expert bytes of the same checkpoint without the page cache, alternating
layer by layer in one run so that a noisy machine hits all. Plain: one thread, preadv of one block
after the other at its best block size, either into one block of memory, which stays in the CPU's
cache and could not be used for anything, or round and round through as much memory as the Reader
fills. Reader: groups of consecutive experts into two slots in turn, as prefill does, every plane
filled. Prints a table and one JSON line.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import random
import shutil
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.open_modes import open_file
from mlx_stream.storage.read_plan import plan_group
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.slot_memory import allocate_slot

MIB = 1 << 20
Setting = tuple[int, int]  # (threads, largest op in MiB)
HOT, RING = "plain, one block", "plain, same memory"
EXPERTS, DIMS, HIDDEN, BITS, GROUP = 128, 2048, 768, 4, 64  # a 30B-A3B layer in 4 bits


def layer_tensors(layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for proj, rows, cols in (
        ("gate_proj", HIDDEN, DIMS),
        ("up_proj", HIDDEN, DIMS),
        ("down_proj", DIMS, HIDDEN),
    ):
        base = f"model.layers.{layer}.mlp.switch_mlp.{proj}"
        yield f"{base}.weight", "U32", (EXPERTS, rows, cols * BITS // 32)
        yield f"{base}.scales", "BF16", (EXPERTS, rows, cols // GROUP)
        yield f"{base}.biases", "BF16", (EXPERTS, rows, cols // GROUP)


def make_checkpoint(folder: Path, nbytes: int) -> None:
    """A one-file checkpoint of at least `nbytes` random bytes."""
    header, end, layer = {}, 0, 0
    while end < nbytes:
        for name, dtype, shape in layer_tensors(layer):
            size = int(np.prod(shape)) * (4 if dtype == "U32" else 2)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
            end += size
        layer += 1
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = np.random.default_rng(0).bytes(8 * MIB)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, end, len(block)):
            f.write(block[: end - start])
        f.flush()
        os.fsync(f.fileno())
    config = {"num_experts": EXPERTS, "quantization": {"bits": BITS, "group_size": GROUP}}
    (folder / "config.json").write_text(json.dumps(config))


class PlainArm:
    """One thread, one preadv after the other, into `ring` bytes of memory used in turn."""

    def __init__(self, path: Path, block: int, ring: int) -> None:
        self.file = open_file(path, "direct")
        if self.file.io_mode.startswith("buffered"):
            raise click.ClickException(f"no cache-bypassing reads here: {self.file.io_mode}")
        self.block = block
        memory = allocate_slot(max(ring // block, 1) * block)
        memory[:] = 0  # commit the pages before the clock runs
        self.blocks = itertools.cycle(
            [memory[at : at + block] for at in range(0, memory.nbytes, block)]
        )

    def seconds(self, begin: int, end: int) -> float:
        """Time to read the blocks that cover [begin, end)."""
        at = begin // self.block * self.block
        began = time.perf_counter()
        while at < end:
            at += os.preadv(self.file.fd, [next(self.blocks)], at)
        return time.perf_counter() - began

    def close(self) -> None:
        os.close(self.file.fd)


class ReaderArm:
    """Read groups of one layer into two slots in turn, as prefill does."""

    def __init__(self, index: ExpertIndex, threads: int, op_nbytes: int, group: int) -> None:
        self.reader = Reader(index.checkpoint, threads=threads)
        self.close = self.reader.close
        sizes = [f.size for f in index.checkpoint.files]
        self.plans = [
            [
                plan_group(
                    layer,
                    range(e, min(e + group, layer.num_experts)),
                    align=self.reader.align,
                    max_op_nbytes=op_nbytes,
                    file_sizes=sizes,
                )
                for e in range(0, layer.num_experts, group)
            ]
            for layer in index.layers
        ]
        nbytes = max(p.slot_nbytes for plans in self.plans for p in plans)
        self.slots = [allocate_slot(nbytes) for _ in range(2)]
        for slot in self.slots:
            slot[:] = 0  # commit the pages before the clock runs

    def seconds(self, layer: int) -> float:
        tickets: list[Ticket | None] = [None, None]
        began = time.perf_counter()
        for n, plan in enumerate(self.plans[layer]):
            if tickets[n % 2] is not None:
                tickets[n % 2].wait()
            tickets[n % 2] = self.reader.submit(plan.ops, self.slots[n % 2])
        for ticket in filter(None, tickets):
            ticket.wait()
        return time.perf_counter() - began


def median_and_spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.3f}  ({min(values):.3f} .. {max(values):.3f})"


@click.command()
@click.option(
    "--file",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Existing MoE checkpoint folder with one shard (default: a scratch one).",
)
@click.option(
    "--dir",
    "scratch",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Where to make the scratch checkpoint.",
)
@click.option("--gb", default=1.3, help="Size of the scratch checkpoint in GB.")
@click.option("--rounds", default=7, help="Alternations.")
@click.option("--threads", default="4", help="Reader threads; several as 1,2,4.")
@click.option("--op-mib", default="8", help="Largest op in MiB; several as 1,4,8.")
@click.option("--group", default=16, help="Experts per read group.")
def main(
    file: Path | None, scratch: Path, gb: float, rounds: int, threads: str, op_mib: str, group: int
) -> None:
    """Reader against a plain cache-bypassing loop on the same bytes."""
    made = None
    if file is None:
        made = file = Path(tempfile.mkdtemp(prefix="reader-bench-", dir=scratch))
    try:
        if made:
            make_checkpoint(made, int(gb * 1e9))
        settings = [(int(t), int(m)) for t in threads.split(",") for m in op_mib.split(",")]
        compare(build_expert_index(open_checkpoint(file)), rounds, settings, group)
    finally:
        if made:
            shutil.rmtree(made)


def layer_range(index: ExpertIndex, layer: int) -> tuple[int, int]:
    tensors = index.layers[layer].tensors
    last = max(tensors, key=lambda t: t.offset)
    end = last.offset + index.layers[layer].num_experts * last.stride
    return min(t.offset for t in tensors), end


def best_block(path: Path, nbytes: int) -> int:
    """Block in MiB at which the plain loop is fastest, best of three short tries each."""
    best = {1: math.inf, 2: math.inf, 4: math.inf, 8: math.inf}
    for attempt in range(3):
        for mib in best:
            arm = PlainArm(path, mib * MIB, 0)
            begin = attempt * 256 * MIB % nbytes
            best[mib] = min(best[mib], arm.seconds(begin, min(begin + 256 * MIB, nbytes)))
            arm.close()
    return min(best, key=best.get)


def compare(index: ExpertIndex, rounds: int, settings: list[Setting], group: int) -> None:
    """Arms alternate layer by layer: a disk that slows down for a second slows down all."""
    path = index.checkpoint.files[0].path
    block = best_block(path, index.nbytes) * MIB
    ours = {
        f"reader {t} threads, ops {m} MiB": ReaderArm(index, t, m * MIB, group) for t, m in settings
    }
    ring = sum(slot.nbytes for arm in ours.values() for slot in arm.slots) // len(ours)
    plain = {HOT: PlainArm(path, block, 0), RING: PlainArm(path, block, ring)}
    run = {name: arm.seconds for name, arm in ours.items()}
    for name, arm in plain.items():
        run[name] = lambda layer, arm=arm: arm.seconds(*layer_range(index, layer))
    seconds = {name: [0.0] * rounds for name in run}
    shuffler = random.Random(0)
    for r in range(rounds):
        for layer in range(len(index.layers)):
            # Not in rotation: each arm must follow each other one equally often.
            for name in shuffler.sample(list(run), len(run)):
                seconds[name][r] += run[name](layer)
    read = sum(arm.reader.counters.bytes for arm in ours.values())
    amplification = read / (len(ours) * rounds * index.nbytes)
    for arm in (*plain.values(), *ours.values()):
        arm.close()
    click.echo(f"{index.nbytes / 1e9:.2f} GB, {group} experts a group, plain block {block} bytes")
    report(index.nbytes, seconds, amplification)


def report(nbytes: int, seconds: dict[str, list[float]], amplification: float) -> None:
    speed = {name: [nbytes / s / 1e9 for s in took] for name, took in seconds.items()}
    rows = []
    click.echo(f"{'median (min .. max)':32}{'GB/s':>24}{'/ ' + RING:>28}{'/ ' + HOT:>28}")
    for name, values in speed.items():
        ratios = [[a / b for a, b in zip(values, speed[base], strict=True)] for base in (RING, HOT)]
        cells = [median_and_spread(v) for v in (values, *ratios)]
        click.echo(f"{name:32}" + "".join(f"{c:>28}" for c in cells))
        medians = [round(statistics.median(v), 3) for v in (values, *ratios)]
        rows.append(dict(zip(("arm", "gbs", "vs_ring", "vs_hot"), (name, *medians), strict=True)))
    machine = f"{platform.system()} {platform.machine()} {os.cpu_count()} cpu"
    result = {
        "bench": "reader",
        "machine": machine,
        "gb": round(nbytes / 1e9, 3),
        "rounds": len(next(iter(speed.values()))),
        "amplification": round(amplification, 4),
        "arms": rows,
    }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
