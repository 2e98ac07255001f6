"""``mlx_stream plan``: will this model be usable here, with prompts of these lengths?"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mlx_stream.click_options import add_options
from mlx_stream.config import BACKENDS, format_bytes, parse_bytes
from mlx_stream.errors import BudgetError
from mlx_stream.planner.decode_bounds import cached_tokens_per_second, uniform_hit_rate
from mlx_stream.planner.forecast import Forecast, forecast_for
from mlx_stream.planner.free_memory import default_budget
from mlx_stream.planner.machine_profile import MachineProfile, load_default
from mlx_stream.planner.outline import ModelOutline, open_outline
from mlx_stream.prefill.schedule import PrefillPlan

WIDTH = 110  # of a table that goes to a file
NO_PROFILE = "no forecast: run `mlx_stream probe` once, it measures this machine in about a minute"


@dataclass(frozen=True)
class Outlook:
    """One prompt length: a plan and what to expect of it, or why there is none.

    Attributes:
        decode: tokens a second that the disk allows, without any cache and with the plan's.
    """

    prompt_tokens: int
    plan: PrefillPlan | None
    forecast: Forecast | None
    decode: tuple[float, float] | None
    error: str | None = None
    largest_prompt: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "fits": self.plan is not None,
            "ttft_seconds": None,
        }
        if self.forecast is not None:
            found = self.forecast
            data |= {
                "ttft_seconds": found.ttft_seconds,
                "ttft_range_seconds": [found.low, found.high],
                "tokens_per_second": found.tokens_per_second,
                "read_seconds": found.read_seconds,
                "compute_seconds": found.compute_seconds,
                "bound": found.bound,
                "break_even_tokens": _finite(found.break_even_tokens),
                "advice": list(found.advice),
            }
        if self.plan is not None:
            memory = self.plan.memory
            data |= {
                "mode": self.plan.mode,
                "segments": len(self.plan.segments),
                "chunk_tokens": self.plan.chunk_tokens,
                "group_size": self.plan.group_size,
                "group_source": self.plan.group_source,
                "read_bytes": self.plan.planned_read_nbytes,
                "budget_bytes": memory.budget,
                "memory_bytes": {name: getattr(memory, name) for name in _PARTS},
                "notes": list(self.plan.notes),
            }
        if self.decode is not None:
            data["decode_tokens_per_second_by_disk"] = [_finite(v) for v in self.decode]
        if self.error is not None:
            data |= {"error": self.error, "largest_prompt_tokens": self.largest_prompt}
        return data


_PARTS = ("resident", "kv", "held", "transient", "scratch", "staging", "expert_cache")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def outlook(
    model: ModelOutline,
    prompt_tokens: int,
    *,
    budget: int,
    chunk_tokens: int,
    profile: MachineProfile | None,
) -> Outlook:
    """Plan and forecast of one prompt length."""
    try:
        plan = model.plan(prompt_tokens, budget=budget, chunk_tokens=chunk_tokens)
    except BudgetError as error:
        largest = model.largest_prompt(budget=budget, chunk_tokens=chunk_tokens)
        return Outlook(prompt_tokens, None, None, None, str(error), largest)
    if profile is None:
        return Outlook(prompt_tokens, plan, None, None)
    forecast = forecast_for(model.index, model.checkpoint.config, plan, profile)
    record = max(layer.expert_nbytes for layer in model.index.layers)
    disk = profile.read_bandwidth(record, order="random")
    hits = uniform_hit_rate(plan.memory.expert_cache, model.index.nbytes)
    decode = tuple(
        cached_tokens_per_second(disk, model.routed_nbytes, h) for h in (0.0, min(1.0, hits))
    )
    return Outlook(prompt_tokens, plan, forecast, (decode[0], decode[1]))


EXAMPLES = """
\b
Examples:
  mlx_stream plan ./checkpoint --prompt-tokens 8192
  mlx_stream plan mlx-community/Qwen3-30B-A3B-4bit -n 2048,8192,32768 --memory-budget 8GB
  mlx_stream plan --model mlx-community/Qwen3-30B-A3B-4bit --revision main --json

A hub repository is not downloaded: only its headers are fetched. Forecasts need the machine
profile that `mlx_stream probe` saves; --profile takes one from another machine.
"""


plan_options = add_options(
    (
        click.option(
            "--prompt-tokens",
            "-n",
            default="2048",
            show_default=True,
            help="Prompt lengths, such as 2048,8192.",
        ),
        click.option(
            "--memory-budget", help="Bytes, '4GB' or '4GiB'; default: a share of free memory."
        ),
        click.option("--chunk-tokens", type=click.IntRange(min=1), default=2048, show_default=True),
        click.option(
            "--group-size",
            type=click.IntRange(min=1),
            help="Experts of a read group.  [default: by what `mlx_stream probe` measured]",
        ),
        click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True),
        click.option(
            "--profile",
            type=click.Path(path_type=Path, exists=True, dir_okay=False),
            help="A machine profile.  [default: what `mlx_stream probe` saved]",
        ),
        click.option("--json", "as_json", is_flag=True, help="One JSON object a prompt length."),
    )
)


def run_plan(
    model: str | None,
    revision: str | None,
    prompt_tokens: str,
    memory_budget: str | None,
    chunk_tokens: int,
    group_size: int | None,
    backend: str,
    profile: Path | None,
    as_json: bool,
    progress: Callable[[int, int], None],
) -> None:
    """Print what to expect of every prompt length.

    Raises:
        BudgetError: none of them fits.
    """
    lengths = _lengths(prompt_tokens)
    budget = default_budget(None)[0] if memory_budget is None else parse_bytes(memory_budget)
    known = MachineProfile.load(profile) if profile is not None else load_default()
    outline = open_outline(
        model,
        revision=revision,
        itemsize=_itemsize(backend),
        group_size=group_size,
        profile=known,
        progress=progress,
    )
    found = [
        outlook(outline, n, budget=budget, chunk_tokens=chunk_tokens, profile=known)
        for n in lengths
    ]
    if as_json:
        for one in found:
            click.echo(json.dumps(one.as_dict()))
        return
    if all(one.plan is None for one in found):
        outline.plan(lengths[0], budget=budget, chunk_tokens=chunk_tokens)  # raises the reason
    _show(found, outline, budget, known)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise click.UsageError(f"--prompt-tokens takes numbers such as 2048,8192, not {text!r}.")
    return lengths


def _itemsize(backend: str) -> int:
    """Bytes of an activation: GPUs keep a 16-bit checkpoint's own."""
    gpu = backend in ("metal", "cuda") or (backend == "auto" and sys.platform == "darwin")
    return 2 if gpu else 4


def _show(
    found: Sequence[Outlook], outline: ModelOutline, budget: int, profile: MachineProfile | None
) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    index = outline.index
    console.print(
        f"{outline.checkpoint.path}: {format_bytes(index.nbytes)} of experts on disk, "
        f"{format_bytes(outline.resident_nbytes)} resident; budget {format_bytes(budget)}",
        highlight=False,
        soft_wrap=True,
    )
    if len(found) == 1 and found[0].plan is not None:
        console.print(str(found[0].plan), highlight=False, soft_wrap=True, markup=False)
    else:
        console.print(_table(found))
    for one in found:
        for line in _remarks(one):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    if profile is None:
        console.print(NO_PROFILE, highlight=False, soft_wrap=True)


def _remarks(one: Outlook) -> list[str]:
    head = f"{one.prompt_tokens} tokens: "
    if one.plan is None:
        largest = (
            f"the longest prompt that fits is about {one.largest_prompt} tokens"
            if one.largest_prompt
            else "no prompt fits"
        )
        return [f"warning: {head}does not fit; {largest}. {one.error}"]
    if one.forecast is None:
        return []
    lines = [head + str(one.forecast)]
    if math.isfinite(one.forecast.break_even_tokens):
        lines.append(
            "  break-even length: computing takes longer than reading all experts for prompts of "
            f"more than about {one.forecast.break_even_tokens:.0f} tokens"
        )
    if one.decode is not None:
        low, high = one.decode
        top = f"{high:.1f}" if math.isfinite(high) else "any speed (all experts fit)"
        lines.append(
            f"  decode: the disk alone would allow {low:.1f} tok/s without a cache, {top} with it"
        )
    return lines


def _table(found: Sequence[Outlook]) -> Table:
    table = Table(box=SIMPLE)
    for name in ("prompt", "first token", "range", "tok/s", "bound", "mode", "read", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found:
        if one.plan is None:
            table.add_row(str(one.prompt_tokens), "does not fit", *[""] * 6)
            continue
        plan, ahead = one.plan, one.forecast
        memory = plan.memory
        segments = f", {len(plan.segments)} segments" if len(plan.segments) > 1 else ""
        table.add_row(
            str(one.prompt_tokens),
            f"{ahead.ttft_seconds:.2f} s" if ahead else "?",
            f"{ahead.low:.2f}-{ahead.high:.2f}" if ahead else "?",
            f"{ahead.tokens_per_second:.0f}" if ahead else "?",
            ahead.bound if ahead else "?",
            f"{plan.mode}, {plan.chunk_tokens} a chunk{segments}",
            format_bytes(plan.planned_read_nbytes),
            format_bytes(memory.total),
        )
    return table
