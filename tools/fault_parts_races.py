"""Two processes at one folder, and clocks that jump."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mlx_stream.kv.options import KvOptions
from mlx_stream.packed.verify import verify
from mlx_stream.storage.packed_manifest import MANIFEST_NAME
from tools.fault_parts import Tally, WrongError, caught
from tools.fault_parts_kills import start_packing
from tools.fault_parts_models import Workplace, check_finish, contents, pack_small

DAY = 86_400
TIMES = (-(10**9), 0, 1, 10**9, int(2e9), int(4.2e9), int(9e9))  # seconds: 1938, 1970 ... 2255


def two_packers(place: Workplace, tally: Tally) -> None:
    """Two processes pack into one folder: one wins, the other says who works there."""
    model = place.model()
    whole = place.packed(model)
    for number in place.each(tally, min(place.places, max(1, place.rounds // 2))):
        with tally.round(number) as current:
            target = place.folder()
            first = start_packing(model, target)
            time.sleep(place.random.random() * (0.0 if number % 3 == 0 else 0.2))
            second = start_packing(model, target)
            kill = number % 5 == 4
            if kill:
                time.sleep(place.random.random() * 0.1)
                first.kill()
            ended = [(p.wait(), p.communicate()) for p in (first, second)]
            current.inject(1 + kill)
            for code, (_, errors) in ended:
                if "Traceback" in errors:
                    raise RuntimeError(errors)
                if code > 0 and "another process" not in errors:
                    raise WrongError(f"it does not say why: {errors}")
                tally.typed += code > 0
            if not kill and all(code for code, _ in ended):
                raise WrongError("nobody won")
            check_finish(model, target, whole)
        shutil.rmtree(target, ignore_errors=True)


@contextmanager
def jumping(offsets: Iterator[float]) -> Iterator[None]:
    """time.time goes back and forth from call to call."""
    real = time.time
    with mock.patch.object(time, "time", side_effect=lambda: real() + next(offsets)):
        yield


def _offsets(place: Workplace) -> Iterator[float]:
    while True:
        yield place.random.choice((-20 * 365 * DAY, -3600.0, -1.0, 0.0, 3600.0, 20 * 365 * DAY))


def clocks(place: Workplace, tally: Tally) -> None:
    """Times of files from 1938 to 2255, times that change between two runs, a clock that jumps."""
    model = place.model()
    whole = place.packed(model)
    for seconds in place.some(TIMES):
        with tally.round(f"a source of {seconds} s") as current, jumping(_offsets(place)):
            source = place.folder("source")
            shutil.copytree(model.path, source)
            for path in source.iterdir():
                os.utime(path, ns=(seconds * 10**9, seconds * 10**9))
            current.inject()
            target = place.folder()
            copy = type(model)("copy", source, model.prompt)
            pack_small(copy, target)
            if not verify(target, io="buffered", against=source).sound:
                raise WrongError("damage")
            if not pack_small(copy, target).already:
                raise WrongError("it is packed again")
            found = contents(target)
            if any(found[n] != d for n, d in whole.items() if n != MANIFEST_NAME):
                raise WrongError("another folder")
    for seconds in place.some(TIMES):
        with tally.round(f"an interrupted packing, {seconds} s") as current:
            target = place.folder()
            process = start_packing(model, target)
            time.sleep(0.05 + place.random.random() * 0.2)
            process.kill()
            process.wait()
            process.communicate()
            _age(target, seconds)
            current.inject()
            with jumping(_offsets(place)):
                check_finish(model, target, whole)
    for seconds in place.some(TIMES):
        with tally.round(f"an interrupted prefill, {seconds} s") as current:
            folder = place.folder("keep")
            kv = KvOptions(kv_evict="disk", kv_dir=folder / "kv")
            with jumping(_offsets(place)):
                model.run(folder / "keep", kv=kv, stop=4)
                _age(folder, seconds)
                current.inject()
                error = caught(lambda: model.run(folder / "keep"))  # noqa: B023
                current.error(error)
                result = model.run(folder / "keep", kv=kv, resume=True)
            assert result is not None
            if result.receipt.resumed_layers < 3:
                raise WrongError("the checkpoint was not used")
            model.require_answer(result)


def _age(folder: Path, seconds: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, ns=(seconds * 10**9, seconds * 10**9))


KINDS = {"two-packers": two_packers, "clock": clocks}
