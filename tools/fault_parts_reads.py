"""Disks that fail to read, and reads that move fewer bytes than were asked for, at every read."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_stream import prompt_caches
from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.kv.options import KvOptions
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from tools.fault_parts import LostError, Round, Tally, WrongError, caught
from tools.fault_parts_models import (
    ANSWER_TOKENS,
    STREAM,
    Model,
    Workplace,
    check_finish,
    check_unfinished,
    contents,
    greedy,
    pack_small,
)
from tools.fault_parts_system import READS, SystemFaults

FAULTS = {"EIO": None, "half": 0.5, "nothing": 0.0}  # what the read does instead
MOST_PLACES = 400  # reads of a kind that are made to fail, of all that there are


@dataclass(frozen=True)
class Subject:
    """Something that reads.

    Attributes:
        act: does it; a result that is not the undisturbed one is a WrongError.
        check: afterwards, with a healthy disk: nothing was lost and it works again.
        prepare: before each round.
        answers: short reads must be survived, since they are not errors.
        notices: no failed read may pass in silence.
    """

    act: Callable[[Path], Any]
    check: Callable[[Path], Any]
    prepare: Callable[[Path], Any] = lambda folder: None
    answers: bool = True
    notices: bool = False


def prefill(place: Workplace, model: Model) -> Subject:
    """A prompt, through the reader."""
    model.answer()

    def act(_: Path) -> None:
        result = model.run()
        assert result is not None
        model.require_answer(result)

    return Subject(act, act)


def decode(place: Workplace, model: Model) -> Subject:
    """The answer behind a prompt; the expert cache is small, so that tokens read."""
    _, said = model.answer()
    result = model.run()
    assert result is not None

    def act(_: Path) -> None:
        again = model.run()
        assert again is not None
        model.engine.decoder.cache.resize(1)
        tokens = model.engine.decode(again, model.prompt, sampler=greedy)
        with SystemFaultsPaused.resumed():
            got = [t for t, _ in (next(tokens) for _ in range(ANSWER_TOKENS))]
        if got != said:
            raise WrongError(f"{got} instead of {said}")

    return Subject(act, act)


class SystemFaultsPaused:
    """Faults that wait for the part of an act that they are meant for."""

    current: SystemFaults | None = None

    @classmethod
    def resumed(cls) -> Any:
        """The faults, or nothing."""
        from contextlib import nullcontext

        return cls.current or nullcontext()


def load(place: Workplace, model: Model) -> Subject:
    """Opening a model: headers, config, resident weights."""

    def act(_: Path) -> None:
        Engine(model.path, StreamConfig(**STREAM)).close()

    return Subject(act, act, answers=False)


def packing(place: Workplace, model: Model) -> Subject:
    """Packing reads the source, and what it finds in the target."""
    whole = place.packed(model)

    def prepare(folder: Path) -> None:
        target = folder / "packed"

        def stop(done: int, total: int, what: str) -> None:
            if what.startswith("experts-00003"):
                raise InterruptedError

        from mlx_stream.packed.pack import PackOptions, pack
        from tools.fault_parts_models import SMALL

        try:
            pack(model.path, target, PackOptions(**SMALL), stop)
        except InterruptedError:
            return

    def check(folder: Path) -> None:
        check_unfinished(folder / "packed", whole)
        check_finish(model, folder / "packed", whole)

    return Subject(
        lambda folder: pack_small(model, folder / "packed"), check, prepare, answers=False
    )


def verifying(place: Workplace, model: Model) -> Subject:
    """Verifying a sound folder: a read that failed must not pass as checked."""

    def act(folder: Path) -> None:
        report = verify(folder / "packed", io="buffered", against=model.path)
        if not report.sound:
            raise FoundDamage(str(report.damage[0]))

    return Subject(
        act, act, lambda f: place.unpack(model, f / "packed"), answers=False, notices=True
    )


class FoundDamage(Exception):
    """verify says so."""


def repairing(place: Workplace, model: Model) -> Subject:
    """Repairing a folder with one damaged record and a side file that is gone."""
    whole = place.packed(model)
    name = min(n for n in whole if n.startswith("experts"))

    def prepare(folder: Path) -> None:
        target = place.unpack(model, folder / "packed")
        data = bytearray(whole[name])
        data[-70_000] ^= 4
        (target / name).write_bytes(data)
        (target / "config.json").unlink()

    def act(folder: Path) -> None:
        repair(folder / "packed", model.path, io="buffered")

    def check(folder: Path) -> None:
        for other, data in whole.items():
            path = folder / "packed" / other
            if other not in (name, "config.json") and path.read_bytes() != data:
                raise LostError(f"{other} was sound before")
        act(folder)
        if contents(folder / "packed") != whole:
            raise WrongError("not repaired")

    return Subject(act, check, prepare, answers=False)


def resuming(place: Workplace, model: Model) -> Subject:
    """Going on from a checkpoint."""
    model.answer()

    def check(folder: Path) -> None:
        result = model.run(folder / "keep", resume=True)
        assert result is not None
        model.require_answer(result)

    def prepare(folder: Path) -> None:
        model.run(folder / "keep", stop=4)

    return Subject(check, check, prepare, answers=False)


def evicted(place: Workplace, model: Model) -> Subject:
    """Keys and values come back from the disk at the end of a prompt."""
    model.answer()

    def act(folder: Path) -> None:
        result = model.run(kv=KvOptions(kv_evict="disk", kv_dir=folder / "kv"))
        assert result is not None
        model.require_answer(result)

    return Subject(act, act)


def prompt_file(place: Workplace, model: Model) -> Subject:
    """Loading a prompt cache."""
    result = model.run()
    assert result is not None
    saved = prompt_caches.save(
        model.engine, place.folder("cache"), result.cache, model.prompt
    ).read_bytes()

    def act(folder: Path) -> None:
        found = prompt_caches.load(model.engine, folder / "c.safetensors")
        if found.tokens != model.prompt:
            raise WrongError("another prompt")

    return Subject(act, act, lambda f: (f / "c.safetensors").write_bytes(saved), answers=False)


SUBJECTS: dict[str, Callable[[Workplace, Model], Subject]] = {
    "prefill": prefill,
    "decode": decode,
    "load": load,
    "pack": packing,
    "verify": verifying,
    "repair": repairing,
    "resume": resuming,
    "evicted": evicted,
    "prompt-file": prompt_file,
}


def at_every_read(name: str) -> Callable[[Workplace, Tally], None]:
    """Each read fails in its own round: EIO, half of the bytes, none of them."""

    def run(place: Workplace, tally: Tally) -> None:
        model = place.model()
        subject = SUBJECTS[name](place, model)
        folder = _made(place, subject)
        with _faults(name, folder, place) as count:
            subject.act(folder)
        for kind, short in place.some(list(FAULTS.items())):
            for number in place.numbers(count.uses, MOST_PLACES):
                _one(place, tally, subject, name, f"{kind} at {number}", number, short)

    return run


def _made(place: Workplace, subject: Subject) -> Path:
    folder = place.folder()
    folder.mkdir()
    subject.prepare(folder)
    return folder


class _Waiting:
    """Faults that begin in the middle of an act; see `decode`."""

    def __init__(self, faults: SystemFaults) -> None:
        self.faults = faults

    def __enter__(self) -> SystemFaults:
        SystemFaultsPaused.current = self.faults
        return self.faults

    def __exit__(self, *exc: object) -> None:
        SystemFaultsPaused.current = None


def _faults(name: str, folder: Path, place: Workplace, *args: Any, **options: Any) -> Any:
    faults = SystemFaults(READS, place.root, *args, **options)
    return _Waiting(faults) if name == "decode" else faults


def _one(
    place: Workplace,
    tally: Tally,
    subject: Subject,
    name: str,
    what: str,
    number: int,
    short: float | None,
) -> None:
    folder = _made(place, subject)
    with tally.round(what) as current:
        faults = _faults(name, folder, place, number, errno.EIO, short=short)
        error, found = None, False
        try:
            with faults:
                error = caught(lambda: subject.act(folder))
        except FoundDamage:
            found = True
        finally:
            current.inject(getattr(faults, "faults", faults).injected)
        _judge(current, subject, error, short, found)
        subject.check(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _judge(
    current: Round, subject: Subject, error: Exception | None, short: float | None, found: bool
) -> None:
    current.error(error)
    if short and subject.answers and error is not None:
        raise WrongError(f"a short read is no error: {error}")
    if short is None and subject.notices and error is None and not found:
        raise WrongError("a read failed and nobody said so")
