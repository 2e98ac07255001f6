"""Fit a prefill into a memory budget: group size, slots, chunk, segments.

What costs nothing is tried first (fewer slots, smaller groups), then smaller attention chunks, and
more segments last, since every segment reads all experts once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from mlx_stream.config import format_bytes
from mlx_stream.errors import BudgetError
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.planner.group_size import ASKED, GroupSize, sizes_to_try
from mlx_stream.planner.kv_size import KvSize, kv_size, live_layers
from mlx_stream.planner.model_shape import ModelShape
from mlx_stream.prefill.schedule import (
    LayerReads,
    MemoryPlan,
    PrefillPlan,
    cut_groups,
    cut_segments,
)
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.read_plan import slot_capacity

# A suspended chunk keeps its residual, its normed input and its output, and a few views of them:
# 4.1 hidden vectors per token were measured on qwen3_moe, the largest plain family 5.0.
HELD_VECTORS = 4.5
TARGET_GROUP_NBYTES = 48 << 20  # without a probe: large requests in every layout measured so far
MIN_SLOTS = 2
SMALL_CHUNK = 64
DIRECT_ALIGN = 4096  # the largest block that file systems ask of cache-bypassing reads
# Enough to go on reading while a layer's attention computes. More buys nothing and costs page
# faults: first touching 2.4 GB took 2.5 s of system time where reading it took 1.8 s.
STAGING_NBYTES = 512 << 20
DEEP_SLOTS = 4
STAGING_SHARE = 0.6  # of what is left, the rest feeds the decode cache
LAYERED_COPIES = 3  # a layer's keys and values as read, as an array, and with the new rows
UNION_BELOW = 0.95  # expected share of experts used, below which only the routed ones are read


@dataclass(frozen=True)
class Traits:
    """What the plan must know of backend and reader.

    Attributes:
        itemsize: bytes of one activation value.
        resident: bytes of the non-expert weights as held in memory.
        scratch: the backend's working memory in bytes.
        align: alignment of cache-bypassing reads.
        combined: whether all expert outputs are weighted inside the stream.
        decode_tokens: tokens to leave KV room for after the prompt.
        union_tokens: longest prompt that waits for its routing before it reads.
        kv: how keys and values are kept.
        cache_overhead: bytes that the expert cache takes besides its records.
        kv_window: tokens that the largest sliding window or attention chunk keeps; 0 without.
        group: experts of a read group; None takes about TARGET_GROUP_NBYTES.
    """

    itemsize: int
    resident: int
    scratch: int
    align: int
    combined: bool = True
    decode_tokens: int = 256
    union_tokens: int = 512
    kv: KvOptions = PLAIN
    cache_overhead: int = 0
    kv_window: int = 0
    group: GroupSize | None = None


@dataclass(frozen=True)
class _Choice:
    segment_tokens: int
    chunk_tokens: int
    group: GroupSize
    slots: int

    @property
    def group_size(self) -> int:
        return self.group.experts


def plan_prefill(
    index: ExpertIndex,
    shape: ModelShape,
    traits: Traits,
    *,
    prompt_tokens: int,
    budget: int,
    chunk_tokens: int,
    past_tokens: int = 0,
) -> PrefillPlan:
    """The plan for one prompt. Pure: same inputs, same plan.

    Args:
        past_tokens: tokens already in the cache.

    Raises:
        BudgetError: nothing fits; the message names the smallest budget that would.
    """
    asked = min(chunk_tokens, prompt_tokens)
    smallest = None
    for segment, chunk, group in _candidates(index, traits, prompt_tokens, asked):
        choice = _Choice(segment, chunk, group, MIN_SLOTS)
        kv = _kv(index, shape, traits, choice, prompt_tokens, past_tokens)
        memory = _memory(index, shape, traits, choice, prompt_tokens, past_tokens, budget, kv)
        if memory.total <= budget:
            return _finish(index, shape, traits, choice, memory, kv, prompt_tokens, asked)
        if smallest is None or memory.total < smallest.total:
            smallest = memory
    assert smallest is not None
    asked_group = traits.group is not None and traits.group.source == ASKED
    raise BudgetError(
        f"a prompt of {prompt_tokens} tokens does not fit the memory budget",
        file=index.checkpoint.path,
        expected=f"at least {format_bytes(smallest.total)}",
        actual=f"{format_bytes(budget)}\n" + "\n".join(smallest.lines()),
        remedy=f"set memory_budget to {format_bytes(smallest.total * 1.02)} or more, "
        + ("take a smaller group_size, " if asked_group else "")
        + "or shorten the prompt",
    )


def require_room(index: ExpertIndex, shape: ModelShape, traits: Traits, budget: int) -> None:
    """Refuse a budget that fits no prompt at all.

    Raises:
        BudgetError: its advice is for a short prompt, not for a single token.
    """

    def plan(prompt_tokens: int) -> None:
        plan_prefill(
            index,
            shape,
            traits,
            prompt_tokens=prompt_tokens,
            budget=budget,
            chunk_tokens=SMALL_CHUNK,
        )

    with suppress(BudgetError):
        plan(1)
        return
    plan(SMALL_CHUNK)


def _candidates(
    index: ExpertIndex, traits: Traits, prompt_tokens: int, asked: int
) -> Iterator[tuple[int, int, GroupSize]]:
    """``(segment_tokens, chunk_tokens, group)`` from best to most frugal."""
    segment = prompt_tokens
    while True:
        chunk = min(asked, segment)
        while True:
            for group in sizes_to_try(index, traits.group, TARGET_GROUP_NBYTES):
                yield segment, chunk, group
            if chunk <= SMALL_CHUNK:
                break
            chunk = max(SMALL_CHUNK, chunk // 2)
        if segment <= SMALL_CHUNK:
            return
        segment = max(SMALL_CHUNK, -(-segment // 2))


def _memory(
    index: ExpertIndex,
    shape: ModelShape,
    traits: Traits,
    choice: _Choice,
    prompt_tokens: int,
    past_tokens: int,
    budget: int,
    kv: KvSize,
) -> MemoryPlan:
    item, tokens, total_tokens = traits.itemsize, choice.segment_tokens, prompt_tokens + past_tokens
    held = int(HELD_VECTORS * shape.streams * shape.hidden * item * tokens)
    if not traits.combined:
        held += tokens * shape.top_k * shape.hidden * item
    if shape.full_masks:
        held += tokens * total_tokens // 2
    return MemoryPlan(
        budget=budget,
        resident=traits.resident,
        kv=kv.held,
        held=held,
        transient=choice.chunk_tokens * shape.attention_values * item + kv.layer + kv.scores,
        scratch=traits.scratch,
        staging=choice.slots * slot_capacity(index, choice.group_size, traits.align),
        expert_cache=slot_capacity(index, 1, traits.align) + traits.cache_overhead,
    )


def _kv(
    index: ExpertIndex,
    shape: ModelShape,
    traits: Traits,
    choice: _Choice,
    prompt_tokens: int,
    past_tokens: int,
) -> KvSize:
    return kv_size(
        shape,
        traits.kv,
        traits.itemsize,
        total_tokens=prompt_tokens + past_tokens,
        decode_tokens=traits.decode_tokens,
        chunk_tokens=choice.chunk_tokens,
        segments=-(-prompt_tokens // choice.segment_tokens),
        live=live_layers([layer.name for layer in index.layers], shape.layers),
        window=traits.kv_window,
    )


def _decode_kv(memory: MemoryPlan, kv: KvSize, least_cache: int) -> tuple[int, bool]:
    """Bytes of keys and values that decode holds, and whether it reads them layer by layer."""
    if kv.stored <= memory.kv:
        return memory.kv, False
    least = memory.resident + memory.scratch + least_cache + kv.stored + kv.layer
    if least <= memory.budget:
        return kv.stored + kv.layer, False
    return LAYERED_COPIES * kv.layer, True


def _finish(
    index: ExpertIndex,
    shape: ModelShape,
    traits: Traits,
    choice: _Choice,
    memory: MemoryPlan,
    kv: KvSize,
    prompt_tokens: int,
    asked: int,
) -> PrefillPlan:
    """Spend what is left on more slots (two layers, or enough), then on the decode cache."""
    slot_nbytes = slot_capacity(index, choice.group_size, traits.align)
    experts = max(layer.num_experts for layer in index.layers)
    two_layers = 2 * -(-experts // choice.group_size)
    spare = memory.budget - memory.total
    deep = max(DEEP_SLOTS, STAGING_NBYTES // slot_nbytes)
    slots = min(two_layers, deep, choice.slots + int(spare * STAGING_SHARE) // slot_nbytes)
    spare -= (slots - choice.slots) * slot_nbytes
    kv_decode, layered = _decode_kv(memory, kv, memory.expert_cache)
    # What decode will hold must be free when the prompt is over.
    left = max(memory.expert_cache, memory.budget - memory.resident - memory.scratch - kv_decode)
    cache = min(memory.expert_cache + spare, left, _whole_cache(index, traits))
    segments = cut_segments(prompt_tokens, choice.segment_tokens, choice.chunk_tokens)
    return PrefillPlan(
        model=shape.model_type,
        prompt_tokens=prompt_tokens,
        mode=_mode(index, shape, traits, prompt_tokens),
        chunk_tokens=choice.chunk_tokens,
        segments=segments,
        layers=tuple(
            LayerReads(
                layer.index,
                layer.name,
                cut_groups(layer.num_experts, choice.group_size),
                layer.nbytes,
            )
            for layer in index.layers
        ),
        group_size=choice.group_size,
        group_source=choice.group.source,
        slots=slots,
        slot_nbytes=slot_nbytes,
        memory=replace(memory, staging=slots * slot_nbytes, expert_cache=cache),
        notes=_notes(choice, asked, len(segments), layered),
        kv_evict=traits.kv.kv_evict,
        kv_dir=None if traits.kv.kv_dir is None else str(traits.kv.kv_dir),
        kv_stored=kv.stored,
        kv_decode=kv_decode,
        kv_layered=layered,
    )


def _whole_cache(index: ExpertIndex, traits: Traits) -> int:
    records = sum(layer.num_experts for layer in index.layers)
    return records * slot_capacity(index, 1, traits.align) + traits.cache_overhead


def _mode(index: ExpertIndex, shape: ModelShape, traits: Traits, tokens: int) -> str:
    few = tokens <= traits.union_tokens
    return "union" if few or _expected_used(index, shape, tokens) < UNION_BELOW else "stream"


def _expected_used(index: ExpertIndex, shape: ModelShape, tokens: int) -> float:
    """Expected share of experts used by `tokens` tokens under uniform routing."""
    experts = index.layers[0].num_experts
    return 1.0 - (1.0 - shape.top_k / experts) ** tokens


def _notes(choice: _Choice, asked: int, segments: int, layered: bool) -> tuple[str, ...]:
    notes = []
    if choice.chunk_tokens < asked:
        notes.append(
            f"chunks of {choice.chunk_tokens} instead of {asked} tokens, to fit the budget"
        )
    if segments > 1:
        notes.append(
            f"the held state does not fit: the experts are read {segments} times, once a segment"
        )
    if layered:
        notes.append(
            "the evicted keys and values do not fit at once: decode reads them layer by layer, "
            "anew for every token"
        )
    return tuple(notes)
