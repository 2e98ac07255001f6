"""What does a smaller expert cache cost a decoded token? Cache shares of 100% down to 12%.

Prints walls, and the process's CPU time, which says more on a machine that has other work.

Every arm is a share of all expert bytes as cache capacity, with prediction off or on, and reads
throttled to an SSD's rate. One engine for each prediction serves all shares, so that model, code
and memory are the same. In every round each arm prefills the same prompt, decodes some tokens to
warm its cache and is then timed; arms take turns to go first.

\b
Examples:
  python benchmarks/decode_budget.py
  python benchmarks/decode_budget.py --model ./checkpoint --tokens 64 --throttle 2GB/s
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

from mlx_stream.config import StreamConfig
from mlx_stream.decode.metrics import StepMetrics
from mlx_stream.engine import Engine
from mlx_stream.hub import demo_path
from mlx_stream.loader import load_tokenizer_if_any

ROOMY = 4 << 30  # the cache's capacity is set, not what a budget leaves
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Timed:
    """One arm in one round, means over its timed tokens."""

    wall_ms: float
    cpu_ms: float
    median_ms: float
    stall_ms: float
    hit_rate: float
    bytes_per_token: float


def pin_cache(engine: Engine, share: float) -> int:
    """The expert cache holds this share of all experts, whatever the budget; returns records."""
    decoder = engine.decoder
    records = max(1, int(share * sum(layer.num_experts for layer in engine.index.layers)))
    decoder.capacity_for = lambda nbytes: records  # type: ignore[method-assign]
    decoder.resize(0)
    return records


def make_prompt(folder: Path, vocab: int, tokens: int, seed: int = 0) -> list[int]:
    """Text of the demo's held-out file where there is a tokenizer, otherwise random ids."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = load_tokenizer_if_any(folder, config)
    if tokenizer is None:
        return np.random.default_rng(seed).integers(0, vocab, tokens).tolist()
    ids = tokenizer.encode((demo_path() / "heldout.txt").read_text())
    start = np.random.default_rng(seed).integers(0, max(1, len(ids) - tokens))
    return list(ids[start : start + tokens])


def decode_steps(engine: Engine, prompt: Sequence[int], warm: int, tokens: int) -> Timed:
    """Prefill, decode `warm` tokens, then time that many."""
    answer = engine.decode(engine.prefill(prompt), prompt, sampler=greedy_sampler)
    for _ in itertools.islice(answer, warm + 1):  # the first is the prefill's own: no step
        pass
    steps: list[StepMetrics] = []
    cpu = time.process_time()
    for _ in itertools.islice(answer, tokens):
        steps.append(engine.decode_metrics.last)  # type: ignore[arg-type]
    cpu = time.process_time() - cpu
    answer.close()
    return summarize(steps, cpu)


def summarize(steps: Sequence[StepMetrics], cpu_seconds: float) -> Timed:
    """Means, and the median of the walls."""
    lookups = sum(s.hits + s.misses for s in steps)
    return Timed(
        wall_ms=1e3 * statistics.fmean(s.wall_seconds for s in steps),
        cpu_ms=1e3 * cpu_seconds / len(steps),
        median_ms=1e3 * statistics.median(s.wall_seconds for s in steps),
        stall_ms=1e3 * statistics.fmean(s.stall_seconds for s in steps),
        hit_rate=sum(s.hits for s in steps) / max(1, lookups),
        bytes_per_token=statistics.fmean(s.bytes_read for s in steps),
    )


Arm = tuple[str, float]


def measure(
    engines: dict[str, Engine],
    shares: Sequence[float],
    prompt: Sequence[int],
    *,
    warm: int,
    tokens: int,
    rounds: int,
) -> dict[Arm, list[Timed]]:
    """Every arm once a round; the order rotates and turns round."""
    arms = list(itertools.product(engines, shares))
    found: dict[Arm, list[Timed]] = {arm: [] for arm in arms}
    for n in range(rounds):
        shift = n * len(arms) // rounds
        order = arms[shift:] + arms[:shift]
        for arm in order if n % 2 == 0 else reversed(order):
            engine = engines[arm[0]]
            pin_cache(engine, arm[1])
            found[arm].append(decode_steps(engine, prompt, warm, tokens))
    return found


def report(found: dict[Arm, list[Timed]], about: dict[str, object]) -> None:
    """A table and one JSON line; ratios are of arms of the same round and prediction."""
    click.echo(
        f"{'predict':<10} {'cache':>6} {'ms/token':>9} {'spread':>16} {'x full':>7} "
        f"{'spread':>12} {'median':>8} {'cpu':>7} {'stall':>7} {'hits':>6} {'MB/token':>9}"
    )
    rows = []
    full = max(share for _, share in found)
    for (predict, share), values in found.items():
        walls = [v.wall_ms for v in values]
        base = [v.wall_ms for v in found[predict, full]]
        ratios = [w / b for w, b in zip(walls, base, strict=True)]
        mid = statistics.median
        ratio = mid(ratios)
        click.echo(
            f"{predict:<10} {share:>6.0%} {mid(walls):>9.2f} "
            f"{f'{min(walls):.2f} to {max(walls):.2f}':>16} {ratio:>7.3f} "
            f"{f'{min(ratios):.2f}-{max(ratios):.2f}':>12} "
            f"{mid(v.median_ms for v in values):>8.2f} {mid(v.cpu_ms for v in values):>7.2f} "
            f"{mid(v.stall_ms for v in values):>7.2f} "
            f"{mid(v.hit_rate for v in values):>6.1%} "
            f"{mid(v.bytes_per_token for v in values) / 1e6:>9.3f}"
        )
        rows.append(
            {
                "predict": predict,
                "share": share,
                "to_full": ratio,
                "to_full_rounds": ratios,
                "rounds": [asdict(v) for v in values],
            }
        )
    click.echo(json.dumps({**about, "arms": rows}))


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Default: the demo.")
@click.option("--shares", default="1,0.5,0.25,0.12", show_default=True)
@click.option("--predict", default="off,auto", show_default=True)
@click.option("--throttle", default="2GB/s", show_default=True, help="'' for none.")
@click.option("--tokens", default=64, show_default=True, help="Timed, of each arm and round.")
@click.option("--warm", default=32, show_default=True, help="Decoded before.")
@click.option("--rounds", default=5, show_default=True)
def main(
    model: Path | None,
    shares: str,
    predict: str,
    throttle: str,
    tokens: int,
    warm: int,
    rounds: int,
) -> None:
    """Open an engine for each prediction and measure."""
    folder = model or demo_path()
    engines: dict[str, Engine] = {}
    try:
        for name in predict.split(","):
            config = StreamConfig.build(
                memory_budget=ROOMY, throttle=throttle or None, predict=name, prerouter="off"
            )
            engines[name] = Engine(folder, config)
        any_engine = next(iter(engines.values()))
        prompt = make_prompt(folder, any_engine._shape.vocab, PROMPT_TOKENS)
        sizes = [float(s) for s in shares.split(",")]
        found = measure(engines, sizes, prompt, warm=warm, tokens=tokens, rounds=rounds)
        about = {
            "model": folder.name,
            "expert_bytes": any_engine.index.nbytes,
            "io": any_engine.reader.io_mode,
            "path": any_engine.decoder.plan.path,
            "prompt_tokens": len(prompt),
            "tokens": tokens,
            "warm": warm,
        }
    finally:
        for engine in engines.values():
            engine.close()
    report(found, about)


if __name__ == "__main__":
    main()
