"""Configuration: one frozen object, built once from flags or arguments."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from mlx_stream.errors import MlxStreamError

IO_MODES = ("direct", "buffered")
BACKENDS = ("auto", "metal", "cuda", "cpu")
VERIFY_MODES = ("off", "first", "always")

_UNITS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class ConfigError(MlxStreamError):
    """An option has a value that cannot be used."""


def parse_bytes(value: int | str) -> int:
    """Bytes from an int or a string such as ``"4GB"`` (1e9) or ``"4GiB"`` (2**30).

    Raises:
        ConfigError: the value is not a positive size.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size: float = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match.group(2).upper() not in _UNITS:
            raise ConfigError(
                "not a size in bytes",
                expected="an integer or a string such as '4GB' or '4GiB'",
                actual=repr(value),
                remedy="pass bytes, or a number with KB, MB, GB, KiB, MiB or GiB",
            )
        size = float(match.group(1)) * _UNITS[match.group(2).upper()]
    if not math.isfinite(size):
        raise ConfigError(
            "a size must be finite",
            expected="a number of bytes",
            actual=repr(value)[:40],
            remedy="pass a size such as '4GB'",
        )
    if size < 1:
        raise ConfigError(
            "a size must be positive",
            expected="at least 1 byte",
            actual=repr(value),
            remedy="pass a size such as '4GB'",
        )
    return int(size)


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_throttle(text: str) -> tuple[float, float]:
    """``(bytes a second, seconds of latency)`` from ``"2GB/s"`` or ``"0.5GB/s:100us"``.

    Raises:
        ConfigError: it is not of this form, or the rate is below 1 byte a second.
    """
    match = re.fullmatch(r"\s*([^/:]+)/s\s*(?::\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*)?", text)
    try:
        if match is not None:
            latency = float(match.group(2) or 0) * _SECONDS[match.group(3) or "s"]
            return float(parse_bytes(match.group(1))), latency
    except ConfigError:
        pass  # said below, with the whole text
    raise ConfigError(
        "not a read rate",
        expected="bytes a second, and a latency if wanted: '2GB/s' or '0.5GB/s:100us'",
        actual=repr(text),
        remedy="give a size and '/s', then ':' and a time in us, ms or s",
    )


def cache_folder() -> Path:
    """Where this program keeps what it can make again; follows XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_stream"


def format_bytes(nbytes: float) -> str:
    """Human-readable size; GB = 1e9 bytes."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


@dataclass(frozen=True)
class StreamConfig:
    """How a checkpoint is streamed.

    Attributes:
        memory_budget: bytes for everything the runtime allocates: resident weights, staging,
            held activations, KV cache and expert cache. None picks a share of free memory.
        chunk_tokens: upper bound of tokens in one attention chunk; the plan may use fewer when
            the budget is tight, and says so.
        backend: one of ``BACKENDS``.
        io: ``"direct"`` bypasses the page cache, ``"buffered"`` goes through it.
        reader_threads: reads in flight at once.
        group_size: experts of a read group, at most a whole layer's; None leaves it to the plan.
        union_tokens: prompts up to this long read only the experts they route to, after routing.
            Such a prompt's attention takes a small part of the time that the reads take, so there
            is little to hide behind it, and skewed routers leave experts unused.
        throttle: makes the reads slower, for benchmarks: "2GB/s" for all threads together, or
            "0.5GB/s:100us" with a latency for each read.
        verify: when an expert's checksum is compared, where the checkpoint is packed: on its first
            read, on every read, or never.
        decode_path, cache_policy, seed_policy, predict, hot_list, prerouter, prerouter_spec: see
            decode/options.py, which also checks them.
        adapter: file or folder of the low-rank adapter of requests that name none; ``"auto"`` is
            the one trained with the Prerouter, where that is on, ``"off"`` none.
        adapter_scale: alpha / r of an adapter that does not say it.
    """

    memory_budget: int | None = None
    chunk_tokens: int = 2048
    backend: str = "auto"
    io: str = "direct"
    reader_threads: int = 4
    group_size: int | None = None
    union_tokens: int = 512
    trust_remote_code: bool = False
    throttle: str | None = None
    verify: str = "first"
    decode_path: str = "auto"
    cache_policy: str = "auto"
    seed_policy: str = "auto"
    predict: str = "auto"
    hot_list: str | None = None
    prerouter: str = "auto"
    prerouter_spec: str | None = None
    adapter: str = "auto"
    adapter_scale: float | None = None

    def __post_init__(self) -> None:
        _check(self.backend in BACKENDS, "backend", BACKENDS, self.backend)
        _check(self.io in IO_MODES, "io", IO_MODES, self.io)
        _check(self.verify in VERIFY_MODES, "verify", VERIFY_MODES, self.verify)
        _check(self.chunk_tokens >= 1, "chunk_tokens", "at least 1", self.chunk_tokens)
        _check(
            1 <= self.reader_threads <= 64, "reader_threads", "1 to 64 threads", self.reader_threads
        )
        groups = self.group_size is None or self.group_size >= 1
        _check(groups, "group_size", "at least 1 expert", self.group_size)
        _check(self.union_tokens >= 0, "union_tokens", "0 or more tokens", self.union_tokens)
        if self.throttle is not None:
            parse_throttle(self.throttle)

    @classmethod
    def build(cls, *, memory_budget: int | str | None = None, **options: object) -> StreamConfig:
        """A config whose budget may be given as a string."""
        budget = None if memory_budget is None else parse_bytes(memory_budget)
        return cls(memory_budget=budget, **options)  # type: ignore[arg-type]


def _check(ok: bool, option: str, expected: object, actual: object) -> None:
    if not ok:
        raise ConfigError(
            f"bad value for {option}",
            expected=expected,
            actual=repr(actual),
            remedy=f"set {option} to a value in the expected range",
        )
