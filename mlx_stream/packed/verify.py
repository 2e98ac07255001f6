"""Verifying: every byte of a packed folder against its checksums, a plain one as far as possible.

A packed folder is read whole. A plain checkpoint has no checksums of its own: its structure is
checked, and its files against the hashes that the hub's client recorded. Either can be compared
with another checkpoint, tensor by tensor.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlx_stream import interrupts
from mlx_stream.errors import DenseModelError, MlxStreamError, PackError
from mlx_stream.packed.checking import FileCheck, check_file, open_files
from mlx_stream.packed.digests import digest_bytes, digest_pieces
from mlx_stream.packed.hub_hashes import file_hash, recorded_hash
from mlx_stream.packed.layout import FileLayout, Part, Span, expert_file
from mlx_stream.packed.manifest_json import part_digests, requantized
from mlx_stream.packed.pieces import PieceSource
from mlx_stream.packed.side_files import MAX_NBYTES
from mlx_stream.storage.checkpoint import Checkpoint, open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.packed_files import expert_path
from mlx_stream.storage.packed_manifest import PackedFile, PackedManifest, is_packed, read_manifest
from mlx_stream.storage.reader import Reader
from mlx_stream.storage.safetensors_header import (
    LENGTH_NBYTES,
    MAX_HEADER_NBYTES,
    parse_header,
)

Progress = Callable[[int, int, str], None]
REMEDY = "mlx_stream repair FOLDER --source CHECKPOINT; then check the disk"


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it must be."""

    file: str
    part: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.part}: {self.problem}"


@dataclass
class VerifyReport:
    """What was looked at, and what was found."""

    packed: bool
    checked: list[str] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    parts: int = 0
    nbytes: int = 0

    @property
    def sound(self) -> bool:
        """Nothing was found."""
        return not self.damage


class _Meter:
    """Bytes done, told to whoever shows them."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, nbytes: int, what: str) -> None:
        """More bytes are done."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total, what)


def verify(
    folder: Path,
    *,
    against: Path | None = None,
    io: IoChoice = "direct",
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a folder. Damage is reported, not raised.

    Raises:
        CheckpointError, PackError, ReadError: the folder cannot be checked at all.
    """
    folder = Path(folder)
    with interrupts.deferred():
        if is_packed(folder):
            report = _verify_packed(folder, io, progress)
        else:
            report = _verify_plain(folder, progress)
        if against is not None and report.sound:
            _compare(folder, against, io, report, progress)
    return report


# --- packed -------------------------------------------------------------------------------------


def _verify_packed(folder: Path, io: IoChoice, progress: Progress | None) -> VerifyReport:
    manifest = read_manifest(folder)
    report = VerifyReport(packed=True)
    meter = _Meter(sum(f.size for f in manifest.files), progress)
    for file in manifest.files:
        report.damage += verify_file(folder, manifest, file, io, report, meter.add)
    for file in manifest.others:
        report.damage += verify_other(folder / file.name, file)
    report.checked += ["checksums of every expert, tensor and file of packed.json"]
    if report.sound:
        build_expert_index(open_checkpoint(folder))
        report.checked.append("structure")
    return report


def verify_file(
    folder: Path,
    manifest: PackedManifest,
    file: PackedFile,
    io: IoChoice,
    report: VerifyReport,
    progress: Callable[[int, str], None],
) -> list[Damage]:
    """One safetensors file of a packed folder."""
    try:
        check = check_packed_file(
            folder, manifest, file, io, lambda n: progress(n, f"verifying {file.name}")
        )
    except MlxStreamError as error:
        return [Damage(file.name, "file", f"{error.problem} {error.actual or ''}".strip())]
    report.parts += len(check.layout.parts)
    report.nbytes += check.layout.nbytes
    return [Damage(file.name, label, "other bytes than were packed") for label in check.labels()]


def check_packed_file(
    folder: Path,
    manifest: PackedManifest,
    file: PackedFile,
    io: IoChoice,
    progress: Callable[[int], None] | None = None,
) -> FileCheck:
    """All parts of a file. Raises MlxStreamError if it is not there, cut, or its header damaged."""
    path = expert_path(folder, file.name)
    try:
        size = path.stat().st_size
        _require_size(path, file.size, size)
        layout = layout_of(path, manifest, file)
    except OSError as error:
        raise PackError(
            "The file cannot be read.",
            file=path,
            expected="a readable file",
            actual=error.strerror or str(error),
            remedy=REMEDY,
        ) from error
    _require_size(path, layout.nbytes, size)
    with open_files(folder, [path], io) as pieces:
        return check_file(layout, part_digests(manifest, layout), pieces, 0, progress)


def _require_size(path: Path, expected: int, found: int) -> None:
    if found != expected:
        raise PackError(
            "The file has another size.",
            file=path,
            expected=f"{expected} bytes",
            actual=f"{found} bytes, not {expected}",
            remedy=REMEDY,
        )


def layout_of(path: Path, manifest: PackedManifest, file: PackedFile) -> FileLayout:
    """The parts of a file: from the manifest, or from its own header when its hash is right."""
    if not file.tensors:
        return expert_file(file.name, [r for r in manifest.layers if r.file == file.name])
    with open(path, "rb") as f:
        header = f.read(min(file.header_nbytes, MAX_HEADER_NBYTES + LENGTH_NBYTES))
    if digest_bytes(header) != file.digest:
        raise PackError(
            "The header is damaged.",
            file=path,
            expected="the bytes that were packed",
            actual="other bytes than were packed",
            remedy=REMEDY,
        )
    return _tensor_layout(file.name, header, file.size, path)


def _tensor_layout(name: str, header: bytes, size: int, path: Path) -> FileLayout:
    parts = [Part("header", 0, len(header))]
    spans = [Span(0, len(header), 0, 0, 0)]
    for t in parse_header(header, size, path):
        if t.nbytes:
            spans.append(Span(t.offset, t.nbytes, len(parts), 0, t.offset))
        parts.append(Part(t.name, t.offset, t.offset + t.nbytes))
    # Its end, not the file's: bytes behind the last tensor would be in no checksum.
    return FileLayout(name, header, parts[-1].end, tuple(parts), tuple(spans))


def verify_other(path: Path, file: PackedFile) -> list[Damage]:
    """One file beside the weights."""
    try:
        found = path.stat()
        if file.size > MAX_NBYTES or not stat.S_ISREG(found.st_mode):
            return [Damage(file.name, "file", f"no regular file of up to {MAX_NBYTES} bytes")]
        sound = found.st_size == file.size and digest_bytes(path.read_bytes()) == file.digest
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return [Damage(file.name, "file", getattr(error, "strerror", None) or str(error))]
    return [] if sound else [Damage(file.name, "file", "other bytes than were packed")]


# --- plain --------------------------------------------------------------------------------------


def _verify_plain(folder: Path, progress: Progress | None) -> VerifyReport:
    report = VerifyReport(packed=False)
    checkpoint = open_checkpoint(folder)
    try:
        build_expert_index(checkpoint)
        report.checked.append("headers, sizes and structure")
    except DenseModelError:
        report.checked.append("headers and sizes (the model has no experts)")
    known = [(p, h) for p in sorted(folder.iterdir()) if p.is_file() and (h := recorded_hash(p))]
    meter = _Meter(sum(p.stat().st_size for p, _ in known), progress)
    for path, wanted in known:
        found = file_hash(path, wanted, lambda n, name=path.name: meter.add(n, f"hashing {name}"))
        report.parts += 1
        report.nbytes += path.stat().st_size
        if found != wanted:
            report.damage.append(Damage(path.name, "file", f"hash {found}, not {wanted}"))
    text = f"hashes of {len(known)} files as the hub gave them" if known else "no hashes are known"
    report.checked.append(text)
    return report


# --- against another checkpoint -----------------------------------------------------------------


def _compare(
    folder: Path, other: Path, io: IoChoice, report: VerifyReport, progress: Progress | None
) -> None:
    mine, theirs = open_checkpoint(folder), open_checkpoint(other)
    _check_comparable(mine, theirs)
    meter = _Meter(mine.tensor_bytes + theirs.tensor_bytes, progress)
    found, wanted = dict(_digests(mine, io, meter)), dict(_digests(theirs, io, meter))
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            problem = "differs" if name in found and name in wanted else "is in one of them only"
            file = mine.files[mine.tensors[name].file].path.name if name in found else folder.name
            report.damage.append(Damage(file, name, f"{problem} (compared with {other})"))
    report.checked.append(f"every tensor against {other}")


def _check_comparable(mine: Checkpoint, theirs: Checkpoint) -> None:
    """Raises PackError for converted weights and those that they were made of."""
    made = [None if c.packed is None else requantized(c.packed.conversion) for c in (mine, theirs)]
    if made[0] != made[1]:
        raise PackError(
            "the weights were quantized while they were packed, so none is as in the other",
            file=mine.path,
            expected="a folder that was quantized in the same way",
            actual=str(theirs.path),
            remedy="without --against the checksums are verified; to compare, pack the source "
            "once more in the same way",
        )


def _digests(checkpoint: Checkpoint, io: IoChoice, meter: _Meter) -> Iterator[tuple[str, object]]:
    """``(tensor, (dtype, shape, xxh3))`` of each tensor, in whatever layout it lies."""
    with Reader(checkpoint, io=io, verify="off") as reader:
        pieces = PieceSource(reader)
        for t in checkpoint.tensors.values():
            layout = _one_tensor(checkpoint, t.name)
            digests = digest_pieces(layout, pieces.assemble(layout)).digests
            meter.add(t.nbytes, f"comparing {checkpoint.path.name}")
            yield t.name, (t.dtype, t.shape, digests[0])


def _one_tensor(checkpoint: Checkpoint, name: str) -> FileLayout:
    """A file of one tensor, its experts in id order."""
    t = checkpoint.tensors[name]
    if t.stride is None:
        spans = [Span(0, t.nbytes, 0, t.file, t.offset)] if t.nbytes else []
    else:
        each = t.nbytes // t.shape[0]
        record = next(r for r in checkpoint.records.values() if name.startswith(r.layer + "."))
        spans = [
            Span(e * each, each, 0, t.file, t.offset + record.position(e) * t.stride)
            for e in range(t.shape[0])
        ]
    return FileLayout(name, b"", t.nbytes, (Part(name, 0, t.nbytes),), tuple(spans))
