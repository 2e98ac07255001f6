"""``mlx_stream bench``: measure prompts and decoding on this machine, arms side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mlx_stream.bench.arms import LAYER_MAJOR, Arm, Setting, sweep
from mlx_stream.config import BACKENDS, IO_MODES, parse_bytes, parse_throttle
from mlx_stream.errors import MlxStreamError

EXAMPLES = """
\b
Examples:
  mlx_stream bench
  mlx_stream bench --model ./checkpoint --tokens 1024,4096 --chunks 512 --plots plots
  mlx_stream bench --model ./checkpoint --budgets 2GB,8GB --orders layer-major,decode
  mlx_stream bench --model ./checkpoint --tokens 4096 --chunks 512 --throttle-reads 1GB/s

Arms run in rounds, each round in another order; the table shows medians and the spread. Reads
bypass the page cache where the system allows it, and the granted mode is shown. Random token ids
are the prompt, so every expert is used.
"""
WIDTH = 124  # of a table that goes to a file
DEMO_ORDERS = "layer-major,chunk-major,stock mlx-lm,read only,compute only,decode"


@dataclass(frozen=True)
class BenchOptions:
    """The flags of one run, as given."""

    model: str | None
    tokens: str
    chunks: str
    budgets: str | None
    orders: str
    io: str
    throttle_reads: str | None
    backend: str
    new_tokens: int
    stock_tokens: int
    rounds: int
    json: bool
    csv: Path | None
    plots: Path | None
    trust_remote_code: bool


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", help="Folder or hub repo id; omitted: the embedded demo model.")
@click.option("--tokens", default="256,1024,4096", show_default=True, help="Prompt lengths.")
@click.option("--chunks", default="512", show_default=True, help="Chunk sizes.")
@click.option("--budgets", help="Memory budgets, such as 2GB,8GB; default: 4GB or what is free.")
@click.option("--orders", default=DEMO_ORDERS, show_default=True, help="What to run.")
@click.option("--io", default="direct", show_default=True, help="direct, buffered or both.")
@click.option("--throttle-reads", help="Read no faster than '1GB/s', or '0.5GB/s:100us'.")
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option("--new-tokens", default=32, show_default=True, help="Decoded in the decode arm.")
@click.option(
    "--stock-tokens",
    default=1024,
    show_default=True,
    help="Longest prompt for stock mlx-lm, which holds everything in memory; 0 leaves it out.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--json", is_flag=True, help="One JSON line on standard output, nothing else.")
@click.option("--csv", type=click.Path(path_type=Path, dir_okay=False), help="Append to a CSV.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="PNG folder.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def bench(**flags: Any) -> None:
    """Measure prefill and decode on this machine: ours, chunk by chunk, stock mlx-lm."""
    _bench(BenchOptions(**flags))


def _bench(options: BenchOptions) -> None:
    settings = _settings(options)
    arms = sweep(
        orders=_words(options.orders),
        tokens=_numbers("--tokens", options.tokens),
        chunks=_numbers("--chunks", options.chunks),
        settings=settings,
        new_tokens=options.new_tokens,
        stock_tokens=options.stock_tokens,
    )
    _check_targets(options)
    from mlx_stream.bench import report
    from mlx_stream.bench.plots import write_plots
    from mlx_stream.bench.results import collect
    from mlx_stream.bench.runner import open_runner
    from mlx_stream.hub import resolve_model

    path = resolve_model(options.model, trust_remote_code=options.trust_remote_code)
    console = Console(stderr=options.json)
    if not console.is_terminal:
        console = Console(stderr=options.json, width=WIDTH)
    name = options.model or "demo"
    prompt = _prompt(path, max(arm.tokens for arm in arms))
    with open_runner(path, prompt, _forecaster()) as runner, console.status("") as status:

        def progress(done: int, of: int, arm: Arm) -> None:
            status.update(f"{done}/{of}  {arm}")

        results = collect(list(runner.run(arms, options.rounds, progress)))
        drawn = next((a for a in reversed(arms) if a.order == LAYER_MAJOR), None)
        timeline = runner.timeline(drawn) if options.plots and drawn else None
    console.print(f"{name} on {report.machine()}")
    console.print(report.table(results))
    for sentence in report.findings(results):
        console.print(f"- {sentence}")
    if options.csv is not None:
        report.append_csv(options.csv, results, name)
    if options.plots is not None:
        for file in write_plots(options.plots, results, timeline, f"{name}, {report.machine()}"):
            console.print(f"wrote {file}")
    if options.json:
        click.echo(report.as_json(results, name))


def _settings(options: BenchOptions) -> list[Setting]:
    if options.throttle_reads is not None:
        parse_throttle(options.throttle_reads)
    ios = IO_MODES if options.io == "both" else (options.io,)
    if not set(ios) <= set(IO_MODES):
        raise click.UsageError(f"--io must be direct, buffered or both, not {options.io!r}.")
    if options.budgets is None:
        from mlx_stream.planner.free_memory import default_budget

        budgets: Sequence[int] = (min(4 * 10**9, default_budget(None)[0]),)
    else:
        budgets = [parse_bytes(word) for word in _words(options.budgets)]
    return [Setting(b, io, options.throttle_reads, options.backend) for b in budgets for io in ios]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.UsageError(f"{flag} takes whole numbers such as 512,2048, not {text!r}.")
    return numbers


def _check_targets(options: BenchOptions) -> None:
    """Before any work: minutes later would be too late to say so."""
    if options.csv is None:
        return
    folder = options.csv.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MlxStreamError(
            "the CSV cannot be written",
            file=options.csv,
            actual="no such folder, or it is not writable",
            remedy="choose a writable folder for --csv",
        )


def _prompt(path: Path, tokens: int) -> list[int]:
    """Random ids: a prompt that uses every expert, the same each time."""
    import numpy as np

    from mlx_stream.planner.model_shape import model_shape
    from mlx_stream.storage.checkpoint import open_checkpoint
    from mlx_stream.storage.expert_index import build_expert_index

    checkpoint = open_checkpoint(path)
    shape = model_shape(checkpoint.config, build_expert_index(checkpoint))
    return np.random.default_rng(0).integers(0, shape.vocab, tokens).tolist()


def _forecaster() -> Any:
    """Seconds that the plan of an arm promises; None without a machine profile."""
    from mlx_stream.planner.forecast import forecast_for
    from mlx_stream.planner.machine_profile import load_default

    profile = load_default()

    def seconds(engine: Any, arm: Arm) -> float | None:
        if profile is None:
            return None
        plan = engine.plan(arm.tokens)
        known = profile
        if arm.setting.throttle is not None:
            known = profile.with_reads_at_most(parse_throttle(arm.setting.throttle)[0])
        config = engine.index.checkpoint.config
        return forecast_for(engine.index, config, plan, known).ttft_seconds

    return seconds
