"""Thousands of changed headers, manifests and journals."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from typing import Any

from mlx_stream import prompt_caches
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from mlx_stream.storage.safetensors_header import parse_header, parse_metadata
from tools.fault_parts import LostError, Round, Tally, WrongError, caught
from tools.fault_parts_hostile import TEXTS
from tools.fault_parts_models import Workplace, contents, pack_small, unfinished

NUMBERS = (0, 1, -1, 2, 63, 64, 255, 4096, 16383, 16384, 2**31, 2**32, 2**53, 2**62, 2**63, 2**70)
TOKENS = (b"[", b"{", b"}", b'"', b"null", b"1e999", b"NaN", b"Infinity", b"\\u0000", b"\xff", b"-")


# --- fuzzing ------------------------------------------------------------------------------------


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut, doubled, or replaced by what parsers do not like."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(6)
        if what == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif what == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif what == 2:
            del data[at : at + rng.randrange(1, 40)]
        elif what == 3:
            data[at:at] = rng.choice(TOKENS) * rng.choice((1, 1, 3))
        elif what == 4:
            data[at:at] = data[max(0, at - rng.randrange(1, 60)) : at]
        else:
            data[at : at + 1] = str(rng.choice(NUMBERS)).encode()
    return bytes(data)


def changed_tree(value: Any, rng: random.Random) -> Any:
    """A decoded JSON value with one to three places replaced, removed or doubled."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        parent, key = value, None
        while isinstance(parent, dict | list) and parent:
            keys = list(parent) if isinstance(parent, dict) else range(len(parent))
            key = rng.choice(list(keys))
            if not isinstance(parent[key], dict | list) or not parent[key] or rng.random() < 0.25:
                break
            parent = parent[key]
        if key is None:
            continue
        junk = [None, True, 1.5, [], {}, float("nan"), float("inf"), *NUMBERS, *TEXTS]
        junk += [[rng.choice(NUMBERS)] * 3, {"a": rng.choice(TEXTS)}]
        if rng.random() < 0.15:
            del parent[key]
        else:
            parent[key] = rng.choice(junk)
    return value


def _fuzz(
    tally: Tally, place: Workplace, one: Callable[[random.Random, Round], None], count: int
) -> None:
    for number in range(count):
        rng = random.Random(f"{place.seed}-{tally.kind}-{number}")
        with tally.round(number) as current:
            current.inject()
            one(rng, current)


def fuzz_headers(place: Workplace, tally: Tally) -> None:
    """safetensors headers: an error, or positions inside of the file that do not overlap."""
    whole = place.packed(place.model())
    raws = [d for n, d in whole.items() if n.endswith(".safetensors")]
    heads = [(r[: 8 + int.from_bytes(r[:8], "little")].rstrip(b" "), len(r)) for r in raws]

    def one(rng: random.Random, current: Round) -> None:
        head, size = rng.choice(heads)
        if rng.random() < 0.5:
            text = json.dumps(changed_tree(json.loads(head[8:]), rng)).encode()
        else:
            text = mutated(head[8:], rng)
        length = len(text) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
        raw = length.to_bytes(8, "little") + text
        found: list[Any] = []
        error = caught(lambda: found.extend(parse_header(raw, size, "fuzzed")))
        caught(lambda: parse_metadata(raw, size, "fuzzed"))
        if error is not None:
            return current.refused(error)
        end = 0
        for t in found:
            if t.nbytes and not end <= t.offset <= t.offset + t.nbytes <= size:
                raise WrongError(f"{t} is accepted")
            end = max(end, t.offset + t.nbytes)

    _fuzz(tally, place, one, 2 * place.cases)


def fuzz_manifests(place: Workplace, tally: Tally) -> None:
    """packed.json, opened, verified and repaired: errors, or no sound file is changed."""
    model = place.model()
    whole = place.packed(model)
    honest = json.loads(whole[MANIFEST_NAME])
    target = place.unpack(model)

    def one(rng: random.Random, current: Round) -> None:
        if rng.random() < 0.7:
            raw = json.dumps(changed_tree(honest, rng)).encode()
        else:
            raw = mutated(whole[MANIFEST_NAME], rng)
        (target / MANIFEST_NAME).write_bytes(raw)
        errors = [
            caught(lambda: build_expert_index(open_checkpoint(target))),
            caught(lambda: verify(target, io="buffered")),
            caught(lambda: repair(target, model.path)),
        ]
        for error in errors:
            current.error(error)
        found = contents(target)
        if any(found.get(n) != d for n, d in whole.items() if n != MANIFEST_NAME):
            place.unpack(model, target)
            raise LostError("a sound file was changed")
        if errors[0] is not None:
            current.was_refused = True

    _fuzz(tally, place, one, place.cases)


def fuzz_journals(place: Workplace, tally: Tally) -> None:
    """packing.json: going on makes the right folder, or says that it is another packing."""
    model = place.model()
    whole = place.packed(model)
    sample = unfinished(place, model)
    raw = (sample / JOURNAL_NAME).read_bytes()
    honest = json.loads(raw)

    def one(rng: random.Random, current: Round) -> None:
        target = place.folder()
        shutil.copytree(sample, target, copy_function=os.link)
        tree = rng.random() < 0.7
        made = json.dumps(changed_tree(honest, rng)).encode() if tree else mutated(raw, rng)
        (target / JOURNAL_NAME).unlink()
        (target / JOURNAL_NAME).write_bytes(made)
        try:
            error = caught(lambda: pack_small(model, target))
            if error is not None:
                return current.refused(error)
            if contents(target) != whole:
                raise WrongError("another folder")
        finally:
            shutil.rmtree(target)

    _fuzz(tally, place, one, max(6, place.cases // 5))


def fuzz_kept(place: Workplace, tally: Tally) -> None:
    """Manifests of checkpoints: changed bytes are refused; signed anew they are no traceback."""
    from mlx_stream.resume.restore import START, Checkpoint, check_identity
    from mlx_stream.resume.store import CheckpointFolder

    model = place.model()
    keep = place.folder("keep")
    model.run(keep, stop=4)
    path = max(keep.glob("manifest-*.json"))
    raw = path.read_bytes()
    honest = json.loads(json.loads(raw)["content"])
    boundaries = list(range(model.layers))

    def read() -> None:
        folder = CheckpointFolder(keep)
        try:
            found = folder.latest()
            assert found is not None
            check_identity(folder, found[1], honest["identity"])
            read = Checkpoint.read(folder, found[1], boundaries)
            read.require_entries(set(dict(honest["caches"])))
            if read.boundary == START:
                return
            for name in read.caches.values():
                folder.load(name)
        finally:
            folder.close()

    def one(rng: random.Random, current: Round) -> None:
        signed = rng.random() < 0.6
        if signed:
            text = json.dumps(changed_tree(honest, rng))
            digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            path.write_text(json.dumps({"content": text, "digest": digest}))
        else:
            path.write_bytes(mutated(raw, rng))
        changed = path.read_bytes()
        error = caught(read)
        path.write_bytes(raw)
        if error is not None:
            return current.refused(error)
        if not signed and json.loads(changed)["content"] != json.loads(raw)["content"]:
            raise WrongError("another content is accepted")

    _fuzz(tally, place, one, place.cases)


def fuzz_prompt_files(place: Workplace, tally: Tally) -> None:
    """Headers of prompt cache files."""
    model = place.model()
    result = model.run()
    assert result is not None
    path = prompt_caches.save(model.engine, place.folder("cache"), result.cache, model.prompt)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    head, data = raw[8:start].rstrip(b" "), raw[start:]
    honest = json.loads(head)

    def one(rng: random.Random, current: Round) -> None:
        tree = rng.random() < 0.7
        text = json.dumps(changed_tree(honest, rng)).encode() if tree else mutated(head, rng)
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        found: list[Any] = []
        error = caught(lambda: found.append(prompt_caches.load(model.engine, path)))
        if error is not None:
            current.refused(error)

    _fuzz(tally, place, one, max(6, place.cases // 3))


KINDS: dict[str, Callable[[Workplace, Tally], None]] = {
    "fuzz-header": fuzz_headers,
    "fuzz-manifest": fuzz_manifests,
    "fuzz-journal": fuzz_journals,
    "fuzz-kept": fuzz_kept,
    "fuzz-prompt-file": fuzz_prompt_files,
}
