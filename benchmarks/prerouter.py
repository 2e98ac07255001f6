"""What does reading a token ahead spare on a slow disk, and what does it cost on a fast one?

Three arms on the same folder: `on-demand` (no Prerouter), `prerouter`, and `same routing`: the same
predicted routing, whose experts are read when their layer comes. The last two compute the same
tokens from the same experts, so they differ in when the reads begin and in nothing else. Each runs
on a throttled disk with a small expert cache, and on the disk as it is with all experts in memory.
In every round each arm prefills the same prompt, decodes some tokens to warm its cache and is then
timed; arms take turns to go first. On the fast disk they take turns at every token, so that what
else the machine does meets all alike; on the slow one that would give an arm's reads the time of
the others. A round's ms/token is the median of its tokens. `--also-spec` adds an arm with other
heads, say those that were trained for half as many experts a token, and compares it with both.

A checkpoint without heads gets random ones: they route at random, so the text means nothing and the
cache hits less; what is said about stalls holds. The output says which heads ran.

\b
Examples:
  python benchmarks/prerouter.py
  python benchmarks/prerouter.py --also-spec mlx_stream/demo/prerouter_k2.json
  python benchmarks/prerouter.py --model ./checkpoint --spec ./heads/prerouter.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.decode_budget import PROMPT_TOKENS, ROOMY, make_prompt, pin_cache  # noqa: E402
from mlx_stream.config import StreamConfig  # noqa: E402
from mlx_stream.decode.metrics import StepMetrics  # noqa: E402
from mlx_stream.engine import Engine  # noqa: E402
from mlx_stream.errors import PrerouterError  # noqa: E402
from mlx_stream.hub import demo_path  # noqa: E402
from mlx_stream.prerouter.opening import choose_prerouter  # noqa: E402
from mlx_stream.prerouter.spec import PrerouterSpec  # noqa: E402
from mlx_stream.prerouter.spec_file import SPEC_NAME, write_spec  # noqa: E402

WAYS = ("on-demand", "same routing", "prerouter")
ALSO = "other heads"
DISKS = ("slow", "fast")
RANDOM_WIDTH = 64


@dataclass(frozen=True)
class Timed:
    """One arm in one round: the median wall of its timed tokens, means of the rest."""

    wall_ms: float
    stall_ms: float
    bytes_per_token: float
    hit_rate: float
    waits_avoided: float
    dropped: int


def random_prerouter(folder: Path, out: Path, engine: Engine) -> Path:
    """Heads of noise for every layer but the first; returns their spec."""
    numbers = [int(m.layer.name.split("layers.")[1].split(".")[0]) for m in engine._mlps]
    owners = tuple(n for n in numbers if n + 1 in numbers)
    spec = PrerouterSpec(
        name=f"random heads for {folder.name}",
        trained=False,
        heads_file="random_heads.safetensors",
        owners=owners,
        consumers=tuple(n + 1 for n in owners),
        top_k=None,
        feature="executed",
        first_prediction="second_step",
        first_previous="zeros",
        missing_linear_init="zeros",
    )
    hidden, experts = engine._shape.hidden, engine._mlps[0].layer.num_experts
    rng, inputs = np.random.default_rng(0), hidden + 2 * experts
    arrays = {}
    for owner in owners:
        for part, shape in (
            ("fc1", (RANDOM_WIDTH, inputs)),
            ("fc2", (experts, RANDOM_WIDTH)),
            ("linear_init", (experts, inputs)),
        ):
            values = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
            arrays[f"layers.{owner}.{part}.weight"] = mx.array(values.astype(np.float16))
    mx.save_safetensors(str(out / spec.heads_file), arrays)
    write_spec(out / SPEC_NAME, spec)
    return out / SPEC_NAME


def decode_steps(
    engines: Sequence[Engine], prompt: Sequence[int], warm: int, tokens: int
) -> list[Timed]:
    """Prefill, decode `warm` tokens, then time that many; several engines in turn, by token."""
    answers = [e.decode(e.prefill(prompt), prompt, sampler=greedy_sampler) for e in engines]
    for answer in answers:
        for _ in itertools.islice(answer, warm + 1):  # the first is the prefill's own: no step
            pass
    steps: list[list[StepMetrics]] = [[] for _ in engines]
    for n in range(tokens):
        for m in range(len(engines)):
            place = (n + m) % len(engines)
            next(answers[place])
            steps[place].append(engines[place].decode_metrics.last)  # type: ignore[arg-type]
    for answer in answers:
        answer.close()
    return [summed(found) for found in steps]


def summed(steps: Sequence[StepMetrics]) -> Timed:
    """Of one arm in one round."""
    lookups = sum(s.hits + s.misses for s in steps)
    return Timed(
        wall_ms=1e3 * statistics.median(s.wall_seconds for s in steps),
        stall_ms=1e3 * statistics.fmean(s.stall_seconds for s in steps),
        bytes_per_token=statistics.fmean(s.bytes_read for s in steps),
        hit_rate=sum(s.hits for s in steps) / max(1, lookups),
        waits_avoided=statistics.fmean(s.waits_avoided for s in steps),
        dropped=sum(s.dropped_experts for s in steps),
    )


Arm = tuple[str, str]


def open_arms(
    folder: Path, spec: Path | None, also: Path | None, throttle: str, backend: str
) -> dict[Arm, Engine]:
    """An engine for every way and disk."""
    engines: dict[Arm, Engine] = {}
    ways = WAYS if also is None else (*WAYS, ALSO)
    try:
        for disk, way in itertools.product(DISKS, ways):
            heads = also if way == ALSO else spec
            config = StreamConfig.build(
                memory_budget=ROOMY,
                backend=backend,
                throttle=throttle if disk == "slow" else None,
                io="direct" if disk == "slow" else "buffered",
                prerouter="off" if way == "on-demand" else "on",
                prerouter_spec=None if heads is None else str(heads),
                predict="off",
            )
            engines[disk, way] = Engine(folder, config)
            if way == "same routing":
                reads = engines[disk, way].decoder.prerouter._reads  # type: ignore[union-attr]
                reads.fill = lambda in_use=(), following=None: None  # type: ignore[method-assign]
    except BaseException:
        close_all(engines)
        raise
    return engines


def close_all(engines: dict[Arm, Engine]) -> None:
    """Release every engine."""
    for engine in engines.values():
        engine.close()


def measure(
    engines: dict[Arm, Engine],
    share: float,
    prompt: Sequence[int],
    *,
    warm: int,
    tokens: int,
    rounds: int,
) -> dict[Arm, list[Timed]]:
    """Every arm once a round; the order rotates and turns round."""
    arms = [arm for arm in engines if arm[0] == "slow"]
    together = [arm for arm in engines if arm[0] == "fast"]
    found: dict[Arm, list[Timed]] = {arm: [] for arm in engines}
    for n in range(rounds):
        shift = n * len(arms) // rounds
        order = arms[shift:] + arms[:shift]
        for group in [*([arm] for arm in (order if n % 2 == 0 else order[::-1])), together]:
            for arm in group:
                pin_cache(engines[arm], share if arm[0] == "slow" else 1.0)
            timed = decode_steps([engines[arm] for arm in group], prompt, warm, tokens)
            for arm, result in zip(group, timed, strict=True):
                found[arm].append(result)
    return found


def ratios(found: dict[Arm, list[Timed]], arm: Arm, base: str, field: str) -> list[float]:
    """Of an arm to another way on the same disk, round by round."""
    pairs = zip(found[arm], found[arm[0], base], strict=True)
    return [getattr(a, field) / max(getattr(b, field), 1e-9) for a, b in pairs]


def report(found: dict[Arm, list[Timed]], about: dict[str, object]) -> None:
    """A table, ratios of arms of the same round, and one JSON line."""
    heads = [str(about["heads"]), *([f"other {about[ALSO]}"] if about[ALSO] else [])]
    click.echo(f"heads: {', '.join(heads)}; {about['io']}")
    click.echo(
        f"{'disk':<5} {'way':<13} {'ms/token':>9} {'spread':>16} {'stall ms':>9} "
        f"{'KB/token':>9} {'hits':>6} {'avoided':>8} {'dropped':>8}"
    )
    mid = statistics.median
    for (disk, way), values in found.items():
        walls = [v.wall_ms for v in values]
        stall, nbytes = mid(v.stall_ms for v in values), mid(v.bytes_per_token for v in values)
        hits, avoided = mid(v.hit_rate for v in values), mid(v.waits_avoided for v in values)
        click.echo(
            f"{disk:<5} {way:<13} {mid(walls):>9.2f} "
            f"{f'{min(walls):.2f} to {max(walls):.2f}':>16} {stall:>9.3f} "
            f"{nbytes / 1e3:>9.1f} {hits:>6.1%} {avoided:>8.1f} {sum(v.dropped for v in values):>8}"
        )
    summary: dict[str, dict[str, list[float]]] = {}
    pairs = [("prerouter", base) for base in WAYS[:2]]
    pairs += [(ALSO, base) for base in ("on-demand", "prerouter") if ("slow", ALSO) in found]
    for (way, base), disk in itertools.product(pairs, DISKS):
        arm = (disk, way)
        entry = {
            "stall": ratios(found, arm, base, "stall_ms") if disk == "slow" else [],
            "bytes": ratios(found, arm, base, "bytes_per_token") if disk == "slow" else [],
            "tokens_per_second": [1 / r for r in ratios(found, arm, base, "wall_ms")],
        }
        summary[f"{way} to {base}, {disk}"] = entry
        shown = [
            f"{name} {mid(rounds):.3f} ({min(rounds):.3f} to {max(rounds):.3f})"
            for name, rounds in entry.items()
            if rounds
        ]
        click.echo(f"{way} / {base}, {disk}: {', '.join(shown)}")
    arms = [
        {"disk": disk, "way": way, "rounds": [asdict(v) for v in values]}
        for (disk, way), values in found.items()
    ]
    click.echo(json.dumps({**about, "ratios": summary, "arms": arms}))


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Default: the demo.")
@click.option("--spec", type=click.Path(path_type=Path, exists=True), help="A prerouter.json.")
@click.option("--also-spec", type=click.Path(path_type=Path, exists=True), help="Another arm.")
@click.option("--share", default=0.12, show_default=True, help="Of all experts, in the cache.")
@click.option("--throttle", default="0.5GB/s:100us", show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--tokens", default=48, show_default=True, help="Timed, of each arm and round.")
@click.option("--warm", default=16, show_default=True, help="Decoded before.")
@click.option("--rounds", default=5, show_default=True)
def main(
    model: Path | None,
    spec: Path | None,
    also_spec: Path | None,
    share: float,
    throttle: str,
    backend: str,
    tokens: int,
    warm: int,
    rounds: int,
) -> None:
    """Open an engine for every arm and measure."""
    folder = model or demo_path()
    with tempfile.TemporaryDirectory() as scratch:
        heads = "random"
        with suppress(PrerouterError):  # there are none; a bad spec fails below
            heads = choose_prerouter(folder, "on", spec).reason.removeprefix("on: ")
        if heads == "random" and spec is None:
            plain = Engine(folder, StreamConfig.build(memory_budget=ROOMY, backend=backend))
            spec = random_prerouter(folder, Path(scratch), plain)
            plain.close()
        engines = open_arms(folder, spec, also_spec, throttle, backend)
        try:
            some = engines["slow", "prerouter"]
            prompt = make_prompt(folder, some._shape.vocab, PROMPT_TOKENS)
            found = measure(engines, share, prompt, warm=warm, tokens=tokens, rounds=rounds)
            about = {
                "model": folder.name,
                "heads": heads,
                ALSO: None
                if also_spec is None
                else engines["slow", ALSO].decoder.prerouter.spec.name,
                "expert_bytes": some.index.nbytes,
                "share": share,
                "io": some.reader.io_mode,
                "prompt_tokens": len(prompt),
                "tokens": tokens,
                "warm": warm,
            }
        finally:
            close_all(engines)
    report(found, about)


if __name__ == "__main__":
    main()
