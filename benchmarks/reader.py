"""How close the Reader comes to the disk: plain O_DIRECT loop against planned, threaded reads.

Both arms read the same expert bytes of the same checkpoint without the page cache, alternating in
one run so that a noisy machine hits both. Plain arm: one thread, preadv of one block after the
other through the whole file, at its best block size. Reader arm: read groups of consecutive experts
into a ring of two slots, as prefill does, every plane filled. Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import math
import mmap
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

MIB = 1 << 20
Setting = tuple[int, int]  # (threads, largest op in MiB)
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
    """One thread, one preadv after the other."""

    def __init__(self, path: Path, block: int) -> None:
        self.file = open_file(path, "direct")
        if self.file.io_mode.startswith("buffered"):
            raise click.ClickException(f"no cache-bypassing reads here: {self.file.io_mode}")
        self.buffer = memoryview(mmap.mmap(-1, block))

    def seconds(self, begin: int, end: int) -> float:
        """Time to read the blocks that cover [begin, end)."""
        at = begin // len(self.buffer) * len(self.buffer)
        began = time.perf_counter()
        while at < end:
            at += os.preadv(self.file.fd, [self.buffer], at)
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
        # mmap memory is page aligned, which O_DIRECT needs.
        self.slots = [np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) for _ in range(2)]

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
            arm = PlainArm(path, mib * MIB)
            begin = attempt * 256 * MIB % nbytes
            best[mib] = min(best[mib], arm.seconds(begin, min(begin + 256 * MIB, nbytes)))
            arm.close()
    click.echo(
        "plain loop, GB/s by MiB: " + "  ".join(f"{m}: {0.268 / s:.2f}" for m, s in best.items())
    )
    return min(best, key=best.get)


def compare(index: ExpertIndex, rounds: int, settings: list[Setting], group: int) -> None:
    """Arms alternate layer by layer: a disk that slows down for a second slows down all."""
    path = index.checkpoint.files[0].path
    block = best_block(path, index.nbytes)
    plain = PlainArm(path, block * MIB)
    ours = {s: ReaderArm(index, s[0], s[1] * MIB, group) for s in settings}
    arms: list[Setting | None] = [None, *settings]
    seconds: dict[Setting | None, list[float]] = {arm: [0.0] * rounds for arm in arms}
    shuffler = random.Random(0)
    for r in range(rounds):
        for layer in range(len(index.layers)):
            # Not in rotation: each arm must follow each other one equally often.
            for arm in shuffler.sample(arms, len(arms)):
                took = (
                    plain.seconds(*layer_range(index, layer))
                    if arm is None
                    else ours[arm].seconds(layer)
                )
                seconds[arm][r] += took
    read = {s: arm.reader.counters.bytes / (rounds * index.nbytes) for s, arm in ours.items()}
    for arm in (plain, *ours.values()):
        arm.close()
    report(index.nbytes, block, group, seconds, read)


def report(
    nbytes: int,
    block: int,
    group: int,
    seconds: dict[Setting | None, list[float]],
    read: dict[Setting, float],
) -> None:
    speed = {arm: [nbytes / s / 1e9 for s in took] for arm, took in seconds.items()}
    ratio = {arm: [a / b for a, b in zip(speed[arm], speed[None], strict=True)] for arm in read}
    rounds = len(speed[None])
    click.echo(f"{nbytes / 1e9:.2f} GB of experts, {rounds} rounds; median (min .. max)")
    click.echo(f"plain, 1 thread, {block} MiB        GB/s {median_and_spread(speed[None])}")
    for threads, mib in read:
        mine = (threads, mib)
        click.echo(
            f"reader, {threads} threads, {mib} MiB      GB/s {median_and_spread(speed[mine])}"
        )
        click.echo(f"                    reader/plain {median_and_spread(ratio[mine])}")
    result = {
        "bench": "reader",
        "machine": f"{platform.system()} {platform.machine()} {os.cpu_count()} cpu",
        "gb": round(nbytes / 1e9, 3),
        "rounds": rounds,
        "group": group,
        "plain_block_mib": block,
        "plain_gbs": round(statistics.median(speed[None]), 3),
        "reader": [
            {
                "threads": arm[0],
                "op_mib": arm[1],
                "gbs": round(statistics.median(speed[arm]), 3),
                "ratio": round(statistics.median(ratio[arm]), 3),
                "amplification": round(read[arm], 4),
            }
            for arm in read
        ],
    }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
