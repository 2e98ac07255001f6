"""Routing traces: which experts a prompt and the tokens after it used, layer by layer, on disk.

A trace is an npz without pickled objects. A file from elsewhere is data to distrust: its sizes are
bounded before anything is allocated, and every id is checked.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_stream.errors import MlxStreamError
from mlx_stream.whole_files import write_whole

VERSION = 1
MAX_FILE_NBYTES = 256 << 20
MAX_ARRAY_NBYTES = 1 << 30
MAX_HEADER_NBYTES = 1 << 20
MAX_LAYERS = 1024
MAX_EXPERTS = 32767  # ids are stored as int16
# What zipfile, zlib and numpy raise for damaged archives, members and array headers.
UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
HEADER_KEYS = {"version", "model", "layers", "num_experts", "expert_nbytes"}


class TraceError(MlxStreamError):
    """A routing trace cannot be read, or is not one."""


@dataclass(frozen=True)
class RoutingTrace:
    """What was routed where.

    Attributes:
        model: name of the checkpoint, for people.
        layers: index of every expert layer, in the order they run.
        num_experts: experts of each layer.
        expert_nbytes: bytes of one expert of each layer.
        prompt: per layer ``[N, K]`` int16, a row for every prompt token.
        decode: per layer ``[T, K]`` int16, a row for every decoded token that was fed back.
        tokens: ``[T]`` int32, those tokens.
    """

    model: str
    layers: tuple[int, ...]
    num_experts: tuple[int, ...]
    expert_nbytes: tuple[int, ...]
    prompt: tuple[np.ndarray, ...]
    decode: tuple[np.ndarray, ...]
    tokens: np.ndarray

    @property
    def steps(self) -> int:
        """Decoded tokens, T."""
        return len(self.tokens)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(e * b for e, b in zip(self.num_experts, self.expert_nbytes, strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; an existing file is replaced whole or left alone.

        Raises:
            TraceError: the file cannot be written.
        """
        target = Path(path)
        check_trace(self, target)
        header = {
            "version": VERSION,
            "model": self.model,
            "layers": self.layers,
            "num_experts": self.num_experts,
            "expert_nbytes": self.expert_nbytes,
        }
        arrays = {
            "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
            "tokens": self.tokens.astype(np.int32),
        }
        for i in range(len(self.layers)):
            arrays[f"prompt.{i}"] = self.prompt[i].astype(np.int16)
            arrays[f"decode.{i}"] = self.decode[i].astype(np.int16)
        packed = io.BytesIO()
        try:
            np.savez_compressed(packed, allow_pickle=False, **arrays)
            write_whole(target, packed.getvalue())
        except OSError as error:
            raise TraceError(
                "the trace cannot be written",
                file=target,
                actual=str(error),
                remedy="choose a writable folder with free space",
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RoutingTrace:
        """Read and check a trace.

        Raises:
            TraceError: no such file, not a trace, too large, or its parts disagree.
        """
        source = Path(path)
        try:
            _check_sizes(source)
            with np.load(source, allow_pickle=False) as archive:
                return _from_archive(archive, source)
        except TraceError:
            raise
        except UNREADABLE as error:
            raise _not_a_trace(source, str(error)) from error


def _check_sizes(source: Path) -> None:
    """The archive's directory says how large its members are: before any is unpacked."""
    size = source.stat().st_size
    if size > MAX_FILE_NBYTES:
        raise _too_large(source, f"at most {MAX_FILE_NBYTES} bytes", size)
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        if len(members) > 2 * MAX_LAYERS + 2:
            raise _too_large(source, f"at most {MAX_LAYERS} layers", f"{len(members)} arrays")
        if any(m.file_size > MAX_HEADER_NBYTES for m in members if m.filename == "header.npy"):
            raise _too_large(source, f"a header of at most {MAX_HEADER_NBYTES} bytes", "more")
        unpacked = sum(m.file_size for m in members)
    if unpacked > MAX_ARRAY_NBYTES:
        raise _too_large(source, f"at most {MAX_ARRAY_NBYTES} bytes unpacked", unpacked)


def _from_archive(archive: Any, source: Path) -> RoutingTrace:
    header = json.loads(archive["header"].astype(np.uint8).tobytes().decode())
    if not isinstance(header, dict) or header.get("version") != VERSION:
        found = header.get("version") if isinstance(header, dict) else type(header).__name__
        raise _mismatch(source, "header", f"trace version {VERSION}", found)
    if not set(header) >= HEADER_KEYS:
        raise _mismatch(source, "header", sorted(HEADER_KEYS), sorted(header))
    count = len(_whole_numbers(header, "layers", source))
    trace = RoutingTrace(
        str(header["model"]),
        _whole_numbers(header, "layers", source),
        _whole_numbers(header, "num_experts", source),
        _whole_numbers(header, "expert_nbytes", source),
        tuple(archive[f"prompt.{i}"] for i in range(count)),
        tuple(archive[f"decode.{i}"] for i in range(count)),
        archive["tokens"],
    )
    check_trace(trace, source)
    return trace


def _whole_numbers(header: dict[str, Any], name: str, source: Path) -> tuple[int, ...]:
    values = header[name]
    if (
        not isinstance(values, list)
        or not 0 < len(values) <= MAX_LAYERS
        or not all(type(v) is int and v >= 0 for v in values)
    ):
        raise _mismatch(source, name, f"1 to {MAX_LAYERS} whole numbers", str(values)[:60])
    return tuple(values)


def check_trace(trace: RoutingTrace, source: Path) -> None:
    """Every part has a row for every token and every id names an expert.

    Raises:
        TraceError: it does not; the message names the part.
    """
    count = len(trace.layers)
    for name in ("num_experts", "expert_nbytes", "prompt", "decode"):
        if len(getattr(trace, name)) != count:
            raise _mismatch(source, name, f"{count} layers", len(getattr(trace, name)))
    if len(set(trace.layers)) != count:
        raise _mismatch(source, "layers", "different layers", list(trace.layers))
    if trace.tokens.ndim != 1 or not np.issubdtype(trace.tokens.dtype, np.integer):
        raise _mismatch(source, "tokens", "integers [T]", _kind(trace.tokens))
    for i, experts in enumerate(trace.num_experts):
        if not 0 < experts <= MAX_EXPERTS:
            raise _mismatch(source, "num_experts", f"1 to {MAX_EXPERTS}", experts)
        for part, rows in (("prompt", len(trace.prompt[0])), ("decode", trace.steps)):
            _check_ids(getattr(trace, part)[i], rows, experts, f"{part}.{i}", source)


def _check_ids(ids: np.ndarray, rows: int, experts: int, name: str, source: Path) -> None:
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or not ids.shape[1]:
        raise _mismatch(source, name, "integers [tokens, experts a token]", _kind(ids))
    if len(ids) != rows:
        raise _mismatch(source, name, f"{rows} tokens", len(ids))
    if ids.size and not (ids.min() >= 0 and ids.max() < experts):
        raise _mismatch(source, name, f"ids 0..{experts - 1}", f"{ids.min()}..{ids.max()}")


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _mismatch(source: Path, part: str, expected: object, actual: object) -> TraceError:
    return TraceError(
        "the routing trace is damaged, or of another version",
        file=source,
        tensor=part,
        expected=expected,
        actual=actual,
        remedy="record it again: mlx_stream trace MODEL -o FILE",
    )


def _too_large(source: Path, expected: object, actual: object) -> TraceError:
    return TraceError(
        "the routing trace is too large",
        file=source,
        expected=expected,
        actual=actual,
        remedy="record fewer tokens",
    )


def _not_a_trace(source: Path, actual: str) -> TraceError:
    return TraceError(
        "the routing trace cannot be read",
        file=source,
        expected="an npz written by mlx_stream trace",
        actual=actual,
        remedy="check the path, or record it again",
    )


def join_rows(chunks: Sequence[np.ndarray]) -> np.ndarray:
    """``[N, K]`` int16 of consecutive pieces ``[C, K]``."""
    return np.concatenate([np.asarray(c, dtype=np.int16) for c in chunks])
