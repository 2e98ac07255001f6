"""``mlx_stream pack``, ``verify`` and ``repair``: the packed layout from the command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from mlx_stream.config import IO_MODES, format_bytes
from mlx_stream.errors import DamagedRecordError, PackError, UnstackedExpertsError
from mlx_stream.hub import resolve_model
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.quant_spec import MODES

if TYPE_CHECKING:
    from mlx_stream.convert.options import Conversion
    from mlx_stream.packed.pack import PackReport
    from mlx_stream.packed.source import PackSource

SHOWN_DAMAGE = 20

PACK_EXAMPLES = """
\b
Examples:
  mlx_stream pack ./checkpoint -o ./packed
  mlx_stream pack mlx-community/Qwen3-30B-A3B-4bit -o ./packed --verify
  mlx_stream trace ./checkpoint -o trace.npz
  mlx_stream pack ./checkpoint -o ./packed --order trace.npz
  mlx_stream pack Qwen/Qwen3-30B-A3B -o ./packed --bits 4
  mlx_stream pack ./checkpoint -o ./packed --rest-bits 4 --expert-bits 3 --refine

A checkpoint in the Hugging Face layout is rewritten as mlx-lm does it, a few experts at a time.
--bits quantizes all linear layers and embeddings as mlx_lm.convert does; --expert-bits and
--rest-bits set the routed experts and everything else apart. What is not named stays as it is.

Run it again after an interruption: finished files are kept.
"""

VERIFY_EXAMPLES = """
\b
Examples:
  mlx_stream verify ./packed
  mlx_stream verify ./packed --against ./checkpoint
  mlx_stream verify mlx-community/Qwen3-30B-A3B-4bit
"""

REPAIR_EXAMPLES = """
\b
Example:
  mlx_stream repair ./packed --source ./checkpoint
"""

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_IO = click.option(
    "--io",
    type=click.Choice(IO_MODES),
    default="direct",
    show_default=True,
    help="'direct' bypasses the page cache.",
)


@contextmanager
def byte_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error: bytes, speed, time left. Silent off a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


@click.command(epilog=PACK_EXAMPLES)
@click.argument("model")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write; made if it is not there.",
)
@click.option(
    "--order",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A routing trace: experts that are used often and together lie side by side.",
)
@click.option("--bits", type=int, help="Quantize everything to so many bits.")
@click.option("--expert-bits", type=int, help="Bits of the routed experts.")
@click.option("--rest-bits", type=int, help="Bits of all other weights.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="Quantization of everything that gets new bits.  [default: affine]",
)
@click.option("--group-size", type=int, help="Weights of one scale.  [default: the mode's]")
@click.option(
    "--refine",
    is_flag=True,
    help="Fit scales and zeros to the weights where there are 3 bits or fewer.",
)
@click.option("--verify", is_flag=True, help="Read everything again at the end.")
@click.option("--force", is_flag=True, help="Replace another packing in the folder.")
@_IO
def pack(
    model: str,
    output: Path,
    order: Path | None,
    bits: int | None,
    expert_bits: int | None,
    rest_bits: int | None,
    mode: str | None,
    group_size: int | None,
    refine: bool,
    verify: bool,
    force: bool,
    io: Any,
) -> None:
    """Write a checkpoint in the packed layout: one record, and one read, for each expert."""
    from mlx_stream.convert.options import conversion_of
    from mlx_stream.packed.pack import PackOptions
    from mlx_stream.packed.pack import pack as run

    conversion = conversion_of(mode, bits, expert_bits, rest_bits, group_size, refine)
    source = resolve_model(model)
    opened = _open(source, conversion)
    orders = None if order is None else _orders(opened.index, order)
    options = PackOptions(orders=orders, verify=verify, force=force, io=io, open=lambda _: opened)
    with byte_bar() as progress:
        report = run(source, output, options, progress)
    if report.already:
        said = f"renewed {', '.join(report.renewed)}" if report.renewed else "nothing to do"
        click.echo(f"{output} is packed already: {said}")
        return
    experts = sum(r.num_experts for r in report.manifest.layers)
    rate = (report.nbytes - report.kept_nbytes) / max(report.seconds, 1e-9)
    click.echo(
        f"{output}: {experts} experts of {len(report.manifest.layers)} layers, "
        f"{format_bytes(report.nbytes)} in {len(report.manifest.files)} files, "
        f"{report.seconds:.1f} s, {format_bytes(rate)}/s"
        + (f", {format_bytes(report.kept_nbytes)} were there" if report.kept_nbytes else "")
        + (", verified" if verify else "")
    )
    if report.errors:
        _show_errors(report, output)
    elif conversion.specs:
        click.echo("no weight was changed: all have the widths asked for, or cannot have them")
    _show_misfits(opened)


def _open(source: Path, conversion: Conversion) -> PackSource:
    """The source as it is, or to be converted."""
    from mlx_stream.packed.source import open_plain

    if not conversion.specs:
        with suppress(UnstackedExpertsError):
            return open_plain(source)
    from mlx_stream.convert.source import open_converted

    return open_converted(source, conversion)


def _reopen(path: Path, found: Mapping[str, Any]) -> PackSource:
    """A source as a manifest says that it was converted."""
    from mlx_stream.convert.options import Conversion
    from mlx_stream.convert.source import open_converted

    return open_converted(path, Conversion.from_json(found))


def _show_errors(report: PackReport, output: Path) -> None:
    """Relative errors by kind of weight: all of them are in the manifest."""
    from mlx_stream.packed.source import TensorError
    from mlx_stream.storage.packed_manifest import MANIFEST_NAME

    kinds: dict[str, list[TensorError]] = {}
    for name, error in report.errors.items():
        kinds.setdefault(_kind(name.rpartition(".")[0]), []).append(error)
    width = max(len(kind) for kind in kinds)
    click.echo(f"{'quantized':<{width}}  weights  relative error (worst)")
    for kind, errors in sorted(kinds.items()):
        total = sum(errors, TensorError(0.0, 0.0)).relative
        worst = max(e.relative for e in errors)
        click.echo(f"{kind:<{width}}  {len(errors):>7}  {total:.4f} ({worst:.4f})")
    click.echo(f"of each weight: {output / MANIFEST_NAME}")


def _kind(path: str) -> str:
    """A module's path without the numbers of layers."""
    return ".".join(p for p in path.split(".") if not p.isdigit())


def _show_misfits(source: PackSource) -> None:
    """What could not be quantized as it was asked, so that nobody takes it for done."""
    from mlx_stream.convert.source import ConvertedSource

    if not isinstance(source, ConvertedSource):
        return
    kinds = Counter(_kind(w.path) for w in source.made.widths.values() if w.misfit)
    if kinds:
        named = ", ".join(f"{kind} ({count})" for kind, count in sorted(kinds.items()))
        click.echo(f"not quantized, rows are no multiple of the group size: {named}")


@click.command(epilog=VERIFY_EXAMPLES)
@click.argument("model")
@click.option("--against", type=_FOLDER, help="Compare every tensor with this checkpoint.")
@_IO
def verify(model: str, against: Path | None, io: Any) -> None:
    """Check a packed folder's checksums, or a plain checkpoint's structure and known hashes."""
    from mlx_stream.packed.verify import verify as run

    folder = resolve_model(model)
    with byte_bar() as progress:
        report = run(folder, against=against, io=io, progress=progress)
    if not report.sound:
        for damage in report.damage[:SHOWN_DAMAGE]:
            click.echo(str(damage))
        if len(report.damage) > SHOWN_DAMAGE:
            click.echo(f"... and {len(report.damage) - SHOWN_DAMAGE} more")
        raise DamagedRecordError(
            f"{len(report.damage)} things are not as they must be",
            file=folder,
            actual=str(report.damage[0]),
            remedy="mlx_stream repair FOLDER --source CHECKPOINT"
            if report.packed
            else "download what differs again",
        )
    click.echo(f"{folder}: sound ({'; '.join(report.checked)})")


@click.command(epilog=REPAIR_EXAMPLES)
@click.argument("folder", type=_FOLDER)
@click.option("--source", required=True, help="The checkpoint that was packed.")
@_IO
def repair(folder: Path, source: str, io: Any) -> None:
    """Write the damaged parts of a packed folder anew."""
    from mlx_stream.packed.repair import repair as run

    with byte_bar() as progress:
        report = run(folder, resolve_model(source), io=io, progress=progress, open_source=_reopen)
    for file, parts in report.repaired:
        for part in parts:
            click.echo(f"{file}: {part}: written anew")
    done = f"{format_bytes(report.nbytes)} written" if report.repaired else "nothing to repair"
    click.echo(f"{folder}: sound, {done}")


def _orders(index: ExpertIndex, trace_file: Path) -> dict[str, list[int]]:
    """By layer name, the order that a trace suggests. Raises TraceError, PackError."""
    from mlx_stream.decode.routing_trace import RoutingTrace
    from mlx_stream.packed.order import used_first

    trace = RoutingTrace.load(trace_file)
    orders: dict[str, list[int]] = {}
    for number, experts, prompt, decoded in zip(
        trace.layers, trace.num_experts, trace.prompt, trace.decode, strict=True
    ):
        layer = index.layers[number] if number < len(index.layers) else None
        if layer is None or layer.num_experts != experts:
            _fail_trace(trace_file, index, number, experts)
        orders[layer.name] = used_first([prompt, decoded], experts)
    return orders


def _fail_trace(file: Path, index: ExpertIndex, layer: int, experts: int) -> NoReturn:
    raise PackError(
        "the routing trace is of another model",
        file=file,
        expected=f"{len(index.layers)} layers of {index.layers[0].num_experts} experts",
        actual=f"layer {layer} with {experts} experts",
        remedy="record one with this model: mlx_stream trace MODEL -o FILE",
    )
