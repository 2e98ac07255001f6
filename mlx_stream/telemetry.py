"""Receipts: what one prompt cost in bytes and seconds, as counted, not as planned."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from mlx_stream.config import format_bytes
from mlx_stream.whole_files import write_whole


@dataclass(frozen=True)
class Receipt:
    """The account of one prefill. Bytes come from the reader, seconds from clocks.

    Attributes:
        prompt_tokens: tokens prefilled.
        segments: expert passes over the prompt; 1 when the held state fitted the budget.
        chunk_tokens: tokens in one attention chunk, as used.
        mode: ``"stream"`` (all experts, in file order), ``"union"`` (routed experts only) or
            ``"cached"`` (a short turn: routed experts that the decode cache has not).
        bytes_read: bytes returned by the operating system for expert reads, padding included.
        distinct_expert_bytes: bytes of the distinct experts that at least one token used.
        read_amplification: bytes_read / distinct_expert_bytes.
        read_calls: preadv calls.
        read_seconds: time with at least one read in flight.
        compute_seconds: wall time less stalls.
        stall_seconds: time the compute thread waited for a read.
        wall_seconds: the whole prefill.
        bound: ``"read"`` or ``"compute"``, whichever took longer.
        peak_bytes: highest sum of MLX allocations and host buffers seen.
        budget_bytes: the memory budget in force.
        io_mode: the mode that the operating system granted.
        backend: the backend's name.
        cached_experts: experts handed to the decode cache.
        weighted_layers: expert layers whose outputs were combined inside the stream.
        kernels: ``"path: reason"`` -> expert layers computed that way.
        kv_peak_bytes: most bytes of keys, values and recurrent states in memory when chunks met.
        resumed_layers: expert layers (of all segments) that a checkpoint spared.
        notes: what did not go as usual.
        decode: what the tokens after it cost (see decode/metrics.py), once they are there.
    """

    prompt_tokens: int
    segments: int
    chunk_tokens: int
    mode: str
    bytes_read: int
    distinct_expert_bytes: int
    read_calls: int
    read_seconds: float
    compute_seconds: float
    stall_seconds: float
    wall_seconds: float
    peak_bytes: int
    budget_bytes: int
    io_mode: str
    backend: str
    cached_experts: int = 0
    weighted_layers: int = 0
    kernels: dict[str, int] = field(default_factory=dict)
    kv_peak_bytes: int = 0
    resumed_layers: int = 0
    notes: tuple[str, ...] = ()
    decode: dict[str, object] | None = None

    @property
    def read_amplification(self) -> float:
        """Bytes read over distinct expert bytes used; 1.0 is one read of each used expert."""
        return self.bytes_read / self.distinct_expert_bytes if self.distinct_expert_bytes else 0.0

    @property
    def bound(self) -> str:
        """What the prompt waited for."""
        return "read" if self.read_seconds > self.compute_seconds else "compute"

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens over wall seconds."""
        return self.prompt_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """All fields and derived values, JSON-ready."""
        data = dataclasses.asdict(self)
        data["read_amplification"] = self.read_amplification
        data["bound"] = self.bound
        data["tokens_per_second"] = self.tokens_per_second
        return data

    def write(self, path: Path) -> None:
        """Write :meth:`as_dict` as JSON, atomically: a reader never sees half a receipt.

        Raises:
            OSError: the folder is missing or not writable; nothing is left behind.
        """
        write_whole(path, json.dumps(self.as_dict(), indent=2) + "\n")

    def summary(self) -> str:
        """One line for a terminal."""
        return (
            f"prefill {self.prompt_tokens} tokens in {self.wall_seconds:.2f} s "
            f"({self.tokens_per_second:.0f} tok/s, {self.bound}-bound) | "
            f"read {format_bytes(self.bytes_read)} x{self.read_amplification:.2f} "
            f"{self.io_mode}, stall {self.stall_seconds:.2f} s | "
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} | "
            f"{self.backend}, {self.segments} segment{'s' if self.segments > 1 else ''} "
            f"of {self.chunk_tokens}-token chunks"
        )
