"""Flipped bits in packed folders: found, or harmless; never a wrong answer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from tools.fault_parts import Round, Tally, WrongError, caught
from tools.fault_parts_models import (
    STREAM,
    Model,
    Workplace,
    contents,
    pack_small,
    tokens_of,
    unfinished,
)

FLIPS = 60  # rounds of a kind in a full run
Place = tuple[Path, int]  # file and byte


def flip(path: Path, at: int, bit: int) -> None:
    """Turn one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def flips(place: Workplace) -> int:
    """How many rounds of a kind."""
    return min(place.places, FLIPS)


# --- packed folders -----------------------------------------------------------------------------


def in_a_packed_folder(
    choose: Callable[[Path, random.Random], Place], *, run: bool
) -> Callable[[Workplace, Tally], None]:
    """A bit of a packed folder: verify names it, a run refuses it or is right, repair mends it."""

    def kind(place: Workplace, tally: Tally) -> None:
        model = place.model()
        whole = place.packed(model)
        target = place.unpack(model)
        for number in range(flips(place)):
            path, at = choose(target, place.random)
            with tally.round(f"{number}: {path.name} byte {at}") as current:
                flip(path, at, place.random.randrange(8))
                current.inject()
                if run:
                    run_packed(model, target, current)
                if verify(target, io="buffered").sound:
                    raise WrongError("verify found nothing")
                repair(target, model.path)
                if contents(target) != whole:
                    raise WrongError("not repaired")
            if contents(target) != whole:
                place.unpack(model, target)

    return kind


def run_packed(model: Model, folder: Path, current: Round) -> None:
    """A prompt over a folder: a typed error, or the answer of an undisturbed run."""

    def prefill() -> None:
        engine = Engine(folder, StreamConfig(**(STREAM | {"verify": "first"})))
        try:
            found = tokens_of(engine, engine.prefill(model.prompt), model.prompt)
        finally:
            engine.close()
        logits, said = model.answer()
        if found[1] != said or (found[0] != logits).any():
            raise WrongError("another answer, and nobody said why")

    current.error(caught(prefill))


def _index(folder: Path) -> Any:
    return build_expert_index(open_checkpoint(folder))


def record_byte(folder: Path, rng: random.Random) -> Place:
    """In a weight, scale or bias of an expert."""
    index = _index(folder)
    layer = rng.choice(index.layers)
    t = rng.choice(layer.record.tensors)
    start = _record_start(layer, rng.randrange(layer.num_experts))
    file = index.checkpoint.files[layer.tensors[0].file].path
    return file, start + t.offset + rng.randrange(t.nbytes)


def _record_start(layer: Any, expert: int) -> int:
    first = min(t.offset for t in layer.tensors)
    return first + layer.position(expert) * layer.record.nbytes


def padding_byte(folder: Path, rng: random.Random) -> Place:
    """Behind the last tensor of a record."""
    index = _index(folder)
    layer = rng.choice(index.layers)
    end = max(t.offset + t.nbytes for t in layer.record.tensors)
    start = _record_start(layer, rng.randrange(layer.num_experts))
    file = index.checkpoint.files[layer.tensors[0].file].path
    return file, start + rng.randrange(end, layer.record.nbytes)


def header_byte(folder: Path, rng: random.Random) -> Place:
    """In the header of an expert file or of a file with resident tensors."""
    path = rng.choice(sorted(folder.glob("*.safetensors")))
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    return path, rng.randrange(8 + size)


def resident_byte(folder: Path, rng: random.Random) -> Place:
    """In a resident tensor."""
    path = rng.choice(sorted(folder.glob("model*.safetensors")))
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    return path, rng.randrange(8 + size, path.stat().st_size)


def side_byte(folder: Path, rng: random.Random) -> Place:
    """In a file beside the weights."""
    others = json.loads((folder / MANIFEST_NAME).read_text())["others"]
    path = folder / rng.choice([f["name"] for f in others if f["size"]])
    return path, rng.randrange(path.stat().st_size)


def manifest(place: Workplace, tally: Tally) -> None:
    """A bit of packed.json: refused, or found, or it changes no answer; pack makes it anew."""
    model = place.model()
    whole = place.packed(model)
    target = place.unpack(model)
    for number in range(2 * flips(place)):
        at, bit = place.random.randrange(len(whole[MANIFEST_NAME])), place.random.randrange(8)
        with tally.round(f"{number}: byte {at} bit {bit}") as current:
            flip(target / MANIFEST_NAME, at, bit)
            current.inject()
            run_packed(model, target, current)
            current.error(caught(lambda: verify(target, io="buffered")))
            current.error(caught(lambda: repair(target, model.path)))
            pack_small(model, target, force=True)
            again = contents(target)
            if again != whole and not _harmless(again, whole):
                raise WrongError("pack --force did not mend it")
        shutil.rmtree(target)
        place.unpack(model, target)


def _harmless(found: dict[str, bytes], whole: dict[str, bytes]) -> bool:
    """The source's path is the only thing in the manifest that nothing depends on."""
    parsed = [json.loads(f[MANIFEST_NAME]) for f in (found, whole)]
    for one in parsed:
        one["source"].pop("path", None)
    rest = [{n: d for n, d in f.items() if n != MANIFEST_NAME} for f in (found, whole)]
    return parsed[0] == parsed[1] and rest[0] == rest[1]


def journal(place: Workplace, tally: Tally) -> None:
    """A bit of packing.json in an unfinished folder: going on makes the right folder anyway."""
    model = place.model()
    whole = place.packed(model)
    sample = unfinished(place, model)
    raw = (sample / JOURNAL_NAME).read_bytes()
    for number in range(flips(place)):
        target = place.folder()
        shutil.copytree(sample, target)
        at, bit = place.random.randrange(len(raw)), place.random.randrange(8)
        with tally.round(f"{number}: byte {at} bit {bit}") as current:
            flip(target / JOURNAL_NAME, at, bit)
            current.inject()
            error = caught(lambda target=target: pack_small(model, target))
            if error is not None:
                current.error(error)
                pack_small(model, target, force=True)
            if contents(target) != whole:
                raise WrongError("another folder")
        shutil.rmtree(target)


KINDS: dict[str, Callable[[Workplace, Tally], None]] = {
    "flip-record": in_a_packed_folder(record_byte, run=True),
    "flip-padding": in_a_packed_folder(padding_byte, run=True),
    "flip-header": in_a_packed_folder(header_byte, run=True),
    "flip-resident": in_a_packed_folder(resident_byte, run=True),
    "flip-side-file": in_a_packed_folder(side_byte, run=False),
    "flip-manifest": manifest,
    "flip-journal": journal,
}
