"""The safetensors header: bytes in, validated tensor positions out.

Owns every check that needs only the header and the file's size. Pure: it opens nothing, so a
local file and a hub range request share it. It never reads tensor data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mlx_stream.errors import CheckpointError, HeaderError, TruncatedFileError

LENGTH_NBYTES = 8  # u64 little endian: byte length of the JSON that follows
MAX_HEADER_NBYTES = 100_000_000  # the bound of the reference implementation
MAX_RANK = 64
MAX_DIM = 2**63 - 1

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
}

_REDOWNLOAD = "download this file again; it is damaged or not a safetensors file"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `offset` is absolute in the file; `offset` and `nbytes` are bytes.

    A tensor of a packed layer has a `stride`: bytes from one expert to the next.
    """

    name: str
    file: int  # index into Checkpoint.files
    dtype: str  # safetensors name: 'U32', 'BF16', ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stride: int | None = None


def read_header(file: BinaryIO, size: int, path: Path) -> bytes:
    """The header's bytes, length included, from the start of an open file; fewer if it ends there.

    Args:
        size: of the file. Raises as `header_nbytes`, and OSError.
    """
    raw = file.read(LENGTH_NBYTES)
    return raw + file.read(header_nbytes(raw, size, path) - LENGTH_NBYTES)


def header_nbytes(prefix: bytes, file_size: int, path: Path | str) -> int:
    """Bytes of the length field plus the JSON, from the file's first 8 bytes.

    Raises HeaderError when the length is impossible, before anything of that size is read.
    """
    if len(prefix) < LENGTH_NBYTES or file_size < LENGTH_NBYTES:
        _fail(path, "The file is too short to hold a safetensors header.", ">= 8 bytes", file_size)
    length = int.from_bytes(prefix[:LENGTH_NBYTES], "little")
    bound = min(file_size - LENGTH_NBYTES, MAX_HEADER_NBYTES)
    if not 2 <= length <= bound:
        _fail(path, "The header length is impossible.", f"2 to {bound} bytes", f"{length} bytes")
    return LENGTH_NBYTES + length


def parse_header(
    raw: bytes, file_size: int, path: Path | str, *, file: int = 0
) -> tuple[TensorInfo, ...]:
    """Parse and validate a header.

    Args:
        raw: the first bytes of the file, at least `header_nbytes` of them (more is allowed).
        file_size: size of the whole file in bytes.
        path: named in errors only.
        file: the file index to put in each TensorInfo.

    Returns:
        The tensors in file order, `__metadata__` left out.

    Raises:
        HeaderError: malformed header, duplicate name, bad dtype, shape or offsets, overlap.
        TruncatedFileError: a tensor ends past the end of the file.
    """
    end = header_nbytes(raw, file_size, path)
    if len(raw) < end:
        _fail(path, "The header was not read whole.", f"{end} bytes", f"{len(raw)} bytes")
    entries = _decode_json(raw[LENGTH_NBYTES:end], path)
    entries.pop("__metadata__", None)
    tensors = [_entry(name, entry, file, end, path) for name, entry in entries.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    _check_inside(tensors, file_size, path)
    _check_overlap(tensors, path)
    return tuple(tensors)


def parse_metadata(raw: bytes, file_size: int, path: Path | str) -> dict[str, str]:
    """The ``__metadata__`` of a header; arguments as for `parse_header`.

    Raises:
        HeaderError: malformed header, or metadata that is not text by name.
    """
    end = header_nbytes(raw, file_size, path)
    found = _decode_json(raw[LENGTH_NBYTES:end], path).get("__metadata__", {})
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        _fail(path, "The metadata is malformed.", "an object of strings", type(found).__name__)
    return found


def _decode_json(text: bytes, path: Path | str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            _fail(path, "A name occurs twice in the header.", "unique names", twice, twice)
        return out

    def constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        # RecursionError: deeply nested brackets are an attack, not a header.
        _fail(path, "The header is not valid JSON.", "a JSON object", str(error) or "nested JSON")
    if not isinstance(header, dict):
        _fail(path, "The header is not a JSON object.", "object", type(header).__name__)
    return header


def _entry(name: str, entry: Any, file: int, data_start: int, path: Path | str) -> TensorInfo:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        _fail(path, "A header entry is incomplete.", "dtype, shape, data_offsets", entry, name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _fail(path, "Unknown dtype.", ", ".join(DTYPE_BITS), dtype, name)
    if not _naturals(shape) or len(shape) > MAX_RANK:
        _fail(path, "Bad shape.", f"up to {MAX_RANK} integers >= 0", shape, name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, "Bad data_offsets.", "[begin, end], 0 <= begin <= end", offsets, name)
    nbits = math.prod(shape) * DTYPE_BITS[dtype]
    nbytes = offsets[1] - offsets[0]
    if nbits != nbytes * 8:
        wanted = f"{nbits / 8 if nbits < 2**60 else f'about 2**{nbits.bit_length() - 4}'} bytes"
        _fail(path, f"The shape {shape} of {dtype} and its offsets disagree.", wanted, nbytes, name)
    return TensorInfo(name, file, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _naturals(value: Any) -> bool:
    # type(), not isinstance(): true is an int to Python but not to JSON.
    return isinstance(value, list) and all(type(v) is int and 0 <= v <= MAX_DIM for v in value)


def _check_inside(tensors: Iterable[TensorInfo], file_size: int, path: Path | str) -> None:
    last = max(tensors, key=lambda t: t.offset + t.nbytes, default=None)
    if last is None or last.offset + last.nbytes <= file_size:
        return
    raise TruncatedFileError(
        "The file ends before a tensor it should hold.",
        file=path,
        tensor=last.name,
        expected=f"at least {last.offset + last.nbytes} bytes",
        actual=f"{file_size} bytes",
        remedy="the download is incomplete: download this file again",
    )


def _check_overlap(ordered: Iterable[TensorInfo], path: Path | str) -> None:
    end, owner = 0, ""
    for t in ordered:
        if not t.nbytes:
            continue
        if t.offset < end:
            _fail(
                path,
                f"Two tensors share bytes: {owner!r} and {t.name!r}.",
                f"begin >= {end}",
                t.offset,
                t.name,
            )
        end, owner = t.offset + t.nbytes, t.name


def _fail(
    path: Path | str, problem: str, expected: object, actual: object, tensor: str | None = None
) -> NoReturn:
    shown = str(actual)
    raise HeaderError(
        problem,
        file=path,
        tensor=tensor,
        expected=expected,
        actual=shown if len(shown) <= 200 else shown[:200] + "...",
        remedy=_REDOWNLOAD,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold one object. Raises CheckpointError otherwise."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_HEADER_NBYTES + 1)
    except FileNotFoundError:
        _fail_json(path, "no such file")
    except OSError as error:
        _fail_json(path, error.strerror or str(error))
    if len(raw) > MAX_HEADER_NBYTES:
        _fail_json(path, f"more than {MAX_HEADER_NBYTES} bytes")
    return parse_json_object(raw, path)


def parse_json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse bytes that must be one JSON object. Raises CheckpointError, which names `path`."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _fail_json(path, f"not valid JSON: {error}")
    if not isinstance(value, dict):
        _fail_json(path, f"a JSON {type(value).__name__}")
    return value


def _fail_json(path: Path, actual: str) -> NoReturn:
    raise CheckpointError(
        f"{path.name} cannot be used.",
        file=path,
        expected="a JSON object",
        actual=actual,
        remedy="check the path, or download the checkpoint again",
    )
