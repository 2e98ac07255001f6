"""What writes to a disk, and how it is looked at afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlx_stream import prompt_caches
from mlx_stream.kv.options import KvOptions
from mlx_stream.packed.repair import repair
from tools.fault_parts import LostError, Round, WrongError
from tools.fault_parts_kills import checkpointed_layers
from tools.fault_parts_models import (
    Workplace,
    check_finish,
    check_unfinished,
    contents,
    pack_small,
)

FILE = "prompt-kv.safetensors"
Act = Callable[[Path], object]  # writes under the folder
Check = Callable[[Path, Exception | None, Round], None]  # afterwards, with the disk healthy again


# --- what is written, and how it is looked at afterwards ----------------------------------------


def packing(place: Workplace) -> tuple[Act, Check]:
    """A packing into ``FOLDER/packed``."""
    model = place.model()
    whole = place.packed(model)

    def act(folder: Path) -> None:
        pack_small(model, folder / "packed")

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        target = folder / "packed"
        if target.exists():
            check_unfinished(target, whole)
        check_finish(model, target, whole)

    return act, check


def repairing(place: Workplace) -> tuple[Act, Check]:
    """The repair of a folder with a damaged record, a missing file and a changed side file."""
    model = place.model()
    whole = place.packed(model)
    experts = sorted(name for name in whole if name.startswith("experts"))

    def act(folder: Path) -> None:
        repair(folder / "packed", model.path)

    def damage(target: Path) -> None:
        place.unpack(model, target, without=(experts[1],))
        data = bytearray(whole[experts[0]])
        data[-70_000] ^= 4
        (target / experts[0]).write_bytes(data)
        (target / "config.json").write_text("{}")

    def prepare(folder: Path) -> None:
        damage(folder / "packed")

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        target = folder / "packed"
        for name in set(whole) - {*experts[:2], "config.json"}:
            if (target / name).read_bytes() != whole[name]:
                raise LostError(f"{name} was sound before")
        repair(target, model.path)
        if contents(target) != whole:
            raise WrongError("not repaired")

    act.prepare = prepare  # type: ignore[attr-defined]
    return act, check


def checkpoints(place: Workplace) -> tuple[Act, Check]:
    """A prefill with checkpoints in ``FOLDER/keep`` that ends behind the last layer but one."""
    model = place.model()
    model.answer()

    def act(folder: Path) -> None:
        model.run(folder / "keep", stop=model.layers - 1)

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        keep = folder / "keep"
        expected = checkpointed_layers(keep, 1)
        result = model.run(keep, resume=True)
        assert result is not None
        if result.receipt.resumed_layers < expected:
            raise LostError(f"{expected} layers were kept, not {result.receipt.resumed_layers}")
        model.require_answer(result)

    return act, check


def whole_prefills(place: Workplace) -> tuple[Act, Check]:
    """A prefill with checkpoints to its end: a failing disk must not take the answer."""
    model = place.model()
    model.answer()

    def act(folder: Path) -> None:
        model.require_answer(model.run(folder / "keep"))

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        if (folder / "keep").exists():
            model.require_answer(model.run(folder / "keep", resume=True))

    return act, check


def eviction(place: Workplace) -> tuple[Act, Check]:
    """A prefill whose keys and values go to ``FOLDER/kv``."""
    model = place.model()
    model.answer()

    def act(folder: Path) -> None:
        kv = KvOptions(kv_evict="disk", kv_dir=folder / "kv")
        model.require_answer(model.run(kv=kv))

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        left = {p.name for p in (folder / "kv").iterdir()} if (folder / "kv").exists() else set()
        if (left - {FILE} and not current.read_only) or (error is not None and FILE in left):
            raise WrongError(f"files are left: {sorted(left)}")
        act(folder)
        if {p.name for p in (folder / "kv").iterdir()} != {FILE}:
            raise WrongError("files are left by the next prompt")

    return act, check


def prompt_files(place: Workplace) -> tuple[Act, Check]:
    """A prompt cache is saved over an older one."""
    model = place.model()
    old, new = model.prompt[:20], model.prompt
    first, second = (model.run(prompt=tokens) for tokens in (old, new))
    saved = place.folder("old") / "cache.safetensors"
    saved.parent.mkdir()
    assert first is not None
    assert second is not None
    prompt_caches.save(model.engine, saved, first.cache, old)
    before = saved.read_bytes()

    def prepare(folder: Path) -> None:
        (folder / saved.name).write_bytes(before)

    def act(folder: Path) -> None:
        prompt_caches.save(model.engine, folder / saved.name, second.cache, new)

    def check(folder: Path, error: Exception | None, current: Round) -> None:
        names = [p.name for p in folder.iterdir()]
        if names != [saved.name] and not current.read_only:
            raise WrongError(f"files are left: {names}")
        if error is not None and (folder / saved.name).read_bytes() != before:
            raise LostError("the file that was there is changed")
        act(folder)
        found = prompt_caches.load(model.engine, folder / saved.name)
        if found.tokens != new:
            raise WrongError("another prompt was saved")

    act.prepare = prepare  # type: ignore[attr-defined]
    return act, check


SUBJECTS = {
    "pack": packing,
    "repair": repairing,
    "checkpoints": checkpoints,
    "prefill": whole_prefills,
    "eviction": eviction,
    "prompt-file": prompt_files,
}
