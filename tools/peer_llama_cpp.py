"""Time llama.cpp's prompt processing on a GGUF, for comparison with our prefill.

Prints one JSON line: seconds to load, seconds to the first token, bytes fetched from storage.
Weights stay in the file mapping (no repacked copies, no locking), which is how llama.cpp runs a
model that is larger than memory. Needs `pip install llama-cpp-python`; run it through
tools/capped_run.py to limit memory and disk.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import click
import llama_cpp
from llama_cpp import Llama

EXAMPLES = """
\b
Examples:
  python tools/peer_llama_cpp.py qwen3-8l.gguf --tokens 4096
  python tools/capped_run.py --model qwen3-8l.gguf -- \\
      python tools/peer_llama_cpp.py qwen3-8l.gguf --tokens 4096 --ubatch 4096
"""


def _keep_weights_in_the_mapping() -> None:
    """Turn off "extra buffer types", which copy weights to repack them.

    The high-level class has no argument for it, so its defaults function is wrapped.
    """
    low = llama_cpp.llama_cpp
    default = low.llama_model_default_params

    def parameters() -> Any:
        values = default()
        values.use_extra_bufts = False
        return values

    low.llama_model_default_params = parameters


def _process_read_bytes() -> int:
    """Bytes that this process caused to be fetched from storage; 0 where it is not told."""
    if sys.platform != "linux":
        return 0
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def measure(
    model: Path, tokens: int, *, ubatch: int, threads: int, mmap: bool, repack: bool, decode: int
) -> dict[str, Any]:
    """Load the model, process a random prompt, decode greedily."""
    if not repack:
        _keep_weights_in_the_mapping()
    started = time.perf_counter()
    llama = Llama(
        str(model),
        n_ctx=tokens + decode + 64,
        n_batch=max(2048, ubatch),
        n_ubatch=ubatch,
        n_threads=threads,
        n_threads_batch=threads,
        use_mmap=mmap,
        use_mlock=False,
        verbose=False,
    )
    loaded, read_before = time.perf_counter(), _process_read_bytes()
    rng = random.Random(1)
    llama.eval([rng.randrange(2, llama.n_vocab()) for _ in range(tokens)])
    token = llama.sample(temp=0.0)
    ttft, read = time.perf_counter() - loaded, _process_read_bytes() - read_before
    begun = time.perf_counter()
    for _ in range(decode - 1):
        llama.eval([token])
        token = llama.sample(temp=0.0)
    decode_seconds = time.perf_counter() - begun
    return {
        "engine": "llama.cpp",
        "version": llama_cpp.__version__,
        "tokens": tokens,
        "ubatch": ubatch,
        "threads": threads,
        "load_seconds": round(loaded - started, 3),
        "ttft_seconds": round(ttft, 3),
        "tokens_per_second": round(tokens / ttft, 1),
        "prefill_read_bytes": read,
        "decode_tokens_per_second": round((decode - 1) / decode_seconds, 2) if decode > 1 else None,
        "file_bytes": model.stat().st_size,
    }


@click.command(
    help=__doc__, epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.argument("model", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--tokens", default=4096, show_default=True, help="Prompt length.")
@click.option("--decode", default=1, show_default=True, help="Tokens to generate, at least 1.")
@click.option("--ubatch", default=512, show_default=True, help="Tokens in one pass over the model.")
@click.option("--threads", default=2, show_default=True)
@click.option("--mmap/--no-mmap", default=True, show_default=True)
@click.option("--repack", is_flag=True, help="Let llama.cpp copy weights to faster layouts.")
def main(
    model: Path, tokens: int, decode: int, ubatch: int, threads: int, mmap: bool, repack: bool
) -> None:
    """Measure and print."""
    result = measure(
        model,
        tokens,
        ubatch=ubatch,
        threads=threads,
        mmap=mmap,
        repack=repack,
        decode=max(1, decode),
    )
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
