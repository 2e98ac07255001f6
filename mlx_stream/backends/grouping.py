"""Which rows go to which expert: a stable sort of the router's choices, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mlx_stream.errors import TensorFormatError


@dataclass(frozen=True)
class Routing:
    """The choices of all chunks of one segment at one layer, sorted by expert.

    A *flat row* is ``token * K + k`` over the concatenated chunks.

    Attributes:
        order: ``[T*K]`` flat rows, ascending within each expert.
        offsets: ``[E+1]`` expert e owns ``order[offsets[e]:offsets[e+1]]``.
        top_k: K.
        chunk_starts: ``[chunks+1]`` first token of each chunk.
    """

    order: np.ndarray
    offsets: np.ndarray
    top_k: int
    chunk_starts: np.ndarray

    def counts(self) -> np.ndarray:
        """``[E]`` rows routed to each expert."""
        return np.diff(self.offsets)

    def used(self) -> np.ndarray:
        """Ascending ids of the experts with at least one row."""
        return np.flatnonzero(self.counts())

    def rows(self, expert: int) -> np.ndarray:
        """Flat rows of one expert, ascending."""
        return self.order[self.offsets[expert] : self.offsets[expert + 1]]

    def chunk_slices(self, tokens: np.ndarray) -> list[tuple[int, slice]]:
        """``(chunk, slice of tokens)`` for ascending tokens, empty chunks left out."""
        cuts = np.searchsorted(tokens, self.chunk_starts)
        return [
            (chunk, slice(int(a), int(b))) for chunk, (a, b) in enumerate(pairwise(cuts)) if b > a
        ]


def group_by_expert(indices: Sequence[np.ndarray], num_experts: int, layer: str) -> Routing:
    """Sort the routed ids of several chunks by expert.

    Args:
        indices: per chunk ``[C, K]`` expert ids.
        num_experts: E; ids outside ``[0, E)`` are an error, never clamped.
        layer: name used in the error.

    Raises:
        TensorFormatError: a router chose an expert that does not exist.
    """
    flat = np.concatenate([chunk.reshape(-1) for chunk in indices])
    check_expert_ids(flat, num_experts, layer)
    flat = flat.astype(np.int32, copy=False)
    counts = np.bincount(flat, minlength=num_experts)
    starts = np.cumsum([0, *(len(chunk) for chunk in indices)])
    return Routing(
        order=np.argsort(flat, kind="stable"),
        offsets=np.concatenate(([0], np.cumsum(counts))),
        top_k=int(indices[0].shape[1]),
        chunk_starts=starts,
    )


def check_expert_ids(ids: np.ndarray, num_experts: int, layer: str) -> None:
    """Raise TensorFormatError if an id is outside ``[0, num_experts)``."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        raise TensorFormatError(
            "the router chose an expert that the checkpoint does not have",
            tensor=layer,
            expected=f"expert ids in 0..{num_experts - 1}",
            actual=f"{int(ids.min())}..{int(ids.max())}",
            remedy="check num_experts in config.json against the expert tensors",
        )
