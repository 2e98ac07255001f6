"""Phases 2 and 3: train the LoRA that a model needs to run with predicted routing. PyTorch.

\b
Phase 2: cross-entropy on text, on the student path: the heads of phase 1 route.
Phase 3: on-policy distillation: the student writes, the frozen base (float32, its own routing and
its own K) scores, reverse KL on its top tokens and the rest.

Each phase wants the folder of the one before (--from). Base and heads stay frozen; routed experts
never get an adapter. Writes heads, LoRA, ``prerouter.json`` and a report with perplexities.

\b
Examples:
  python tools/train_recovery_lora.py --phase 2 --from build/k4 --checkpoint mlx_stream/demo \\
      --data build/demo.work --out build/k4_lora
  python tools/train_recovery_lora.py --phase 3 --from build/k4_lora ... --out build/k4_final
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.prerouter_training.torch_extra import torch  # noqa: E402

# isort: split
from mlx_stream.prerouter.spec import PrerouterSpec  # noqa: E402
from tools.prerouter_training.data import Corpus, Windows, load_corpus  # noqa: E402
from tools.prerouter_training.distill import distillation_loss, text_loss  # noqa: E402
from tools.prerouter_training.files import (  # noqa: E402
    HEADS_NAME,
    LORA_NAME,
    need_phase,
    save_whole,
    with_lora,
    write_phase,
)
from tools.prerouter_training.generate import write  # noqa: E402
from tools.prerouter_training.heads import Heads  # noqa: E402
from tools.prerouter_training.loop import Loop  # noqa: E402
from tools.prerouter_training.lora import Lora  # noqa: E402
from tools.prerouter_training.model import Student  # noqa: E402
from tools.prerouter_training.options import (  # noqa: E402
    PhaseFlags,
    layer_list,
    phase_options,
    plain_errors,
)
from tools.prerouter_training.report import load_lora, results  # noqa: E402
from tools.prerouter_training.scores import perplexity  # noqa: E402
from tools.prerouter_training.weights import load_base  # noqa: E402

HEADS_RATE = 0.5  # of the LoRA's learning rate
LORA_SCRIPT = "tools/train_recovery_lora.py --phase"
SCRIPTS = {1: "tools/train_prerouter.py", 2: f"{LORA_SCRIPT} 2", 3: f"{LORA_SCRIPT} 3"}
LossOf = Callable[[int], tuple[torch.Tensor, dict[str, float]]]
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@dataclass(frozen=True)
class OwnText:
    """What phase 3 learns from.

    Attributes:
        prompt: tokens of the text that the student goes on from.
        top: tokens of the teacher's distribution that are compared one by one.
        reuse: steps that learn from one writing.
    """

    prompt: int
    top: int
    reuse: int


@click.command(help=__doc__)
@click.option("--phase", type=click.IntRange(2, 3), required=True)
@click.option("--from", "before", type=_FOLDER, required=True, help="OUT of the phase before.")
@click.option("--more", type=_FOLDER, help="OUT of this phase, to go on from with a new schedule.")
@phase_options(steps=600, learning_rate=2e-3)
@click.option("--consumers", help="Fewer layers than phase 1's, such as 2-5 (phase 2).")
@click.option("--rank", type=click.IntRange(1), default=16, show_default=True, help="Phase 2.")
@click.option("--alpha", type=float, default=32.0, show_default=True, help="Phase 2.")
@click.option(
    "--train-heads/--freeze-heads",
    default=False,
    show_default=True,
    help="Let the loss reach the heads too, through the weights of the experts they choose.",
)
@click.option("--prompt", type=click.IntRange(1), default=32, show_default=True, help="Phase 3.")
@click.option("--top", type=click.IntRange(1), default=64, show_default=True, help="Phase 3.")
@click.option(
    "--reuse",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Phase 3: steps that learn from one writing; a divisor of --save-every.",
)
@click.option(
    "--soft-labels",
    type=click.FloatRange(0, 1),
    default=0.75,
    show_default=True,
    help="Phase 2: weight of the base's own distribution as label; the text has the rest.",
)
@click.option(
    "--runners-up",
    type=click.IntRange(0),
    default=4,
    show_default=True,
    help="Experts after the chosen K that trained heads learn from too.",
)
@plain_errors
def main(
    phase: int,
    before: Path,
    more: Path | None,
    consumers: str | None,
    rank: int,
    alpha: float,
    train_heads: bool,
    prompt: int,
    top: int,
    reuse: int,
    soft_labels: float,
    runners_up: int,
    **flags: object,
) -> None:
    """Command line."""
    spec = need_phase(before, phase - 1, SCRIPTS[phase - 1])
    common, own = PhaseFlags.of(flags), OwnText(prompt, top, reuse)
    if phase == 3 and common.save_every % reuse:
        raise click.UsageError("--save-every must be a multiple of --reuse.")
    base = load_base(common.checkpoint, torch.bfloat16)
    corpus = load_corpus(common.data, common.checkpoint)
    start = more or before
    if more is not None:
        spec = need_phase(more, phase, SCRIPTS[phase])
    heads = Heads.load(start / HEADS_NAME)
    if phase == 2 and more is None:
        spec, heads = _routing(with_lora(spec, alpha, rank), heads, consumers)
        lora = Lora.fresh(base, alpha, rank, common.seed)
    else:
        lora = load_lora(start, spec)
    k = spec.top_k or base.shape.num_experts_per_tok
    wide = runners_up if train_heads else 0
    student = Student(base, k, heads, spec.consumers, spec.feature, lora, wide)
    kind = {"phase": phase, "train_heads": train_heads, "soft_labels": soft_labels}
    kind |= {"runners_up": wide}
    loop = _loop(
        student, common, asdict(own) | kind | {"more": None if more is None else str(more)}
    )
    part = corpus.validation[: common.validation_tokens]
    loop.run(
        _text(student, corpus, common, soft_labels)
        if phase == 2
        else _own(student, corpus, common, own),
        lambda: {"perplexity": round(perplexity(student, part), 4)},
    )
    for found in (heads, lora):
        found.parameters = {n: loop.best.get(n, t) for n, t in found.parameters.items()}
    save_whole(heads.save, common.out / HEADS_NAME)
    save_whole(lora.save, common.out / LORA_NAME)
    exact = Student(load_base(common.checkpoint), k, None, spec.consumers, spec.feature)
    values = results(exact, before, common.out, spec, corpus.excerpt)
    report = {"phase": phase, "top_k": k, "perplexity": values, "steps": loop.step}
    report |= {"seconds": round(loop.seconds), "settings": loop.settings}
    write_phase(common.out, spec, report)
    click.echo(json.dumps(report))


def _loop(student: Student, common: PhaseFlags, settings: dict[str, Any]) -> Loop:
    """Of the LoRA, and of the heads if they are trained, at a part of the rate."""
    lora, heads = student.lora, student.heads
    assert lora is not None and heads is not None, "both phases have both"  # noqa: PT018
    settings = common.settings() | settings
    settings |= {"top_k": student.top_k, "consumers": list(student.consumers)}
    settings |= {"alpha": lora.alpha, "rank": lora.rank}
    trained = lora.parameters | (heads.parameters if settings["train_heads"] else {})
    slower = (frozenset(heads.parameters), HEADS_RATE)
    plan = common.schedule()
    return Loop(common.out, trained, plan, settings, resume=common.resume, slower=slower)


def _routing(
    spec: PrerouterSpec, heads: Heads, consumers: str | None
) -> tuple[PrerouterSpec, Heads]:
    """The spec and the heads with only those consumers; heads that route nothing are dropped."""
    if consumers is None:
        return spec, heads
    layers = layer_list(consumers, spec.consumers[0], spec.consumers[-1])
    spec = replace(spec, consumers=layers, owners=tuple(n - 1 for n in layers))
    return spec, heads.of(spec.owners)


def _text(student: Student, corpus: Corpus, common: PhaseFlags, soft: float) -> LossOf:
    """Phase 2. A quarter of the batches has a prompt of random length, routed by its layers."""
    windows = Windows(corpus.train, common.window, common.rows, common.seed)
    own_k = student.base.shape.num_experts_per_tok
    teacher = Student(student.base, own_k) if soft else None

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        random = np.random.default_rng((common.seed, step, 2))
        first = int(random.integers(2, common.window)) if random.random() < 0.25 else 1
        return text_loss(student, windows.batch(step), first, teacher, soft), {}

    return loss_of


def _own(student: Student, corpus: Corpus, common: PhaseFlags, own: OwnText) -> LossOf:
    """Phase 3. The student writes for several steps at once: little dearer than for one."""
    exact = load_base(common.checkpoint)
    teacher = Student(exact, exact.shape.num_experts_per_tok)
    prompts = Windows(corpus.train, own.prompt, common.rows * own.reuse, common.seed + 1)
    written: list[torch.Tensor] = []

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        number, part = divmod(step, own.reuse)
        if part == 0:
            generator = torch.Generator().manual_seed(common.seed * 1_000_003 + number)
            starts = prompts.batch(number)[:, : own.prompt]
            ids = write(student, starts, common.window - own.prompt, generator)
            written[:] = ids.split(common.rows)
        return distillation_loss(student, teacher, written[part], own.prompt, own.top), {}

    return loss_of


if __name__ == "__main__":
    main()
