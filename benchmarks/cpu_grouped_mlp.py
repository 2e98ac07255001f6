"""How close the CPU backend's grouped expert MLP comes to numpy's own float32 SGEMM.

Ours runs as the backend runs it: packed weights, gathered tokens, activation, weighted sum, over
all of a read group's experts. The SGEMM arm multiplies the same rows with weights that somebody
else has dequantized before the clock runs, three products an expert and nothing else. It gets
numpy's best setting for each shape: one product at a time on all BLAS threads, or one thread a
product and experts in parallel; rows or columns first. Arms alternate in one run. GFLOPS count
2 * rows * 3 * D * F for both. Prints a table and one JSON line.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import click
import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwiGLU
from threadpoolctl import threadpool_limits

from mlx_stream.backends.cpu.activations import resolve_activation
from mlx_stream.backends.cpu.grouped_mlp import ExpertJob, ExpertWeights, MlpSpec, grouped_mlp
from mlx_stream.backends.cpu.pool import WorkerPool, default_threads
from mlx_stream.storage.quant_spec import QuantSpec

FORMATS = {
    "affine 4-bit g64": QuantSpec("affine", 4, 64),
    "mxfp4": QuantSpec("mxfp4", 4, 32),
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PASS_ROWS = 256  # rows an expert that a timing takes, over all its passes
Arm = Callable[[], int]  # computes, and says how many FLOPs
Key = tuple[str, int]  # format or way of asking numpy, rows per expert
Dense = dict[str, np.ndarray]  # by projection, float32 [outputs, inputs]


@dataclass(frozen=True)
class Shapes:
    """The experts of one read group, and how many tokens are routed to each."""

    experts: int  # G
    dims: int  # D
    hidden: int  # F
    top_k: int = 8

    def matrix(self, projection: str) -> tuple[int, int]:
        """(outputs, inputs) of a projection."""
        return (self.dims, self.hidden) if projection == "down_proj" else (self.hidden, self.dims)

    def flops(self, rows: int) -> int:
        """Of one pass over all experts with `rows` rows each: three products a row."""
        return 2 * self.experts * rows * 3 * self.dims * self.hidden


@dataclass(frozen=True)
class Group:
    """Weights of a read group in one packing, and the same weights in float32."""

    spec: QuantSpec
    packed: list[ExpertWeights]
    dtypes: Mapping[tuple[str, str], str]
    dense: list[Dense]


def make_group(shapes: Shapes, spec: QuantSpec) -> Group:
    """Random experts, packed and dequantized by MLX."""
    packed, dense, dtypes = [], [], {}
    for expert in range(shapes.experts):
        parts, matrices = {}, {}
        for p, name in enumerate(PROJECTIONS):
            key = mx.random.key(expert * len(PROJECTIONS) + p)
            w = 0.02 * mx.random.normal(shapes.matrix(name), dtype=mx.bfloat16, key=key)
            arrays = mx.quantize(w, spec.group_size, spec.bits, mode=spec.mode)
            floats = [a.astype(mx.float32) if a.dtype == mx.bfloat16 else a for a in arrays]
            matrix = mx.dequantize(
                *floats, group_size=spec.group_size, bits=spec.bits, mode=spec.mode
            )
            matrices[name] = np.array(matrix.astype(mx.float32))
            for part, array in zip(("weight", "scales", "biases"), arrays, strict=False):
                bf16 = array.dtype == mx.bfloat16
                parts[name, part] = np.array(array.view(mx.uint16) if bf16 else array)
                dtypes[name, part] = {mx.bfloat16: "BF16", mx.uint8: "U8"}.get(array.dtype, "U32")
        packed.append(parts)
        dense.append(matrices)
    return Group(spec, packed, dtypes, dense)


class OurArm:
    """The backend's work on one read group: gather, MLP, weighted sum into the tokens' rows."""

    def __init__(self, shapes: Shapes, group: Group, rows: int, pool: WorkerPool) -> None:
        self.group, self.pool, self.rows = group, pool, 0
        self.spec = MlpSpec(
            kind="glu",
            quant=dict.fromkeys(PROJECTIONS, group.spec),
            activation=resolve_activation(SwiGLU()),
            mlx_activation=SwiGLU(),
            input_dims=shapes.dims,
            hidden_dims=shapes.hidden,
        )
        rng = np.random.default_rng(0)
        tokens = max(rows, shapes.experts * rows // shapes.top_k)
        self.x = rng.standard_normal((tokens, shapes.dims), dtype=np.float32)
        self.y = np.zeros_like(self.x)
        self.routed = [
            np.sort(rng.choice(tokens, rows, replace=False)) for _ in range(shapes.experts)
        ]
        self.scores = [rng.random((rows, 1), dtype=np.float32) for _ in self.routed]
        self.jobs = [self._job(e) for e in range(shapes.experts)]

    def __call__(self) -> int:
        """One pass over all experts, added to y; the FLOPs of the rows that came back."""
        self.rows = 0
        grouped_mlp(self.jobs, self.spec, self.group.dtypes, self.pool)
        return self.rows * 2 * 3 * self.spec.input_dims * self.spec.hidden_dims

    def _job(self, expert: int) -> ExpertJob:
        tokens, scores = self.routed[expert], self.scores[expert]

        def load(x: np.ndarray) -> None:
            np.take(self.x, tokens, axis=0, out=x)

        def store(y: np.ndarray) -> None:
            self.rows += len(y)
            self.y[tokens] += y * scores

        return ExpertJob(self.group.packed[expert], len(tokens), load, store)


class SgemmArm:
    """Three float32 products an expert through numpy, and nothing else."""

    def __init__(
        self, shapes: Shapes, dense: Sequence[Dense], rows: int, *, workers: int, columns: bool
    ) -> None:
        """workers: 0 for one product at a time on all BLAS threads. columns: w x, not x wT."""
        self.dense, self.columns, self.workers = dense, columns, workers
        self.x = self._filled(rows, shapes.dims, len(dense))
        self.h = self._filled(rows, shapes.hidden, len(dense))
        self.out = {
            name: self._filled(rows, shapes.matrix(name)[0], max(workers, 1))
            for name in PROJECTIONS
        }

    @contextmanager
    def ready(self) -> Iterator[Arm]:
        """The arm, with its threads started and BLAS limited outside of what is timed."""
        if not self.workers:
            with threadpool_limits(default_threads(), user_api="blas"):
                yield lambda: self._multiply(0, 1)
            return
        steps = [self.workers] * self.workers
        with (
            ThreadPoolExecutor(self.workers) as pool,
            threadpool_limits(1, user_api="blas"),
        ):
            list(pool.map(time.sleep, [0.01] * self.workers))  # start every thread
            yield lambda: sum(pool.map(self._multiply, range(self.workers), steps))

    def _filled(self, rows: int, width: int, n: int) -> np.ndarray:
        shape = (n, width, rows) if self.columns else (n, rows, width)
        return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)

    def _multiply(self, first: int, step: int) -> int:
        """Every step-th expert; the FLOPs of the operands multiplied."""
        flops = 0
        for e in range(first, len(self.dense), step):
            for name in PROJECTIONS:
                x = self.h[e] if name == "down_proj" else self.x[e]
                w, out = self.dense[e][name], self.out[name][first]
                if self.columns:
                    np.matmul(w, x, out=out)
                else:
                    np.matmul(x, w.T, out=out)
                flops += 2 * out.size * w.shape[1]
        return flops


def sgemm_arms(shapes: Shapes, dense: Sequence[Dense], rows: int) -> dict[str, SgemmArm]:
    """Every way of asking numpy for the same products, by name."""
    threads = default_threads()
    ways = {f"1 call x {threads} threads": 0}
    if threads > 1:
        ways[f"{threads} calls x 1 thread"] = threads
    return {
        f"{way}, {'w x' if columns else 'x wT'}": SgemmArm(
            shapes, dense, rows, workers=workers, columns=columns
        )
        for way, workers in ways.items()
        for columns in (False, True)
    }


@contextmanager
def our_arm(arm: OurArm) -> Iterator[Arm]:
    """As `SgemmArm.ready`; the backend limits BLAS by itself."""
    yield arm


def timed(context: AbstractContextManager[Arm], flops: int, passes: int) -> float:
    """GFLOPS of `passes` passes of `flops` each."""
    with context as arm:
        began = time.perf_counter()
        counted = sum(arm() for _ in range(passes))
        seconds = time.perf_counter() - began
    assert counted == passes * flops, f"computed {counted} FLOPs, expected {passes * flops}"
    return counted / seconds / 1e9


def measure(
    shapes: Shapes, row_counts: Sequence[int], rounds: int, threads: int | None = None
) -> list[dict[str, object]]:
    """One result a format and row count; every arm of all of them once a round, shuffled."""
    groups = {name: make_group(shapes, spec) for name, spec in FORMATS.items()}
    dense = next(iter(groups.values())).dense
    with WorkerPool(threads) as pool:
        ours = {
            (name, rows): OurArm(shapes, group, rows, pool)
            for name, group in groups.items()
            for rows in row_counts
        }
        sgemm = {
            (way, rows): arm
            for rows in row_counts
            for way, arm in sgemm_arms(shapes, dense, rows).items()
        }
        rates = run_rounds(shapes, ours, sgemm, rounds)
    return [summarize(rates, list(sgemm), name, rows) for name, rows in ours]


def run_rounds(
    shapes: Shapes, ours: dict[Key, OurArm], sgemm: dict[Key, SgemmArm], rounds: int
) -> dict[Key, list[float]]:
    """GFLOPS by arm and round, after one round that does not count.

    Arms of equal row counts follow each other: what slows the machine down for a second hits them
    all. Few rows take several passes, so that all timings are about equally long.
    """
    rates: dict[Key, list[float]] = {key: [] for key in (*ours, *sgemm)}
    row_counts = dict.fromkeys(rows for _, rows in ours)
    shuffler = random.Random(0)
    for _ in range(rounds + 1):
        for rows in row_counts:
            keys = [key for key in rates if key[1] == rows]
            for key in shuffler.sample(keys, len(keys)):
                context = our_arm(ours[key]) if key in ours else sgemm[key].ready()
                rates[key].append(timed(context, shapes.flops(rows), -(-PASS_ROWS // rows)))
    return {key: values[1:] for key, values in rates.items()}


def summarize(
    rates: dict[Key, list[float]], sgemm: Sequence[Key], name: str, rows: int
) -> dict[str, object]:
    """Ours against the way of asking numpy that has the best median for these shapes."""
    ways = {key: statistics.median(rates[key]) for key in sgemm if key[1] == rows}
    best = max(ways, key=ways.__getitem__)
    ratios = [a / b for a, b in zip(rates[best], rates[name, rows], strict=True)]
    return {
        "format": name,
        "rows": rows,
        "ours": spread(rates[name, rows]),
        "sgemm": spread(rates[best]),
        "sgemm_way": best[0],
        "sgemm_ways": {way: round(median, 3) for (way, _), median in ways.items()},
        "ratio": spread(ratios),
    }


def spread(values: Sequence[float]) -> list[float]:
    """[median, smallest, largest]."""
    return [round(v, 3) for v in (statistics.median(values), min(values), max(values))]


def cell(values: object, digits: int) -> str:
    """Median and range."""
    median, low, high = (f"{v:.{digits}f}" for v in values)
    return f"{median} ({low} .. {high})"


@click.command(help=__doc__)
@click.option("--experts", default=16, show_default=True, help="Of the read group.")
@click.option("--dims", default=2048, show_default=True, help="Hidden size D.")
@click.option("--hidden", default=768, show_default=True, help="Intermediate size F.")
@click.option("--rows", default="64,128,256", show_default=True, help="Rows per expert.")
@click.option("--rounds", default=11, show_default=True)
def main(experts: int, dims: int, hidden: int, rows: str, rounds: int) -> None:
    """Alternate the arms and print rates and ratios."""
    shapes = Shapes(experts, dims, hidden)
    results = measure(shapes, [int(r) for r in rows.split(",")], rounds)
    click.echo(f"{experts} experts of {dims} x {hidden}; median (min .. max) of {rounds} rounds")
    click.echo(f"{'format':18}{'rows':>5}{'ours GFLOPS':>26}{'SGEMM GFLOPS':>26}{'ratio':>23}  way")
    for r in results:
        click.echo(
            f"{r['format']:18}{r['rows']:5}{cell(r['ours'], 1):>26}{cell(r['sgemm'], 1):>26}"
            f"{cell(r['ratio'], 2):>23}  {r['sgemm_way']}"
        )
    machine = f"{platform.system()} {platform.machine()} {os.cpu_count()} cpu"
    summary = {"bench": "cpu_grouped_mlp", "machine": machine, "rounds": rounds}
    click.echo(json.dumps({**summary, **vars(shapes), "results": results}))


if __name__ == "__main__":
    main()
