"""The flags of decoding, shared by the commands that answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlx_stream.click_options import add_options
from mlx_stream.decode.options import PATHS, PREDICTORS, PREROUTER_MODES
from mlx_stream.decode.policy import POLICIES
from mlx_stream.decode.seed_policy import SEED_POLICIES

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)

_OPTIONS = (
    click.option(
        "--decode-path",
        type=click.Choice(PATHS),
        default="auto",
        show_default=True,
        help="How tokens are computed: read what is missing (exact), gather from the cache "
        "(hot, staged), or stream every layer (whole-layer).",
    ),
    click.option(
        "--cache-policy",
        type=click.Choice(("auto", *POLICIES)),
        default="auto",
        show_default=True,
        help="Which expert leaves a full cache.",
    ),
    click.option(
        "--seed-policy",
        type=click.Choice(("auto", *SEED_POLICIES)),
        default="auto",
        show_default=True,
        help="Which experts the prompt leaves in the cache.",
    ),
    click.option(
        "--predict",
        type=click.Choice(PREDICTORS),
        default="auto",
        show_default=True,
        help="Read the next layer's likely experts ahead; auto stops when it does not pay.",
    ),
    click.option("--hot-list", type=_FILE, help="Experts to keep besides the prompt's, a file."),
    click.option(
        "--prerouter",
        type=click.Choice(PREROUTER_MODES),
        default="auto",
        show_default=True,
        help="Route by trained heads, a token ahead, so that no read is waited for; changes the "
        "answer. auto: where the checkpoint was trained for it.",
    ),
    click.option("--prerouter-spec", type=_FILE, help="Heads to use instead of the checkpoint's."),
    click.option("--draft-model", help="Small model for speculative decoding, folder or repo id."),
    click.option(
        "--num-draft-tokens",
        type=click.IntRange(1, 64),
        default=3,
        show_default=True,
        help="Tokens that the draft model proposes a step.",
    ),
    click.option("--stats", is_flag=True, help="A table of what decoding cost, at the end."),
)


@dataclass(frozen=True, kw_only=True)
class DecodeFlags:
    """The values of the flags."""

    decode_path: str
    cache_policy: str
    seed_policy: str
    predict: str
    hot_list: Path | None
    prerouter: str
    prerouter_spec: Path | None
    draft_model: str | None
    num_draft_tokens: int
    stats: bool


decode_options = add_options(_OPTIONS)


def decode_arguments(flags: DecodeFlags) -> dict[str, Any]:
    """What ``load`` takes of them."""
    return {
        "decode_path": flags.decode_path,
        "cache_policy": flags.cache_policy,
        "seed_policy": flags.seed_policy,
        "predict": flags.predict,
        "hot_list": flags.hot_list,
        "prerouter": flags.prerouter,
        "prerouter_spec": flags.prerouter_spec,
        "draft_model": flags.draft_model,
        "num_draft_tokens": flags.num_draft_tokens,
    }
