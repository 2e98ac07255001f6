"""A conversation on one prompt cache: each turn prefills only what is new.

With a chat template every turn templates the whole history, and the cache keeps what it shares
with that from the front. Where template and generated tokens disagree (a template may drop an
answer's reasoning) the cache goes back: by trimming where that is exact, else to the end of the
last prompt, else to nothing. Without a template the turns' tokens simply follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from mlx_lm.generate import GenerationResponse

from mlx_stream import prompt_caches
from mlx_stream.adapting import AUTO, Adapter
from mlx_stream.engine import Engine, PrefillResult
from mlx_stream.errors import KvCacheError, PromptFileError
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.kv.prompt_files import PromptFile
from mlx_stream.kv.rewind import CachePoint, can_rewind, common_prefix, rewind
from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.prompts import empty_prompt

Message = dict[str, str]


class Streams(Protocol):
    """What a conversation needs of a Runtime."""

    engine: Engine

    @property
    def tokenizer(self) -> Any | None:
        """mlx-lm's TokenizerWrapper, or None."""

    def encode(self, prompt: Any, **template: Any) -> list[int]:
        """Token ids of text, chat messages or token ids."""

    def stream_generate(
        self, prompt: Any, max_tokens: int, **options: Any
    ) -> Generator[GenerationResponse, None, None]:
        """Prefill, then a response for every token."""


class Conversation:
    """Made by :meth:`Runtime.chat`; lives as long as the runtime. One turn at a time.

    A turn that fails or is interrupted before its first token leaves no trace. Later, the answer
    so far is part of the conversation, and of the cache.
    """

    def __init__(
        self,
        runtime: Streams,
        system: str | None = None,
        prompt_cache_file: Path | str | PromptFile | None = None,
        *,
        kv: KvOptions = PLAIN,
        adapter: Adapter = AUTO,
        template: dict[str, Any] | None = None,
    ) -> None:
        self._runtime = runtime
        self._kv = kv
        self._adapter = adapter
        self._template = dict(template or {})
        self._templated = bool(getattr(runtime.tokenizer, "has_chat_template", False))
        self._system = system
        self._turn: Generator[GenerationResponse, None, None] | None = None
        self.reset()
        if prompt_cache_file is not None:
            self._open(prompt_cache_file)

    def _open(self, path: Path | str | PromptFile) -> None:
        file = path
        if not isinstance(file, PromptFile):
            file = prompt_caches.load(self._runtime.engine, file, self._adapter)
        if file.tokens is None:
            raise PromptFileError(
                "this prompt cache file does not say which tokens it holds",
                file=None if file is path else path,
                expected="a file that a conversation or mlx_stream cache-prompt has saved",
                actual="one of mlx-lm",
                remedy="continue it with mlx_stream generate --prompt-cache-file",
            )
        self._cache = self._runtime.engine.kv.prepare(file.cache, self._kv)
        self._held = list(file.tokens)
        self._said = list(file.tokens)
        if file.messages is not None:
            own = [] if self._system is None else self._messages
            kept = [m for m in file.messages if not own or m["role"] != "system"]
            self._messages = own + kept

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids in the cache, in order."""
        return tuple(self._held)

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said, system message first; empty without a chat template."""
        return tuple(self._messages)

    @property
    def cache(self) -> list[Any]:
        """The mlx-lm prompt cache; changed by every turn."""
        return self._cache

    def __repr__(self) -> str:
        return f"Conversation({len(self.tokens)} tokens in the cache)"

    def send(
        self, message: str | Sequence[int], max_tokens: int = 256, **sampling: Any
    ) -> Iterator[GenerationResponse]:
        """Say something, and iterate over the answer; nothing happens before the first step.

        Leaving the iteration early ends the turn with what was generated so far.

        Args:
            message: text, or token ids where the model has no tokenizer.
            max_tokens: at least 1; -1 for no limit.
            sampling: as for :meth:`Runtime.stream_generate`: sampler, logits_processors,
                stop_tokens, progress.

        Raises:
            BudgetError: the turn does not fit; the conversation is as it was.
            ReadError, FileChangedError: the checkpoint cannot be read; the same.
        """
        self._end_turn()
        self._turn = self._answer(message, max_tokens, sampling)
        return self._turn

    def ask(self, message: str | Sequence[int], max_tokens: int = 256, **sampling: Any) -> str:
        """The whole answer as text; as :meth:`send`."""
        return "".join(r.text for r in self.send(message, max_tokens, **sampling))

    def save(self, path: Path | str) -> Path:
        """Write cache, tokens and messages to a file; returns its path.

        Raises:
            PromptFileError: it cannot be written; a file that was there is untouched.
        """
        self._end_turn()
        messages = self._messages if self._templated else None
        return prompt_caches.save(self._runtime.engine, path, self._cache, self._held, messages)

    def trim(self, tokens: int) -> int:
        """Drop the last tokens from the cache, and say how many remain.

        The messages stay: the next turn prefills again what is missing. Without a chat template
        the dropped tokens are forgotten.

        Raises:
            KvCacheError: the cache cannot go back exactly that far.
        """
        self._end_turn()
        keep = max(0, len(self._held) - tokens)
        if tokens < 0 or not self._go_back(keep, exactly=True):
            raise KvCacheError(
                "the prompt cache cannot go back by this many tokens",
                expected="0 tokens or more, and no windows or recurrent states that moved on",
                actual=f"{tokens} of {len(self._held)} tokens",
                remedy="use reset()",
            )
        self._said = list(self._held)
        return len(self._held)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._end_turn()
        self._messages: list[Message] = []
        if self._system is not None and self._templated:
            self._messages.append({"role": "system", "content": self._system})
        self._said: list[int] = []  # all tokens so far, where there is no chat template
        self._clear()

    def _clear(self) -> None:
        self._cache = self._runtime.engine.kv.prepare(None, self._kv)
        self._held: list[int] = []
        self._point: CachePoint | None = None

    def _end_turn(self) -> None:
        """A turn nobody iterates any more must not write into the cache later."""
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def _answer(
        self, message: str | Sequence[int], max_tokens: int, sampling: dict[str, Any]
    ) -> Generator[GenerationResponse, None, None]:
        ids, history = self._prompt(message)
        if not ids:
            raise empty_prompt()
        self._go_back(min(common_prefix(ids, self._held), len(ids) - 1))
        answer: list[int] = []
        text: list[str] = []
        responses = self._runtime.stream_generate(
            ids[len(self._held) :],
            max_tokens,
            prompt_cache=self._cache,
            kv=self._kv,
            adapter=self._adapter,
            on_prefill=self._note_prompt(ids),
            **sampling,
        )
        try:
            for response in responses:
                answer.append(response.token)
                text.append(response.text)
                yield response
        finally:
            responses.close()
            if answer:
                self._note_answer(ids, answer, "".join(text), history)

    def _prompt(self, message: str | Sequence[int]) -> tuple[list[int], list[Message]]:
        """All token ids up to where the answer begins, and the messages they stand for."""
        if self._templated and isinstance(message, str):
            history = [*self._messages, {"role": "user", "content": message}]
            return self._runtime.encode(history, **self._template), history
        said = list(self._said)
        if not said and self._system is not None:
            said = self._runtime.encode(self._system)
        return said + self._continuation(message, first=not said), self._messages

    def _continuation(self, message: str | Sequence[int], *, first: bool) -> list[int]:
        tokenizer = self._runtime.tokenizer
        if first or not isinstance(message, str) or tokenizer is None:
            return self._runtime.encode(message)
        return list(tokenizer.encode(message, add_special_tokens=False))

    def _go_back(self, keep: int, *, exactly: bool = False) -> bool:
        """Shorten the cache to its first `keep` tokens, or fewer; says whether it did."""
        surplus = len(self._held) - keep
        if can_rewind(self._cache, surplus):
            rewind(self._cache, surplus)
        elif self._point is not None and self._reaches(self._point.tokens, keep, exactly):
            self._point.restore()
            keep = self._point.tokens
        elif exactly and keep:
            return False
        else:
            self._clear()
            keep = 0
        del self._held[keep:]
        if self._point is not None and self._point.tokens > keep:
            self._point = None
        return True

    @staticmethod
    def _reaches(point: int, keep: int, exactly: bool) -> bool:
        return point == keep if exactly else point <= keep

    def _note_prompt(self, ids: list[int]) -> Callable[[PrefillResult], None]:
        def note(result: PrefillResult) -> None:
            self._held = list(ids)
            # A limited cache has no room planned for a second copy of its window.
            if self._kv.max_kv_size is None:
                self._point = CachePoint(self._cache, len(ids))

        return note

    def _note_answer(
        self, ids: list[int], answer: list[int], text: str, history: list[Message]
    ) -> None:
        """The last token was chosen, but is not in the cache before another one is asked for."""
        everything = ids + answer
        held = cache_offset(self._cache) or len(everything) - 1
        self._held = everything[:held]
        self._said = everything
        if self._templated and history is not self._messages:
            self._messages = [*history, {"role": "assistant", "content": text}]
