"""Streamed prefill against stock mlx-lm: same checkpoint, same prompt, same machine, one run.

Stock mlx-lm holds the whole model in memory; the streamed arm reads it from disk within a budget.
Prints both times, their ratio, and whether the greedy tokens agree.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_stream.runtime import load


def stock(
    model_path: Path, ids: list[int], new_tokens: int, chunk: int
) -> tuple[float, list[int], np.ndarray]:
    """``(prefill seconds, greedy tokens, last logits [V])`` as mlx_lm.generate_step does it."""
    model, _ = load_model(model_path)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    cache, prompt = make_prompt_cache(model), mx.array(ids)
    started = time.perf_counter()
    for start in range(0, len(ids) - 1, chunk):
        model(prompt[start : min(start + chunk, len(ids) - 1)][None], cache=cache)
        mx.eval([c.state for c in cache])
    logits = model(prompt[-1:][None], cache=cache)[0, -1]
    mx.eval(logits)
    seconds, first = time.perf_counter() - started, np.array(logits)
    tokens = [int(first.argmax())]
    while len(tokens) < new_tokens:
        logits = model(mx.array([[tokens[-1]]]), cache=cache)[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
    return seconds, tokens, first


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--tokens", default=1024, show_default=True)
@click.option("--new-tokens", default=8, show_default=True)
@click.option("--memory-budget", default="4GB", show_default=True)
@click.option("--chunk-tokens", default=2048, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Of the streamed arm.")
def main(
    model: Path,
    tokens: int,
    new_tokens: int,
    memory_budget: str,
    chunk_tokens: int,
    rounds: int,
) -> None:
    """Run both arms."""
    ids = np.random.default_rng(0).integers(2, 1000, tokens).tolist()
    options = {"memory_budget": memory_budget, "chunk_tokens": chunk_tokens}
    with load(model, prerouter="off", **options) as runtime:
        receipts = [runtime.prefill(ids).receipt for _ in range(rounds)]
        logits = np.array(runtime.prefill(ids).logits)
        streamed = [r.token for r in runtime.stream_generate(ids, max_tokens=new_tokens)]
    seconds = sorted(r.wall_seconds for r in receipts)
    ours = seconds[len(seconds) // 2]
    click.echo(f"streamed   {ours:8.2f} s  ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    click.echo(f"           {receipts[-1].summary()}")
    theirs, expected, reference = stock(model, ids, new_tokens, chunk_tokens)
    error = float(np.abs(logits - reference).max() / np.abs(reference).max())
    click.echo(f"stock      {theirs:8.2f} s  mlx-lm, everything in memory, float32")
    click.echo(f"stock / streamed: {theirs / ours:.1f}")
    click.echo(
        f"greedy tokens equal: {streamed == expected}; logits differ by {error:.1e} relative"
    )
    click.echo(
        json.dumps(
            {
                "tokens": tokens,
                "streamed_seconds": seconds,
                "stock_seconds": theirs,
                "ratio": theirs / ours,
                "tokens_equal": streamed == expected,
                "relative_error": error,
            }
        )
    )


if __name__ == "__main__":
    main()
