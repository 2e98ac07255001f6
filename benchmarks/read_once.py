"""Are the experts read once per prompt, whatever its length and the chunk size?

For each prompt length and chunk size: bytes counted by the reader, bytes counted by the operating
system for the process (Linux, with O_DIRECT), distinct bytes of the experts used, amplification.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np

from mlx_stream.config import format_bytes
from mlx_stream.runtime import load


def process_read_bytes() -> int | None:
    """Bytes this process made the disk read so far; None where /proc does not say."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(text.split("read_bytes: ")[1].split()[0])


@click.command(help=__doc__)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--tokens", multiple=True, type=int, default=(300, 2048, 8192), show_default=True)
@click.option(
    "--chunks", multiple=True, type=int, default=(64, 512, 0), help="0: the whole prompt."
)
@click.option("--memory-budget", default="4GB", show_default=True)
def main(model: Path, tokens: tuple[int, ...], chunks: tuple[int, ...], memory_budget: str) -> None:
    """Print one line a combination and one JSON line."""
    rows = []
    click.echo(f"{'tokens':>7} {'chunk':>6} {'read':>11} {'outside':>11} {'used':>11} {'ampl.':>6}")
    for count in tokens:
        ids = np.random.default_rng(0).integers(2, 1000, count)
        for chunk in chunks:
            size = chunk or count
            with load(model, memory_budget=memory_budget, chunk_tokens=size) as runtime:
                before = process_read_bytes()
                receipt = runtime.prefill(ids).receipt
                after = process_read_bytes()
            outside = None if before is None or after is None else after - before
            rows.append({**receipt.as_dict(), "outside_bytes": outside})
            click.echo(
                f"{count:>7} {receipt.chunk_tokens:>6} {format_bytes(receipt.bytes_read):>11} "
                f"{'-' if outside is None else format_bytes(outside):>11} "
                f"{format_bytes(receipt.distinct_expert_bytes):>11} "
                f"{receipt.read_amplification:>6.3f}"
            )
    click.echo(json.dumps(rows))


if __name__ == "__main__":
    main()
