"""Tokens as mlx-lm's GenerationResponse: text, speed, and the reason why the last one ended it."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from mlx_lm.generate import GenerationResponse

from mlx_stream.engine import Engine
from mlx_stream.prompts import next_text


def respond(
    engine: Engine,
    tokens: Generator[Any, None, None],
    prompt_tokens: int,
    prompt_tps: float,
    max_tokens: int,
    stop: frozenset[int],
) -> Generator[GenerationResponse, None, None]:
    """Turn ``(token, logprobs[, from draft])`` into responses; the last has the reason.

    Args:
        tokens: closed when the caller stops.
        max_tokens: -1 for no limit.
        stop: end-of-sequence ids besides the tokenizer's.
    """
    tokenizer = engine.tokenizer
    detokenizer = tokenizer.detokenizer if tokenizer is not None else None
    ends = stop | frozenset(tokenizer.eos_token_ids if tokenizer is not None else ())
    started = time.perf_counter()
    try:
        for n, (token, logprobs, *draft) in enumerate(tokens, start=1):
            reason = "stop" if token in ends else "length" if n == max_tokens else None
            yield GenerationResponse(
                text=next_text(detokenizer, token, reason),
                token=token,
                logprobs=logprobs,
                from_draft=bool(draft and draft[0]),
                prompt_tokens=prompt_tokens,
                prompt_tps=prompt_tps,
                generation_tokens=n,
                generation_tps=n / max(time.perf_counter() - started, 1e-9),
                peak_memory=engine.peak_nbytes / 1e9,
                finish_reason=reason,
            )
            if reason is not None:
                return
    finally:
        tokens.close()
