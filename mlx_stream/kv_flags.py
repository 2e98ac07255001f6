"""The flags of the KV cache and of loading, for the commands that share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlx_stream.click_options import add_options
from mlx_stream.config import BACKENDS, IO_MODES, VERIFY_MODES
from mlx_stream.decode_flags import DecodeFlags, decode_arguments
from mlx_stream.kv.options import PLAIN, KvOptions

if TYPE_CHECKING:
    from mlx_stream.runtime import Runtime

_KV = (
    click.option(
        "--max-kv-size",
        type=int,
        help="Most tokens a layer's KV cache keeps; older ones are dropped.",
    ),
    click.option(
        "--kv-bits", type=int, help="Bits of a quantized KV cache; default: not quantized."
    ),
    click.option(
        "--kv-group-size",
        type=int,
        default=PLAIN.kv_group_size,
        show_default=True,
        help="Group size of a quantized KV cache.",
    ),
    click.option(
        "--quantized-kv-start",
        type=int,
        default=PLAIN.quantized_kv_start,
        show_default=True,
        help="With --kv-bits: quantize from this many tokens on.",
    ),
)
_LOAD = (
    click.option(
        "--model", help="Folder or Hugging Face repo id; omitted: the embedded demo model."
    ),
    click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    click.option(
        "--memory-budget", help="Bytes, '4GB' or '4GiB'; default: a share of free memory."
    ),
    click.option(
        "--chunk-tokens",
        "--prefill-step-size",
        "chunk_tokens",
        default=2048,
        show_default=True,
        help="Most tokens in one attention chunk.",
    ),
    click.option(
        "--group-size",
        type=click.IntRange(min=1),
        help="Experts of a read group.  [default: by what `mlx_stream probe` measured]",
    ),
    click.option("--backend", type=click.Choice(BACKENDS), default="auto", show_default=True),
    click.option(
        "--io",
        type=click.Choice(IO_MODES),
        default="direct",
        show_default=True,
        help="'direct' bypasses the page cache.",
    ),
    click.option(
        "--verify",
        type=click.Choice(VERIFY_MODES),
        default="first",
        show_default=True,
        help="When checksums of a packed folder are compared: at an expert's first read, always.",
    ),
    click.option(
        "--adapter",
        default="auto",
        show_default=True,
        help="Low-rank adapter: a safetensors file or mlx-lm's folder. auto: the one trained with "
        "the Prerouter, where that is on; off: none.",
    ),
    click.option("--adapter-scale", type=float, help="alpha / r of an adapter that lacks it."),
    click.option(
        "--throttle-reads",
        help="(benchmarks) Read no faster than '2GB/s', or '0.5GB/s:100us' with a latency.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class KvFlags:
    """The values of the KV flags."""

    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """The values of the loading flags."""

    model: str | None
    trust_remote_code: bool
    memory_budget: str | None
    chunk_tokens: int
    group_size: int | None
    backend: str
    io: str
    verify: str
    adapter: str = "auto"
    adapter_scale: float | None = None
    throttle_reads: str | None


kv_options = add_options(_KV)  # those of mlx_lm.generate
load_options = add_options(_LOAD)


def prompt_cache_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--prompt-cache-file``, a file to go on from."""
    return click.option(
        "--prompt-cache-file",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Go on from a saved prompt cache.",
    )(command)


def kv_of(flags: KvFlags) -> KvOptions:
    """Checked KV options. Raises ConfigError."""
    return KvOptions(
        max_kv_size=flags.max_kv_size,
        kv_bits=flags.kv_bits,
        kv_group_size=flags.kv_group_size,
        quantized_kv_start=flags.quantized_kv_start,
    )


def load_of(flags: LoadFlags) -> Runtime:
    """The runtime that the flags ask for, decode flags too if there are any.

    Errors as :func:`mlx_stream.load`.
    """
    from mlx_stream.runtime import load

    return load(
        flags.model,
        memory_budget=flags.memory_budget,
        chunk_tokens=flags.chunk_tokens,
        group_size=flags.group_size,
        backend=flags.backend,
        io=flags.io,
        verify=flags.verify,
        adapter=flags.adapter,
        adapter_scale=flags.adapter_scale,
        throttle=flags.throttle_reads,
        trust_remote_code=flags.trust_remote_code,
        **(decode_arguments(flags) if isinstance(flags, DecodeFlags) else {}),
    )
