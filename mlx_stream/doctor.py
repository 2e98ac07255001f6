"""``mlx_stream doctor``: does this machine compute experts right, how fast, and what was chosen?"""

from __future__ import annotations

import os
import platform
from itertools import chain
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from mlx_stream.config import BACKENDS, format_bytes

if TYPE_CHECKING:
    from mlx_stream.backends.base import Backend
    from mlx_stream.backends.selftest import CaseResult

EXAMPLES = """
\b
Examples:
  mlx_stream doctor
  mlx_stream doctor --backend cpu --rounds 10

Exit code 0: every case is right. 1: at least one is wrong; please report its table.
"""


@click.command(epilog=EXAMPLES)
@click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def doctor(backend: str, rounds: int) -> None:
    """Check this machine: every expert format against a reference, timed against stock MLX."""
    from mlx_stream.backends.select import select_backend
    from mlx_stream.backends.selftest import run_selftest
    from mlx_stream.backends.selftest_kernels import run_kernel_selftest as kernels

    # What is checked on a Mac is our kernels; whether they are used afterwards depends on it.
    os.environ.setdefault("MLX_STREAM_KERNELS", "fused")
    chosen = select_backend(backend)
    console = Console()
    try:
        for line in _machine(chosen):
            console.print(line, highlight=False)
        table = Table("experts", "largest error", "allowed", "layer", "stock MLX", "ratio", "")
        results = []
        with console.status("computing"):
            for result in chain(run_selftest(chosen, rounds=rounds), kernels(chosen, rounds)):
                results.append(result)
                table.add_row(*_row(result))
        console.print(table)
        if chosen.name == "metal":
            console.print(_remember(results))
    finally:
        chosen.close()
    wrong = [r.name for r in results if not r.healthy]
    if wrong:
        raise SystemExit(f"unhealthy: {', '.join(wrong)}")
    formats = {r.name for r in results if r.kernel is None}
    steps = sorted({r.kernel for r in results if r.kernel is not None})
    console.print(
        f"healthy: {len(formats)} expert formats agree with their float32 reference"
        + (f", and so do the kernels for {' and '.join(steps)}" if steps else "")
    )


def _machine(backend: Backend) -> list[str]:
    import mlx.core as mx
    import psutil

    memory = backend.memory()
    lines = [
        f"mlx {mx.__version__} on {platform.platform()}, Python {platform.python_version()}",
        f"backend {backend.name}: {', '.join(sorted(backend.capabilities))}; activations "
        f"{backend.compute_dtype or 'as in the checkpoint'}",
        f"memory {format_bytes(psutil.virtual_memory().total)}, "
        f"{format_bytes(psutil.virtual_memory().available)} available",
    ]
    if memory.limit is not None:
        lines.append(f"recommended GPU working set {format_bytes(memory.limit)}")
    return lines


def _remember(results: list[CaseResult]) -> str:
    """Keep what our kernels gained here; later runs choose by it."""
    from mlx_stream.backends.kernels.selection import (
        ENVIRONMENT,
        forced_path,
        machine_name,
        save_profile,
    )

    if forced_path() != "fused":
        return f"our kernels were not measured: {ENVIRONMENT}={forced_path()}"
    gains = {r.name: r.stock_seconds / r.seconds for r in results if r.healthy}
    path = save_profile(machine_name(), gains)
    used = sorted(name for name, gain in gains.items() if gain > 1.0)
    return f"our kernels will be used for: {', '.join(used) or 'nothing'} ({path})"


def _row(result: CaseResult) -> tuple[str, ...]:
    return (
        result.name,
        f"{result.error:.1e}",
        f"{result.tolerance:.0e}",
        f"{result.seconds * 1e3:.2f} ms",
        f"{result.stock_seconds * 1e3:.2f} ms",
        f"{result.stock_seconds / result.seconds:.1f}x",
        "ok" if result.healthy else "WRONG",
    )
