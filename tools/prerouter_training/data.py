"""Token windows in an order that follows from the seed and the step alone, and held-out text.

So a run that was killed sees, when it goes on, what it would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from mlx_stream.errors import MlxStreamError
from tools.train_demo_model import load_tokens

NEEDLE = 32  # tokens in a row that two texts share only if they are the same text


@dataclass(frozen=True)
class Windows:
    """Shuffled windows of size + 1 tokens; each epoch cuts at another offset.

    Attributes:
        tokens: ``[N]`` int64.
        rows: windows of a batch.
    """

    tokens: torch.Tensor
    size: int
    rows: int
    seed: int

    @cached_property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return (len(self.tokens) - 2 * self.size - 1) // (self.size * self.rows)

    def batch(self, step: int) -> torch.Tensor:
        """``[rows, size + 1]`` of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        random = np.random.default_rng((self.seed, epoch))
        first = int(random.integers(self.size))
        count = self.steps_per_epoch * self.rows
        order = random.permutation(count)[place * self.rows : (place + 1) * self.rows]
        starts = first + order * self.size
        return torch.stack([self.tokens[i : i + self.size + 1] for i in starts.tolist()])


@dataclass(frozen=True)
class Corpus:
    """Prepared text. Attributes are token ids, int64.

    Attributes:
        train: what is learned from.
        validation: held-out text that early stopping looks at; none of `excerpt` is in it.
        excerpt: held-out text that results are reported on (``heldout.txt``).
    """

    train: torch.Tensor
    validation: torch.Tensor
    excerpt: torch.Tensor


def load_corpus(folder: Path, checkpoint: Path) -> Corpus:
    """What ``tools/train_demo_model.py prepare`` wrote.

    Raises:
        MlxStreamError: it was prepared with another tokenizer than the checkpoint's.
    """
    ours, theirs = folder / "tokenizer.json", checkpoint / "tokenizer.json"
    if ours.read_bytes() != theirs.read_bytes():
        raise MlxStreamError(
            "the text was prepared with another tokenizer",
            file=ours,
            expected=f"the bytes of {theirs}",
            actual="other bytes",
            remedy="prepare it with the checkpoint's tokenizer.json",
        )
    train, held, excerpt = (
        load_tokens(folder / f"{n}.bin") for n in ("train", "heldout", "excerpt")
    )
    return Corpus(train, without(held, excerpt), excerpt)


def without(tokens: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`tokens` less those that lie in a run of NEEDLE tokens which `part` has too."""
    rows = np.lib.stride_tricks.sliding_window_view(tokens.numpy(), NEEDLE)
    known = {
        row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(part.numpy(), NEEDLE)
    }
    keep = np.ones(len(tokens), dtype=bool)
    for start, row in enumerate(rows):
        if row.tobytes() in known:
            keep[start : start + NEEDLE] = False
    return tokens[torch.from_numpy(keep)]
