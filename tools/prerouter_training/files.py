"""What the phases leave for each other and for the runtime: spec, heads, adapter, report.

The order of the phases is enforced here: each asks for the files of the one before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_stream.errors import MlxStreamError
from mlx_stream.prerouter.spec import LoraSpec, PrerouterSpec, RouterMaths
from mlx_stream.prerouter.spec_file import SPEC_NAME, read_spec, write_spec
from mlx_stream.whole_files import write_whole

HEADS_NAME, LORA_NAME, REPORT_NAME = (
    "prerouter_heads.safetensors",
    "lora.safetensors",
    "report.json",
)


def prerouter_spec(
    name: str, owners: Sequence[int], consumers: Sequence[int], top_k: int, feature: str
) -> PrerouterSpec:
    """The spec of heads trained here.

    The first decode step routes itself, so nothing of a prompt but its cache is needed: prefill
    checkpoints and saved prompt caches work with the heads on.
    """
    return PrerouterSpec(
        name=name,
        trained=False,
        heads_file=HEADS_NAME,
        owners=tuple(owners),
        consumers=tuple(consumers),
        top_k=top_k,
        feature=feature,
        first_prediction="second_step",
        first_previous="zeros",
        missing_linear_init="error",
        router=RouterMaths("softmax_topk"),
    )


def with_lora(spec: PrerouterSpec, alpha: float, rank: int) -> PrerouterSpec:
    """The spec once an adapter makes the model fit to be used with its heads."""
    return replace(spec, trained=True, lora=LoraSpec(LORA_NAME, alpha, rank))


def need_phase(folder: Path, phase: int, script: str) -> PrerouterSpec:
    """The spec of an earlier phase's folder, whose files are all there.

    Raises:
        MlxStreamError: that phase was not run, or did not end.
    """
    report = folder / REPORT_NAME
    found = json.loads(report.read_text()).get("phase") if report.is_file() else None
    missing = [n for n in (SPEC_NAME, HEADS_NAME) if not (folder / n).is_file()]
    if phase > 1 and not (folder / LORA_NAME).is_file():
        missing.append(LORA_NAME)
    if missing or found != phase:
        raise MlxStreamError(
            f"phase {phase + 1} needs the files of phase {phase}",
            file=folder,
            expected=f"{REPORT_NAME} of phase {phase}, with heads" + (" and LoRA" * (phase > 1)),
            actual=f"missing {missing}" if missing else f"phase {found}",
            remedy=f"run {script} first, and give its --out folder",
        )
    return read_spec(folder / SPEC_NAME)


def write_phase(folder: Path, spec: PrerouterSpec, report: dict[str, Any]) -> None:
    """Write spec and report, the report last: it says that the phase has ended."""
    write_spec(folder / SPEC_NAME, spec)
    write_whole(folder / REPORT_NAME, json.dumps(report, indent=1) + "\n")


def save_whole(write: Any, path: Path) -> None:
    """Call ``write(other path)`` and move the file into its place."""
    fresh = path.with_name(f"{path.name}.new")
    write(fresh)
    os.replace(fresh, path)
