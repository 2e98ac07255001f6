"""Put trained heads and their LoRA into a checkpoint's folder, where ``--prerouter`` finds them.

Without --tier they are the checkpoint's own (``prerouter.json``). With one they lie beside it as
``prerouter_TIER.json``, for ``--prerouter-spec``.

\b
Examples:
  python tools/install_prerouter.py --from build/k4_final --earlier build/k4 \\
      --earlier build/k4_lora --checkpoint mlx_stream/demo
  python tools/install_prerouter.py --from build/k2_final ... --tier k2
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.prerouter.spec_file import SPEC_NAME, read_spec, write_spec  # noqa: E402
from mlx_stream.whole_files import write_whole  # noqa: E402
from tools.prerouter_training.files import (  # noqa: E402
    HEADS_NAME,
    LORA_NAME,
    REPORT_NAME,
    need_phase,
    save_whole,
)

METRICS_NAME = "prerouter_metrics.json"
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command(help=__doc__)
@click.option("--from", "trained", type=_FOLDER, required=True, help="OUT of phase 2 or 3.")
@click.option("--earlier", type=_FOLDER, multiple=True, help="OUT of earlier phases, in order.")
@click.option("--checkpoint", type=_FOLDER, required=True)
@click.option("--tier", help="A name for heads beside the checkpoint's own.")
@click.option("--on-request", is_flag=True, help="Only for --prerouter on: auto leaves it off.")
@click.option("--phase", type=click.IntRange(2, 3), default=3, show_default=True)
def main(
    trained: Path,
    earlier: tuple[Path, ...],
    checkpoint: Path,
    tier: str | None,
    on_request: bool,
    phase: int,
) -> None:
    """Command line."""
    need_phase(trained, phase, "tools/train_recovery_lora.py")
    click.echo(install(trained, checkpoint, tier, on_request=on_request))
    note_reports([*earlier, trained], checkpoint, tier)


def install(trained: Path, checkpoint: Path, tier: str | None, *, on_request: bool = False) -> Path:
    """Copy the files, the spec last; returns its path.

    Raises:
        PrerouterError: the spec of `trained` is bad.
    """
    spec = read_spec(trained / SPEC_NAME)
    assert spec.lora is not None, "phases 2 and 3 leave a LoRA"
    names = {HEADS_NAME: _named(HEADS_NAME, tier), LORA_NAME: _named(LORA_NAME, tier)}
    for name, target in names.items():
        save_whole(partial(shutil.copyfile, trained / name), checkpoint / target)
    lora = replace(spec.lora, file=names[LORA_NAME])
    path = checkpoint / _named(SPEC_NAME, tier)
    auto = spec.trained and not on_request
    write_spec(path, replace(spec, trained=auto, heads_file=names[HEADS_NAME], lora=lora))
    return path


def note_reports(folders: list[Path], checkpoint: Path, tier: str | None) -> None:
    """Put the phases' reports into the checkpoint's METRICS_NAME, by tier and phase."""
    path = checkpoint / METRICS_NAME
    known = json.loads(path.read_text()) if path.exists() else {}
    reports = [json.loads((folder / REPORT_NAME).read_text()) for folder in folders]
    for report in reports:
        report["settings"].pop("more", None)  # a path of the machine that trained
    known[tier or "own"] = {f"phase_{report['phase']}": report for report in reports}
    write_whole(path, json.dumps(known, indent=1) + "\n")


def _named(name: str, tier: str | None) -> str:
    stem, _, ending = name.partition(".")
    return name if tier is None else f"{stem}_{tier}.{ending}"


if __name__ == "__main__":
    main()
