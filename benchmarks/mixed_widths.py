"""Bytes and held-out perplexity of a model at several widths for its experts and for the rest.

For each pair of widths, with and without refinement: ``mlx_stream pack MODEL --rest-bits A
--expert-bits B [--refine]`` into a scratch folder, then the perplexity of a text through our
runtime. Prints a table and one JSON line. See docs/mixed_widths.md.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlx_stream.convert.options import REFINED_BITS

WIDTHS = ("4/4", "4/3", "4/2", "3/3")


@dataclass(frozen=True)
class Row:
    """One packing. Bytes are those of tensors; errors are relative: sqrt(sum e² / sum w²)."""

    name: str
    refined: bool
    expert_bytes: int
    rest_bytes: int
    expert_error: float
    rest_error: float
    tokens: int
    perplexity: float


def pack(model: Path, folder: Path, width: str | None, refine: bool) -> None:
    """Pack the model as the command line does; width as REST/EXPERTS, None for no change."""
    flags = []
    if width is not None:
        rest, experts = width.split("/")
        flags = ["--rest-bits", rest, "--expert-bits", experts, *(["--refine"] if refine else [])]
    command = [sys.executable, "-m", "mlx_stream", "pack", str(model), "-o", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}\n{done.stderr}")


def perplexity(runtime: Any, ids: list[int], window: int) -> tuple[float, int]:
    """As the demo's card says: windows without overlap, all tokens but each window's first."""
    import mlx.core as mx
    import mlx.nn as nn

    total, scored = 0.0, 0
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        with runtime.engine.backend.compute_scope():
            logits = runtime.model(mx.array(part[:-1])[None])[0].astype(mx.float32)
            loss = nn.losses.cross_entropy(logits, mx.array(part[1:]), reduction="sum")
            total += loss.item()
        scored += len(part) - 1
    return math.exp(total / scored), scored


def errors(folder: Path) -> tuple[float, float]:
    """Relative error of the routed experts and of the rest: root mean square over the weights."""
    conversion = json.loads((folder / "packed.json").read_text()).get("conversion") or {}
    parts: dict[bool, list[float]] = {True: [], False: []}
    for name, error in conversion.get("relative_errors", {}).items():
        parts[".switch_mlp." in name].append(error)
    experts, rest = (
        math.sqrt(statistics.fmean(e * e for e in found)) if found else 0.0
        for found in (parts[True], parts[False])
    )
    return experts, rest


def measure(folder: Path, name: str, refined: bool, text: str, limit: int, window: int) -> Row:
    """Load the packed folder and measure it."""
    import mlx_stream

    with mlx_stream.load(folder, prerouter="off") as runtime:
        ids = runtime.encode(text)[:limit]
        value, scored = perplexity(runtime, ids, window)
        index = runtime.engine.index
    sizes = index.nbytes, index.resident_nbytes
    return Row(name, refined, *sizes, *errors(folder), scored, round(value, 4))


def refined_too(width: str) -> bool:
    """Whether there is anything to refine: 4 bits and more are left alone."""
    return min(int(bits) for bits in width.split("/")) <= REFINED_BITS


def shown(row: Row) -> str:
    """A line of the table."""
    refined = "yes" if row.refined else "no" if row.expert_error else ""
    total = row.expert_bytes + row.rest_bytes
    return (
        f"| {row.name} | {refined} | {total / 1e6:.2f} | {row.expert_bytes / 1e6:.2f} | "
        f"{row.expert_error:.4f} | {row.rest_error:.4f} | {row.perplexity:.3f} |"
    )


HEADER = """\
| rest/experts | refined | MB | of it experts | error, experts | error, rest | perplexity |
|---|---|---:|---:|---:|---:|---:|"""


@click.command(help=__doc__)
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--width", "widths", multiple=True, help="REST/EXPERTS; may be given again.")
@click.option("--tokens", default=1 << 30, help="At most so many of the text.")
@click.option("--window", default=512, show_default=True, help="Tokens read from an empty context.")
def main(model: Path, text: Path | None, widths: tuple[str, ...], tokens: int, window: int) -> None:
    """Command line; the text is MODEL/heldout.txt unless given."""
    held_out = (text or model / "heldout.txt").read_text(encoding="utf-8")
    arms: list[tuple[str | None, bool]] = [(None, False)]
    for width in widths or WIDTHS:
        arms += [(width, False), *([(width, True)] if refined_too(width) else [])]
    rows = []
    click.echo(HEADER)
    for width, refine in arms:
        with tempfile.TemporaryDirectory() as folder:
            pack(model, Path(folder), width, refine)
            name = width or "unchanged"
            rows.append(measure(Path(folder), name, refine, held_out, tokens, window))
        click.echo(shown(rows[-1]))
    facts = {"machine": platform.platform(), "model": model.name, "window": window}
    click.echo(json.dumps(facts | {"rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
