"""What a machine sustains: reads by request size, computing by shape. Measured once, kept as JSON.

Pure data and interpolation. `mlx_stream probe` measures (storage/read_probe.py, compute_probe.py);
forecasts read. Rates are FLOP/s (a multiply-add is two), except for "overhead", whose unit is named
beside each use: values, or bytes for the format COPY.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_stream.config import cache_folder
from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.read_probe import ReadRate
from mlx_stream.whole_files import write_whole

VERSION = 1
KINDS = ("experts", "linear", "attention", "overhead")
ELEMENTWISE, COPY = "elementwise", "copy"  # formats of kind "overhead"
READER_DEPTH = 4  # the reader's threads, unless told otherwise

__all__ = ["ComputeRate", "MachineProfile", "ProfileError", "ReadRate", "default_profile_path"]


class ProfileError(MlxStreamError):
    """A machine profile cannot be read, or lacks what was asked of it."""


@dataclass(frozen=True)
class ComputeRate:
    """One measured shape.

    Attributes:
        kind: one of KINDS.
        format: a QuantSpec's name; of `attention_format`; ELEMENTWISE or COPY.
        rows: rows per expert, or tokens of a chunk.
        dims: ``(in, out)`` of a linear layer, ``(D, F)`` of an expert, ``(context,)``.
        flops_per_second: the median.
        spread: half the range of the runs over their median, 0.1 for 10%.
    """

    kind: str
    format: str
    rows: int
    dims: tuple[int, ...]
    flops_per_second: float
    spread: float = 0.0

    @property
    def size(self) -> int:
        """Product of the dimensions, by which rates are interpolated."""
        return math.prod(self.dims)


@dataclass(frozen=True)
class MachineProfile:
    """Rates of one machine with one backend.

    Attributes:
        created: ISO date and time.
        io_mode: what the system granted for the reads.
        overlap_cost: share of the shorter of reading and computing that is lost when both go on:
            0 when neither slows the other, 1 when it is no better than one after the other.
    """

    version: int
    machine: str
    backend: str
    io_mode: str
    created: str
    reads: tuple[ReadRate, ...]
    computes: tuple[ComputeRate, ...]
    notes: tuple[str, ...] = ()
    overlap_cost: float = 0.0

    def with_reads_at_most(self, bytes_per_second: float) -> MachineProfile:
        """The same machine with a slower disk, as a throttled reader has it."""
        slower = tuple(
            dataclasses.replace(r, bytes_per_second=min(r.bytes_per_second, bytes_per_second))
            for r in self.reads
        )
        return dataclasses.replace(self, reads=slower)

    def read_bandwidth(
        self, nbytes: float, depth: int | None = None, order: str = "sequential"
    ) -> float:
        """Bytes per second of requests of `nbytes`, interpolated in the logarithm of the size.

        Args:
            depth: requests in flight; the nearest measured is taken.

        Raises:
            ProfileError: no reads were measured.
        """
        rates = [r for r in self.reads if r.order == order] or list(self.reads)
        if not rates:
            raise _lacks("reads")
        wanted = READER_DEPTH if depth is None else depth
        nearest = min({r.depth for r in rates}, key=lambda d: abs(math.log(d / wanted)))
        points = [(r.nbytes, r.bytes_per_second) for r in rates if r.depth == nearest]
        return interpolate(points, nbytes)

    def flops(
        self, kind: str, rows: float, format: str, dims: Sequence[int] | None = None
    ) -> float:
        """FLOP/s at a shape, interpolated in the logarithms of rows and size.

        Args:
            format: when it was not measured, the nearest relative is taken (`nearest_format`).
            dims: None takes the largest measured.

        Raises:
            ProfileError: nothing of this kind was measured.
        """
        rates = self._of(kind, format)
        by_size: dict[int, list[tuple[float, float]]] = {}
        for rate in rates:
            by_size.setdefault(rate.size, []).append((rate.rows, rate.flops_per_second))
        size = max(by_size) if dims is None else math.prod(dims)
        return interpolate([(s, interpolate(p, rows)) for s, p in by_size.items()], size)

    def spread(self, kind: str) -> float:
        """Median of the spreads of a kind; 0 when nothing was measured."""
        spreads = sorted(r.spread for r in self.computes if r.kind == kind)
        return spreads[len(spreads) // 2] if spreads else 0.0

    def has(self, kind: str, format: str) -> bool:
        """Whether exactly this was measured."""
        return any(r.kind == kind and r.format == format for r in self.computes)

    def _of(self, kind: str, format: str) -> list[ComputeRate]:
        known = {r.format for r in self.computes if r.kind == kind}
        if not known:
            raise _lacks(kind)
        chosen = nearest_format(format, known)
        return [r for r in self.computes if r.kind == kind and r.format == chosen]

    def save(self, path: Path) -> None:
        """Write as JSON, atomically.

        Raises:
            ProfileError: the folder cannot be written; nothing is left behind.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        except OSError as error:
            raise ProfileError(
                "the machine profile cannot be saved",
                file=path,
                actual=str(error),
                remedy="make the folder writable, or pass --no-save",
            ) from error

    @classmethod
    def load(cls, path: Path) -> MachineProfile:
        """Read and validate what :meth:`save` wrote.

        Raises:
            ProfileError: no such file, not JSON, another version, or an impossible value.
        """
        try:
            data = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise _bad(path, "a machine profile in JSON", str(error)) from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise _bad(path, f"version {VERSION}", found)
        try:
            return cls(
                version=VERSION,
                **{k: _text(data[k]) for k in ("machine", "backend", "io_mode", "created")},
                reads=tuple(_read_rate(r) for r in data["reads"]),
                computes=tuple(_compute_rate(r) for r in data["computes"]),
                notes=tuple(_text(n) for n in data["notes"]),
                overlap_cost=_share(data["overlap_cost"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(
                path, "the fields of a profile", f"{type(error).__name__}: {error}"
            ) from error


def default_profile_path() -> Path:
    """In the user's cache folder, beside what doctor keeps; follows XDG_CACHE_HOME."""
    return cache_folder() / "machine.json"


def load_default() -> MachineProfile | None:
    """The profile that `mlx_stream probe` saved; None when there is none.

    Raises:
        ProfileError: there is one, but it is damaged.
    """
    path = default_profile_path()
    return MachineProfile.load(path) if path.exists() else None


def attention_format(queries: int, head_dim: int) -> str:
    """``"head 128"``; ``"token 128"`` for single queries, which take another path."""
    return f"{'token' if queries == 1 else 'head'} {head_dim}"


def nearest_format(format: str, known: Iterable[str]) -> str:
    """The measured format whose speed says most about `format`.

    Itself; else one of the same mode, then of the same kind (packed or floats), with the nearest
    number of bits; for attention the nearest head size.
    """

    def distance(other: str) -> tuple[bool, bool, float, str]:
        bits = abs(math.log(_number(other) / _number(format)))
        packed = "floats" in other, "floats" in format
        return packed[0] != packed[1], other.split()[0] != format.split()[0], bits, other

    names = sorted(known)
    return format if format in names else min(names, key=distance)


def _number(format: str) -> int:
    """Bits of ``"affine 4-bit g64"``, ``"16-bit floats"``; the size in ``"head 128"``; else 1."""
    for word in format.split():
        digits = word.removesuffix("-bit")
        if digits.isdigit() and int(digits):
            return int(digits)
    return 1


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between the nearest points, straight in both logarithms; beyond them, the last one's."""
    ordered = sorted(points)
    if at <= ordered[0][0]:
        return ordered[0][1]
    for (a, low), (b, high) in pairwise(ordered):
        if at <= b:
            share = math.log(at / a) / math.log(b / a)
            return low * (high / low) ** share
    return ordered[-1][1]


def _read_rate(data: dict[str, Any]) -> ReadRate:
    rate = ReadRate(**data)
    if rate.order not in ("sequential", "random"):
        raise ValueError(f"order {rate.order!r}")
    _positive(rate.nbytes, rate.depth, rate.bytes_per_second, rate.iops)
    _positive(rate.p50_seconds, rate.p99_seconds)
    _text(rate.io_mode)
    return rate


def _compute_rate(data: dict[str, Any]) -> ComputeRate:
    rate = ComputeRate(**{**data, "dims": tuple(data["dims"])})
    if rate.kind not in KINDS:
        raise ValueError(f"kind {rate.kind!r}")
    _positive(rate.rows, rate.flops_per_second, *rate.dims)
    _not_negative(rate.spread)
    _text(rate.format)
    return rate


def _positive(*values: float) -> None:
    _not_negative(*values)
    if 0 in values:
        raise ValueError("0 where there must be more")


def _not_negative(*values: float) -> None:
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value >= 0):
            raise ValueError(f"{value!r} is no rate or size")


def _share(value: Any) -> float:
    _not_negative(value)
    if value > 1:
        raise ValueError(f"{value!r} is no share")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _lacks(what: str) -> ProfileError:
    return ProfileError(
        f"the machine profile has no rates of {what}", remedy="run mlx_stream probe again"
    )


def _bad(path: Path, expected: str, actual: object) -> ProfileError:
    return ProfileError(
        "the machine profile cannot be used",
        file=path,
        expected=expected,
        actual=actual,
        remedy="run mlx_stream probe again",
    )
