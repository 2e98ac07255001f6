"""Going on from a prompt cache file with one more prompt, as mlx_lm.generate does.

A file that holds a conversation gets one more turn. Any other holds the beginning of a user's
message, and the prompt is its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.generate import GenerationResponse

from mlx_stream.errors import MlxStreamError, PromptFileError
from mlx_stream.kv.options import PLAIN, KvOptions

if TYPE_CHECKING:
    from mlx_stream.runtime import Runtime

_MARK = "<query>"


def continue_saved(
    runtime: Runtime,
    path: Path,
    text: str | list[int],
    max_tokens: int,
    *,
    system: str | None = None,
    template: dict[str, Any] | None = None,
    kv: KvOptions = PLAIN,
    **sampling: Any,
) -> Iterator[GenerationResponse]:
    """Answer to `text` after what the file holds.

    Args:
        text: the prompt, or token ids to put behind the cache as they are.
        template: arguments of the chat template; None uses the text as it is.
        sampling: as for :meth:`Runtime.stream_generate`.

    Raises:
        PromptFileError: the file is damaged, of another model, or empty.
        BudgetError, KvCacheError: the prompt cannot run like this.
    """
    file = runtime.load_prompt_cache(path)
    templated = template is not None and isinstance(text, str)
    if file.messages and templated:
        talk = runtime.chat(system, file, kv=kv, template=template)
        return talk.send(text, max_tokens, **sampling)
    if file.tokens == []:
        raise PromptFileError(
            "this prompt cache file holds no tokens",
            file=path,
            expected="at least one token",
            actual="none",
            remedy="make it with mlx_stream cache-prompt",
        )
    ids = prompt_end(runtime.tokenizer, text, template if templated else None)
    return runtime.stream_generate(ids, max_tokens, prompt_cache=file.cache, kv=kv, **sampling)


def prompt_beginning(runtime: Runtime, text: str | list[int], system: str | None) -> list[int]:
    """Token ids of a user's message that is to be continued: its end is left open."""
    tokenizer = runtime.tokenizer
    if not isinstance(text, str) or tokenizer is None or not tokenizer.has_chat_template:
        return runtime.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    return runtime.encode(messages, add_generation_prompt=False, continue_final_message=True)


def prompt_end(
    tokenizer: Any | None, text: str | list[int], template: dict[str, Any] | None
) -> list[int]:
    """Token ids of the rest of a user's message, and of what follows it in the template."""
    if not isinstance(text, str) or tokenizer is None:
        return list(text)  # type: ignore[arg-type]
    if template is not None:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}],
            tokenize=False,
            **({"add_generation_prompt": True} | template),
        )
        if _MARK not in rendered:
            raise MlxStreamError(
                "the chat template does not show the user's message",
                expected="the message in the rendered prompt",
                actual=rendered[:80],
                remedy="use --ignore-chat-template",
            )
        text += rendered[rendered.index(_MARK) + len(_MARK) :]
    return list(tokenizer.encode(text, add_special_tokens=False))
