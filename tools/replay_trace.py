"""Replay routing traces against caches of several sizes: hit rates and bytes, policy by policy.

Traces come from `mlx_stream trace`. Figures of several traces are summed, so a ratio is one of
total bytes. `belady` starts empty and `belady+oracle` with the experts that decode uses first: both
are bounds, not policies. `streamlx` is that engine's cache (an LRU a layer, equal bytes each);
`streamlx+rest` also uses the slots that do not divide evenly.

\b
Examples:
  python tools/replay_trace.py demo.npz
  python tools/replay_trace.py demo.npz --budgets 25% --policies lfu --seeds none,weighted
  python tools/replay_trace.py choose*.npz --save-hot-list hot.json
  python tools/replay_trace.py report.npz --hot-list hot.json --json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.config import ConfigError, format_bytes, parse_bytes  # noqa: E402
from mlx_stream.decode.hot_list import HotList  # noqa: E402
from mlx_stream.decode.policy import POLICIES  # noqa: E402
from mlx_stream.decode.replay import (  # noqa: E402
    BELADY,
    ORACLE_SEED,
    STREAMLX,
    ReplayResult,
    replay,
    replay_per_layer_lru,
)
from mlx_stream.decode.routing_trace import RoutingTrace  # noqa: E402
from mlx_stream.decode.seed_policy import DEFAULT_SEED_POLICY, SEED_POLICIES  # noqa: E402
from mlx_stream.errors import MlxStreamError  # noqa: E402

SPANS = (32, 64, 128, 512)
STREAMLX_REST = "streamlx+rest"
BELADY_ORACLE = "belady+oracle"
PEERS = {STREAMLX, STREAMLX_REST}
BOUNDS = {BELADY: "none", BELADY_ORACLE: ORACLE_SEED}
HOT_LIST = "hot-list"


@dataclass(frozen=True)
class Row:
    """One policy and seed at one budget, over all traces; lists have an entry a span."""

    budget: str
    policy: str
    seed: str
    hit_rate: list[float]
    bytes_per_token: list[float]
    to_streamlx: list[float | None]
    to_belady: list[float | None]


def capacity_nbytes(trace: RoutingTrace, budget: str) -> int:
    """Bytes of a budget: a share of all experts such as ``25%``, or a size such as ``4GB``."""
    if budget.endswith("%"):
        try:
            return int(trace.total_nbytes * float(budget[:-1]) / 100)
        except ValueError as error:
            raise click.UsageError(f"--budgets {budget!r}: expected for example 25%") from error
    try:
        return parse_bytes(budget)
    except ConfigError as error:
        raise click.UsageError(f"--budgets {budget!r}: {error.problem}") from error


def replay_all(
    traces: Sequence[RoutingTrace], policy: str, seed: str | HotList, budget: str
) -> ReplayResult:
    """The sum of all traces' replays, token by token, over as many tokens as all have."""
    steps = min(t.steps for t in traces)
    results = []
    for trace in traces:
        nbytes = capacity_nbytes(trace, budget)
        if policy in PEERS:
            rest = policy == STREAMLX_REST
            results.append(replay_per_layer_lru(trace, nbytes, tokens=steps, spread_rest=rest))
        else:
            name = policy.partition("+")[0]
            results.append(replay(trace, name, nbytes, seed=seed, tokens=steps))
    return ReplayResult(
        *(np.sum([getattr(r, f) for r in results], 0) for f in ("hits", "misses", "nbytes"))
    )


def make_rows(
    traces: Sequence[RoutingTrace],
    budget: str,
    policies: Sequence[str],
    seeds: Sequence[str],
    hot_list: HotList | None,
) -> list[Row]:
    """A row for each policy and seed, the peer first and the bounds last."""
    steps = min(t.steps for t in traces)
    spans = [s for s in SPANS if s < steps] + [steps]
    runs = {(p, "own"): replay_all(traces, p, "none", budget) for p in (STREAMLX, STREAMLX_REST)}
    named: dict[str, str | HotList] = {seed: seed for seed in seeds}
    if hot_list is not None:
        named[HOT_LIST] = hot_list
    for policy in policies:
        for name, seed in named.items():
            runs[policy, name] = replay_all(traces, policy, seed, budget)
    for bound, name in BOUNDS.items():
        runs[bound, name] = replay_all(traces, bound, name, budget)
    peer, best = runs[STREAMLX, "own"], runs[BELADY, "none"]

    def ratios(result: ReplayResult, to: ReplayResult) -> list[float | None]:
        pairs = [(result.nbytes[:s].sum(), to.nbytes[:s].sum()) for s in spans]
        return [float(a / b) if b else None for a, b in pairs]

    return [
        Row(
            budget,
            policy,
            seed,
            [result.hit_rate(s) for s in spans],
            [result.nbytes_per_token(s) / len(traces) for s in spans],
            ratios(result, peer),
            ratios(result, best),
        )
        for (policy, seed), result in runs.items()
    ]


def show(rows: Sequence[Row], spans: Sequence[int], console: Console) -> None:
    """One table a budget."""
    for budget in dict.fromkeys(row.budget for row in rows):
        table = Table(title=f"cache of {budget} of the experts; first {spans} tokens")
        for column in ("policy", "seed", "hit rate", "read a token", "/ streamlx", "/ belady"):
            table.add_column(column, no_wrap=True)
        for row in rows:
            if row.budget == budget:
                table.add_row(
                    row.policy,
                    row.seed,
                    " ".join(f"{100 * v:5.1f}" for v in row.hit_rate),
                    " ".join(format_bytes(round(v)) for v in row.bytes_per_token),
                    _join(row.to_streamlx),
                    _join(row.to_belady),
                )
        console.print(table)


def _join(values: Sequence[float | None]) -> str:
    return " ".join("  -  " if v is None else f"{v:5.3f}" for v in values)


def _names(text: str, known: Sequence[str], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise click.UsageError(f"{option}: known are {', '.join(known)}")
    return names


@click.command(help=__doc__)
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--budgets", default="100%,50%,25%,12%", show_default=True)
@click.option("--policies", default=",".join(POLICIES), show_default=True)
@click.option("--seeds", default=DEFAULT_SEED_POLICY, show_default=True, help=str(SEED_POLICIES))
@click.option("--hot-list", "hot_list_file", type=click.Path(path_type=Path), help="One more seed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of tables.")
@click.option("--save-hot-list", type=click.Path(path_type=Path, dir_okay=False))
def main(
    traces: tuple[Path, ...],
    budgets: str,
    policies: str,
    seeds: str,
    hot_list_file: Path | None,
    as_json: bool,
    save_hot_list: Path | None,
) -> None:
    """Load, replay, report."""
    try:
        loaded = [RoutingTrace.load(path) for path in traces]
        hot_list = None if hot_list_file is None else HotList.load(hot_list_file)
        if save_hot_list is not None:
            HotList.from_traces(loaded).save(save_hot_list)
            click.echo(f"{save_hot_list}: hot list of {len(loaded)} traces", err=True)
            return
        steps = min(t.steps for t in loaded)
        if not steps:
            raise click.UsageError("a trace has no decoded tokens")
        rows: list[Row] = []
        for budget in [b.strip() for b in budgets.split(",") if b.strip()]:
            rows += make_rows(
                loaded,
                budget,
                _names(policies, POLICIES, "--policies"),
                _names(seeds, SEED_POLICIES, "--seeds"),
                hot_list,
            )
    except MlxStreamError as error:
        raise click.ClickException(str(error)) from error
    spans = [s for s in SPANS if s < steps] + [steps]
    if as_json:
        content = {
            "traces": [p.name for p in traces],
            "spans": spans,
            "rows": list(map(vars, rows)),
        }
        click.echo(json.dumps(content))
    else:
        show(rows, spans, Console(width=None if sys.stdout.isatty() else 160))


if __name__ == "__main__":
    main()
