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
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.resume.forms import changed_forms, output_form, seen_forms
from mlx_stream.resume.kept_caches import restore_cache
from mlx_stream.resume.store import CheckpointFolder

START = -1  # the boundary in front of all layers
DTYPES = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "complex64"),
)


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
        except (LookupError, TypeError, ArithmeticError, ValueError, AttributeError) as error:
            raise _foreign(folder, "a complete checkpoint", type(error).__name__) from error
        if made.boundary not in (START, *boundaries):
            where = f"a boundary at one of the layers {list(boundaries)}"
            raise _foreign(folder, f"{where}, as --checkpoint-every says", made.boundary)
        return made

    def _read_held(self, held: dict[str, Any]) -> None:
        name = held["files"][0]
        if name not in self.sums:
            raise ValueError("a file without a checksum")
        arrays = self.folder.load(name)
        for n, (output, changed, count) in enumerate(held["chunks"]):
            own = [arrays[f"{n}.{k}"] for k in range(min(int(count), len(arrays) + 1))]
            if not (output_form(output, len(own)) and changed_forms(changed, len(own))):
                raise ValueError("a form of a layer's output")
            self.kept.append(Kept(output, changed, own))
        self.seen = held["seen"]
        if not all(seen_forms(seen, DTYPES) for seen in self.seen):
            raise ValueError("a form of what a chunk saw")

    def require_chunks(self, plan: PrefillPlan, entries: int) -> None:
        """Refuse a checkpoint of other segments, chunks or cache entries. Raises ResumeError."""
        if not 0 <= self.segment < len(plan.segments):
            raise _foreign(self.folder, f"{len(plan.segments)} segments", self.segment)
        if self.boundary == START:
            return
        chunks = len(plan.segments[self.segment].chunks)
        found = (len(self.kept), [len(seen) for seen in self.seen])
        if found != (chunks, [entries] * chunks):
            raise _foreign(self.folder, f"{chunks} chunks of {entries} caches", found)

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
