"""``python -m mlx_stream.generate``: mlx_lm.generate's flags, and the streaming ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_stream.decode_flags import DecodeFlags, decode_options
from mlx_stream.errors import MlxStreamError
from mlx_stream.keep_flags import KeepFlags, evicting, keep_of, keep_options
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
from mlx_stream.timeline import Timeline

if TYPE_CHECKING:
    from mlx_stream.runtime import Runtime
    from mlx_stream.telemetry import Receipt

DEMO_PROMPT = "And it came to pass"
DEFAULT_PROMPT = "hello"

EXAMPLES = """
\b
Examples:
  python -m mlx_stream.generate --prompt "In the beginning"
  python -m mlx_stream.generate --model mlx-community/Qwen3-30B-A3B-4bit \\
      --memory-budget 8GB --prompt "Explain mixture of experts."
  python -m mlx_stream.generate --model ./checkpoint --prompt-file report.txt \\
      --system-prompt "Summarize." --max-tokens 300 --receipt receipt.json
  cat notes.md | python -m mlx_stream.generate --model ./checkpoint --prompt -

Without --model a small demo model that ships in the package writes prose in the manner of the
King James Bible and Jane Austen; --temp 0.7 --top-p 0.9 suits it better than greedy decoding.
"""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(LoadFlags, KvFlags, KeepFlags, DecodeFlags, SamplingFlags):
    """The flags of one run, as given."""

    prompt: str | None
    prompt_file: Path | None
    system_prompt: str | None
    prefill_response: str | None
    max_tokens: int
    seed: int | None
    ignore_chat_template: bool
    chat_template_config: str | None
    extra_eos_token: tuple[str, ...]
    verbose: bool
    receipt: Path | None
    trace: Path | None
    prompt_cache_file: Path | None


@click.command(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]})
@load_options
@click.option(
    "--prompt",
    "-p",
    help=f"The user's message; '-' reads standard input.  [default: {DEFAULT_PROMPT!r}, and a "
    f"beginning for the demo model]",
)
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the message from a file.",
)
@click.option("--system-prompt", help="System message for the chat template.")
@click.option("--prefill-response", help="Beginning of the answer, put into the chat template.")
@click.option(
    "--max-tokens",
    "-m",
    type=click.IntRange(min=-1),
    default=100,
    show_default=True,
    help="-1: no limit.",
)
@sampling_options
@click.option("--seed", type=SEED, help="Seed of the sampler.")
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--chat-template-config", help="JSON object of chat template arguments.")
@click.option("--extra-eos-token", multiple=True, help="More end tokens; may be repeated.")
@click.option(
    "--verbose",
    type=bool,
    default=True,
    show_default=True,
    help="Progress and a receipt line on standard error.",
)
@click.option(
    "--receipt",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what the prompt and its answer cost as JSON.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a timeline of reads and compute, for ui.perfetto.dev.",
)
@prompt_cache_option
@kv_options
@keep_options
@decode_options
def generate(**flags: Any) -> None:
    """Prefill a prompt by streaming the experts once, then generate text."""
    _generate(GenerateOptions(**flags))


def _generate(options: GenerateOptions) -> None:
    if options.max_tokens == 0:
        raise click.UsageError("--max-tokens must be at least 1, or -1 for no limit.")
    for target, flag in ((options.receipt, "--receipt"), (options.trace, "--trace")):
        _check_folder(target, flag)
    evicting(kv_of(options), options)  # before anything is loaded
    keep = keep_of(options)
    text = _read_prompt(options)
    import mlx.core as mx

    if options.seed is not None:
        mx.random.seed(options.seed)
    with load_of(options) as runtime:
        timeline = Timeline() if options.trace is not None else None
        runtime.record(timeline)
        runtime.keep(keep)
        _stream(runtime, options, _prepare(runtime, options, text))
        _write(runtime.last_receipt, options.receipt, "--receipt")
        _write(timeline, options.trace, "--trace")


def _read_prompt(options: GenerateOptions) -> str:
    if options.prompt is not None and options.prompt_file is not None:
        raise click.UsageError("--prompt and --prompt-file exclude each other.")
    if options.prompt_file is not None:
        return read_prompt_file(options.prompt_file)
    if options.prompt == "-":
        return _read_stdin()
    if options.prompt is None:
        return DEMO_PROMPT if options.model is None else DEFAULT_PROMPT
    return options.prompt.replace("\\n", "\n").replace("\\t", "\t")


def _read_stdin() -> str:
    if sys.stdin is None:
        raise MlxStreamError(
            "there is no standard input to read the prompt from",
            expected="text",
            actual="closed",
            remedy="pass --prompt TEXT or --prompt-file FILE",
        )
    return sys.stdin.read()


def read_prompt_file(path: Path) -> str:
    """The text of a prompt file.

    Raises:
        MlxStreamError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MlxStreamError(
            "the prompt file cannot be read",
            file=path,
            expected="UTF-8 text",
            actual=str(error),
            remedy="check the path and the encoding",
        ) from error


def _encode(runtime: Runtime, options: GenerateOptions, text: str) -> list[int]:
    tokenizer = runtime.tokenizer
    for token in options.extra_eos_token:
        if tokenizer is not None:
            try:
                tokenizer.add_eos_token(token)
            except ValueError as error:
                raise click.UsageError(f"--extra-eos-token: {error}") from error
    if tokenizer is None:
        return parse_token_ids(text)
    if options.ignore_chat_template or not tokenizer.has_chat_template:
        return runtime.encode(text)
    messages = [] if options.system_prompt is None else [_message("system", options.system_prompt)]
    messages.append(_message("user", text))
    template = _template_arguments(options.chat_template_config)
    if options.prefill_response is not None:
        messages.append(_message("assistant", options.prefill_response))
        template |= {"continue_final_message": True, "add_generation_prompt": False}
    return runtime.encode(messages, **template)


def parse_token_ids(text: str) -> list[int]:
    """A folder without a tokenizer takes its prompt as token ids, and answers with them."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise MlxStreamError(
            "the model folder has no tokenizer, so text cannot be encoded",
            expected="token ids, such as --prompt '1 2 3'",
            actual=repr(text if len(text) <= 40 else text[:40] + "..."),
            remedy="add tokenizer.json to the model folder, or pass token ids",
        ) from error


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _template_arguments(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--chat-template-config is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise click.UsageError("--chat-template-config must be a JSON object.")
    return arguments


def _prepare(runtime: Runtime, options: GenerateOptions, text: str) -> Callable[..., Any]:
    """A function that starts the answer, given sampler and progress."""
    ids, kv = _encode(runtime, options, text), evicting(kv_of(options), options)
    if options.prompt_cache_file is None:
        return partial(runtime.stream_generate, ids, options.max_tokens, kv=kv)
    from mlx_stream.continuation import continue_saved

    raw = options.ignore_chat_template or not getattr(runtime.tokenizer, "has_chat_template", False)
    template = None if raw else _template_arguments(options.chat_template_config)
    said = ids if runtime.tokenizer is None else text
    return partial(
        continue_saved,
        runtime,
        options.prompt_cache_file,
        said,
        options.max_tokens,
        system=options.system_prompt,
        template=template,
        kv=kv,
    )


def _stream(runtime: Runtime, options: GenerateOptions, start: Callable[..., Any]) -> None:
    """Print tokens as they come; the bar goes when the first one is there."""
    response = None
    if options.verbose:
        click.echo(repr(runtime), err=True)
    with PrefillBar(enabled=options.verbose) as bar:
        sampler = make_sampler_of(runtime.tokenizer, options)
        for response in start(sampler=sampler, progress=bar.update):
            text = response.text if runtime.tokenizer is not None else f"{response.token} "
            click.echo(text, nl=False)
            sys.stdout.flush()
    click.echo()
    if options.verbose and response is not None and runtime.last_receipt is not None:
        click.echo(
            f"{runtime.last_receipt.summary()} | decode {response.generation_tokens} tokens, "
            f"{response.generation_tps:.1f} tok/s",
            err=True,
        )
        for note in runtime.last_receipt.notes:
            click.echo(f"note: {note}", err=True)
    if options.stats:
        click.echo(runtime.request_metrics.table(), err=True)


def _check_folder(target: Path | None, flag: str) -> None:
    """Before any work: minutes later would be too late to say so."""
    if target is None:
        return
    folder = target.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise _write_error(target, flag, "no such folder, or it is not writable")


def _write(report: Receipt | Timeline | None, target: Path | None, flag: str) -> None:
    if target is None or report is None:
        return
    try:
        report.write(target)
    except OSError as error:
        raise _write_error(target, flag, str(error)) from error


def _write_error(target: Path, flag: str, actual: str) -> MlxStreamError:
    what = {"--receipt": "receipt", "--trace": "trace"}[flag]
    return MlxStreamError(
        f"the {what} cannot be written",
        file=target,
        actual=actual,
        remedy=f"choose a writable folder for {flag}",
    )


def main() -> None:
    """Entry point of ``python -m mlx_stream.generate``."""
    run_command(generate, "python -m mlx_stream.generate")


if __name__ == "__main__":
    main()
