"""``mlx_stream trace``: runs a prompt and some tokens, and writes down which experts they used."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_stream.config import format_bytes
from mlx_stream.errors import MlxStreamError
from mlx_stream.generate import DEFAULT_PROMPT, DEMO_PROMPT, parse_token_ids, read_prompt_file

if TYPE_CHECKING:
    from mlx_stream.decode.routing_trace import RoutingTrace
    from mlx_stream.runtime import Runtime

EXAMPLES = """
\b
Examples:
  mlx_stream trace -o demo.npz
  mlx_stream trace ./checkpoint --prompt-file question.txt --max-tokens 512 -o question.npz
  python tools/replay_trace.py question.npz --budgets 50%,25%
"""


@click.command(epilog=EXAMPLES)
@click.argument("model", required=False)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The trace, an npz file.",
)
@click.option("--prompt", "-p", help="Text, used as it is, or token ids.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the prompt from a file.",
)
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    help="Tokens to decode; fewer when the model ends its answer.",
)
@click.option(
    "--temp",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Sampling temperature; 0 is greedy.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option("--memory-budget", help="Bytes, '4GB' or '4GiB'; default: a share of free memory.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model.")
def trace(
    model: str | None,
    output: Path,
    prompt: str | None,
    prompt_file: Path | None,
    max_tokens: int,
    temp: float,
    seed: int,
    memory_budget: str | None,
    trust_remote_code: bool,
) -> None:
    """Record which experts a prompt and its answer use, for tools/replay_trace.py.

    The trace holds expert and token ids. Token ids are the answer's text: treat it alike.
    """
    if prompt is not None and prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other.")
    _check_folder(output)
    if prompt_file is not None:
        prompt = read_prompt_file(prompt_file)
    if prompt is None:
        prompt = DEMO_PROMPT if model is None else DEFAULT_PROMPT
    import mlx.core as mx

    from mlx_stream.runtime import load

    mx.random.seed(seed)
    with load(
        model,
        memory_budget=memory_budget,
        decode_path="exact",
        prerouter="off",  # the model's own routing is recorded
        trust_remote_code=trust_remote_code,
    ) as runtime:
        recorded = record_trace(runtime, prompt, max_tokens, temp)
    recorded.save(output)
    click.echo(
        f"{output}: {len(recorded.layers)} layers, {len(recorded.prompt[0])} prompt tokens, "
        f"{recorded.steps} decoded tokens, {format_bytes(recorded.total_nbytes)} of experts"
    )


def record_trace(runtime: Runtime, prompt: str, max_tokens: int, temp: float = 0.0) -> RoutingTrace:
    """Run a prompt and up to `max_tokens` decode steps; the runtime must decode by the exact path.

    Raises:
        MlxStreamError: the prompt is not one, or prefill fails.
    """
    from mlx_lm.sample_utils import make_sampler

    from mlx_stream.decode.routing_recorder import RoutingRecorder

    engine, tokenizer = runtime.engine, runtime.tokenizer
    ids = runtime.encode(prompt if tokenizer is not None else parse_token_ids(prompt))
    ends = frozenset(tokenizer.eos_token_ids if tokenizer is not None else ())
    recorder = RoutingRecorder(engine.index.layers)
    engine.decoder.observer = recorder
    try:
        steps = engine.decode(engine.prefill(ids), ids, sampler=make_sampler(temp))
        # A token's step runs when the token after it is asked for.
        taken = list(itertools.islice(_up_to_end(steps, ends), max_tokens + 1))
        steps.close()
    finally:
        engine.decoder.observer = None
    return recorder.trace(engine.path.name, taken[:-1])


def _up_to_end(steps: Iterable[tuple[int, Any]], ends: frozenset[int]) -> Iterator[int]:
    """The tokens, up to and with the first that ends an answer."""
    for token, _ in steps:
        yield token
        if token in ends:
            return


def _check_folder(output: Path) -> None:
    """Before any work."""
    folder = output.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MlxStreamError(
            "the trace cannot be written",
            file=output,
            actual="no such folder, or it is not writable",
            remedy="choose a writable folder for --output",
        )
