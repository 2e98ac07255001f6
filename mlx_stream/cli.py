"""The ``mlx_stream`` command."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from mlx_stream import __version__
from mlx_stream.bench.command import bench
from mlx_stream.cache_prompt import cache_prompt
from mlx_stream.chat import chat
from mlx_stream.config import format_bytes
from mlx_stream.doctor import doctor
from mlx_stream.generate import generate
from mlx_stream.pack_command import pack, repair, verify
from mlx_stream.plan_command import EXAMPLES as PLAN_EXAMPLES
from mlx_stream.plan_command import plan_options, run_plan
from mlx_stream.probe_command import probe
from mlx_stream.terminal import run_command
from mlx_stream.trace_command import trace

EXAMPLES = """
\b
Examples:
  mlx_stream generate --prompt "In the beginning"
  mlx_stream info ./checkpoint
  mlx_stream plan ./checkpoint --prompt-tokens 8192 --memory-budget 8GB
"""

MANY_SHARDS = 10  # above this, fetching their headers shows progress


@click.group(
    epilog=EXAMPLES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="mlx_stream")
@click.pass_context
def cli(context: click.Context) -> None:
    """Run Mixture-of-Experts models larger than memory by streaming their experts."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli.add_command(generate)
cli.add_command(chat)
cli.add_command(cache_prompt)
cli.add_command(doctor)
cli.add_command(bench)
cli.add_command(trace)
cli.add_command(probe)
cli.add_command(pack)
cli.add_command(verify)
cli.add_command(repair)


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The model as an argument or as --model, and --revision; the command gets one `model`."""

    @click.argument("model", required=False)
    @click.option("--model", "option", metavar="MODEL", help="The same as the argument MODEL.")
    @click.option("--revision", help="Branch, tag or commit of a hub repository.")
    @wraps(command)
    def run(model: str | None, option: str | None, **others: Any) -> None:
        if model and option and model != option:
            raise click.UsageError(f"two models: {model} and --model {option}")
        command(model=model or option, **others)

    return run


def header_progress() -> Callable[[int, int], None]:
    """Shows on a terminal how many headers have come, where there are many."""

    def show(done: int, total: int) -> None:
        if total > MANY_SHARDS and sys.stderr.isatty():
            end = "\n" if done == total else ""
            click.echo(f"\rheaders {done}/{total}{end}", nl=False, err=True)

    return show


@cli.command(epilog=PLAN_EXAMPLES)
@model_options
@plan_options
def plan(**flags: Any) -> None:
    """Show how prompts would run and how long they would take, from headers alone."""
    run_plan(**flags, progress=header_progress())


INFO_EXAMPLES = """
\b
Examples:
  mlx_stream info
  mlx_stream info mlx-community/Qwen3-30B-A3B-4bit
"""


@cli.command(epilog=INFO_EXAMPLES)
@model_options
def info(model: str | None, revision: str | None) -> None:
    """Show what a checkpoint holds: expert layers, sizes, quantization."""
    from mlx_stream.planner.model_headers import open_headers
    from mlx_stream.storage.expert_index import build_expert_index
    from mlx_stream.storage.remote_checkpoint import RemoteCheckpoint

    checkpoint = open_headers(model, revision=revision, progress=header_progress())
    index = build_expert_index(checkpoint)
    first = index.layers[0]
    click.echo(f"{checkpoint.path}")
    click.echo(f"  model type     {checkpoint.config.get('model_type')}")
    click.echo(f"  files          {len(checkpoint.files)}, {len(checkpoint.tensors)} tensors")
    click.echo(
        f"  expert layers  {len(index.layers)} x {first.num_experts} experts of "
        f"{format_bytes(first.expert_nbytes)} = {format_bytes(index.nbytes)}"
    )
    click.echo(f"  resident       {format_bytes(index.resident_nbytes)}")
    if isinstance(checkpoint, RemoteCheckpoint):
        traffic = checkpoint.traffic
        click.echo(
            f"  fetched        {format_bytes(traffic.nbytes)} of headers "
            f"in {traffic.requests} requests, no weights"
        )
    for projection in dict.fromkeys(t.key[0] for t in first.tensors):
        spec = first.spec(projection)
        click.echo(
            f"  {projection:<14} {spec.mode}, {spec.bits} bits"
            + (f", groups of {spec.group_size}" if spec.group_size else "")
        )


def main() -> None:
    """Entry point of the ``mlx_stream`` command."""
    run_command(cli, "mlx_stream")


if __name__ == "__main__":
    main()
