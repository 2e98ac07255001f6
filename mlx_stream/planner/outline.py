"""A model as its headers show it: enough for plans and forecasts of many prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlx_stream.errors import BudgetError, MlxStreamError
from mlx_stream.planner.fit import DIRECT_ALIGN, Traits, plan_prefill
from mlx_stream.planner.group_size import GroupSize, wanted_group
from mlx_stream.planner.machine_profile import MachineProfile
from mlx_stream.planner.model_headers import open_headers
from mlx_stream.planner.model_shape import ModelShape, model_shape
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.remote_checkpoint import Progress

SCRATCH_NBYTES = 128 << 20  # a backend's working memory, before one is chosen
WIDE = {"BF16": 2, "F16": 2}  # item sizes that double when activations are float32
MOST_TOKENS = 1 << 22


@dataclass(frozen=True)
class ModelOutline:
    """What headers and config say.

    Attributes:
        itemsize: bytes of an activation value.
        group: experts of a read group; None takes the default.
    """

    checkpoint: Checkpoint
    index: ExpertIndex
    shape: ModelShape
    itemsize: int
    group: GroupSize | None = None

    def plan(self, prompt_tokens: int, *, budget: int, chunk_tokens: int) -> PrefillPlan:
        """The prefill plan for a prompt length.

        Raises:
            BudgetError: the prompt does not fit; the message names the smallest budget that would.
            MlxStreamError: the prompt is empty.
        """
        if prompt_tokens < 1:
            raise MlxStreamError(
                "the prompt is empty", expected="at least one token", actual=prompt_tokens
            )
        traits = Traits(
            itemsize=self.itemsize,
            resident=self.resident_nbytes,
            scratch=SCRATCH_NBYTES,
            align=DIRECT_ALIGN,
            group=self.group,
        )
        return plan_prefill(
            self.index,
            self.shape,
            traits,
            prompt_tokens=prompt_tokens,
            budget=budget,
            chunk_tokens=chunk_tokens,
        )

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes of the non-expert weights as held: 16-bit floats widen on a float32 backend."""
        total = 0
        for name, tensor in self.checkpoint.tensors.items():
            if name not in self.index.tensor_names:
                stored = WIDE.get(tensor.dtype)
                total += (
                    tensor.nbytes if stored is None else tensor.nbytes // stored * self.itemsize
                )
        return total

    @property
    def routed_nbytes(self) -> float:
        """Bytes of the experts that one token uses."""
        return float(sum(self.shape.top_k * layer.expert_nbytes for layer in self.index.layers))

    def largest_prompt(self, *, budget: int, chunk_tokens: int) -> int:
        """The longest prompt that fits, 0 if none does."""
        low, high = 0, 1
        while high <= MOST_TOKENS and self._fits(high, budget, chunk_tokens):
            low, high = high, 2 * high
        while high - low > max(1, low // 256):
            middle = (low + high) // 2
            if self._fits(middle, budget, chunk_tokens):
                low = middle
            else:
                high = middle
        return low

    def _fits(self, tokens: int, budget: int, chunk_tokens: int) -> bool:
        try:
            self.plan(tokens, budget=budget, chunk_tokens=chunk_tokens)
        except BudgetError:
            return False
        return True


def open_outline(
    path_or_repo: str | Path | None,
    *,
    revision: str | None = None,
    itemsize: int = 4,
    group_size: int | None = None,
    profile: MachineProfile | None = None,
    progress: Progress | None = None,
) -> ModelOutline:
    """Read headers and config of a folder or, without a download, of a hub repository.

    Args:
        itemsize: bytes of an activation value: 4 on the CPU backend, 2 for a 16-bit checkpoint
            on a GPU.
        group_size: experts of a read group; None goes by the profile, where there is one.

    Raises:
        CheckpointError: the checkpoint cannot be streamed.
        ModelNotFoundError, HubError: there is no such model, or the hub does not give it.
    """
    checkpoint = open_headers(path_or_repo, revision=revision, progress=progress)
    index = build_expert_index(checkpoint)
    group = wanted_group(index, profile, asked=group_size, align=DIRECT_ALIGN)
    return ModelOutline(checkpoint, index, model_shape(checkpoint.config, index), itemsize, group)
