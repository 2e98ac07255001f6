"""Speculative decoding: a small draft model proposes, the streamed model verifies in one step.

The verified tokens' experts are read once, as the union over all of them. Greedy output is that of
plain decoding; with a sampler a proposal is accepted when the sampler draws it, as in mlx-lm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache, trim_prompt_cache

from mlx_stream.decode.loop import LogitsProcessor, Sampler, Step, draw
from mlx_stream.errors import CapabilityError

DRAFT_CHUNK = 512


class Drawn(NamedTuple):
    """A token of a round; `logprobs` is ``[V]``."""

    token: int
    logprobs: mx.array
    from_draft: bool


class Drafter:
    """The draft model and its prompt cache, kept in step with the streamed model's.

    Args:
        model: an mlx-lm model that is all in memory, over the same vocabulary.
        tokens: how many it proposes a round.

    Raises:
        CapabilityError: its cache cannot be trimmed.
    """

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self._model = model
        self.tokens = tokens
        self._cache: list[Any] = make_prompt_cache(model)
        check_trimmable("draft model", self._cache)
        self._behind: list[int] = []  # accepted tokens that it has not processed

    def prefill(self, prompt: Sequence[int]) -> None:
        """Process the prompt; the next proposal follows the token after it."""
        self._cache, self._behind = make_prompt_cache(self._model), []
        for start in range(0, len(prompt), DRAFT_CHUNK):
            chunk = mx.array([list(prompt[start : start + DRAFT_CHUNK])], dtype=mx.uint32)
            self._model(chunk, cache=self._cache)
            mx.eval([c.state for c in self._cache])

    def propose(self, token: int, count: int) -> list[int]:
        """Greedily continue after `token`."""
        step = mx.array([[*self._behind, token]], dtype=mx.uint32)
        proposed = []
        for _ in range(count):
            step = mx.argmax(self._model(step, cache=self._cache)[:, -1], axis=-1)[:, None]
            proposed.append(step)
        self._behind = []
        return [int(t) for t in mx.concatenate(proposed, axis=1)[0].tolist()]

    def settle(self, proposed: Sequence[int], accepted: int) -> None:
        """Forget what was not accepted."""
        if accepted == len(proposed):
            self._behind = [proposed[-1]]
        else:
            trim_prompt_cache(self._cache, len(proposed) - accepted - 1)


class Rounds:
    """Draft, verify, accept: one round a call. Compute thread only.

    Args:
        step: the streamed model's step.
        cache: its prompt cache, which must be trimmable.

    Raises:
        CapabilityError: the cache cannot be trimmed (recurrent or rotating state).
    """

    def __init__(
        self,
        step: Step,
        cache: list[Any],
        drafter: Drafter,
        *,
        prompt: Sequence[int],
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        check_trimmable("model", cache)
        self._step, self.cache, self._drafter = step, cache, drafter
        self._sampler, self._processors = sampler, processors
        self._history = mx.array(list(prompt), dtype=mx.uint32) if processors else None
        self.drafted = self.accepted = 0

    def first(self, logits: mx.array) -> Drawn:
        """The token after the prompt, from its logits ``[V]``."""
        return self._draw(logits, from_draft=False)

    def round(self, last: int) -> list[Drawn]:
        """At least one token after `last`; the prompt cache then holds all of them but the last."""
        proposed = self._drafter.propose(last, self._drafter.tokens)
        tokens = mx.array([[last, *proposed]], dtype=mx.uint32)
        logits = self._step(tokens, self.cache)
        self._remember(last)
        drawn: list[Drawn] = []
        for row, guess in zip(logits, [*proposed, None], strict=True):
            drawn.append(self._draw(row, from_draft=True))
            if drawn[-1].token != guess:
                break
            self._remember(guess)
        drawn[-1] = Drawn(drawn[-1].token, drawn[-1].logprobs, from_draft=False)
        accepted = len(drawn) - 1
        trim_prompt_cache(self.cache, len(proposed) - accepted)
        self._drafter.settle(proposed, accepted)
        self.drafted += len(proposed)
        self.accepted += accepted
        return drawn

    def take_back(self, count: int) -> None:
        """The caller stops before the last `count` tokens of a round: the cache forgets them."""
        trim_prompt_cache(self.cache, count)

    def _draw(self, logits: mx.array, *, from_draft: bool) -> Drawn:
        row = logits[None]
        for processor in self._processors:
            row = processor(self._history, row)
        logprobs = row - mx.logsumexp(row, axis=-1, keepdims=True)
        return Drawn(draw(self._sampler, logprobs), logprobs[0], from_draft)

    def _remember(self, token: int) -> None:
        if self._history is not None:
            self._history = mx.concatenate([self._history, mx.array([token], dtype=mx.uint32)])


def check_trimmable(whose: str, cache: list[Any]) -> None:
    """Refuse prompt caches that cannot always forget proposals.

    A rotating cache can be trimmed only until it wraps, which may be in the middle of an answer.

    Raises:
        CapabilityError: it names the caches that cannot.
    """
    kinds = sorted({type(c).__name__ for c in cache if not _always_trimmable(c)})
    if kinds:
        raise CapabilityError(
            f"speculative decoding needs a prompt cache of the {whose} that can be trimmed",
            expected="plain KV caches",
            actual=", ".join(kinds),
            remedy="leave out --draft-model (and --max-kv-size)",
        )


def _always_trimmable(cache: Any) -> bool:
    if isinstance(cache, CacheList):
        return all(_always_trimmable(c) for c in cache.caches)
    return cache is not None and cache.is_trimmable() and not hasattr(cache, "max_size")
