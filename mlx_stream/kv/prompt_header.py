"""What a prompt cache file says about itself, parsed and checked; no model is needed for it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from mlx_stream.config import format_bytes
from mlx_stream.errors import HeaderError, PromptFileError, TruncatedFileError
from mlx_stream.storage.safetensors_header import (
    LENGTH_NBYTES,
    header_nbytes,
    parse_header,
    parse_metadata,
)

_DTYPES = {"F32", "F16", "BF16", "U8", "U32", "I32", "I64", "BOOL"}


@dataclass(frozen=True)
class PromptHeader:
    """The header of a file.

    Attributes:
        about: the metadata under its own names.
        classes: class names, one a layer.
        scalars: entries that are not arrays: ``"scalar"``, ``"string"`` or ``"none"``.
        entries: names of all arrays.
    """

    about: dict[str, str]
    classes: list[str]
    scalars: dict[str, str]
    entries: set[str]


class Entries:
    """Takes entries out of a file's arrays, and turns what was a scalar into one again."""

    def __init__(self, path: Path, arrays: dict[str, mx.array], scalars: dict[str, str]) -> None:
        self._path = path
        self._arrays = arrays
        self._scalars = scalars

    def get(self, key: str) -> Any:
        """An entry, once."""
        if key not in self._arrays:
            fail(self._path, "entries", f"an entry {key}", "none")
        array, kind = self._arrays.pop(key), self._scalars.get(key)
        if kind is None:
            return array
        if kind == "none":
            return None
        if kind == "scalar":
            self.check(array.size == 1, f"entry {key}", "one value", array.shape)
            return array.item()
        self.check(array.ndim == 1 and array.size <= 100, f"entry {key}", "a name", array.shape)
        codes = array.tolist()
        plain = all(isinstance(code, int) and 0 < code < 128 for code in codes)
        self.check(plain, f"entry {key}", "a name", "other characters")
        return "".join(map(chr, codes))

    def check(self, ok: bool, what: str, expected: object, actual: object) -> None:
        """Raise PromptFileError unless `ok`."""
        if not ok:
            fail(self._path, what, expected, actual)


def read_prompt_header(path: Path, max_nbytes: int) -> PromptHeader:
    """Read and check a file's header.

    Raises:
        PromptFileError: not readable, malformed, or the file has more than `max_nbytes`.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_nbytes:
                fail(path, "size", f"at most {format_bytes(max_nbytes)}", format_bytes(size))
            prefix = file.read(LENGTH_NBYTES)
            raw = prefix + file.read(header_nbytes(prefix, size, path) - LENGTH_NBYTES)
        tensors = parse_header(raw, size, path)
        metadata = parse_metadata(raw, size, path)
    except OSError as error:
        raise damaged(path, "a readable file", error.strerror or str(error)) from error
    except (HeaderError, TruncatedFileError) as error:
        raise damaged(path, error.expected, f"{error.problem} {error.actual}") from error
    strange = [t.dtype for t in tensors if t.dtype not in _DTYPES]
    if strange:
        fail(path, "dtype", ", ".join(sorted(_DTYPES)), strange[0])
    return PromptHeader(*_split(path, metadata), {t.name for t in tensors})


def _split(
    path: Path, metadata: dict[str, str]
) -> tuple[dict[str, str], list[str], dict[str, str]]:
    """mlx-lm flattens ``[metadata, classes, scalars]`` into ``0.name``, ``1.n``, ``2.n.0|1``."""
    about: dict[str, str] = {}
    classes: dict[int, str] = {}
    pairs: dict[str, str] = {}
    for key, value in metadata.items():
        part, _, rest = key.partition(".")
        if part == "0":
            about[rest] = value
        elif part == "1" and rest.isdecimal() and len(rest) < 6:
            classes[int(rest)] = value
        elif part == "2":
            pairs[rest] = value
    scalars = {}
    for rest, name in pairs.items():
        number, _, side = rest.partition(".")
        if side == "0":
            scalars[name] = pairs.get(f"{number}.1", "")
    kinds = set(scalars.values()) - {"scalar", "string", "none"}
    if kinds or sorted(classes) != list(range(len(classes))) or not classes:
        fail(path, "metadata", "that of a prompt cache file", sorted(metadata)[:3])
    return about, [classes[n] for n in range(len(classes))], scalars


def read_tokens(path: Path, about: dict[str, str], vocab: int) -> list[int] | None:
    """The token ids that a file of ours names; None in others. Raises PromptFileError."""
    if "tokens" not in about or "mlx_stream" not in about:
        return None
    tokens = _json(path, about["tokens"], "tokens")
    good = isinstance(tokens, list) and all(
        type(t) is int and 0 <= t < (vocab or 2**31) for t in tokens
    )
    if not good:
        fail(path, "tokens", "ids of the vocabulary", type(tokens).__name__)
    return tokens


def read_messages(path: Path, about: dict[str, str]) -> list[dict[str, str]] | None:
    """The conversation that a file of ours holds; None if it holds none. Raises PromptFileError."""
    if "messages" not in about or "mlx_stream" not in about:
        return None
    messages = _json(path, about["messages"], "messages")
    good = isinstance(messages, list) and all(
        isinstance(m, dict)
        and m.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in m.values())
        for m in messages
    )
    if not good:
        fail(path, "messages", "roles and contents", type(messages).__name__)
    return messages


def _json(path: Path, text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        fail(path, what, "JSON", text[:40])


def fail(path: Path, what: str, expected: object, actual: object) -> NoReturn:
    """Raise PromptFileError for a file whose `what` is wrong."""
    raise damaged(path, f"{what}: {expected}", actual)


def damaged(path: Path, expected: object, actual: object) -> PromptFileError:
    """The error for a file that cannot be used."""
    shown = str(actual)
    return PromptFileError(
        "this is not a prompt cache file that the model can use",
        file=path,
        expected=expected,
        actual=shown if len(shown) <= 200 else shown[:200] + "...",
        remedy="make the prompt cache again with this model",
    )
