"""Repairing: only what is damaged is written anew, from the source, and only if the source is it.

What the source gives is hashed before a byte is written: a folder is never made worse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_stream import interrupts
from mlx_stream.errors import MlxStreamError, PackError
from mlx_stream.packed.checking import FileCheck
from mlx_stream.packed.digests import Digester, digest_bytes
from mlx_stream.packed.folder_lock import folder_lock
from mlx_stream.packed.layout import (
    FileLayout,
    Span,
    expert_file,
    resident_files,
    source_places,
)
from mlx_stream.packed.manifest_json import part_digests, source_files
from mlx_stream.packed.output_file import OutputFile, write_all
from mlx_stream.packed.side_files import copy_side_file, side_bytes, side_files
from mlx_stream.packed.source import PackSource, PieceMaker, SideFile, open_plain
from mlx_stream.packed.verify import check_packed_file, verify_other
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.expert_index import ExpertIndex
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.packed_manifest import PackedFile, PackedManifest, read_manifest

Progress = Callable[[int, int, str], None]
OpenSource = Callable[[Path, Mapping[str, Any]], PackSource]  # a path, what packed.json says
THREADS = 4


@dataclass(frozen=True)
class RepairReport:
    """What was written anew: ``(file, parts)``; a whole file is named as such."""

    repaired: tuple[tuple[str, tuple[str, ...]], ...]
    nbytes: int


def repair(
    folder: Path,
    source: Path,
    *,
    io: IoChoice = "direct",
    progress: Progress | None = None,
    open_source: OpenSource | None = None,
) -> RepairReport:
    """Find what is damaged and write it anew from the checkpoint that was packed.

    Args:
        open_source: opens the checkpoint as `packed.json` says its weights were converted; only
            asked for a folder that says so.

    Raises:
        PackError: the source is not the one that was packed, or holds other bytes.
        CheckpointError: the manifest itself is damaged: pack again.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    opened = _open(source, manifest, open_source)
    _check_source(opened.checkpoint, manifest, folder)
    layouts = _layouts(opened.index, manifest)
    with interrupts.deferred(), folder_lock(folder):
        work = _Repair(folder, manifest, opened, io, progress)
        return work.run(layouts)


def _open(source: Path, manifest: PackedManifest, other: OpenSource | None) -> PackSource:
    if manifest.conversion is None:
        return open_plain(source)
    if other is None:
        raise PackError(
            "the weights were converted while they were packed",
            file=source,
            expected="a way to convert them again",
            remedy="use mlx_stream repair, or pass open_source",
        )
    return other(source, manifest.conversion)


def _check_source(checkpoint: Checkpoint, manifest: PackedManifest, folder: Path) -> None:
    found = {(s.name, s.size, s.header_digest) for s in source_files(checkpoint)}
    wanted = {(s.name, s.size, s.header_digest) for s in manifest.sources}
    if found != wanted:
        differing = sorted(name for name, *_ in found ^ wanted)
        raise PackError(
            "this is not the checkpoint that was packed",
            file=checkpoint.path,
            expected=f"the shards of {manifest.source}, as packed.json describes them",
            actual=f"other shards: {', '.join(differing[:4])}",
            remedy=f"pass the checkpoint that {folder.name} was made of",
        )


def _layouts(index: ExpertIndex, manifest: PackedManifest) -> dict[str, FileLayout]:
    """Every file of the manifest, with the places of its bytes in the source."""
    where = source_places(index)
    known = {
        t.name: (layer.num_experts, index.checkpoint.tensors[t.name].nbytes // layer.num_experts)
        for layer in index.layers
        for t in layer.tensors
    }
    for record in manifest.layers:
        if any(known.get(t.name) != (record.num_experts, t.nbytes) for t in record.tensors):
            raise PackError(
                "the manifest names tensors that the source has not",
                file=index.checkpoint.path,
                tensor=record.layer,
                expected=f"tensors of {record.num_experts} experts, as packed.json says",
                actual="others",
                remedy="pack the checkpoint again",
            )
    made = {f.name: f for f in resident_files(index)}
    for file in manifest.expert_files:
        records = [r for r in manifest.layers if r.file == file.name]
        made[file.name] = expert_file(file.name, records, where)
    for file in manifest.files:
        if file.name not in made or made[file.name].nbytes != file.size:
            found = made[file.name].nbytes if file.name in made else "no such file"
            raise PackError(
                "the manifest names a file that the source does not give",
                file=index.checkpoint.path,
                expected=f"{file.name} of {file.size} bytes",
                actual=found,
                remedy="pack the checkpoint again",
            )
    return made


class _Repair:
    """One run, with the folder's lock held."""

    def __init__(
        self,
        folder: Path,
        manifest: PackedManifest,
        source: PackSource,
        io: IoChoice,
        progress: Progress | None,
    ) -> None:
        self._folder, self._manifest, self._source = folder, manifest, source
        self._io, self._progress = io, progress
        self._done, self._total = 0, sum(f.size for f in manifest.files)
        self._nbytes = 0

    def run(self, layouts: dict[str, FileLayout]) -> RepairReport:
        """Check every file, write what is wrong."""
        repaired: list[tuple[str, tuple[str, ...]]] = []
        with self._source.pieces(io=self._io, threads=THREADS) as pieces:
            for file in self._manifest.files:
                if labels := self._file(file, layouts[file.name], pieces):
                    repaired.append((file.name, labels))
        origins = {f.name: f for f in self._source.side_files(self._found())}
        for file in self._manifest.others:
            if self._other(file, origins.get(file.name)):
                repaired.append((file.name, ("file",)))
        return RepairReport(tuple(repaired), self._nbytes)

    def _found(self) -> list[Path]:
        return side_files(self._source.checkpoint.path)

    def _file(self, file: PackedFile, layout: FileLayout, pieces: PieceMaker) -> tuple[str, ...]:
        try:
            check = check_packed_file(
                self._folder, self._manifest, file, self._io, lambda n: self._report(n, file.name)
            )
        except (MlxStreamError, OSError):  # not there, cut, or its header damaged
            self._whole(layout, pieces)
            return ("file",)
        if not check.damaged:
            return ()
        self._parts(check, layout, pieces)
        return tuple(check.labels())

    def _whole(self, layout: FileLayout, pieces: PieceMaker) -> None:
        path = self._folder / layout.name
        digester = Digester(layout)
        with OutputFile(path, layout.nbytes, io=self._io) as output:
            for piece in pieces.assemble(layout):
                interrupts.check()
                output.write(piece.at, piece.data)
                digester.add(piece)
            self._require_same(layout, digester.finish(), range(len(layout.parts)))
            output.commit()
        self._nbytes += layout.nbytes

    def _parts(self, check: FileCheck, layout: FileLayout, pieces: PieceMaker) -> None:
        """In place: these bytes are wrong already, so an interruption loses nothing."""
        for n in check.damaged:
            digest = Digester(_only(layout, n))
            for piece in pieces.assemble(layout, [layout.parts[n][1:]]):
                digest.add(piece)
            self._require_same(layout, {n: digest.finish()[n]}, [n])
        path = self._folder / layout.name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                for n in check.damaged:
                    interrupts.check()
                    for piece in pieces.assemble(layout, [layout.parts[n][1:]]):
                        write_all(fd, piece.data, piece.at)
                        self._nbytes += len(piece.data)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise PackError(
                "a damaged part cannot be written",
                file=path,
                actual=error.strerror or str(error),
                remedy="check the disk and permissions, then repair again",
            ) from error

    def _require_same(
        self, layout: FileLayout, found: Sequence[int] | dict[int, int], parts: Sequence[int]
    ) -> None:
        expected = part_digests(self._manifest, layout)
        for n in parts:
            if found[n] != expected[n]:
                raise PackError(
                    "the source holds other bytes than were packed",
                    file=self._source.checkpoint.path,
                    tensor=layout.parts[n].label,
                    expected=f"xxh3-64 {expected[n]:016x}",
                    actual=f"{found[n]:016x}",
                    remedy="the source is damaged or changed: verify it, then pack it again",
                )

    def _other(self, file: PackedFile, origin: SideFile | None) -> bool:
        if not verify_other(self._folder / file.name, file):
            return False
        data = b"" if origin is None else side_bytes(origin)
        if origin is None or digest_bytes(data) != file.digest:
            raise PackError(
                "the source has another version of a file beside the weights",
                file=self._source.checkpoint.path / file.name,
                expected=f"xxh3-64 {file.digest:016x}",
                actual="no such file" if origin is None else "other bytes",
                remedy="restore it, or pack the checkpoint again",
            )
        copy_side_file(SideFile(file.name, None, data), self._folder)
        self._nbytes += file.size
        return True

    def _report(self, nbytes: int, what: str) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total, f"checking {what}")


def _only(layout: FileLayout, part: int) -> FileLayout:
    """The same file with the spans of one part."""
    spans: tuple[Span, ...] = tuple(s for s in layout.spans if s.part == part)
    return FileLayout(layout.name, layout.header, layout.nbytes, layout.parts, spans)
