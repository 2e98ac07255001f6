"""Held-out perplexity of a checkpoint with predicted routing, through the runtime's own decode.

The text is given to the sampler, token by token, so every token is a decode step: heads, staged
reads, adapter and all. Windows begin with one token of prompt; every token but the first two of a
window is scored, since the first decode step routes itself. Prints one line an arm.

\b
Example:
  python tools/prerouter_perplexity.py --tokens 2048
  python tools/prerouter_perplexity.py --prerouter-spec mlx_stream/demo/prerouter_k2.json
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click
import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.hub import demo_path  # noqa: E402
from mlx_stream.runtime import Runtime, load  # noqa: E402

WINDOW = 512
ARMS = {
    "real routing": {"prerouter": "off", "adapter": "off"},
    "predicted": {"prerouter": "on", "adapter": "off"},
    "predicted with LoRA": {"prerouter": "on", "adapter": "auto"},
}


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="The demo by default.")
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True), help="heldout.txt by default."
)
@click.option("--prerouter-spec", type=click.Path(path_type=Path, exists=True))
@click.option("--tokens", type=click.IntRange(3), default=2048, show_default=True)
def main(model: Path | None, text: Path | None, prerouter_spec: Path | None, tokens: int) -> None:
    """Command line."""
    folder = model or demo_path()
    words = (text or folder / "heldout.txt").read_text(encoding="utf-8")
    for name, options in ARMS.items():
        spec = prerouter_spec if options["prerouter"] == "on" else None
        with load(folder, backend="cpu", prerouter_spec=spec, **options) as runtime:
            ids = runtime.encode(words)[:tokens]
            value = perplexity(runtime, ids)
            steps = runtime.engine.decode_metrics.as_dict()
            predicted = steps.get("predicted_layer_steps", 0)
            click.echo(
                f"{name}: {value:.4f} over {len(ids)} tokens, {predicted} layer-steps predicted"
            )


def perplexity(runtime: Runtime, ids: list[int]) -> float:
    """exp of the mean loss of tokens 3.. of every window of `ids`."""
    total, scored = 0.0, 0
    for start in range(0, len(ids), WINDOW):
        losses = window_losses(runtime, ids[start : start + WINDOW])[1:]
        total, scored = total + sum(losses), scored + len(losses)
    return math.exp(total / scored)


def window_losses(runtime: Runtime, ids: list[int]) -> list[float]:
    """Losses of tokens 2.. of a window, each but the first by a decode step."""
    engine, losses, rest = runtime.engine, [], iter(ids[1:])

    def forced(logprobs: mx.array) -> mx.array:
        token = next(rest)
        losses.append(-logprobs[0, token].item())
        return mx.array([token])

    tokens = engine.decode(engine.prefill(ids[:1]), ids[:1], sampler=forced)
    while len(losses) < len(ids) - 1:
        next(tokens)
    tokens.close()
    return losses


if __name__ == "__main__":
    main()
