"""Does the forecast hold? Predicted against measured time to the first token, over many shapes.

A point is CHECKPOINT:TOKENS:BUDGET[:THROTTLE], such as ./q:2048:4GB or ./q:256:4GB:1GB/s.
Points given by --fit were looked at while the forecast was written; those given by --verify were
not, and are listed apart. Rates come from the profile that `mlx_stream probe` saved. Loading is
not part of either number.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from mlx_stream.config import StreamConfig, parse_throttle
from mlx_stream.engine import Engine
from mlx_stream.planner.forecast import Forecast, forecast_for
from mlx_stream.planner.machine_profile import (
    MachineProfile,
    default_profile_path,
)

GOOD = 0.2  # of the measured time
WARM_TOKENS = 100


@dataclass(frozen=True)
class Point:
    """One prompt on one checkpoint."""

    model: Path
    tokens: int
    budget: str
    throttle: str | None

    @classmethod
    def parse(cls, text: str) -> Point:
        """From the command line."""
        model, tokens, budget, *throttle = text.split(":")
        return cls(Path(model), int(tokens), budget, ":".join(throttle) or None)

    @property
    def engine(self) -> tuple[Path, str, str | None]:
        """What needs an engine of its own."""
        return self.model, self.budget, self.throttle


@dataclass(frozen=True)
class Outcome:
    """What was predicted and what came."""

    model: str
    tokens: int
    budget: str
    throttle: str | None
    mode: str
    groups: int
    slots: int
    segments: int
    bound: str
    reads: float
    computes: float
    predicted: float
    measured: float
    runs: tuple[float, ...]
    measured_reads: float
    measured_stall: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def good(self) -> bool:
        """Within 20%."""
        return abs(self.ratio - 1) <= GOOD


def run_points(points: Sequence[Point], profile: MachineProfile, rounds: int) -> Iterator[Outcome]:
    """In order; points that follow each other and share an engine share it."""
    engine: Engine | None = None
    held = None
    try:
        for point in points:
            if point.engine != held:
                if engine is not None:
                    engine.close()
                config = StreamConfig.build(
                    memory_budget=point.budget, throttle=point.throttle, prerouter="off"
                )
                engine, held = Engine(point.model, config), point.engine
                engine.prefill(_prompt(engine, WARM_TOKENS))
            assert engine is not None
            yield measure(engine, point, profile, rounds)
    finally:
        if engine is not None:
            engine.close()


def _prompt(engine: Engine, tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(2, 1000, tokens)


def predict(engine: Engine, point: Point, profile: MachineProfile) -> Forecast:
    """Before anything runs."""
    if point.throttle is not None:
        profile = profile.with_reads_at_most(parse_throttle(point.throttle)[0])
    index = engine.index
    return forecast_for(index, index.checkpoint.config, engine.plan(point.tokens), profile)


def measure(engine: Engine, point: Point, profile: MachineProfile, rounds: int) -> Outcome:
    """The prediction, then the median of the runs."""
    plan, found = engine.plan(point.tokens), predict(engine, point, profile)
    ids = _prompt(engine, point.tokens)
    receipts = [engine.prefill(ids).receipt for _ in range(rounds)]
    return Outcome(
        model=point.model.name,
        tokens=point.tokens,
        budget=point.budget,
        throttle=point.throttle,
        mode=plan.mode,
        groups=len(plan.layers[0].groups),
        slots=plan.slots,
        segments=len(plan.segments),
        bound=found.bound,
        reads=found.read_seconds,
        computes=found.compute_seconds,
        predicted=found.ttft_seconds,
        measured=statistics.median(r.wall_seconds for r in receipts),
        runs=tuple(r.wall_seconds for r in receipts),
        measured_reads=statistics.median(r.read_seconds for r in receipts),
        measured_stall=statistics.median(r.stall_seconds for r in receipts),
    )


HEADER = (
    f"{'checkpoint':<15}{'tokens':>7} {'budget':>7} {'disk':>8} {'mode':<7}{'g/s/seg':>10} "
    f"{'bound':<8}{'reads':>7}{'compute':>8}{'forecast':>9}{'measured':>9}  ratio"
)


def row(o: Outcome) -> str:
    """One line of the table."""
    shape = f"{o.groups}/{o.slots}/{o.segments}"
    spread = f"  ({min(o.runs):.2f} to {max(o.runs):.2f})" if len(o.runs) > 1 else ""
    return (
        f"{o.model:<15}{o.tokens:>7} {o.budget:>7} {o.throttle or '':>8} {o.mode:<7}{shape:>10} "
        f"{o.bound:<8}{o.reads:>7.2f}{o.computes:>8.2f}{o.predicted:>9.2f}{o.measured:>9.2f}  "
        f"{o.ratio:.2f}{'' if o.good else ' !'}  reads {o.measured_reads:.2f} "
        f"stall {o.measured_stall:.2f}{spread}"
    )


@click.command(help=__doc__)
@click.option("--fit", multiple=True, help="A point that was used while writing the forecast.")
@click.option("--verify", multiple=True, help="A point that was not.")
@click.option("--profile", type=click.Path(path_type=Path, exists=True), default=None)
@click.option("--rounds", default=2, show_default=True)
def main(fit: tuple[str, ...], verify: tuple[str, ...], profile: Path | None, rounds: int) -> None:
    """Run the points, print the tables and one JSON line."""
    rates = MachineProfile.load(profile or default_profile_path())
    done: dict[str, list[Outcome]] = {}
    for name, texts in (("fit", fit), ("verify", verify)):
        if not texts:
            continue
        click.echo(f"{name}\n{HEADER}")
        done[name] = []
        for outcome in run_points([Point.parse(t) for t in texts], rates, rounds):
            done[name].append(outcome)
            click.echo(row(outcome))
        good = sum(o.good for o in done[name])
        click.echo(f"{good} of {len(texts)} within {GOOD:.0%}")
    click.echo(
        json.dumps(
            {
                "machine": rates.machine,
                "profile": rates.created,
                **{k: [asdict(o) | {"ratio": o.ratio} for o in v] for k, v in done.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
