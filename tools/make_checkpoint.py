"""Write a random checkpoint of any mlx-lm MoE model, at any size, without holding it in memory.

The mlx-lm model is built and quantized lazily, which gives the name, shape and dtype of every
tensor; the bytes are then generated and written chunk by chunk. The folder is what
`mlx_lm.convert` would have left: `model*.safetensors`, its index, and `config.json` with
"quantization". The values are noise, scaled so that activations stay finite and routing is
spread. There is no tokenizer.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from tests.support.families import FAMILIES  # noqa: E402
from tools.checkpoint_tensors import (  # noqa: E402
    GROUP_OF_MODE,
    Quant,
    Tensor,
    build_model,
    chunks,
    plan_tensors,
    pool_bytes,
)

__all__ = ["Quant", "Summary", "make_checkpoint"]

PRESETS = ROOT / "tools" / "presets"  # config.json files of real models


@dataclass(frozen=True)
class Summary:
    """What was written."""

    path: Path
    nbytes: int
    tensors: int
    shards: int
    seconds: float


def _shards(plan: Sequence[Tensor], shard_bytes: int) -> list[list[Tensor]]:
    """Cut in model order as mlx-lm does; within a file the order is scattered, as mlx writes it."""
    shards: list[list[Tensor]] = []
    size = 0
    for tensor in plan:
        if not shards or size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(shard, key=lambda t: zlib.crc32(t.name.encode())) for shard in shards]


def _header(tensors: Sequence[Tensor]) -> bytes:
    """Length and JSON, unpadded as mlx writes it: data starts at any byte of the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for t in tensors:
        span = [offset, offset + t.nbytes]
        entries[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": span}
        offset += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text


def _write_shard(
    file: BinaryIO, tensors: Sequence[Tensor], seed: int, pool: int, progress: Callable[[int], None]
) -> None:
    file.write(_header(tensors))
    for tensor in tensors:
        written = 0
        for chunk in chunks(tensor, seed, pool):
            nbytes = file.write(memoryview(chunk).cast("B"))
            progress(nbytes)
            written += nbytes
        assert written == tensor.nbytes, (tensor, written)
    file.flush()
    os.fsync(file.fileno())


def _write_folder(
    folder: Path,
    plan: Sequence[Tensor],
    config: dict[str, Any],
    metadata: dict[str, int],
    *,
    seed: int,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> int:
    """Shards, index and config into an existing empty folder; returns the number of shards."""
    shards = _shards(plan, shard_bytes)
    pool = pool_bytes(plan)
    weight_map = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        with open(folder / name, "wb") as file:
            _write_shard(file, tensors, seed, pool, progress)
        weight_map |= {t.name: name for t in tensors}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    mlx_lm_utils.save_config(config, folder / "config.json")
    return len(shards)


def make_checkpoint(
    out: str | os.PathLike[str],
    config: dict[str, Any],
    *,
    quant: Quant | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
    shard_bytes: int = 5 << 30,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Write the checkpoint at `out`, which appears complete or not at all.

    `dtype` is that of scales and unquantized parameters. `progress(done, total)` is in bytes.
    Reseeds `mx.random`. The bytes depend on the arguments and the mlx-lm version only.
    """
    out, started = Path(out), time.perf_counter()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another --out")
    if shard_bytes <= 0:
        raise ValueError(f"shard size must be positive, got {shard_bytes}")
    mx.random.seed(seed)
    model, config = build_model(config, quant or Quant(), getattr(mx, dtype))
    plan = plan_tensors(model, seed)
    total = sum(t.nbytes for t in plan)
    metadata = {
        "total_size": total,
        "total_parameters": mlx_lm_utils.get_total_parameters(model),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out.parent).free
    if total + (64 << 20) > free:
        raise OSError(f"{out.parent} has {free / 1e9:.2f} GB free, needs {total / 1e9:.2f} GB")
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    temporary.mkdir()
    try:
        shards = _write_folder(
            temporary, plan, config, metadata, seed=seed, shard_bytes=shard_bytes, progress=advance
        )
        os.replace(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Summary(out, total, len(plan), shards, time.perf_counter() - started)


# ---- command line


def _base_config(family: str | None, config: Path | None, preset: str | None) -> dict[str, Any]:
    if sum(source is not None for source in (family, config, preset)) != 1:
        raise click.UsageError("give exactly one of --family, --config and --preset")
    if family is None:
        return json.loads((config or PRESETS / f"{preset}.json").read_text())
    if family not in FAMILIES:
        raise click.UsageError(f"unknown family {family!r}: known are {', '.join(FAMILIES)}")
    return copy.deepcopy(FAMILIES[family].config)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _set_layers(config: dict[str, Any], layers: int) -> None:
    """Change the depth; lists with one entry a layer are cut or repeated to the new length."""
    text = _text_config(config)
    names = [n for n in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if n in text]
    if not names:
        raise click.UsageError("the config has no layer count for --layers to change")
    old = text[names[0]]
    for key, value in text.items():
        if isinstance(value, list) and len(value) == old:
            text[key] = (value * -(-layers // old))[:layers]
    for part in (text, config):
        part.update({name: layers for name in names if name in part})


def _set_value(config: dict[str, Any], assignment: str) -> None:
    """`a.b=value`; the value is JSON, else a string."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise click.UsageError(f"--set {assignment!r}: expected key=value")
    *parents, leaf = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    try:
        config[leaf] = json.loads(text)
    except json.JSONDecodeError:
        config[leaf] = text


def _parse_override(text: str) -> tuple[str, dict[str, Any] | bool]:
    """`REGEX=bits:8,group_size:64`, or `REGEX=false` to leave the modules unquantized."""
    pattern, _, value = text.rpartition("=")
    if not pattern:
        raise click.UsageError(f"--override {text!r}: expected REGEX=bits:8,group_size:64 or false")
    if value in ("true", "false"):
        return pattern, value == "true"
    pairs = dict(part.partition(":")[::2] for part in value.split(","))
    if not set(pairs) <= {"bits", "group_size", "mode"}:
        raise click.UsageError(f"--override {text!r}: keys are bits, group_size and mode")
    return pattern, {k: v if k == "mode" else int(v) for k, v in pairs.items()}


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise click.UsageError(f"--shard-size {text!r}: expected for example 5GB or 500MB")
    return int(float(match[1]) * 1000 ** " KMG".index(match[2].upper() or " "))


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--family", help="A tiny config of tests/support/families.py.")
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--preset", type=click.Choice(sorted(p.stem for p in PRESETS.glob("*.json"))))
@click.option("--set", "assignments", multiple=True, help="key=value; text_config.key=value.")
@click.option("--layers", type=click.IntRange(1))
@click.option("--vocab", type=click.IntRange(1))
@click.option("--mode", type=click.Choice([*GROUP_OF_MODE, "none"]), default="affine")
@click.option("--bits", type=int)
@click.option("--group-size", type=int)
@click.option("--override", "overrides", multiple=True, help="REGEX=bits:8,group_size:64 or false.")
@click.option("--global-scale", is_flag=True, help="nvfp4: one more scale an expert.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16")
@click.option("--shard-size", default="5GB", show_default=True)
@click.option("--seed", type=int, default=0)
def main(
    out: Path,
    family: str | None,
    config: Path | None,
    preset: str | None,
    assignments: tuple[str, ...],
    layers: int | None,
    vocab: int | None,
    mode: str,
    bits: int | None,
    group_size: int | None,
    overrides: tuple[str, ...],
    global_scale: bool,
    dtype: str,
    shard_size: str,
    seed: int,
) -> None:
    """Parse, write, report."""
    values = _base_config(family, config, preset)
    if layers:
        _set_layers(values, layers)
    if vocab:
        values.update({"vocab_size": vocab} if "vocab_size" in values else {})
        _text_config(values)["vocab_size"] = vocab
    for assignment in assignments:
        _set_value(values, assignment)
    parsed = tuple(_parse_override(text) for text in overrides)
    shard_bytes = _parse_size(shard_size)
    with click.progressbar(length=1, label=str(out), file=sys.stderr) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        try:
            summary = make_checkpoint(
                out,
                values,
                quant=Quant(mode, bits, group_size, parsed, global_scale),
                dtype=dtype,
                seed=seed,
                shard_bytes=shard_bytes,
                progress=progress,
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error
    click.echo(
        f"{summary.path}: {summary.nbytes / 1e9:.3f} GB, {summary.tensors} tensors, "
        f"{summary.shards} files, {summary.seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
