"""``mlx_stream.plan``: how a prompt would run, from the checkpoint's headers alone."""

from __future__ import annotations

from pathlib import Path

from mlx_stream.config import StreamConfig, parse_bytes
from mlx_stream.planner.free_memory import default_budget
from mlx_stream.planner.machine_profile import load_default
from mlx_stream.planner.outline import open_outline
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.storage.remote_checkpoint import Progress


def plan(
    path_or_repo: str | Path | None,
    prompt_tokens: int,
    *,
    memory_budget: int | str | None = None,
    chunk_tokens: int = 2048,
    activation_itemsize: int = 4,
    group_size: int | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> PrefillPlan:
    """The prefill plan for a prompt length. Reads headers and config; loads no weights.

    A hub repository is not downloaded: its headers are fetched, see `open_headers`.

    Args:
        activation_itemsize: bytes of an activation value: 4 on the CPU backend, 2 for a 16-bit
            checkpoint on a GPU.
        group_size: experts of a read group; None leaves it to the plan, which goes by the read
            rates that `mlx_stream probe` saved, if it has been run.
        revision: of a hub repository; ``owner/name@revision`` says the same.
        progress: called with (shards done, shards) while headers are fetched.

    Raises:
        BudgetError: the prompt does not fit; the message names the smallest budget that would do.
        ConfigError: group_size is less than 1.
        ProfileError: the saved profile is damaged.
        CheckpointError: the checkpoint cannot be streamed.
        ModelNotFoundError, HubError: there is no such model, or the hub does not give it.
    """
    StreamConfig(chunk_tokens=chunk_tokens, group_size=group_size)  # checks them
    outline = open_outline(
        path_or_repo,
        revision=revision,
        itemsize=activation_itemsize,
        group_size=group_size,
        profile=load_default(),
        progress=progress,
    )
    budget = default_budget(None)[0] if memory_budget is None else parse_bytes(memory_budget)
    return outline.plan(prompt_tokens, budget=budget, chunk_tokens=chunk_tokens)
