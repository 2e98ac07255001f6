"""Disks that are full, fail while they are written, or cannot be written at all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from mlx_stream import prompt_caches
from mlx_stream.packed.verify import verify
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from tools.fault_parts import LostError, Round, Tally, WrongError, caught
from tools.fault_parts_models import (
    Model,
    Workplace,
    pack_small,
)
from tools.fault_parts_subjects import SUBJECTS, Act, Check
from tools.fault_parts_system import (
    CHANGES,
    WRITES,
    SystemFaults,
    no_mounts,
    plenty_of_room,
    remount,
    small_disk,
)

CODES = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
DISK_STEPS = 16  # sizes of small disks


def prepared(act: Act, folder: Path) -> Path:
    """The folder as it must be before."""
    folder.mkdir(exist_ok=True)
    getattr(act, "prepare", lambda _: None)(folder)
    return folder


# --- every write fails once ---------------------------------------------------------------------


def at_every_write(subject: str) -> Callable[[Workplace, Tally], None]:
    """Each write, sync, rename and cut fails in its own round; short writes go on."""

    def run(place: Workplace, tally: Tally) -> None:
        act, check = SUBJECTS[subject](place)
        folder = prepared(act, place.folder())
        with SystemFaults(WRITES, folder) as count:
            act(folder)
        with plenty_of_room():
            for number in place.numbers(count.uses):
                code = CODES[number % len(CODES)]
                short = 0.5 if number % 4 == 3 else None
                _one(place, tally, act, check, number, code=code, short=short)

    return run


def _one(
    place: Workplace,
    tally: Tally,
    act: Act,
    check: Check,
    number: int,
    *,
    code: int,
    short: float | None = None,
    lasting: bool = False,
    calls: tuple[str, ...] = WRITES,
) -> None:
    folder = place.folder()
    with tally.round(f"{errno.errorcode[code]} at use {number}") as current:
        prepared(act, folder)
        current.read_only = lasting
        faults = SystemFaults(calls, folder, number, code, short=short, lasting=lasting)
        try:
            with faults:
                error = caught(lambda: act(folder))
        finally:
            current.inject(faults.injected)
        current.error(error)
        check(folder, error, current)
    shutil.rmtree(folder, ignore_errors=True)


# --- disks that are really small ----------------------------------------------------------------


def on_a_small_disk(subject: str) -> Callable[[Workplace, Tally], None]:
    """A tmpfs of many sizes; the disk grows afterwards, and the same is done again."""

    def run(place: Workplace, tally: Tally) -> None:
        tally.skipped = no_mounts()
        if tally.skipped:
            return
        act, check = SUBJECTS[subject](place)
        sample = prepared(act, place.folder())
        base = _size(sample)
        act(sample)
        needed = base + (1 << 19) if subject in ("prefill", "repair") else _size(sample)
        for number in place.numbers(DISK_STEPS):
            size = base + 16384 + (needed - base) * number // DISK_STEPS // 4096 * 4096
            _small(place, tally, act, check, size)

    return run


def _small(place: Workplace, tally: Tally, act: Act, check: Check, size: int) -> None:
    with tally.round(f"a disk of {size} bytes") as current:
        folder = place.folder("disk")
        with small_disk(folder, size), plenty_of_room():
            prepared(act, folder)
            error = caught(lambda: act(folder))
            full = error is not None or shutil.disk_usage(folder).free > 1 << 40
            current.inject(int(full))
            current.error(error)
            remount(folder, f"size={256 << 20}")
            check(folder, error, current)


def _size(folder: Path) -> int:
    """In pages, as a tmpfs counts."""
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in folder.rglob("*") if p.is_file())


# --- disks that become read-only, and folders that are ------------------------------------------


def read_only_from(subject: str) -> Callable[[Workplace, Tally], None]:
    """From some change on every change is refused, as when a disk is remounted after an error."""

    def run(place: Workplace, tally: Tally) -> None:
        act, check = SUBJECTS[subject](place)
        folder = prepared(act, place.folder())
        with SystemFaults(CHANGES, folder) as count:
            act(folder)
        for number in place.numbers(count.uses):
            _one(
                *(place, tally, act, check, number),
                code=errno.EROFS,
                lasting=True,
                calls=CHANGES,
            )

    return run


def read_only_folders(place: Workplace, tally: Tally) -> None:
    """Everything that writes, on a disk that is mounted read-only; and what only reads."""
    tally.skipped = no_mounts()
    if tally.skipped:
        return
    for name, subject in place.some(list(SUBJECTS.items())):
        act, check = subject(place)
        with tally.round(name) as current:
            folder = place.folder("disk")
            with small_disk(folder, 256 << 20):
                prepared(act, folder)
                before = _all_files(folder)
                remount(folder, "ro")
                current.inject()
                current.read_only = True
                error = caught(lambda act=act, folder=folder: act(folder))
                if error is None:
                    raise WrongError("no error on a read-only disk")
                current.refused(error)
                if _all_files(folder) != before:
                    raise LostError("something changed")
                remount(folder, "rw")
                check(folder, error, current)
    model = place.model()
    for name in place.some(("unfinished", "packed", "kept", "cache")):
        with tally.round(f"{name}, only read") as current:
            _read_only(place, model, name, current)


def _read_only(place: Workplace, model: Model, name: str, current: Round) -> None:
    folder = place.folder("disk")
    with small_disk(folder, 256 << 20):
        if name == "kept":
            model.run(folder / "keep", stop=3)
        elif name == "cache":
            result = model.run()
            assert result is not None
            prompt_caches.save(model.engine, folder / "x.safetensors", result.cache, model.prompt)
        else:
            place.unpack(model, folder / "packed")
            if name == "unfinished":
                (folder / "packed" / MANIFEST_NAME).unlink()
                (folder / "packed" / JOURNAL_NAME).write_text("{}")
        before = _all_files(folder)
        remount(folder, "ro")
        current.inject()
        if name == "packed":  # reading needs no writing
            if not verify(folder / "packed").sound:
                raise WrongError("verify needs a writable folder")
        elif name == "cache":
            prompt_caches.load(model.engine, folder / "x.safetensors")
        elif name == "kept":
            error = caught(lambda: model.run(folder / "keep", resume=True))
            if error is not None:
                current.refused(error)
        if name in ("packed", "unfinished"):
            error = caught(lambda: pack_small(model, folder / "packed"))
            if error is not None:
                current.refused(error)
        if _all_files(folder) != before:
            raise LostError("something changed")


def _all_files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
