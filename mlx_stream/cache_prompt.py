"""``mlx_stream cache-prompt``: prefill a prompt once and keep its cache, as mlx_lm.cache_prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlx_stream.generate import parse_token_ids
from mlx_stream.kv_flags import KvFlags, LoadFlags, kv_of, kv_options, load_of, load_options
from mlx_stream.terminal import PrefillBar

EXAMPLES = """
\b
Examples:
  mlx_stream cache-prompt --prompt "In the beginning" --prompt-cache-file begin.safetensors
  mlx_stream generate --prompt-cache-file begin.safetensors --prompt " God created"
  cat report.txt | mlx_stream cache-prompt --model ./checkpoint --prompt - \\
      --prompt-cache-file report.safetensors
"""


@dataclass(frozen=True, kw_only=True)
class CachePromptOptions(LoadFlags, KvFlags):
    """The flags of one run, as given."""

    prompt: str
    system_prompt: str | None
    prompt_cache_file: Path


@click.command("cache-prompt", epilog=EXAMPLES)
@load_options
@click.option("--prompt", "-p", required=True, help="The message; '-' reads standard input.")
@click.option("--system-prompt", help="System message for the chat template.")
@click.option(
    "--prompt-cache-file",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to save the prompt cache.",
)
@kv_options
def cache_prompt(**flags: Any) -> None:
    """Prefill the beginning of a message and save its cache; generate goes on from it."""
    options = CachePromptOptions(**flags)
    kv = kv_of(options)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    from mlx_stream.continuation import prompt_beginning

    with load_of(options) as runtime:
        prompt = text if runtime.tokenizer is not None else parse_token_ids(text)
        ids = prompt_beginning(runtime, prompt, options.system_prompt)
        with PrefillBar() as bar:
            result = runtime.prefill(ids, kv=kv, progress=bar.update)
        path = runtime.save_prompt_cache(options.prompt_cache_file, result.cache, ids)
        click.echo(f"{path}: {len(ids)} tokens", err=True)
