"""The flags for long prompts: where keys and values go, and checkpoints of the prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import click

from mlx_stream.click_options import add_options
from mlx_stream.config import ConfigError
from mlx_stream.kv.options import KV_EVICT, KvOptions
from mlx_stream.resume.options import KeepOptions

_FOLDER = click.Path(path_type=Path, file_okay=False)
_KEEP = (
    click.option(
        "--kv-evict",
        type=click.Choice(KV_EVICT),
        default="keep",
        show_default=True,
        help="What becomes of a layer's KV cache once the prompt has passed the layer.",
    ),
    click.option(
        "--kv-dir",
        type=_FOLDER,
        help="With --kv-evict disk: folder of the KV cache, an mlx-lm prompt cache file.",
    ),
    click.option(
        "--checkpoint-dir",
        type=_FOLDER,
        help="Folder for checkpoints of the prefill; removed when the prompt is through.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(min=1),
        default=KeepOptions.every,
        show_default=True,
        help="Expert layers between checkpoints.",
    ),
    click.option(
        "--resume", is_flag=True, help="Go on from the checkpoint in --checkpoint-dir, if any."
    ),
)


@dataclass(frozen=True, kw_only=True)
class KeepFlags:
    """The values of the flags for long prompts."""

    kv_evict: str
    kv_dir: Path | None
    checkpoint_dir: Path | None
    checkpoint_every: int
    resume: bool


keep_options = add_options(_KEEP)


def evicting(kv: KvOptions, flags: KeepFlags) -> KvOptions:
    """The KV options with eviction as asked. Raises ConfigError."""
    return replace(kv, kv_evict=flags.kv_evict, kv_dir=flags.kv_dir)


def keep_of(flags: KeepFlags) -> KeepOptions | None:
    """The checkpoints asked for. Raises ConfigError."""
    if flags.checkpoint_dir is None:
        if flags.resume:
            raise ConfigError(
                "--resume goes with --checkpoint-dir",
                expected="the folder of the checkpoint",
                actual="none",
                remedy="add --checkpoint-dir",
            )
        return None
    return KeepOptions(flags.checkpoint_dir, flags.checkpoint_every, flags.resume)
