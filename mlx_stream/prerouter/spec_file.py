"""``prerouter.json``: a spec as a checkpoint carries it. Read as untrusted input.

Owns the file's form and every check that needs nothing but the file.
"""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from mlx_stream.errors import PrerouterError
from mlx_stream.prerouter.spec import (
    FEATURES,
    FIRST_PREDICTIONS,
    FIRST_PREVIOUS,
    MISSING_LINEAR,
    ROUTERS,
    LoraSpec,
    PrerouterSpec,
    RouterMaths,
)
from mlx_stream.storage.regular_file import open_regular
from mlx_stream.whole_files import write_whole

SPEC_NAME = "prerouter.json"
FORMAT_VERSION = 1
MAX_NBYTES = 64 << 10
MAX_LAYERS = 4096
MAX_TOP_K = 1024
MAX_NAME = 200


def read_spec(path: Path) -> PrerouterSpec:
    """The spec in a file.

    Raises:
        PrerouterError: it cannot be read, is no JSON object of this form, or contradicts itself.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_NBYTES + 1)
    except OSError as error:
        _fail(path, "cannot be read", "a readable regular file", str(error))
    if len(raw) > MAX_NBYTES:
        _fail(path, "is too large", f"at most {MAX_NBYTES} bytes", "more")
    try:
        data = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        _fail(path, "is not JSON", "a JSON object", str(error)[:100] or "nested too deeply")
    return _Fields(path, "", data).spec()


def write_spec(path: Path, spec: PrerouterSpec) -> None:
    """Write a spec so that :func:`read_spec` gives it back."""
    data = {"format_version": FORMAT_VERSION} | dataclasses.asdict(spec)
    write_whole(path, json.dumps(data, indent=2) + "\n")


def is_plain_name(name: str) -> bool:
    """A file name without any folder."""
    return 0 < len(name) <= MAX_NAME and name not in (".", "..") and not set(name) & set("/\\\0")


def _fail(path: Path, problem: str, expected: object, actual: object) -> NoReturn:
    raise PrerouterError(
        f"the Prerouter's spec {problem}",
        file=path,
        expected=expected,
        actual=actual,
        remedy="correct the file, or run with --prerouter off",
    )


class _Fields:
    """A JSON object whose every key must be asked for."""

    def __init__(self, path: Path, where: str, data: Any) -> None:
        self._path, self._where = path, where
        if not isinstance(data, dict):
            self._wrong("the whole" if not where else "", "an object", data)
        self._data: dict[str, Any] = dict(data)

    def spec(self) -> PrerouterSpec:
        version = self._take("format_version")
        if version != FORMAT_VERSION or isinstance(version, bool):
            self._wrong("format_version", FORMAT_VERSION, version)
        spec = PrerouterSpec(
            name=self._text("name"),
            trained=self._flag("trained"),
            heads_file=self._file("heads_file"),
            owners=self._layers("owners"),
            consumers=self._layers("consumers"),
            top_k=self._optional("top_k", lambda: self._number("top_k", 1, MAX_TOP_K)),
            feature=self._one_of("feature", FEATURES),
            first_prediction=self._one_of("first_prediction", FIRST_PREDICTIONS),
            first_previous=self._one_of("first_previous", FIRST_PREVIOUS),
            missing_linear_init=self._one_of("missing_linear_init", MISSING_LINEAR),
            router=self._optional("router", lambda: self._part("router").router()),
            lora=self._optional("lora", lambda: self._part("lora").lora()),
        )
        self.end()
        lone = [n for n in spec.consumers if n - 1 not in spec.owners]
        if lone:
            self._wrong("consumers", "layers that follow an owner", lone[:8])
        return spec

    def router(self) -> RouterMaths:
        maths = RouterMaths(
            kind=self._one_of("kind", ROUTERS),
            norm=self._flag("norm"),
            scaling=self._real("scaling"),
            n_group=self._number("n_group", 1, MAX_LAYERS),
            topk_group=self._number("topk_group", 1, MAX_LAYERS),
            expert_bias=self._flag("expert_bias"),
        )
        self.end()
        if maths.topk_group > maths.n_group:
            self._wrong("topk_group", f"at most {maths.n_group}", maths.topk_group)
        if maths.kind == "softmax_topk" and (maths.n_group > 1 or maths.expert_bias):
            self._wrong("kind", "no groups and no bias with softmax_topk", maths)
        return maths

    def lora(self) -> LoraSpec:
        found = LoraSpec(
            self._file("file"), self._real("alpha"), self._number("rank", 1, MAX_LAYERS)
        )
        self.end()
        return found

    def end(self) -> None:
        """Nothing else may be there: a misspelt option would be ignored."""
        if self._data:
            names = sorted(str(k)[:40] for k in self._data)[:8]
            _fail(self._path, "has unknown fields", "only the fields of the format", names)

    def _wrong(self, name: str, expected: object, actual: object) -> NoReturn:
        place = ".".join(filter(None, (self._where, name)))
        _fail(self._path, f"has a bad value: {place}", expected, repr(actual)[:100])

    def _take(self, name: str) -> Any:
        if name not in self._data:
            self._wrong(name, "a value", "the field is missing")
        return self._data.pop(name)

    def _optional(self, name: str, take: Any) -> Any:
        if self._data.get(name) is None:
            self._data.pop(name, None)
            return None
        return take()

    def _part(self, name: str) -> _Fields:
        return _Fields(self._path, name, self._take(name))

    def _text(self, name: str) -> str:
        value = self._take(name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            self._wrong(name, f"a text of 1 to {MAX_NAME} characters", value)
        return value

    def _file(self, name: str) -> str:
        value = self._text(name)
        if not is_plain_name(value):
            self._wrong(name, "a plain file name", value)
        return value

    def _flag(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            self._wrong(name, "true or false", value)
        return value

    def _one_of(self, name: str, names: tuple[str, ...]) -> str:
        value = self._take(name)
        if value not in names:
            self._wrong(name, ", ".join(names), value)
        return value

    def _number(self, name: str, least: int, most: int) -> int:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self._wrong(name, f"a whole number, {least} to {most}", value)
        return value

    def _real(self, name: str) -> float:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(name, "a number", value)
        if not 0 < abs(value) <= 1e6:  # NaN and huge whole numbers fail here too
            self._wrong(name, "a finite number other than 0, at most 1e6", value)
        return float(value)

    def _layers(self, name: str) -> tuple[int, ...]:
        value = self._take(name)
        fine = isinstance(value, list) and 0 < len(value) <= MAX_LAYERS
        fine = fine and all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n < MAX_LAYERS for n in value
        )
        if not fine or any(a >= b for a, b in pairwise(value)):
            self._wrong(name, "layer numbers, ascending", value)
        return tuple(value)
