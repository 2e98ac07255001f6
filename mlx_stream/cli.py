"""The ``mlx_stream`` command."""

from __future__ import annotations

import click

from mlx_stream import __version__
from mlx_stream.cache_prompt import cache_prompt
from mlx_stream.chat import chat
from mlx_stream.config import format_bytes
from mlx_stream.doctor import doctor
from mlx_stream.generate import generate
from mlx_stream.terminal import run_command
from mlx_stream.trace_command import trace

EXAMPLES = """
\b
Examples:
  mlx_stream generate --prompt "In the beginning"
  mlx_stream info ./checkpoint
  mlx_stream plan ./checkpoint --prompt-tokens 8192 --memory-budget 8GB
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlx_stream")
def cli() -> None:
    """Run Mixture-of-Experts models larger than memory by streaming their experts."""


cli.add_command(generate)
cli.add_command(chat)
cli.add_command(cache_prompt)
cli.add_command(doctor)
cli.add_command(trace)

PLAN_EXAMPLES = """
\b
Examples:
  mlx_stream plan ./checkpoint --prompt-tokens 8192
  mlx_stream plan mlx-community/Qwen3-30B-A3B-4bit --prompt-tokens 32768 --memory-budget 8GB
"""


@cli.command(epilog=PLAN_EXAMPLES)
@click.argument("model", required=False)
@click.option("--prompt-tokens", "-n", type=click.IntRange(min=1), default=2048, show_default=True)
@click.option("--memory-budget", help="Bytes, '4GB' or '4GiB'; default: a share of free memory.")
@click.option("--chunk-tokens", type=click.IntRange(min=1), default=2048, show_default=True)
def plan(
    model: str | None, prompt_tokens: int, memory_budget: str | None, chunk_tokens: int
) -> None:
    """Show how a prompt would run, from the checkpoint's headers alone."""
    from mlx_stream.planner.plan import plan as make_plan

    click.echo(
        make_plan(model, prompt_tokens, memory_budget=memory_budget, chunk_tokens=chunk_tokens)
    )


INFO_EXAMPLES = """
\b
Examples:
  mlx_stream info
  mlx_stream info mlx-community/Qwen3-30B-A3B-4bit
"""


@cli.command(epilog=INFO_EXAMPLES)
@click.argument("model", required=False)
def info(model: str | None) -> None:
    """Show what a checkpoint holds: expert layers, sizes, quantization."""
    from mlx_stream.hub import resolve_model
    from mlx_stream.storage.checkpoint import open_checkpoint
    from mlx_stream.storage.expert_index import build_expert_index

    checkpoint = open_checkpoint(resolve_model(model))
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
