"""The decode loop: one token at a time from a prefilled cache, as mlx-lm's generate_step yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlx_stream.errors import MlxStreamError

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
Step = Callable[[mx.array, list[Any]], mx.array]
"""``step(tokens [1, T], cache) -> evaluated logits [T, V]``."""


def draw(sampler: Sampler, logprobs: mx.array) -> int:
    """The sampler's token for ``logprobs [1, V]``, all evaluated.

    Raises:
        MlxStreamError: it is not one token of the vocabulary, which would read outside memory.
    """
    sampled = sampler(logprobs)
    mx.eval(sampled, logprobs)
    token = int(sampled.item()) if sampled.size == 1 else -1
    if not 0 <= token < logprobs.shape[-1]:
        raise MlxStreamError(
            "the sampler did not draw a token of the vocabulary",
            expected=f"one of 0..{logprobs.shape[-1] - 1}",
            actual=sampled.tolist(),
            remedy="return an array of one token id from logprobs [1, V]",
        )
    return token


def decode_tokens(
    step: Step,
    cache: list[Any],
    logits: mx.array,
    prompt: Sequence[int],
    *,
    sampler: Sampler,
    processors: Sequence[LogitsProcessor] = (),
) -> Iterator[tuple[int, mx.array]]:
    """Yield ``(token, logprobs [V])`` without end; the caller stops.

    Unlike a pipelined loop it never starts a step before the previous token was asked for: a step
    costs expert reads, so a token past the end must not be computed.

    Args:
        logits: ``[V]`` of the last prompt position.
        prompt: token ids that processors see before the generated ones.
    """
    history = mx.array(list(prompt), dtype=mx.uint32) if processors else None
    while True:
        row = logits[None]
        for processor in processors:
            row = processor(history, row)
        logprobs = row - mx.logsumexp(row, axis=-1, keepdims=True)
        token = draw(sampler, logprobs)
        yield token, logprobs[0]
        tokens = mx.array([[token]], dtype=mx.uint32)
        if history is not None:
            history = mx.concatenate([history, tokens[0]])
        logits = step(tokens, cache)[-1]
