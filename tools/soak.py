"""Everything at once, for a long time: no wrong token, and nothing that grows.

One process opens and closes engines with random decode options and budgets. They answer random
prompts and interleaved conversations, greedily, while budgets change between tokens, Ctrl-C comes
at random moments, and reads fail. Every answer is compared with stock mlx-lm's tokens (prompts up
to 400 tokens) or with our exact path at 100% cache (longer ones); near ties end a comparison.

Prints a line a minute and one JSON line. Exits with 1 on any wrong token, on any error that was not
provoked, or when memory, descriptors or threads grow beyond the limits.

\b
Examples:
  python tools/soak.py --minutes 3
  python tools/soak.py --minutes 40 --seed 7 --model ./checkpoint
"""

from __future__ import annotations

import json
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.decode.options import PATHS, PREDICTORS  # noqa: E402
from mlx_stream.decode.policy import POLICIES  # noqa: E402
from mlx_stream.decode.seed_policy import SEED_POLICIES  # noqa: E402
from mlx_stream.errors import BudgetError, ReadError  # noqa: E402
from mlx_stream.hub import demo_path  # noqa: E402
from mlx_stream.runtime import Runtime, load  # noqa: E402
from tools.soak_parts import (  # noqa: E402
    STOCK_TOKENS,
    Case,
    CtrlC,
    RandomFaults,
    Talk,
    Watch,
    exact_answer,
    faulty_readers,
    spoil_proposals,
    stock_answer,
    stock_model,
    wrong_tokens,
)

SHORT_CASES, LONG_CASES, LONGEST = 40, 12, 3000
ANSWER_TOKENS = 32
TALK_SHARE = 0.35  # of the answers
SLOW_TOKENS = 6  # a token of the whole-layer path costs a pass over the file
ROOMY = 1 << 30
WARM_SHARE, WARM_SECONDS = 0.25, 300.0  # of the run, at least; a shorter run has no slope
RSS_PER_HOUR, RSS_GROWTH = 40.0, 15.0  # MB; both the slope and end minus warm must be above
MOST_ERRORS = 5
SETTLE_SECONDS = 2.0  # threads of a closed engine may take a moment to go


class Soak:
    """One run."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.watch, self.faults, self.ctrl_c = Watch(), RandomFaults(), CtrlC()
        self.stock = stock_model(folder)
        self.text: list[int] = []
        self.cases: list[Case] = []

    def prepare(self) -> None:
        """Reference answers, once."""
        text = (demo_path() / "heldout.txt").read_text()
        with load(
            self.folder, memory_budget=ROOMY, decode_path="exact", predict="off", prerouter="off"
        ) as runtime:
            vocab = runtime.engine._shape.vocab
            self.text = (
                runtime.encode(text)
                if runtime.tokenizer is not None
                else [self.random.randrange(vocab) for _ in range(4 * LONGEST)]
            )
            for n in range(SHORT_CASES + LONG_CASES):
                short = n < SHORT_CASES
                size = self.random.randint(*((1, STOCK_TOKENS) if short else (401, LONGEST)))
                prompt = self.piece(size)
                answer = (
                    stock_answer(self.stock, prompt, ANSWER_TOKENS)
                    if short
                    else exact_answer(runtime, prompt, ANSWER_TOKENS)
                )
                if answer:
                    self.cases.append(Case(tuple(prompt), tuple(answer), short))

    def piece(self, size: int) -> list[int]:
        """That many consecutive tokens of the text."""
        start = self.random.randrange(max(1, len(self.text) - size))
        return self.text[start : start + size]

    def session(self, until: float) -> None:
        """One or two engines, some answers each, closed again."""
        rng = self.random
        with ExitStack() as stack:
            runtimes = [stack.enter_context(self.open()) for _ in range(rng.choice((1, 1, 1, 2)))]
            talks = [Talk(r) for r in runtimes for _ in range(2)]
            for _ in range(rng.randint(4, 24)):
                if time.monotonic() >= until or len(self.errors) >= MOST_ERRORS:
                    break
                talk = rng.choice(talks) if rng.random() < TALK_SHARE else None
                if not self.disturbed(talk.runtime if talk else rng.choice(runtimes), talk):
                    break
                self.watch.now()
            self.counts["engines"] += len(runtimes)

    def open(self) -> Runtime:
        """With random options."""
        rng = self.random
        path = rng.choice([p for p in PATHS if p != "whole-layer" or rng.random() < 0.3])
        draft = self.folder if path != "whole-layer" and rng.random() < 0.25 else None
        options = {
            "decode_path": path,
            "cache_policy": rng.choice(POLICIES),
            "seed_policy": rng.choice(SEED_POLICIES),
            "predict": rng.choice(PREDICTORS),
            "io": rng.choice(("direct", "direct", "buffered")),
            "chunk_tokens": rng.choice((64, 512, 2048)),
            "draft_model": draft,
            "num_draft_tokens": rng.randint(1, 5),
        }
        runtime = load(self.folder, memory_budget=ROOMY, prerouter="off", **options)
        runtime.soak_options = options  # type: ignore[attr-defined]
        if draft is not None:
            self.counts["engines with a draft"] += 1
            spoil_proposals(runtime, rng)
        return runtime

    def disturbed(self, runtime: Runtime, talk: Talk | None) -> bool:
        """One answer with whatever may happen to it; False when that was an error."""
        errors = len(self.errors)
        try:
            self.answer(runtime, talk)
        except Exception:
            self.note_error(runtime, traceback.format_exc())
        return len(self.errors) == errors

    def answer(self, runtime: Runtime, talk: Talk | None) -> None:
        """One answer, and its check."""
        rng = self.random
        case = rng.choice(self.cases)
        self.change_budget(runtime, needed=talk.next_tokens if talk else len(case.prompt))
        slow = runtime.engine.decoder.plan.path == "whole-layer"
        count = rng.randint(1, SLOW_TOKENS if slow else ANSWER_TOKENS)
        self.faults.arm(int(rng.expovariate(1 / 60)), rng.randint(1, 3) * (rng.random() < 0.12))
        ctrl_c = rng.expovariate(1 / 0.4) if rng.random() < 0.2 else None
        answer: list[int] = []
        injected = self.faults.injected
        try:
            with self.ctrl_c.after(ctrl_c):
                responses = (
                    talk.send(self.piece(rng.randint(1, 24)), count)
                    if talk
                    else runtime.stream_generate(list(case.prompt), count)
                )
                for response in responses:
                    answer.append(response.token)
                    if rng.random() < 0.06:
                        self.change_budget(runtime)
                    if rng.random() < 0.005:
                        responses.close()
                        break
        except KeyboardInterrupt:
            self.counts["interrupted answers"] += 1
        except ReadError:
            self.counts["answers with a failed read"] += 1
            if self.faults.injected == injected:
                self.note_error(runtime, "a read failed that was not made to")
        except BudgetError:
            self.counts["answers that did not fit"] += 1
        finally:
            self.faults.arm(0, 0)
        self.check(runtime, talk, case, answer)

    def check(self, runtime: Runtime, talk: Talk | None, case: Case, answer: list[int]) -> None:
        """Compare an answer, whole or cut short."""
        if talk is not None:
            prompt = talk.prompt
            answer = talk.heard(answer)
            wrong = wrong_tokens(self.stock, prompt, answer)
            if len(talk.said) > STOCK_TOKENS:
                talk.start_again()
        else:
            wrong = sum(a != b for a, b in zip(answer, case.answer, strict=False))
        self.counts["answers"] += 1
        self.counts["tokens"] += len(answer)
        self.counts["turns of conversations" if talk else "prompts"] += 1
        self.counts["long prompts"] += talk is None and not case.stock
        self.counts["wrong tokens"] += wrong
        if wrong:
            self.note_error(runtime, f"{wrong} wrong tokens of {len(answer)}: {answer}")

    def change_budget(self, runtime: Runtime, needed: int | None = None) -> None:
        """To something between one cached expert and all; enough for a prompt of `needed`."""
        engine, rng = runtime.engine, self.random
        if needed is not None and rng.random() < 0.5:
            return engine.change_budget(ROOMY)
        scratch = engine._plans.scratch
        if needed is None:
            least = engine.budget.used - engine.decoder.nbytes + scratch
        else:
            engine.change_budget(ROOMY)
            memory = engine.plan(needed).memory
            least = memory.total - memory.expert_cache
        try:
            engine.change_budget(int(least + rng.random() ** 2 * 1.2 * engine.index.nbytes) + 1)
            self.counts["budget changes"] += 1
        except BudgetError:
            self.counts["budget changes refused"] += 1

    def note_error(self, runtime: Runtime, text: str) -> None:
        """Print it, with how the engine was opened."""
        self.errors.append(f"{text} {runtime.soak_options}")  # type: ignore[attr-defined]
        click.echo(f"ERROR {self.errors[-1]}", err=True)

    def rest(self, base_threads: int) -> None:
        """A sample with nothing open, once closed engines' threads have gone."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.watch.now().threads > base_threads and time.monotonic() < deadline:
            time.sleep(0.05)
        self.watch.rest()

    def run(self, minutes: float) -> None:
        """Prepare, then sessions until the time is over."""
        self.prepare()
        stock = sum(c.stock for c in self.cases)
        click.echo(f"{stock} references of stock mlx-lm, {len(self.cases) - stock} of our own")
        first = self.watch.rest()
        start, minute = time.monotonic(), 1
        until = start + 60 * minutes
        with faulty_readers(self.faults), self.ctrl_c.installed():
            while time.monotonic() < until and len(self.errors) < MOST_ERRORS:
                self.session(until)
                self.rest(first.threads)
                if time.monotonic() >= start + 60 * minute:
                    minute = 1 + int((time.monotonic() - start) // 60)
                    self.print_line(time.monotonic() - start)

    def print_line(self, seconds: float) -> None:
        """Where it stands."""
        now, c = self.watch.samples[-1], self.counts
        click.echo(
            f"{seconds / 60:5.1f} min  {c['answers']} answers, {c['tokens']} tokens, "
            f"{self.ctrl_c.raised} interrupts, {self.faults.injected} failed reads, "
            f"{c['budget changes']} budgets, {c['wrong tokens']} wrong; "
            f"rss {now.rss / 1e6:.0f} MB, {now.fds} fds, {now.threads} threads"
        )
        sys.stdout.flush()


def report(soak: Soak, minutes: float, seed: int) -> bool:
    """Print the JSON line; says whether all was well."""
    drift = soak.watch.drift(max(WARM_SECONDS, 60 * minutes * WARM_SHARE))
    rss, fds, threads = drift["rss"], drift["fds"], drift["threads"]
    growth = rss["end"] - rss["warm"]
    grew = [
        name
        for name, bad in (
            ("rss", growth > RSS_GROWTH and rss["per_hour"] > RSS_PER_HOUR),
            ("fds", fds["end"] > fds["start"]),
            ("threads", threads["end"] > threads["warm"]),
        )
        if bad
    ]
    click.echo(
        json.dumps(
            {
                "minutes": minutes,
                "seed": seed,
                **{k.replace(" ", "_"): v for k, v in soak.counts.items()},
                "wrong_tokens": soak.counts["wrong tokens"],
                "interrupts_sent": soak.ctrl_c.sent,
                "interrupts_delivered": soak.ctrl_c.raised,
                "failures_injected": soak.faults.injected,
                "limits": {"rss_mb_per_hour": RSS_PER_HOUR, "rss_growth_mb": RSS_GROWTH},
                "drift": drift,
                "grew": grew,
                "errors": soak.errors,
            }
        )
    )
    return not (soak.errors or grew)


@click.command(help=__doc__)
@click.option("--minutes", type=float, default=40.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--model", default="demo", show_default=True, help="'demo', or a folder.")
def main(minutes: float, seed: int, model: str) -> None:
    """See above."""
    soak = Soak(demo_path() if model == "demo" else Path(model), seed)
    soak.run(minutes)
    if not report(soak, minutes, seed):
        sys.exit(1)


if __name__ == "__main__":
    main()
