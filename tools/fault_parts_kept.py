"""Flipped bits in checkpoints of prefills, in keys and values on the disk, in prompt caches."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from typing import Any
from unittest import mock

from mlx_stream import prompt_caches
from mlx_stream.errors import MlxStreamError
from mlx_stream.kv.options import KvOptions
from tools.fault_parts import LostError, Tally, WrongError, caught
from tools.fault_parts_flips import flip, flips
from tools.fault_parts_models import (
    Workplace,
    contents,
)

# --- checkpoints of prefills --------------------------------------------------------------------


def kept(pattern: str) -> Callable[[Workplace, Tally], None]:
    """A bit of a checkpoint's file: it is refused, nothing is touched, and it can be mended."""

    def kind(place: Workplace, tally: Tally) -> None:
        model = place.model()
        folder = place.folder("keep")
        model.run(folder, stop=4)
        for number in range(flips(place)):
            path = sorted(folder.glob(pattern))[-1 - number % 2]
            at, bit = place.random.randrange(path.stat().st_size), place.random.randrange(8)
            with tally.round(f"{number}: {path.name} byte {at} bit {bit}") as current:
                flip(path, at, bit)
                before = contents(folder)
                current.inject()
                result: list[Any] = []
                error = caught(lambda out=result: out.append(model.run(folder, resume=True)))
                if error is None:  # of the generation that is not needed any more
                    model.require_answer(result[0])
                else:
                    current.refused(error)
                    if contents(folder) != before:
                        raise LostError("the checkpoint was touched")
                    flip(path, at, bit)
            if not path.exists():
                shutil.rmtree(folder)
                model.run(folder, stop=4)

    return kind


# --- keys and values ----------------------------------------------------------------------------


def evicted(place: Workplace, tally: Tally) -> None:
    """A bit of what comes back from the file of evicted keys and values."""
    model = place.model()
    model.answer()
    for number in range(flips(place)):
        folder = place.folder("kv")
        reads, rng = [0], random.Random(f"{place.seed}-{number}")
        hit = rng.randrange(2 * model.layers)
        real = os.preadv

        def damaged(fd: int, views: Any, at: int, *more: int) -> int:
            got = real(fd, views, at, *more)  # noqa: B023
            if f"/{folder.name}/" in os.readlink(f"/proc/self/fd/{fd}") and got:  # noqa: B023
                if reads[0] == hit:  # noqa: B023
                    views[0][rng.randrange(got)] ^= 1 << rng.randrange(8)  # noqa: B023
                reads[0] += 1  # noqa: B023
            return got

        with tally.round(number) as current:
            kv, out = KvOptions(kv_evict="disk", kv_dir=folder), []
            with mock.patch.object(os, "preadv", damaged):
                error = caught(lambda kv=kv, out=out: out.append(model.run(kv=kv)))
            current.inject(int(reads[0] > hit))
            if error is not None:
                current.refused(error)
            else:
                model.require_answer(out[0])
        shutil.rmtree(folder, ignore_errors=True)


def prompt_file(place: Workplace, tally: Tally) -> None:
    """A bit of a prompt cache file, one that was saved or one that eviction left."""
    model = place.model()
    folder = place.folder("cache")
    folder.mkdir()
    result = model.run(kv=KvOptions(kv_evict="disk", kv_dir=folder))
    assert result is not None
    prompt_caches.save(model.engine, folder / "saved.safetensors", result.cache, model.prompt)
    wanted = _cache_bytes(result.cache)
    for number in range(2 * flips(place)):
        path = sorted(folder.iterdir())[number % 2]
        at, bit = place.random.randrange(path.stat().st_size), place.random.randrange(8)
        with tally.round(f"{path.name} byte {at} bit {bit}") as current:
            flip(path, at, bit)
            current.inject()
            try:
                found = prompt_caches.load(model.engine, path)
            except MlxStreamError as error:
                current.refused(error)
            else:
                if found.tokens != model.prompt or _cache_bytes(found.cache) != wanted:
                    raise WrongError("another cache is loaded")
        flip(path, at, bit)


def _cache_bytes(cache: list[Any]) -> list[Any]:
    import numpy as np

    rows = [
        [np.array(part[..., : c.offset, :]).tobytes() for part in (c.keys, c.values)] for c in cache
    ]
    return [[c.offset for c in cache], rows]


KINDS: dict[str, Callable[[Workplace, Tally], None]] = {
    "flip-kept-kv": kept("kv-*.safetensors"),
    "flip-kept-held": kept("held-*.safetensors"),
    "flip-kept-manifest": kept("manifest-*.json"),
    "flip-evicted": evicted,
    "flip-prompt-file": prompt_file,
}
