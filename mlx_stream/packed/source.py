"""Where the bytes of a packing come from: a checkpoint as it is, or whatever makes new ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlx_stream.packed.layout import FileLayout
from mlx_stream.packed.pieces import PIECE_NBYTES, Piece, PieceSource
from mlx_stream.storage.checkpoint import Checkpoint, open_checkpoint
from mlx_stream.storage.expert_index import ExpertIndex, build_expert_index
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.reader import Reader


class TensorError(NamedTuple):
    """What quantizing a weight changed: sums over all its values, in float32."""

    squared_error: float
    squared_norm: float

    def __add__(self, other: object) -> TensorError:
        assert isinstance(other, tuple)
        return TensorError(self[0] + other[0], self[1] + other[1])

    @property
    def relative(self) -> float:
        """Root of the error's energy over the weight's."""
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0


class SideFile(NamedTuple):
    """A file beside the weights: a copy of `path`, or `data`."""

    name: str
    path: Path | None
    data: bytes = b""

    @property
    def nbytes(self) -> int:
        """Its size. Raises OSError if the file is gone."""
        return len(self.data) if self.path is None else self.path.stat().st_size


class PieceMaker(Protocol):
    """Makes the bytes of packed files."""

    def assemble(
        self, layout: FileLayout, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[Piece]:
        """The file, or some ranges of it. Pieces are valid until the piece after the next."""

    def take_errors(self) -> Mapping[str, TensorError]:
        """By weight, what quantizing changed since the last call."""


class PackSource(Protocol):
    """What is packed."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What is read."""

    @property
    def index(self) -> ExpertIndex:
        """What is written."""

    @property
    def conversion(self) -> Mapping[str, Any] | None:
        """How the weights are changed, for the manifest; None if they are not."""

    def side_files(self, found: Sequence[Path]) -> list[SideFile]:
        """The files beside the weights, made of those that were found."""

    def pieces(
        self, *, io: IoChoice, threads: int, piece_nbytes: int = PIECE_NBYTES
    ) -> AbstractContextManager[PieceMaker]:
        """Open the source. Its files must not have changed when the block ends."""


@dataclass(frozen=True)
class PlainSource:
    """A checkpoint whose values stay as they are."""

    index: ExpertIndex

    @property
    def checkpoint(self) -> Checkpoint:
        """What is read, and what is written."""
        return self.index.checkpoint

    @property
    def conversion(self) -> None:
        """None: no value changes."""
        return

    def side_files(self, found: Sequence[Path]) -> list[SideFile]:
        """All of them."""
        return [SideFile(p.name, p) for p in found]

    @contextmanager
    def pieces(
        self, *, io: IoChoice, threads: int, piece_nbytes: int = PIECE_NBYTES
    ) -> Iterator[PieceMaker]:
        """The source's own bytes."""
        with Reader(self.checkpoint, io=io, threads=threads) as reader:
            yield PlainPieces(reader, piece_nbytes=piece_nbytes)
            reader.check_unchanged()


class PlainPieces(PieceSource):
    """Bytes that are somewhere in the source."""

    def take_errors(self) -> Mapping[str, TensorError]:
        """None: no value changes."""
        return {}


def open_plain(path: Path) -> PlainSource:
    """Raises CheckpointError, and UnsupportedModelError for experts that are not stacked."""
    return PlainSource(build_expert_index(open_checkpoint(path)))
