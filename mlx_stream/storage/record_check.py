"""Checksums of expert records: what must hash to what, and the check itself.

A record's checksum is the xxh3-64 of its tensors in file order, padding left out, so that it can be
computed wherever the tensors lie in a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from mlx_stream.errors import DamagedRecordError

if TYPE_CHECKING:
    from pathlib import Path

    from mlx_stream.storage.checkpoint import FileIdentity
    from mlx_stream.storage.expert_index import ExpertLayer
    from mlx_stream.storage.read_plan import Plane

VerifyChoice = Literal["off", "first", "always"]


@dataclass(frozen=True)
class RecordCheck:
    """One expert of one read."""

    layer: str
    expert: int
    file: int  # index into Checkpoint.files
    digest: int
    parts: tuple[tuple[int, int], ...]  # (slot offset, nbytes), in the order of the record


def record_checks(
    layer: ExpertLayer, experts: Sequence[int], planes: Sequence[Plane]
) -> tuple[RecordCheck, ...]:
    """A check for each expert of a packed layer's read; none for other layers."""
    if layer.record is None:
        return ()
    places = dict(zip((t.offset for t in layer.tensors), planes, strict=True))
    ordered = [places[offset] for offset in sorted(places)]  # tensors at one place count once
    return tuple(
        RecordCheck(
            layer.name,
            expert,
            layer.tensors[0].file,
            layer.record.digests[expert],
            tuple((p.offsets[i], p.nbytes) for p in ordered),
        )
        for i, expert in enumerate(experts)
    )


class RecordVerifier:
    """Decides which checks are due, and remembers the experts that were sound. Thread safe."""

    def __init__(self, mode: VerifyChoice) -> None:
        self._mode = mode
        self._sound: set[tuple[str, int]] = set()

    def due(self, checks: Sequence[RecordCheck]) -> tuple[RecordCheck, ...]:
        """Those that must be done on these reads."""
        if self._mode == "off":
            return ()
        if self._mode == "always":
            return tuple(checks)
        return tuple(c for c in checks if (c.layer, c.expert) not in self._sound)

    def check(
        self, checks: Iterable[RecordCheck], buffer: np.ndarray, files: Sequence[FileIdentity]
    ) -> DamagedRecordError | None:
        """The error of the first record that is damaged, or None."""
        for c in checks:
            found = digest_parts(buffer, c.parts)
            if found != c.digest:
                return damaged_record(files[c.file].path, c.layer, c.expert, c.digest, found)
            self._sound.add((c.layer, c.expert))
        return None


def digest_parts(buffer: np.ndarray, parts: Iterable[tuple[int, int]]) -> int:
    """xxh3-64 of parts of a 1-D uint8 array, one after the other."""
    digest = xxhash.xxh3_64()
    for start, nbytes in parts:
        digest.update(buffer[start : start + nbytes])
    return digest.intdigest()


def damaged_record(
    path: Path | str, layer: str, expert: int, expected: int, found: int
) -> DamagedRecordError:
    """The error that names the record."""
    return DamagedRecordError(
        "An expert's bytes are damaged.",
        file=path,
        tensor=f"{layer} expert {expert}",
        expected=f"xxh3-64 {expected:016x}",
        actual=f"{found:016x}",
        remedy="mlx_stream repair FOLDER --source CHECKPOINT writes it anew; then check the disk",
    )
