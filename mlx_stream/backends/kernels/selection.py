"""Stock MLX operations or our kernels? Decided per expert layer, with a reason that is recorded.

Our kernels are correct by test but no one can know their speed on a chip they never ran on. So
"auto" takes them only where ``mlx_stream doctor`` has compiled, checked and timed them on this very
machine and they won; elsewhere the stock operations run. ``MLX_STREAM_KERNELS=stock|fused`` forces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlx_stream.config import cache_folder
from mlx_stream.errors import MlxStreamError
from mlx_stream.whole_files import write_whole

ENVIRONMENT = "MLX_STREAM_KERNELS"
PATHS = ("auto", "stock", "fused")
# From the public comparison quoted in tiles.py: below this many rows an expert the wide tiles lose.
MIN_ROWS = 24


class KernelChoiceError(MlxStreamError):
    """MLX_STREAM_KERNELS has a value that is none of the known ones."""


@dataclass(frozen=True)
class Choice:
    """How a layer is computed, such as ``"stock"`` or ``"fused"``, and why: for the receipt."""

    path: str
    reason: str


def forced_path() -> str:
    """``"auto"``, ``"stock"`` or ``"fused"``, from the environment.

    Raises:
        KernelChoiceError: another value.
    """
    value = os.environ.get(ENVIRONMENT, "auto").strip().lower() or "auto"
    if value not in PATHS:
        raise KernelChoiceError(
            f"{ENVIRONMENT} has an unknown value",
            expected=PATHS,
            actual=value,
            remedy=f"unset {ENVIRONMENT}, or set it to one of these",
        )
    return value


def choose(
    *,
    forced: str,
    supported: bool,
    unsupported_reason: str,
    format_name: str,
    rows_per_expert: float,
    verified: Mapping[str, float],
) -> Choice:
    """Pick a path for one layer. Pure.

    Args:
        forced: of :func:`forced_path`.
        supported: whether the kernels know this combination at all.
        format_name: such as ``"affine 4-bit g64"``, the key of `verified`.
        rows_per_expert: mean rows of the experts that have any.
        verified: measured speed of our kernel over stock, by format, on this machine.
    """
    if not supported:
        return Choice("stock", f"no kernel for this layer: {unsupported_reason}")
    if forced != "auto":
        return Choice(forced, f"{ENVIRONMENT}={forced}")
    gain = verified.get(format_name)
    if gain is None:
        return Choice("stock", f"{format_name} not verified on this machine: run mlx_stream doctor")
    if gain <= 1.0:
        return Choice("stock", f"doctor measured our kernel at {gain:.2f}x of stock here")
    if rows_per_expert < MIN_ROWS:
        return Choice("stock", f"{rows_per_expert:.0f} rows an expert, below {MIN_ROWS}")
    return Choice("fused", f"doctor measured our kernel at {gain:.2f}x of stock here")


def choose_kernel(
    kernel: str,
    *,
    forced: str,
    unsupported: str | None,
    measured: str,
    verified: Mapping[str, float],
) -> Choice:
    """Whether the kernel of another step than the grouped MLP runs. Pure.

    Args:
        kernel: the step, such as ``"decode"``; the path is that, or ``"stock decode"``.
        forced: of :func:`forced_path`.
        unsupported: why the kernel cannot compute this layer, None if it can.
        measured: doctor's name of the kernel, the key of `verified`.
        verified: measured speed of our kernels over stock, on this machine.
    """
    stock = f"stock {kernel}"
    if unsupported is not None:
        return Choice(stock, f"no kernel for this layer: {unsupported}")
    if forced != "auto":
        return Choice(kernel if forced == "fused" else stock, f"{ENVIRONMENT}={forced}")
    gain = verified.get(measured)
    if gain is None:
        return Choice(stock, f"{measured} not verified on this machine: run mlx_stream doctor")
    return Choice(
        kernel if gain > 1.0 else stock, f"doctor measured our kernel at {gain:.2f}x of stock here"
    )


def machine_name() -> str:
    """The GPU and the MLX version: what a measurement holds for."""
    return f"{mx.device_info().get('device_name', 'unknown')}, mlx {mx.__version__}"


def profile_path() -> Path:
    """Where doctor keeps what it measured; follows XDG_CACHE_HOME."""
    return cache_folder() / "kernels.json"


def load_profile(machine: str) -> dict[str, float]:
    """Measured gains by format for `machine`; empty when there are none that can be read."""
    try:
        data = json.loads(profile_path().read_text())
        gains = data[machine]
        return {str(name): float(gain) for name, gain in gains.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_profile(machine: str, gains: Mapping[str, float]) -> Path:
    """Keep gains for `machine`, beside those of other machines; written atomically."""
    path = profile_path()
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({**known, machine: dict(gains)}, indent=2) + "\n")
    return path
