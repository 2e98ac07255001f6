"""Phase 1: train Prerouter heads for a checkpoint. PyTorch on the CPU, extra ``train``.

Works on the dequantized weights of the very checkpoint that is deployed, which stays frozen. The
head of layer N learns what layer N + 1 routes the next token to. Writes ``prerouter.json``, the
heads and a report with held-out top-k recall. tools/train_recovery_lora.py goes on from there.

\b
Examples:
  python tools/train_demo_model.py prepare --out build/demo
  python tools/train_prerouter.py --checkpoint mlx_stream/demo --data build/demo.work --out build/k4
  python tools/train_prerouter.py ... --top-k 2 --out build/k2
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from tools.prerouter_training.torch_extra import torch  # noqa: E402

# isort: split
from mlx_stream.prerouter.spec import FEATURES  # noqa: E402
from tools.prerouter_training.data import Corpus, Windows, load_corpus  # noqa: E402
from tools.prerouter_training.files import (  # noqa: E402
    HEADS_NAME,
    prerouter_spec,
    save_whole,
    write_phase,
)
from tools.prerouter_training.heads import Heads  # noqa: E402
from tools.prerouter_training.imitation import imitation_loss, look  # noqa: E402
from tools.prerouter_training.loop import Loop  # noqa: E402
from tools.prerouter_training.model import Student  # noqa: E402
from tools.prerouter_training.options import (  # noqa: E402
    PhaseFlags,
    layer_list,
    phase_options,
    plain_errors,
)
from tools.prerouter_training.scores import perplexity, recall  # noqa: E402
from tools.prerouter_training.weights import load_base  # noqa: E402

LossOf = Callable[[int], tuple[torch.Tensor, dict[str, float]]]
Score = Callable[[], dict[str, float]]


@click.command(help=__doc__)
@phase_options(steps=600, learning_rate=2e-3)
@click.option("--top-k", type=click.IntRange(1), help="Experts a token; the model's by default.")
@click.option("--consumers", help="Layers that heads route, such as 1-5; all but the first.")
@click.option("--width", type=click.IntRange(1), default=128, show_default=True, help="Of fc1.")
@click.option("--feature", type=click.Choice(FEATURES), default="executed", show_default=True)
@plain_errors
def main(
    top_k: int | None, consumers: str | None, width: int, feature: str, **flags: object
) -> None:
    """Command line."""
    common = PhaseFlags.of(flags)
    base = load_base(common.checkpoint, torch.bfloat16)
    corpus = load_corpus(common.data, common.checkpoint)
    layers = base.shape.num_hidden_layers
    routed = layer_list(consumers or f"1-{layers - 1}", 1, layers - 1)
    k = top_k or base.shape.num_experts_per_tok
    heads = Heads.warm_start(base, [n - 1 for n in routed], width, common.seed)
    settings = {"phase": 1, "top_k": k, "consumers": list(routed), "width": width}
    settings = common.settings() | settings
    loop = Loop(common.out, heads.parameters, common.schedule(), settings, resume=common.resume)
    loop.run(*_work(Student(base, k, heads, routed, feature), corpus, common))
    save_whole(Heads(loop.best).save, common.out / HEADS_NAME)
    trained = Heads.load(common.out / HEADS_NAME)  # what is reported is what was written
    spec = prerouter_spec(common.name, trained.owners, routed, k, feature)
    report = results(corpus, Student(base, k, trained, routed, feature), common, width)
    report |= {"steps": loop.step, "seconds": round(loop.seconds), "settings": loop.settings}
    write_phase(common.out, spec, report)
    click.echo(json.dumps(report))


def _work(student: Student, corpus: Corpus, common: PhaseFlags) -> tuple[LossOf, Score]:
    """The loss of a step, and the held-out numbers."""
    base, k, heads = student.base, student.top_k, student.heads
    assert heads is not None, "phase 1 trains heads"
    windows = Windows(corpus.train, common.window, common.rows, common.seed)
    part = corpus.validation[: common.validation_tokens]

    def loss_of(step: int) -> tuple[torch.Tensor, dict[str, float]]:
        seen = look(base, k, windows.batch(step)[:, :-1])
        return imitation_loss(heads, seen, base.shape.num_experts), {}

    def score() -> dict[str, float]:
        found = recall(base, k, part, {"heads": heads})["heads"].values()
        value = perplexity(student, part)
        return {"perplexity": round(value, 4), "recall": round(sum(found) / len(found), 4)}

    return loss_of, score


def results(corpus: Corpus, student: Student, common: PhaseFlags, width: int) -> dict[str, object]:
    """Numbers on the excerpt, in float32."""
    exact = load_base(common.checkpoint)
    heads, routed, k = student.heads, student.consumers, student.top_k
    assert heads is not None, "phase 1 trains heads"
    warm = Heads.warm_start(exact, heads.owners, width, common.seed)
    run = {"warm start": warm, "heads": heads}
    with torch.no_grad():
        native = perplexity(Student(exact, exact.shape.num_experts_per_tok), corpus.excerpt)
        values = {
            "base, its own K": native,
            "base": perplexity(Student(exact, k), corpus.excerpt),
        }
        for name, some in run.items():
            chosen = Student(exact, k, some, routed, student.feature)
            values[f"predicted, {name}"] = perplexity(chosen, corpus.excerpt)
        found = recall(exact, k, corpus.excerpt, run)
    rounded = {name: round(value, 4) for name, value in values.items()}
    return {"phase": 1, "top_k": k, "recall": found, "perplexity": rounded}


if __name__ == "__main__":
    main()
