"""Which seed policy saves most reads? The real engine, one arm a policy, the same text for all.

Every arm prefills a piece of text into an empty expert cache of a fixed share, and decodes the text
that follows it (greedy answers of a small model repeat themselves, which flatters every cache).
Hits and bytes are the engine's own counts, with prediction off. `belady` is the optimal eviction on
the recorded routing, from an empty cache; `belady+oracle` starts with what decode uses first.

\b
Examples:
  python benchmarks/seed_policies.py
  python benchmarks/seed_policies.py --share 0.5 --prompts 10 --prompt-tokens 1024
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.decode_budget import ROOMY, pin_cache  # noqa: E402
from mlx_stream.config import StreamConfig  # noqa: E402
from mlx_stream.decode.replay import BELADY, ORACLE_SEED, ReplayResult, replay  # noqa: E402
from mlx_stream.decode.routing_recorder import RoutingRecorder  # noqa: E402
from mlx_stream.decode.routing_trace import RoutingTrace  # noqa: E402
from mlx_stream.decode.seed_policy import DEFAULT_SEED_POLICY, SEED_POLICIES  # noqa: E402
from mlx_stream.engine import Engine  # noqa: E402
from mlx_stream.hub import demo_path  # noqa: E402

SPANS = (32, 64, 128, 512)
CLAIM_SPAN, CLAIM_POINTS = 64, 0.02
BOUNDS = {"belady": "none", "belady+oracle": ORACLE_SEED}

Piece = tuple[list[int], list[int]]
"""Prompt and what follows it, token ids."""


def pieces(ids: Sequence[int], count: int, prompt_tokens: int, tokens: int) -> list[Piece]:
    """`count` places of a text, evenly spread."""
    size = prompt_tokens + tokens
    if len(ids) < size:
        raise click.UsageError(f"the text has {len(ids)} tokens, {size} are needed")
    starts = np.linspace(0, len(ids) - size, count).astype(int)
    return [
        (list(ids[s : s + prompt_tokens]), list(ids[s + prompt_tokens : s + size])) for s in starts
    ]


def empty_cache(engine: Engine, share: float) -> int:
    """Nothing cached, nothing remembered, room for a share of all experts; returns records."""
    engine.decoder.cache.close()
    return pin_cache(engine, share)


def decode_piece(engine: Engine, piece: Piece) -> tuple[RoutingTrace, ReplayResult]:
    """Decode a piece as if its text were the answer; the routing, and what the engine counted."""
    prompt, answer = piece
    text: Iterator[int] = iter([*answer, 0])  # the last one's step never runs

    def from_text(logprobs: mx.array) -> mx.array:
        return mx.array([next(text)], dtype=mx.uint32)

    recorder = RoutingRecorder(engine.index.layers)
    engine.decoder.observer = recorder
    try:
        steps = engine.decode(engine.prefill(prompt), prompt, sampler=from_text)
        next(steps)
        counted = []
        for _ in itertools.islice(steps, len(answer)):
            last = engine.decode_metrics.last
            counted.append((last.hits, last.misses, last.bytes_read))
        steps.close()
    finally:
        engine.decoder.observer = None
    result = ReplayResult(*np.array(counted).T)
    return recorder.trace(engine.path.name, answer), result


def run(folder: Path, work: Sequence[Piece], share: float) -> dict[str, list[ReplayResult]]:
    """``{arm: a result for each piece}``: the seed policies live, and the bounds."""
    live: dict[str, list[ReplayResult]] = {}
    traces: list[RoutingTrace] = []
    records = 0
    for seed in SEED_POLICIES:
        config = StreamConfig.build(
            memory_budget=ROOMY,
            decode_path="exact",
            predict="off",
            seed_policy=seed,
            prerouter="off",
        )
        engine = Engine(folder, config)
        try:
            for n, piece in enumerate(work):
                records = empty_cache(engine, share)
                trace, result = decode_piece(engine, piece)
                live.setdefault(seed, []).append(result)
                if n == len(traces):
                    traces.append(trace)
        finally:
            engine.close()
    nbytes = records * max(traces[0].expert_nbytes)
    for name, seed in BOUNDS.items():
        live[name] = [replay(t, BELADY, nbytes, seed=seed) for t in traces]
    return live


def row(name: str, results: Sequence[ReplayResult]) -> dict[str, object]:
    """Means and spreads over the pieces, for every span."""
    tokens = len(results[0].hits)
    spans = [s for s in SPANS if s <= tokens] or [tokens]
    rates = {s: [r.hit_rate(s) for r in results] for s in spans}
    nbytes = {s: [r.nbytes_per_token(s) for r in results] for s in spans}
    return {
        "arm": name,
        "spans": spans,
        "hit_rate": [statistics.fmean(rates[s]) for s in spans],
        "hit_rate_spread": [[min(rates[s]), max(rates[s])] for s in spans],
        "bytes_per_token": [statistics.fmean(nbytes[s]) for s in spans],
        "hit_rates": [rates[s] for s in spans],
    }


def report(rows: Sequence[dict], about: dict[str, object]) -> None:
    """A table, the claim about the default, and one JSON line."""
    spans = rows[0]["spans"]
    click.echo(f"{'first tokens':<14}" + "".join(f"{s:>28}" for s in spans))
    for r in rows:
        cells = [
            f"{rate:6.1%} ({low:.0%}-{high:.0%}) {nbytes / 1e6:6.3f} MB"
            for rate, (low, high), nbytes in zip(
                r["hit_rate"], r["hit_rate_spread"], r["bytes_per_token"], strict=True
            )
        ]
        click.echo(f"{r['arm']:<14}" + "".join(f"{c:>28}" for c in cells))
    at = spans.index(CLAIM_SPAN) if CLAIM_SPAN in spans else len(spans) - 1
    rates = {r["arm"]: r["hit_rate"][at] for r in rows if r["arm"] in SEED_POLICIES}
    best = max(rates, key=rates.__getitem__)
    behind = rates[best] - rates[DEFAULT_SEED_POLICY]
    click.echo(
        f"first {spans[at]} tokens: best {best} {rates[best]:.1%}, default {DEFAULT_SEED_POLICY} "
        f"{behind * 100:.1f} points behind ({'holds' if behind <= CLAIM_POINTS else 'FAILS'})"
    )
    click.echo(json.dumps({**about, "best": best, "default_behind": behind, "arms": list(rows)}))


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Default: the demo.")
@click.option("--text", type=click.Path(path_type=Path, exists=True), help="Default: the demo's.")
@click.option("--share", default=0.25, show_default=True, help="Of all experts, in the cache.")
@click.option("--prompts", default=6, show_default=True)
@click.option("--prompt-tokens", default=512, show_default=True)
@click.option("--tokens", default=512, show_default=True, help="Decoded after each prompt.")
def main(
    model: Path | None,
    text: Path | None,
    share: float,
    prompts: int,
    prompt_tokens: int,
    tokens: int,
) -> None:
    """Run all arms and print them."""
    folder = model or demo_path()
    with_tokenizer = Engine(folder, StreamConfig.build(memory_budget=ROOMY))
    try:
        if with_tokenizer.tokenizer is None:
            raise click.UsageError("--model: needs a tokenizer, real text is decoded")
        ids = with_tokenizer.tokenizer.encode((text or demo_path() / "heldout.txt").read_text())
    finally:
        with_tokenizer.close()
    found = run(folder, pieces(ids, prompts, prompt_tokens, tokens), share)
    about = {"model": folder.name, "share": share, "prompt_tokens": prompt_tokens}
    report([row(name, results) for name, results in found.items()], about)


if __name__ == "__main__":
    main()
