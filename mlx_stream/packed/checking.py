"""Files of a packed folder against their checksums, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_stream import interrupts
from mlx_stream.errors import DamagedRecordError, PackError
from mlx_stream.packed.digests import Digester, differing
from mlx_stream.packed.layout import FileLayout
from mlx_stream.packed.pieces import PieceSource
from mlx_stream.storage.checkpoint import Checkpoint, FileIdentity
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.reader import Reader


@dataclass(frozen=True)
class FileCheck:
    """What a file's parts hash to, and which of them are damaged."""

    layout: FileLayout
    expected: Sequence[int]
    found: Sequence[int]
    damaged: Sequence[int]

    def labels(self) -> list[str]:
        """Names of the damaged parts."""
        return [self.layout.parts[n].label for n in self.damaged]

    def require_sound(self, path: Path) -> None:
        """Raises DamagedRecordError that names the first damaged part."""
        for n in self.damaged:
            padding = self.found[n] == self.expected[n]
            raise DamagedRecordError(
                f"The file is damaged in {len(self.damaged)} of {len(self.layout.parts)} parts.",
                file=path,
                tensor=self.layout.parts[n].label,
                expected="zeros as padding" if padding else f"xxh3-64 {self.expected[n]:016x}",
                actual="other bytes" if padding else f"{self.found[n]:016x}",
                remedy="mlx_stream repair FOLDER --source CHECKPOINT; then check the disk",
            )


@contextmanager
def open_files(folder: Path, paths: Sequence[Path], io: IoChoice) -> Iterator[PieceSource]:
    """Pieces of files as they are now. Raises PackError for one that cannot be opened."""
    identities = []
    for path in paths:
        try:
            identities.append(FileIdentity.of(path, path.stat()))
        except OSError as error:
            raise PackError(
                "a file cannot be read",
                file=path,
                actual=error.strerror or str(error),
                remedy="check its permissions, or run mlx_stream repair",
            ) from error
    with Reader(Checkpoint(folder, {}, tuple(identities), {}), io=io) as reader:
        yield PieceSource(reader)


def check_file(
    layout: FileLayout,
    expected: Sequence[int],
    pieces: PieceSource,
    number: int,
    progress: Callable[[int], None] | None = None,
) -> FileCheck:
    """Read a file and compare.

    Args:
        expected: a checksum for each part.
        pieces: of files that `open_files` opened; this one is `number`, as long as the layout says.
    """
    digester = Digester(layout, check_padding=True)
    for piece in pieces.read(number, layout.nbytes):
        interrupts.check()
        digester.add(piece)
        if progress is not None:
            progress(len(piece.data))
    found = digester.finish()
    return FileCheck(layout, expected, found, differing(found, expected, digester.dirty))
