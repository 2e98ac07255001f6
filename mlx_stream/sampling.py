"""The sampling flags of the command line, as mlx_lm.generate has them, and their sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from mlx_stream.click_options import add_options

SHARE = click.FloatRange(0, 1)
SEED = click.IntRange(0, 2**64 - 1)

_OPTIONS = (
    click.option(
        "--temp",
        type=click.FloatRange(min=0),
        default=0.0,
        show_default=True,
        help="Sampling temperature; 0 is greedy.",
    ),
    click.option("--top-p", type=SHARE, default=1.0, show_default=True, help="Nucleus sampling."),
    click.option(
        "--min-p", type=SHARE, default=0.0, show_default=True, help="Least share of the top token."
    ),
    click.option(
        "--top-k",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="Sample among the k likeliest; 0: all.",
    ),
    click.option(
        "--min-tokens-to-keep",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="For --min-p.",
    ),
    click.option(
        "--xtc-probability",
        type=SHARE,
        default=0.0,
        show_default=True,
        help="Chance of XTC sampling.",
    ),
    click.option(
        "--xtc-threshold",
        type=click.FloatRange(0, 0.5),
        default=0.1,
        show_default=True,
        help="XTC threshold.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """The values of the flags."""

    temp: float
    top_p: float
    min_p: float
    top_k: int
    min_tokens_to_keep: int
    xtc_probability: float
    xtc_threshold: float


sampling_options = add_options(_OPTIONS)


def make_sampler_of(tokenizer: Any | None, flags: SamplingFlags) -> Any:
    """mlx-lm's sampler for these flags."""
    from mlx_lm.sample_utils import make_sampler

    special: list[int] = []
    top_k = flags.top_k
    if tokenizer is not None and top_k >= tokenizer.vocab_size:
        top_k = 0  # all of them
    if tokenizer is not None and flags.xtc_probability > 0:
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
    return make_sampler(
        flags.temp,
        flags.top_p,
        flags.min_p,
        flags.min_tokens_to_keep,
        top_k=top_k,
        xtc_probability=flags.xtc_probability,
        xtc_threshold=flags.xtc_threshold,
        xtc_special_tokens=special,
    )
