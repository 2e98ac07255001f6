"""Hostile files: links, ``..``, and sizes that are lies."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from mlx_stream import prompt_caches
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from tools.fault_parts import LostError, Round, Tally, WrongError, caught
from tools.fault_parts_models import Model, Workplace, contents, pack_small

HUGE = 1 << 40  # bytes of a sparse file that claims to be small text
TEXTS = ("..", "../x", "/etc/passwd", ".", "", "a\0b", "U32", "F7", "model.safetensors", "\ud800x")


# --- links and names that lead elsewhere --------------------------------------------------------


def links(place: Workplace, tally: Tally) -> None:
    """A file of ours is a link to one of the user's: nothing is written through it."""
    model = place.model()
    whole = place.packed(model)
    experts = min(n for n in whole if n.startswith("experts"))
    names = [experts, "config.json", MANIFEST_NAME, JOURNAL_NAME, ".pack.lock"]
    names += [f".{name}.partial" for name in (experts, "config.json", MANIFEST_NAME, JOURNAL_NAME)]
    for name in place.some(names):
        for act in (_pack_over, _repair_over):
            with tally.round(f"{name}, {act.__name__}") as current:
                outside = place.folder("mine")
                outside.write_bytes(b"the user's own")
                target = place.unpack(model, without=("config.json",))
                path = target / name
                path.unlink(missing_ok=True)
                path.symlink_to(outside)
                current.inject()
                current.error(caught(lambda act=act, target=target: act(model, target)))
                if outside.read_bytes() != b"the user's own":
                    raise LostError("a file outside of the folder was written")
            shutil.rmtree(target)
    for name in place.some((".lock", "manifest-000000.json", "kv-0000-00000.safetensors")):
        with tally.round(f"{name} in a checkpoint folder") as current:
            _checkpoint_link(place, model, name, current)


def _pack_over(model: Model, target: Path) -> None:
    pack_small(model, target, force=True)


def _repair_over(model: Model, target: Path) -> None:
    repair(target, model.path)


def _checkpoint_link(place: Workplace, model: Model, name: str, current: Round) -> None:
    outside, folder = place.folder("mine"), place.folder("keep")
    outside.write_bytes(b"the user's own")
    folder.mkdir()
    (folder / name).symlink_to(outside)
    (folder / "manifest-mine.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    current.inject()
    current.error(caught(lambda: model.run(folder)))
    if outside.read_bytes() != b"the user's own":
        raise LostError("a file outside of the folder was written")
    if not (folder / "manifest-mine.json").exists() or not (folder / "notes.txt").exists():
        raise LostError("files of the user were removed")


def names(place: Workplace, tally: Tally) -> None:
    """``..``, absolute paths and other files' names in manifests and journals."""
    model = place.model()
    whole = place.packed(model)
    manifest = json.loads(whole[MANIFEST_NAME])
    for bad in place.some((*TEXTS, "../packed.json", "experts-00001-of-00009.safetensors/../x")):
        for where in (("files", 0, "name"), ("others", 0, "name"), ("layers", 0, "file")):
            changed = json.loads(json.dumps(manifest))
            changed[where[0]][where[1]][where[2]] = bad
            with tally.round(f"{where} {bad!r}") as current:
                current.inject()
                _refuse_manifest(place, model, json.dumps(changed).encode(), current)
    for bad in place.some(TEXTS):
        with tally.round(f"journal {bad!r}") as current:
            target = place.folder()
            target.mkdir()
            journal = {"plan": "x", "finished": {bad: ["00"], "../../x": ["zz"]}, "errors": {}}
            (target / JOURNAL_NAME).write_text(json.dumps(journal))
            current.inject()
            current.error(caught(lambda target=target: pack_small(model, target)))
            pack_small(model, target, force=True)
            if contents(target) != whole:
                raise WrongError("another folder")


def _refuse_manifest(place: Workplace, model: Model, raw: bytes, current: Round) -> None:
    """Opening, verifying and repairing: typed errors or damage; nothing outside is touched."""
    target = place.unpack(model)
    before = {n: d for n, d in contents(target).items() if n != MANIFEST_NAME}
    (target / MANIFEST_NAME).write_bytes(raw)
    try:
        current.error(caught(lambda: build_expert_index(open_checkpoint(target))))
        current.error(caught(lambda: verify(target, io="buffered")))
        current.error(caught(lambda: repair(target, model.path)))
        after = {n: d for n, d in contents(target).items() if n != MANIFEST_NAME}
        if {n: after.get(n) for n in before} != before:
            raise LostError("a sound file was changed")
    finally:
        shutil.rmtree(target)


# --- bombs --------------------------------------------------------------------------------------


def bombs(place: Workplace, tally: Tally) -> None:
    """Headers and JSON that claim, or have, a size that no memory holds."""
    model = place.model()
    whole = place.packed(model)
    files = [MANIFEST_NAME, JOURNAL_NAME, "config.json", "model.safetensors.index.json"]
    for name in place.some(files):
        with tally.round(f"{name} of {HUGE} bytes") as current:
            target = place.unpack(model)
            with open(target / name, "wb") as file:
                file.truncate(HUGE)
            current.inject()
            _touch_all(model, target, current)
        shutil.rmtree(target)
    for name in place.some(sorted(n for n in whole if n.endswith(".safetensors"))):
        for length in (0, 1, 2**31, 2**40, 2**63, 2**64 - 1):
            with tally.round(f"{name}: a header of {length} bytes") as current:
                target = place.unpack(model)
                with open(target / name, "r+b") as file:
                    file.write(struct.pack("<Q", length))
                    if length in (2**31, 2**40):
                        file.truncate(2 * length)
                current.inject()
                _touch_all(model, target, current)
            shutil.rmtree(target)
    for depth in place.some((10_000, 1_000_000)):
        for name in files[:3]:
            with tally.round(f"{name}: {depth} brackets") as current:
                target = place.unpack(model)
                (target / name).write_text("[" * depth)
                current.inject()
                _touch_all(model, target, current)
            shutil.rmtree(target)
    _lying_sizes(place, model, tally)
    _checkpoint_bombs(place, model, tally)


def _touch_all(model: Model, target: Path, current: Round) -> None:
    """Everything that reads a packed folder."""
    errors = [
        caught(lambda: build_expert_index(open_checkpoint(target))),
        caught(lambda: verify(target, io="buffered")),
        caught(lambda: repair(target, model.path)),
        caught(lambda: pack_small(model, target)),
    ]
    for error in errors:
        current.error(error)


def _lying_sizes(place: Workplace, model: Model, tally: Tally) -> None:
    """A manifest whose files, headers and records are as large as sparse files can be."""
    manifest = json.loads(place.packed(model)[MANIFEST_NAME])
    lies = (("files", "header_nbytes"), ("files", "size"), ("others", "size"))
    for where, key in place.some(lies):
        for number in (0, -1):
            entry = manifest[where][number]
            with tally.round(f"{where} {number} {key}") as current:
                target = place.unpack(model)
                changed = json.loads(json.dumps(manifest))
                changed[where][number][key] = HUGE
                if key == "header_nbytes":
                    changed[where][number]["size"] = HUGE
                with open(target / entry["name"], "r+b") as file:
                    file.truncate(HUGE)
                (target / MANIFEST_NAME).write_text(json.dumps(changed))
                current.inject()
                _touch_all(model, target, current)
            shutil.rmtree(target)


def _checkpoint_bombs(place: Workplace, model: Model, tally: Tally) -> None:
    files = ("manifest-000001.json", "kv-0000-00000.safetensors", "held-000001.safetensors")
    for name in place.some(files):
        with tally.round(f"{name} in a checkpoint folder") as current:
            folder = place.folder("keep")
            model.run(folder, stop=3)
            with open(folder / name, "ab") as file:
                file.truncate(1 << 33)
            current.inject()
            error = caught(lambda folder=folder: model.run(folder, resume=True))
            if error is not None:
                current.refused(error)
        shutil.rmtree(folder)
    with tally.round("a prompt cache file") as current:
        path = place.folder("cache").with_suffix(".safetensors")
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", 99_000_000))
            file.truncate(HUGE)
        current.inject()
        error = caught(lambda: prompt_caches.load(model.engine, path))
        if error is None:
            raise WrongError("a bomb is a prompt cache")
        current.refused(error)


KINDS: dict[str, Callable[[Workplace, Tally], None]] = {
    "links": links,
    "names": names,
    "bombs": bombs,
}
