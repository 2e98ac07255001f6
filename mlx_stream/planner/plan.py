"""``mlx_stream.plan``: how a prompt would run, from the checkpoint's headers alone."""

from __future__ import annotations

from pathlib import Path

from mlx_stream.config import parse_bytes
from mlx_stream.errors import MlxStreamError
from mlx_stream.planner.fit import DIRECT_ALIGN, Traits, plan_prefill
from mlx_stream.planner.free_memory import default_budget
from mlx_stream.planner.model_headers import open_headers
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.remote_checkpoint import Progress

SCRATCH_NBYTES = 128 << 20  # a backend's working memory, before one is chosen
WIDE = {"BF16": 2, "F16": 2}  # item sizes that double when activations are float32


def plan(
    path_or_repo: str | Path | None,
    prompt_tokens: int,
    *,
    memory_budget: int | str | None = None,
    chunk_tokens: int = 2048,
    activation_itemsize: int = 4,
    revision: str | None = None,
    progress: Progress | None = None,
) -> PrefillPlan:
    """The prefill plan for a prompt length. Reads headers and config; loads no weights.

    A hub repository is not downloaded: its headers are fetched, see `open_headers`.

    Args:
        activation_itemsize: bytes of an activation value: 4 on the CPU backend, 2 for a 16-bit
            checkpoint on a GPU.
        revision: of a hub repository; ``owner/name@revision`` says the same.
        progress: called with (shards done, shards) while headers are fetched.

    Raises:
        BudgetError: the prompt does not fit; the message names the smallest budget that would do.
        CheckpointError: the checkpoint cannot be streamed.
        ModelNotFoundError, HubError: there is no such model, or the hub does not give it.
    """
    if prompt_tokens < 1:
        raise MlxStreamError(
            "the prompt is empty", expected="at least one token", actual=prompt_tokens
        )
    checkpoint = open_headers(path_or_repo, revision=revision, progress=progress)
    index = build_expert_index(checkpoint)
    budget = default_budget(None)[0] if memory_budget is None else parse_bytes(memory_budget)
    shape = model_shape(checkpoint.config, index)
    traits = Traits(
        itemsize=activation_itemsize,
        resident=_resident_nbytes(checkpoint, index, activation_itemsize),
        scratch=SCRATCH_NBYTES,
        align=DIRECT_ALIGN,
    )
    return plan_prefill(
        index,
        shape,
        traits,
        prompt_tokens=prompt_tokens,
        budget=budget,
        chunk_tokens=chunk_tokens,
    )


def _resident_nbytes(checkpoint: Checkpoint, index: ExpertIndex, itemsize: int) -> int:
    """Bytes of the non-expert weights as held: 16-bit floats widen on a float32 backend."""
    total = 0
    for name, tensor in checkpoint.tensors.items():
        if name not in index.tensor_names:
            stored = WIDE.get(tensor.dtype)
            total += tensor.nbytes if stored is None else tensor.nbytes // stored * itemsize
    return total
