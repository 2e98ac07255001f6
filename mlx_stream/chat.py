"""``python -m mlx_stream.chat``: a conversation at the terminal, or one line of input a turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_stream.decode_flags import DecodeFlags, decode_options
from mlx_stream.errors import MlxStreamError
from mlx_stream.generate import parse_token_ids
from mlx_stream.kv_flags import (
    KvFlags,
    LoadFlags,
    kv_of,
    kv_options,
    load_of,
    load_options,
    prompt_cache_option,
)
from mlx_stream.sampling import SEED, SamplingFlags, make_sampler_of, sampling_options
from mlx_stream.terminal import PrefillBar, run_command

if TYPE_CHECKING:
    from mlx_stream.conversation import Conversation
    from mlx_stream.runtime import Runtime

HELP = "/reset forgets everything, /save FILE keeps the conversation, /quit ends (Ctrl-D too)."

EXAMPLES = f"""
\b
Examples:
  mlx_stream chat
  python -m mlx_stream.chat --model mlx-community/Qwen3-30B-A3B-4bit --memory-budget 8GB
  mlx_stream chat --model ./checkpoint --prompt-cache-file yesterday.safetensors
  printf 'Hello\\nAnd now?\\n' | mlx_stream chat --model ./checkpoint

{HELP} Ctrl-C stops an answer; what it said so far stays part of the conversation.
"""


@dataclass(frozen=True, kw_only=True)
class ChatOptions(LoadFlags, KvFlags, DecodeFlags, SamplingFlags):
    """The flags of one run, as given."""

    system_prompt: str | None
    prompt_cache_file: Path | None
    max_tokens: int
    seed: int | None


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@load_options
@click.option("--system-prompt", help="System message for the chat template.")
@prompt_cache_option
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(min=-1),
    default=256,
    show_default=True,
    help="Of one answer; -1: no limit.",
)
@sampling_options
@click.option("--seed", type=SEED, help="Seed of the sampler.")
@kv_options
@decode_options
def chat(**flags: Any) -> None:
    """Talk with a model; every turn prefills only what is new."""
    options = ChatOptions(**flags)
    if options.max_tokens == 0:
        raise click.UsageError("--max-tokens must be at least 1, or -1 for no limit.")
    kv = kv_of(options)
    import mlx.core as mx

    if options.seed is not None:
        mx.random.seed(options.seed)
    with load_of(options) as runtime:
        talk = runtime.chat(options.system_prompt, options.prompt_cache_file, kv=kv)
        if sys.stdin.isatty():
            click.echo(f"{runtime!r}\n{HELP}", err=True)
        for line in _lines():
            if not _turn(runtime, talk, options, line):
                break


def _lines() -> Iterator[str]:
    """What the user says, without the newline; empty lines are skipped."""
    while True:
        if sys.stdin.isatty():
            click.echo(">> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def _turn(runtime: Runtime, talk: Conversation, options: ChatOptions, line: str) -> bool:
    """One line of input; False ends the program. At a terminal errors end only the turn."""
    try:
        if line.startswith("/"):
            return _command(talk, line)
        _answer(runtime, talk, options, line)
    except MlxStreamError as error:
        if not sys.stdin.isatty():
            raise
        click.echo(f"error: {error}", err=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        click.echo("\n(stopped)", err=True)
    return True


def _command(talk: Conversation, line: str) -> bool:
    name, _, argument = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/help":
        click.echo(HELP, err=True)
    elif name == "/reset":
        talk.reset()
    elif name == "/save" and argument.strip():
        path = talk.save(Path(argument.strip()))
        click.echo(f"saved {path}: {len(talk.tokens)} tokens", err=True)
    else:
        raise MlxStreamError("there is no such command", actual=line, expected=HELP)
    return True


def _answer(runtime: Runtime, talk: Conversation, options: ChatOptions, line: str) -> None:
    words = runtime.tokenizer is not None
    with PrefillBar() as bar:
        for response in talk.send(
            line if words else parse_token_ids(line),
            options.max_tokens,
            sampler=make_sampler_of(runtime.tokenizer, options),
            progress=bar.update,
        ):
            click.echo(response.text if words else f"{response.token} ", nl=False)
            sys.stdout.flush()
    click.echo()
    if options.stats:
        click.echo(runtime.request_metrics.table(), err=True)


def main() -> None:
    """Entry point of ``python -m mlx_stream.chat``."""
    run_command(chat, "python -m mlx_stream.chat")


if __name__ == "__main__":
    main()
