"""Prompts: text, chat messages or token ids become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_stream.errors import MlxStreamError

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def encode_prompt(tokenizer: Any | None, prompt: Prompt, **template: Any) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: mlx-lm's TokenizerWrapper, or None when the folder has no tokenizer files.
        prompt: text (encoded as it is), chat messages (through the chat template), or token ids.
        template: passed to ``apply_chat_template``.

    Raises:
        MlxStreamError: text without a tokenizer, or messages without a chat template.
    """
    if isinstance(prompt, str):
        tokenizer = _need(tokenizer)
        check_text(prompt)
        bos = tokenizer.bos_token
        return list(
            tokenizer.encode(prompt, add_special_tokens=not bos or not prompt.startswith(bos))
        )
    if len(prompt) and isinstance(prompt[0], dict):
        return encode_messages(tokenizer, prompt, **template)  # type: ignore[arg-type]
    return _one_row(prompt).tolist()


def check_text(text: str) -> None:
    """Raises MlxStreamError for text that is no Unicode, such as undecodable input bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MlxStreamError(
            "the prompt is not valid Unicode text",
            expected="UTF-8",
            actual=f"{error.object[error.start : error.end]!r} at position {error.start}",
            remedy="check the encoding of the input",
        ) from error


def encode_messages(
    tokenizer: Any | None, messages: Sequence[Message], **template: Any
) -> list[int]:
    """Token ids of a conversation, ending where the assistant's answer begins."""
    tokenizer = _need(tokenizer)
    for message in messages:
        if isinstance(message.get("content"), str):
            check_text(message["content"])
    if not tokenizer.has_chat_template:
        raise MlxStreamError(
            "this tokenizer has no chat template",
            expected="a chat_template in tokenizer_config.json or chat_template.jinja",
            actual="none",
            remedy="pass the prompt as text (--ignore-chat-template)",
        )
    options = {"add_generation_prompt": True} | template
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _need(tokenizer: Any | None) -> Any:
    if tokenizer is None:
        raise MlxStreamError(
            "the model folder has no tokenizer, so text cannot be encoded",
            expected="tokenizer.json or tokenizer.model beside config.json",
            actual="no tokenizer files",
            remedy="add the tokenizer files, or pass token ids",
        )
    return tokenizer


def check_token_ids(tokens: Any, vocab: int) -> np.ndarray:
    """``[N]`` int64 token ids, checked against the vocabulary (0: size unknown).

    Raises:
        MlxStreamError: text, nothing, or an id that does not exist.
    """
    if isinstance(tokens, str):
        raise MlxStreamError(
            "prefill takes token ids", actual="text", remedy="use Runtime.encode(text) first"
        )
    ids = _one_row(tokens)
    if not ids.size:
        raise empty_prompt()
    wrong = np.flatnonzero((ids < 0) | ((ids >= vocab) if vocab else False))
    if wrong.size:
        raise MlxStreamError(
            "a token id is outside the vocabulary",
            expected=f"0..{vocab - 1}",
            actual=f"{ids[wrong[0]]} at position {wrong[0]}",
            remedy="use the checkpoint's own tokenizer",
        )
    return ids


def empty_prompt() -> MlxStreamError:
    """The error for a prompt without tokens."""
    return MlxStreamError(
        "the prompt is empty", expected="at least one token", remedy="pass a prompt"
    )


def _one_row(tokens: Any) -> np.ndarray:
    """``[N]`` int64 of one prompt given as ``[N]`` or ``[1, N]``; never a batch, never floats."""
    try:
        ids = np.array(tokens)
        whole = ids.size == 0 or np.issubdtype(ids.dtype, np.integer)
        if whole and (ids.ndim == 1 or (ids.ndim == 2 and len(ids) == 1)):
            return ids.reshape(-1).astype(np.int64)
        actual = f"{ids.dtype} of shape {list(ids.shape)}"
    except (TypeError, ValueError) as error:
        actual = str(error)
    raise MlxStreamError(
        "this is not one prompt of token ids",
        expected="integers, [tokens] or [1, tokens]",
        actual=actual,
        remedy="batches are not supported; encode text with Runtime.encode",
    )


def next_text(detokenizer: Any | None, token: int, reason: str | None) -> str:
    """What a token adds to the answer; the last one, with its `reason`, brings what was held back.

    Args:
        detokenizer: mlx-lm's; None gives no text.
    """
    if detokenizer is None:
        return ""
    if reason != "stop":
        detokenizer.add_token(token)
    if reason is not None:
        detokenizer.finalize()
    return detokenizer.last_segment
