"""kill -9 at random points of packing, of a prefill with checkpoints, and of its resumption."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_stream.kv.options import PLAIN, KvOptions
from tools.fault_parts import LostError, Round, Tally, WrongError
from tools.fault_parts_models import (
    FAMILIES,
    Model,
    Workplace,
    check_finish,
    check_unfinished,
    final_names,
)

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = 2  # processes that are being killed at the same time
MOST_WRITE = 60  # writes, renames and syncs of a prefill with a checkpoint behind each layer


def start_packing(model: Model, target: Path) -> subprocess.Popen[str]:
    """A process that packs slowly; it has begun when this returns."""
    command = [sys.executable, "-m", "tests.packed.killing", str(model.path), str(target)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@dataclass
class Killed:
    """What a round's processes left; `reports` are texts of processes that failed."""

    number: int
    folder: Path
    kills: int = 0
    reports: list[str] = field(default_factory=list)
    problem: str = ""
    about: dict[str, Any] = field(default_factory=dict)


def kill_pack(place: Workplace, tally: Tally) -> None:
    """Packing is killed one to three times; then it runs to the end."""

    def kill(number: int) -> Killed:
        rng = random.Random(f"{place.seed}-{number}")
        model = place.extra() if number % 10 == 9 else place.model()
        done = Killed(number, place.root / f"kill-pack-{number}", about={"model": model})
        for _ in range(rng.randint(1, 3)):
            process = start_packing(model, done.folder)
            time.sleep(rng.random() * 0.3)
            process.kill()
            done.kills += process.wait() == -signal.SIGKILL
            _, errors = process.communicate()
            done.reports += [errors] if "Traceback" in errors else []
        return done

    for done in _all(place, tally, kill):
        with tally.round(done.number) as current:
            current.inject(done.kills)
            _require_quiet(done)
            model = done.about["model"]
            whole = place.packed(model)
            if final_names(done.folder):
                check_unfinished(done.folder, whole)
            check_finish(model, done.folder, whole)
        shutil.rmtree(done.folder, ignore_errors=True)


def kill_prefill(place: Workplace, tally: Tally) -> None:
    """A prefill with checkpoints is killed once; then it is resumed."""
    _kill_prefills(place, tally, "prefill", lambda rng: 0)


def kill_resume(place: Workplace, tally: Tally) -> None:
    """A prefill is killed, and its resumption too, one to three times; then it is resumed."""
    _kill_prefills(place, tally, "resume", lambda rng: 1 if place.quick else rng.randint(1, 3))


def _kill_prefills(
    place: Workplace, tally: Tally, what: str, again: Callable[[random.Random], int]
) -> None:
    def kill(number: int) -> Killed:
        rng = random.Random(f"{place.seed}-{what}-{number}")
        family = list(FAMILIES)[0 if place.quick else number % len(FAMILIES)]
        model = place.extra() if number % 10 == 9 else place.model(family)
        folder = place.root / f"kill-{what}-{number}"
        folder.mkdir()
        kv_dir = folder / "kv" if rng.random() < 0.4 else None
        done = Killed(number, folder, about={"model": model, "kv": kv_dir, "rng": rng})
        done.about["every"] = rng.choice((1, 1, 2))
        job = {"model": str(model.path), "folder": str(folder / "keep"), "prompt": model.prompt}
        job |= {"every": done.about["every"], "throttle": "30MB/s"}
        job |= {"kv_dir": None if kv_dir is None else str(kv_dir)}
        for attempt in range(1 + again(rng)):
            spent = _run_killed(folder, job | _end(rng, model.layers) | {"resume": attempt > 0})
            done.kills += spent.returncode == -signal.SIGKILL
            if spent.returncode not in (0, -signal.SIGKILL):
                done.reports.append(spent.stderr)
            if spent.returncode == 0 and list((folder / "keep").glob("*.safetensors")):
                done.problem = "files of a finished prefill are left"
        return done

    for family in list(FAMILIES)[: 1 if place.quick else None]:
        place.model(family).answer()
    for done in _all(place, tally, kill):
        with tally.round(f"{what} {done.number}") as current:
            _finish_prefill(done, current)
        shutil.rmtree(done.folder, ignore_errors=True)


def _finish_prefill(done: Killed, current: Round) -> None:
    current.inject(done.kills)
    _require_quiet(done)
    model, kv_dir = done.about["model"], done.about["kv"]
    expected = checkpointed_layers(done.folder / "keep", done.about["every"])
    kv = PLAIN if kv_dir is None else KvOptions(kv_evict="disk", kv_dir=kv_dir)
    result = model.run(done.folder / "keep", kv=kv, every=done.about["every"], resume=True)
    assert result is not None
    receipt = result.receipt
    if receipt.resumed_layers < expected:
        raise LostError(f"{expected} layers were kept, {receipt.resumed_layers} were resumed")
    left = model.engine.index.layers[receipt.resumed_layers :]
    if receipt.bytes_read != sum(layer.nbytes for layer in left):
        raise WrongError(f"{receipt.bytes_read} bytes were read")
    model.require_answer(result)
    if [p for p in (done.folder / "keep").iterdir() if p.name != ".lock"]:
        raise WrongError("files are left in the checkpoint folder")
    if kv_dir is not None and {p.name for p in kv_dir.iterdir()} != {"prompt-kv.safetensors"}:
        raise WrongError(f"files are left: {sorted(p.name for p in kv_dir.iterdir())}")


def checkpointed_layers(folder: Path, every: int) -> int:
    """Expert layers that the newest checkpoint of a prompt in one segment is behind."""
    numbers = [int(path.stem.split("-")[1]) for path in folder.glob("manifest-*.json")]
    return (max(numbers) + 1) * every if numbers else 0


def _run_killed(folder: Path, job: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.prefill.resume_worker", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def _end(rng: random.Random, layers: int) -> dict[str, Any]:
    """When the process kills itself: some time behind a layer, or in the middle of a write."""
    if rng.random() < 0.5:
        return {"layer": rng.randrange(1, layers + 1), "delay": rng.random() * 0.03}
    return {"write": rng.randrange(MOST_WRITE)}


def _require_quiet(done: Killed) -> None:
    if done.reports:
        raise RuntimeError(done.reports[0])
    if done.problem:
        raise WrongError(done.problem)


def _all(place: Workplace, tally: Tally, kill: Callable[[int], Killed]) -> Iterator[Killed]:
    """Rounds in order; processes of the next run while one is being looked at."""
    place.model().engine  # noqa: B018 - opened here, not in a thread
    place.extra().engine  # noqa: B018
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = {n: pool.submit(kill, n) for n in range(min(AT_ONCE + 1, place.rounds))}
        for number in place.each(tally, place.rounds):
            done = waiting.pop(number).result()
            following = number + AT_ONCE + 1
            if following < place.rounds:
                waiting[following] = pool.submit(kill, following)
            if number % 20 == 19:
                place.say(f"{tally.kind}: {number + 1} of {place.rounds}")
            yield done
