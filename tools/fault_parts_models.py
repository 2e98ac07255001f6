"""The models of the fault suite, what undisturbed runs of them give, and comparisons with that."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine, PrefillResult
from mlx_stream.errors import CheckpointError
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.packed.pack import PackOptions, PackReport, pack
from mlx_stream.packed.verify import verify
from mlx_stream.resume.options import KeepOptions
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, MANIFEST_NAME
from tests.packed.building import SMALL, contents, final_names
from tests.support.checkpoints import build_family
from tools.fault_parts import LostError, Tally, WrongError

PROMPT_TOKENS, CHUNK_TOKENS, ANSWER_TOKENS = 67, 16, 6
STREAM = {"memory_budget": 1 << 30, "chunk_tokens": CHUNK_TOKENS, "backend": "cpu"}
STREAM |= {"union_tokens": 0, "io": "buffered", "predict": "off"}
DEEP = {"num_hidden_layers": 6, "decoder_sparse_step": 1, "mlp_only_layers": []}
FAMILIES = {"qwen3_moe": DEEP, "gpt_oss": {}, "qwen3_next": {}, "deepseek_v3": {}}


class StopHere(Exception):
    """What ends a prefill between two layers."""


@dataclass
class Model:
    """A checkpoint, an open engine of it once it was needed, and what it says."""

    name: str
    path: Path
    prompt: list[int]
    _engine: Engine | None = None
    _answers: dict[Any, tuple[np.ndarray, list[int]]] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """Opened once."""
        if self._engine is None:
            self._engine = Engine(self.path, StreamConfig(**STREAM))
        return self._engine

    @property
    def layers(self) -> int:
        """Expert layers."""
        return len(self.engine.index.layers)

    def answer(self, prompt: Sequence[int] | None = None) -> tuple[np.ndarray, list[int]]:
        """Logits and greedy tokens of an undisturbed prefill."""
        key = tuple(self.prompt if prompt is None else prompt)
        if key not in self._answers:
            self.keep(None)
            self._answers[key] = tokens_of(self.engine, self.engine.prefill(list(key)), list(key))
        return self._answers[key]

    def keep(self, folder: Path | None, every: int = 1, resume: bool = False) -> None:
        """Checkpoints of the prompts from now on."""
        options = None if folder is None else KeepOptions(folder, every, resume)
        self.engine.runner.keep = options

    def run(
        self,
        folder: Path | None = None,
        *,
        kv: KvOptions = PLAIN,
        stop: int | None = None,
        prompt: Sequence[int] | None = None,
        **options: Any,
    ) -> PrefillResult | None:
        """A prefill, with checkpoints in `folder`; None when it ended behind layer `stop`."""

        def progress(state: Any) -> None:
            if state.layer == stop:
                raise StopHere

        self.keep(folder, **options)
        try:
            tokens = list(self.prompt if prompt is None else prompt)
            return self.engine.prefill(tokens, kv=kv, progress=progress)
        except StopHere:
            return None
        finally:
            self.keep(None)

    def require_answer(
        self, result: PrefillResult | None, prompt: Sequence[int] | None = None
    ) -> None:
        """Raises WrongError unless it is the undisturbed one, bit by bit."""
        assert result is not None
        tokens = list(self.prompt if prompt is None else prompt)
        logits, said = self.answer(tokens)
        found, got = tokens_of(self.engine, result, tokens)
        if not np.array_equal(found, logits) or got != said:
            raise WrongError(f"{got} instead of {said}")

    def close(self) -> None:
        """Close its engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def greedy(logprobs: mx.array) -> mx.array:
    """Temperature 0."""
    return mx.argmax(logprobs, axis=-1)


def tokens_of(
    engine: Engine, result: PrefillResult, prompt: Sequence[int]
) -> tuple[np.ndarray, list[int]]:
    """Logits and the next tokens."""
    tokens = engine.decode(result, list(prompt), sampler=greedy)
    return np.array(result.logits), [t for t, _ in (next(tokens) for _ in range(ANSWER_TOKENS))]


class Workplace:
    """Folders, models and random numbers of one run of the suite; close it.

    Args:
        rounds: of the kinds that are random.
        extra: a checkpoint to use besides the generated one.
        quick: a few rounds of each kind only: `places` of all that there are.
    """

    def __init__(self, root: Path, rounds: int, seed: int, extra: Path | None, quick: bool) -> None:
        self.root, self.rounds, self.seed, self.quick = root, rounds, seed, quick
        self.places, self.cases = (3, 60) if quick else (1 << 30, 2500)
        self.random = random.Random(seed)
        self._extra = extra
        self._models: dict[str, Model] = {}
        self._packed: dict[str, dict[str, bytes]] = {}
        self._serial = 0
        self.say: Callable[[str], None] = print

    def folder(self, what: str = "round") -> Path:
        """A new name of a folder that is not there."""
        self._serial += 1
        return self.root / f"{what}-{self._serial}"

    def model(self, family: str = "qwen3_moe") -> Model:
        """A generated checkpoint of that family."""
        if family not in self._models:
            path = self.root / f"model-{family}"
            build_family(family, path, changes=FAMILIES[family], shard_bytes=200_000)
            self._models[family] = self._made(family, path)
        return self._models[family]

    def extra(self) -> Model:
        """The further checkpoint, or the generated one."""
        if self._extra is None:
            return self.model()
        if "extra" not in self._models:
            self._models["extra"] = self._made(self._extra.name, self._extra)
        return self._models["extra"]

    def _made(self, name: str, path: Path) -> Model:
        model = Model(name, path, [])
        vocab = model.engine._shape.vocab
        numbers = np.random.default_rng(self.seed).integers(0, vocab, PROMPT_TOKENS)
        model.prompt = numbers.tolist()
        return model

    def packed(self, model: Model) -> dict[str, bytes]:
        """What an undisturbed packing writes, by file name."""
        if model.name not in self._packed:
            target = self.folder("whole")
            pack_small(model, target)
            self._packed[model.name] = contents(target)
            shutil.rmtree(target)
        return self._packed[model.name]

    def unpack(self, model: Model, target: Path | None = None, without: Sequence[str] = ()) -> Path:
        """A packed folder, fresh; files `without` are missing."""
        target = target or self.folder("packed")
        target.mkdir(parents=True, exist_ok=True)
        for name, data in self.packed(model).items():
            if name not in without:
                (target / name).write_bytes(data)
        return target

    def numbers(self, total: int, most: int = 1 << 30) -> list[int]:
        """All of range(total), or a sample of them in a quick run."""
        return self.some(range(total), most)

    def some(self, what: Sequence[Any], most: int = 1 << 30) -> list[Any]:
        """All of it, or a sample in a quick run; in order."""
        most = min(most, self.places)
        if len(what) <= most:
            return list(what)
        chosen = sorted(self.random.sample(range(len(what)), most))
        return [what[n] for n in chosen]

    def each(self, tally: Tally, total: int) -> range:
        """So many rounds; says where it stands from time to time."""
        self.say(f"{tally.kind}: {total} rounds")
        return range(total)

    def close(self) -> None:
        """Close the engines."""
        for model in self._models.values():
            model.close()


# --- packed folders -----------------------------------------------------------------------------


def pack_small(model: Model, target: Path, **options: Any) -> PackReport:
    """Pack in small pieces and many files."""
    return pack(model.path, target, PackOptions(**(SMALL | options)))


def check_unfinished(folder: Path, whole: dict[str, bytes]) -> None:
    """Whatever has its name is whole, and nobody takes the folder for a finished one."""
    names = final_names(folder)
    for name in names - {JOURNAL_NAME}:
        if (folder / name).read_bytes() != whole[name]:
            raise WrongError(f"{name} has its name and is not whole")
    if MANIFEST_NAME not in names:
        try:
            open_checkpoint(folder)
        except CheckpointError:
            return
        raise WrongError("an unfinished folder is opened as a checkpoint")


def finished_nbytes(folder: Path) -> int:
    """Bytes of the files that the journal calls finished."""
    journal = folder / JOURNAL_NAME
    if (folder / MANIFEST_NAME).exists() or not journal.exists():
        return 0
    names = json.loads(journal.read_bytes())["finished"]
    return sum((folder / name).stat().st_size for name in names if (folder / name).exists())


def check_finish(model: Model, target: Path, whole: dict[str, bytes]) -> None:
    """Pack to the end: what was finished is kept, and the folder is the undisturbed one."""
    before = finished_nbytes(target)
    report = pack_small(model, target)
    if not report.already and report.kept_nbytes < before:
        raise LostError(f"{before} bytes were finished, {report.kept_nbytes} were kept")
    if contents(target) != whole:
        raise WrongError("another folder than an undisturbed run makes")


def unfinished(place: Workplace, model: Model) -> Path:
    """A folder whose packing was stopped in its fourth file."""
    target = place.folder("unfinished")

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("experts-00004"):
            raise StopHere

    try:
        pack(model.path, target, PackOptions(**SMALL), stop)
    except StopHere:
        return target
    raise AssertionError("too few layers")


def require_sound(folder: Path) -> None:
    """Raises WrongError if verify finds damage."""
    report = verify(folder, io="buffered")
    if not report.sound:
        raise WrongError(f"damage: {report.damage[0]}")
