"""load -> prefill -> decode: the whole runtime in one screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationResponse
from mlx_lm.sample_utils import greedy_sampler

from mlx_stream import prompt_caches
from mlx_stream.adapting import AUTO, Adapter
from mlx_stream.config import StreamConfig, format_bytes
from mlx_stream.conversation import Conversation
from mlx_stream.decode.loop import LogitsProcessor, Sampler
from mlx_stream.decode.metrics import DecodeMetrics
from mlx_stream.engine import Engine, PrefillResult, Progress
from mlx_stream.errors import MlxStreamError
from mlx_stream.hub import resolve_model
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.kv.prompt_files import PromptFile
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.prompts import Prompt, encode_prompt
from mlx_stream.responses import respond
from mlx_stream.resume.options import KeepOptions
from mlx_stream.telemetry import Receipt
from mlx_stream.timeline import Timeline

__all__ = ["PrefillResult", "Runtime", "load"]


class Runtime:
    """One loaded checkpoint; made by :func:`load`, released by :meth:`close` or a with-block.

    Not for use from two threads at once.
    """

    def __init__(self, path: Path, config: StreamConfig) -> None:
        # What benchmarks and tests look into; not part of the stable interface.
        self.engine = Engine(path, config)

    @property
    def tokenizer(self) -> Any | None:
        """mlx-lm's TokenizerWrapper; None when the folder has no tokenizer files."""
        return self.engine.tokenizer

    @property
    def model(self) -> Any:
        """The mlx-lm model, its switch layers streamed; callable with an mlx-lm prompt cache."""
        return self.engine.model

    @property
    def memory_budget(self) -> int:
        """The budget in force, in bytes."""
        return self.engine.budget.total

    @property
    def budget_reason(self) -> str:
        """Where the budget came from."""
        return self.engine.budget_reason

    @property
    def last_receipt(self) -> Receipt | None:
        """The receipt of the last prefill."""
        return self.engine.last_receipt

    def record(self, timeline: Timeline | None) -> None:
        """Note reads and compute phases in a timeline from now on; None stops."""
        self.engine.record(timeline)

    def keep(self, options: KeepOptions | None) -> None:
        """Checkpoint the prefill of prompts from now on, and resume it; None stops.

        What :meth:`prefill` then raises besides: ResumeError (foreign, stale or damaged
        checkpoint, no room), CapabilityError (the model cannot be resumed).
        """
        self.engine.runner.keep = options

    @property
    def request_metrics(self) -> DecodeMetrics:
        """What the last request's tokens cost, step by step."""
        return self.engine.request_metrics

    def plan(self, prompt_tokens: int, *, kv: KvOptions = PLAIN) -> PrefillPlan:
        """The plan that a prompt of this length would follow; raises BudgetError as prefill."""
        return self.engine.plan(prompt_tokens, kv=kv)

    def encode(self, prompt: Prompt, **template: Any) -> list[int]:
        """Token ids of text, chat messages or token ids."""
        return encode_prompt(self.tokenizer, prompt, **template)

    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray | mx.array,
        cache: list[Any] | None = None,
        *,
        kv: KvOptions = PLAIN,
        adapter: Adapter = AUTO,
        progress: Progress | None = None,
    ) -> PrefillResult:
        """Run a prompt through the model, reading each expert once; see :meth:`Engine.prefill`."""
        return self.engine.prefill(tokens, cache, kv=kv, adapter=adapter, progress=progress)

    def stream_generate(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        *,
        sampler: Sampler | None = None,
        logits_processors: Sequence[LogitsProcessor] = (),
        prompt_cache: list[Any] | None = None,
        stop_tokens: Sequence[int] = (),
        kv: KvOptions = PLAIN,
        adapter: Adapter = AUTO,
        progress: Progress | None = None,
        on_prefill: Callable[[PrefillResult], object] | None = None,
        **kv_options: Any,
    ) -> Generator[GenerationResponse, None, None]:
        """Prefill the prompt, then yield mlx-lm's GenerationResponse for every token.

        Args:
            max_tokens: at least 1; -1 for no limit.
            sampler: ``logprobs [1, V] -> token [1]``, as mlx-lm's ``make_sampler`` makes; None is
                greedy.
            prompt_cache: an mlx-lm prompt cache that already holds what came before the prompt.
            stop_tokens: end-of-sequence ids besides the tokenizer's.
            adapter: file or folder of a low-rank adapter; ``"auto"`` is that of :func:`load`,
                ``"off"`` or None the base model. A prompt cache is of one adapter.
            kv: how keys and values are kept.
            kv_options: the same by name: max_kv_size, kv_bits, kv_group_size, quantized_kv_start
                as in mlx-lm, kv_evict, kv_dir.
            on_prefill: called once the prompt is in the cache, before the first token.

        Raises:
            BudgetError, KvCacheError: the prompt cannot run like this; nothing was read.
            AdapterError: the adapter does not fit this model.
        """
        if not isinstance(max_tokens, int) or (max_tokens < 1 and max_tokens != -1):
            raise MlxStreamError(
                "bad max_tokens", expected="at least 1, or -1 for no limit", actual=max_tokens
            )
        kv = KvOptions.of(kv, kv_options)
        ids = self.encode(prompt)
        started = time.perf_counter()
        result = self.prefill(ids, prompt_cache, kv=kv, adapter=adapter, progress=progress)
        if on_prefill is not None:
            on_prefill(result)
        prompt_tps = len(ids) / (time.perf_counter() - started)
        decode = self.engine.decode_speculative if self.engine.drafts else self.engine.decode
        tokens = decode(
            result, ids, sampler=sampler or greedy_sampler, processors=logits_processors
        )
        rates = (len(ids), prompt_tps, max_tokens)
        yield from respond(self.engine, tokens, *rates, frozenset(stop_tokens))

    def generate(self, prompt: Prompt, **options: Any) -> str:
        """The whole answer as text; options as :meth:`stream_generate`."""
        return "".join(response.text for response in self.stream_generate(prompt, **options))

    def chat(
        self,
        system: str | None = None,
        prompt_cache_file: Path | str | PromptFile | None = None,
        *,
        kv: KvOptions = PLAIN,
        adapter: Adapter = AUTO,
        template: dict[str, Any] | None = None,
        **kv_options: Any,
    ) -> Conversation:
        """A conversation that keeps its prompt cache between turns.

        Args:
            system: the system message, or what comes first where there is no chat template.
            prompt_cache_file: a file of :meth:`Conversation.save` to go on from, or one loaded.
            kv, kv_options, adapter: as for :meth:`stream_generate`.
            template: arguments of the chat template.

        Raises:
            PromptFileError: the file is damaged, of another model, or without its tokens.
            KvCacheError: the model cannot follow `kv`.
        """
        options = {"kv": KvOptions.of(kv, kv_options), "adapter": adapter, "template": template}
        return Conversation(self, system, prompt_cache_file, **options)

    def save_prompt_cache(self, path: Path | str, cache: list[Any], tokens: Sequence[int]) -> Path:
        """Write a prompt cache with the `tokens` it holds; mlx-lm can load it.

        Raises:
            PromptFileError: it cannot be written; nothing is left behind.
        """
        return prompt_caches.save(self.engine, path, cache, tokens)

    def load_prompt_cache(self, path: Path | str, adapter: Adapter = AUTO) -> PromptFile:
        """A prompt cache from a file of ours or of mlx-lm, checked against this model.

        Raises:
            PromptFileError: damaged, or of another model or adapter.
        """
        return prompt_caches.load(self.engine, path, adapter)

    def close(self) -> None:
        """Release files, threads and memory; safe to call twice."""
        self.engine.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"Runtime({engine.path.name}: {len(engine.index.layers)} expert layers, "
            f"{format_bytes(engine.index.nbytes)} on disk, {engine.backend.name}, "
            f"budget {format_bytes(self.memory_budget)} ({self.budget_reason}))"
        )


def load(
    path_or_repo: str | Path | None = None,
    *,
    memory_budget: int | str | None = None,
    chunk_tokens: int = 2048,
    group_size: int | None = None,
    backend: str = "auto",
    io: str = "direct",
    throttle: str | None = None,
    verify: str = "first",
    trust_remote_code: bool = False,
    decode_path: str = "auto",
    cache_policy: str = "auto",
    seed_policy: str = "auto",
    predict: str = "auto",
    hot_list: str | Path | None = None,
    prerouter: str = "auto",
    prerouter_spec: str | Path | None = None,
    adapter: str | Path = AUTO,
    adapter_scale: float | None = None,
    draft_model: str | Path | None = None,
    num_draft_tokens: int = 3,
) -> Runtime:
    """Open a checkpoint for streaming.

    Args:
        path_or_repo: folder or hub repository id; None is the embedded demo model.
        memory_budget: bytes, or a string such as ``"4GB"`` (1e9) or ``"4GiB"`` (2**30); None takes
            a safe share of what is free, and ``Runtime.budget_reason`` says which.
        chunk_tokens, group_size: most tokens of an attention chunk, experts of a read group.
        backend: ``"auto"``, ``"metal"``, ``"cuda"`` or ``"cpu"``.
        io: ``"direct"`` bypasses the page cache; ``"buffered"`` goes through it.
        throttle: makes the reads slower, for benchmarks: ``"2GB/s"`` or ``"0.5GB/s:100us"``.
        verify: compare packed experts' checksums at ``"first"`` reads, ``"always"`` or ``"off"``.
        decode_path, cache_policy, seed_policy, predict, hot_list, prerouter, prerouter_spec: how
            tokens are decoded; see :class:`mlx_stream.decode.options.DecodeOptions`.
        adapter: low-rank adapter of requests that name none: a safetensors file in the published
            form or mlx-lm's folder; ``"auto"`` is the Prerouter's own, ``"off"`` none.
        adapter_scale: alpha / r of a file that nothing beside it tells.
        draft_model: a small model of the same vocabulary for speculative decoding, held in memory;
            ``prerouter="auto"`` then means off.
        num_draft_tokens: tokens that it proposes a step.

    Raises:
        CheckpointError: the checkpoint is damaged, dense, or of an unknown layout.
        BudgetError: the resident weights alone exceed the budget.
    """
    if draft_model is not None and prerouter == "auto":
        prerouter = "off"  # heads say where one token goes, a draft is several
    config = StreamConfig.build(
        memory_budget=memory_budget,
        chunk_tokens=chunk_tokens,
        group_size=group_size,
        backend=backend,
        io=io,
        throttle=throttle,
        verify=verify,
        trust_remote_code=trust_remote_code,
        decode_path=decode_path,
        cache_policy=cache_policy,
        seed_policy=seed_policy,
        predict=predict,
        hot_list=None if hot_list is None else str(hot_list),
        prerouter=prerouter,
        prerouter_spec=None if prerouter_spec is None else str(prerouter_spec),
        adapter=str(adapter),
        adapter_scale=adapter_scale,
    )
    runtime = Runtime(resolve_model(path_or_repo, trust_remote_code=trust_remote_code), config)
    if draft_model is not None:
        try:
            draft = resolve_model(draft_model, trust_remote_code=trust_remote_code)
            runtime.engine.load_draft(draft, num_draft_tokens)
        except BaseException:
            runtime.close()
            raise
    return runtime
