"""Reading a checkpoint of a prefill back, and refusing one that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from mlx_stream.errors import ResumeError
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from mlx_stream.prefill.boundary import Kept
from mlx_stream.resume.kept_caches import restore_cache
from mlx_stream.resume.store import CheckpointFolder

START = -1  # the boundary in front of all layers


@dataclass(frozen=True)
class KeeperModel:
    """The model that is prefilled.

    Attributes:
        family: its name in messages.
        make_cache: makes a fresh mlx-lm prompt cache.
        probed: such a cache after a few tokens; not changed.
        scope: what must be active while the model runs.
    """

    model: nn.Module
    family: str
    streamed: list[StreamedExperts]
    slot: ExecutorSlot
    scope: Callable[[], AbstractContextManager[None]]
    make_cache: Callable[[], list[Any]]
    probed: list[Any]


@dataclass
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        segment, boundary: all chunks of the segment have passed this decoder layer.
        caches: file names by entry of the prompt cache.
        sums: sizes and checksums by file name.
        kept: what each chunk hands on at the boundary.
        seen: what each chunk saw of every entry when it began.
    """

    folder: CheckpointFolder
    segment: int
    boundary: int
    caches: dict[int, str]
    sums: dict[str, list[Any]]
    kept: list[Kept] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)

    @classmethod
    def read(
        cls, folder: CheckpointFolder, content: dict[str, Any], boundaries: Sequence[int]
    ) -> Checkpoint:
        """What a manifest says, and the activations that it names.

        Args:
            boundaries: where this prefill has checkpoints.

        Raises:
            ResumeError: it is incomplete, or has its boundary elsewhere.
        """
        try:
            made = cls(
                folder,
                int(content["segment"]),
                int(content["boundary"]),
                {int(entry): str(name) for entry, name in content["caches"]},
                dict(content["files"]),
            )
            if made.boundary != START:
                made._read_held(content["held"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise _foreign(folder, "a complete checkpoint", type(error).__name__) from error
        if made.boundary not in (START, *boundaries):
            where = f"a boundary at one of the layers {list(boundaries)}"
            raise _foreign(folder, f"{where}, as --checkpoint-every says", made.boundary)
        return made

    def _read_held(self, held: dict[str, Any]) -> None:
        arrays = self.folder.load(held["files"][0])
        self.kept = [
            Kept(output, changed, [arrays[f"{n}.{k}"] for k in range(count)])
            for n, (output, changed, count) in enumerate(held["chunks"])
        ]
        self.seen = held["seen"]

    def require_entries(self, entries: set[int]) -> None:
        """Refuse a checkpoint that does not hold exactly these entries. Raises ResumeError."""
        if set(self.caches) != entries:
            raise _foreign(self.folder, f"caches {sorted(entries)}", sorted(self.caches))

    def restore_entry(self, entry: int, own: Any, probed: Any, *, into: Any) -> None:
        """Fill one entry of the prompt cache; see restore_cache."""
        name = self.caches[entry]
        restore_cache(self.folder.folder / name, self.folder.load(name), own, probed, into)


def check_identity(
    folder: CheckpointFolder, content: dict[str, Any], identity: dict[str, str]
) -> None:
    """Refuse a checkpoint of another prefill. Raises ResumeError, which says what differs."""
    found = content.get("identity")
    for name, wanted in identity.items():
        actual = found.get(name, "nothing") if isinstance(found, dict) else "nothing"
        if actual != wanted:
            budget = content.get("budget")
            more = f" (with memory_budget {budget})" if name == "chunks" else ""
            raise _foreign(folder, f"{name}: {wanted}", f"{actual}{more}")


def _foreign(folder: CheckpointFolder, expected: str, actual: object) -> ResumeError:
    return ResumeError(
        "this checkpoint is of another prefill",
        file=folder.folder,
        expected=expected,
        actual=actual,
        remedy="use the model, prompt and options that it was made with, or remove the folder",
    )
