"""The prefill plan: pure data, printable, built without touching a disk or a device."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_stream.config import format_bytes

GROUP_SOURCES = {
    "asked": "as asked",
    "probe": "by probed read rates",
    "default": "by default, not probed",
    "memory": "to fit the budget",
}


@dataclass(frozen=True)
class Segment:
    """A part of the prompt that passes all layers together: one read of the experts.

    Attributes:
        start, stop: token positions within the prompt.
        chunks: ``(start, stop)`` of each attention chunk.
    """

    start: int
    stop: int
    chunks: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """Tokens of the segment."""
        return self.stop - self.start


@dataclass(frozen=True)
class LayerReads:
    """One expert layer's read groups: consecutive expert ranges ``[start, stop)``, file order."""

    index: int
    name: str
    groups: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of everything a prefill holds at its peak, against the budget."""

    budget: int
    resident: int
    kv: int
    held: int
    transient: int
    scratch: int
    staging: int
    expert_cache: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return (
            self.resident
            + self.kv
            + self.held
            + self.transient
            + self.scratch
            + self.staging
            + self.expert_cache
        )

    def lines(self) -> list[str]:
        """One line per part."""
        parts = ("resident", "kv", "held", "transient", "scratch", "staging", "expert_cache")
        rows = [f"  {part:<13}{format_bytes(getattr(self, part)):>12}" for part in parts]
        return [*rows, f"  {'total':<13}{format_bytes(self.total):>12}"]


@dataclass(frozen=True)
class PrefillPlan:
    """How a prompt of `prompt_tokens` goes through the model.

    Attributes:
        mode: ``"stream"`` reads every expert in file order; ``"union"`` reads only the experts
            that the prompt routes to, after routing (short prompts).
        chunk_tokens: tokens of one attention chunk; at most what was asked for.
        group_size: G, experts in one read group.
        group_source: why so many: "asked", "probe" (measured read rates), "default" (about as
            many bytes on any machine), or "memory" (fewer, to fit the budget).
        slots: staging slots of `slot_nbytes` each.
        layers: the reads of one segment.
        memory: where the budget goes.
        notes: what the planner changed to make it fit.
        kv_evict, kv_dir: what becomes of a layer's keys and values behind it (see KvOptions).
        kv_stored: bytes of all keys and values after the prompt, at most, wherever they are.
        kv_decode: bytes of them that decode holds.
        kv_layered: whether decode reads evicted ones layer by layer, as not all fit.
    """

    model: str
    prompt_tokens: int
    mode: str
    chunk_tokens: int
    segments: tuple[Segment, ...]
    layers: tuple[LayerReads, ...]
    group_size: int
    slots: int
    slot_nbytes: int
    memory: MemoryPlan
    notes: tuple[str, ...] = ()
    kv_evict: str = "keep"
    kv_dir: str | None = None
    kv_stored: int = 0
    kv_decode: int = 0
    kv_layered: bool = False
    group_source: str = "default"

    @property
    def expert_nbytes(self) -> int:
        """Bytes of all routed experts: one pass."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def planned_read_nbytes(self) -> int:
        """Expert bytes that a stream plan reads; an upper bound for a union plan."""
        return self.expert_nbytes * len(self.segments)

    @property
    def holds_two_layers(self) -> bool:
        """Whether the staging slots hold two whole layers."""
        return self.slots * self.slot_nbytes >= 2 * max(layer.nbytes for layer in self.layers)

    def __str__(self) -> str:
        groups = len(self.layers[0].groups)
        staging = "two layers" if self.holds_two_layers else "read groups"
        return "\n".join(
            [
                f"prefill of {self.prompt_tokens} tokens, {self.model}",
                f"  mode         {self.mode}: {len(self.segments)} segment(s), chunks of "
                f"{self.chunk_tokens} tokens",
                f"  reads        {format_bytes(self.planned_read_nbytes)} in {len(self.layers)} "
                f"expert layers x {groups} groups of {self.group_size} experts"
                f" ({GROUP_SOURCES[self.group_source]})",
                f"  staging      {self.slots} slots of {format_bytes(self.slot_nbytes)}: {staging}",
                f"memory, of a budget of {format_bytes(self.memory.budget)}",
                *self.memory.lines(),
                *(f"note: {note}" for note in self.notes),
            ]
        )


@dataclass(frozen=True)
class PrefillProgress:
    """Where a prefill stands; bytes as counted by the reader since its start."""

    segment: int
    segments: int
    layer: int
    layers: int
    bytes_read: int
    bytes_planned: int
    seconds: float


def cut_segments(prompt_tokens: int, segment_tokens: int, chunk_tokens: int) -> tuple[Segment, ...]:
    """Cut a prompt into segments and chunks.

    The last token is a chunk of its own: only its logits are needed, so no other chunk ever
    evaluates the vocabulary projection.
    """
    assert prompt_tokens >= 1
    assert segment_tokens >= 1
    assert chunk_tokens >= 1
    body = prompt_tokens - 1
    starts = list(range(0, body, segment_tokens)) or [0]
    segments = []
    for start in starts:
        stop = min(start + segment_tokens, body)
        chunks = [(a, min(a + chunk_tokens, stop)) for a in range(start, stop, chunk_tokens)]
        segments.append((start, stop, chunks))
    start, stop, chunks = segments[-1]
    segments[-1] = (start, prompt_tokens, [*chunks, (body, prompt_tokens)])
    return tuple(Segment(a, b, tuple(chunks)) for a, b, chunks in segments)


def cut_groups(num_experts: int, group_size: int) -> tuple[tuple[int, int], ...]:
    """Consecutive ranges of at most `group_size` experts."""
    return tuple((a, min(a + group_size, num_experts)) for a in range(0, num_experts, group_size))
