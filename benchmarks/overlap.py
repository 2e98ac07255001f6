"""Does reading hide behind computing? Three arms of one prefill, alternated in one run.

read-only     the plan's reads through the staging ring, slots released at once
compute-only  the same prefill with its slots served from memory (no reads)
streamed      the real thing

Prints streamed / max(read-only, compute-only) with median and spread, in a shape of your choice:
many tokens make it compute-bound, few tokens or a throttled disk make it read-bound.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import click
import numpy as np

from mlx_stream.bench.isolated import PreloadedRing, preload, read_only
from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine


def summary(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):7.2f} s  ({min(values):.2f} to {max(values):.2f})"


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--tokens", default=2048, show_default=True)
@click.option("--memory-budget", default="4GB", show_default=True)
@click.option("--chunk-tokens", default=2048, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(model: Path, tokens: int, memory_budget: str, chunk_tokens: int, rounds: int) -> None:
    """Run the three arms and print their ratio."""
    ids = np.random.default_rng(0).integers(2, 1000, tokens)
    arms: dict[str, list[float]] = {"read-only": [], "compute-only": [], "streamed": []}
    # Short prompts would read only what they route to: here every arm streams everything.
    config = StreamConfig.build(
        memory_budget=memory_budget, chunk_tokens=chunk_tokens, union_tokens=0
    )
    engine = Engine(model, config)
    try:
        plan = engine.plan(tokens)
        click.echo(str(plan))
        filled = preload(engine, plan)
        engine.prefill(ids)
        for _ in range(rounds):
            arms["read-only"].append(read_only(engine, plan))
            ring = PreloadedRing(filled)
            arms["compute-only"].append(engine.run_plan(plan, ids, ring=ring)[1].wall_seconds)
            arms["streamed"].append(engine.prefill(ids).receipt.wall_seconds)
    finally:
        engine.close()
    report(arms, tokens)


def report(arms: dict[str, list[float]], tokens: int) -> None:
    """A table and one JSON line."""
    ratios = [
        s / max(r, c)
        for r, c, s in zip(arms["read-only"], arms["compute-only"], arms["streamed"], strict=True)
    ]
    for name, values in arms.items():
        click.echo(f"{name:<13} {summary(values)}")
    ratio = statistics.median(ratios)
    click.echo(f"streamed / max(read-only, compute-only): {ratio:.3f}")
    click.echo(json.dumps({"tokens": tokens, "arms": arms, "ratio": ratio, "ratios": ratios}))


if __name__ == "__main__":
    main()
