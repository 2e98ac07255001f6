"""One layer's cache as a file of a checkpoint: a prompt cache file with a single layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_stream.errors import PromptFileError, ResumeError
from mlx_stream.kv.evict import SpillingKVCache
from mlx_stream.kv.leaf_state import class_name, leaf_state, restore_leaf
from mlx_stream.kv.prompt_files import file_metadata, state_entries
from mlx_stream.kv.prompt_header import Entries, read_prompt_header
from mlx_stream.prefill.cache_views import cache_leaves


def cache_entries(cache: Any) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and metadata of the file of one layer's cache."""
    arrays, scalars = state_entries([leaf_state(cache)])
    return arrays, file_metadata({"mlx_stream": "checkpoint"}, [cache], scalars)


def restore_cache(
    path: Path, arrays: dict[str, mx.array], own: Any, probed: Any, into: Any
) -> None:
    """Put a layer's cache back as it was written.

    Args:
        own: a fresh cache of the model at this place; used up.
        probed: the same after a few tokens.
        into: the prompt cache's own, empty, of the same or of one of our classes.

    Raises:
        ResumeError: the file holds something else.
    """
    try:
        header = read_prompt_header(path, path.stat().st_size)
        reader = Entries(path, arrays, header.scalars)
        restored = restore_leaf(own, probed, header.classes[0], "0", reader.get, reader.check)
    except (PromptFileError, OSError) as error:
        raise ResumeError(
            "this checkpoint does not hold the caches of this model",
            file=path,
            expected=f"a {class_name(into)}",
            actual=str(error),
            remedy="remove the folder, and run the prompt from the beginning",
        ) from error
    for leaf, found in zip(cache_leaves(into), cache_leaves(restored), strict=True):
        if isinstance(leaf, SpillingKVCache):
            leaf.keys, leaf.values, leaf.offset = found.keys, found.values, found.offset
        else:
            leaf.__dict__.update(found.__dict__)
