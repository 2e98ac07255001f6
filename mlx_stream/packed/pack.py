"""Packing: a checkpoint's experts into records, file by file, safe to stop at any moment.

The order of events makes it safe: every file gets its name when it is complete, the journal then
says so, and the manifest, without which nobody uses the folder, is written last.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_stream import interrupts
from mlx_stream.errors import PackError
from mlx_stream.packed.checking import check_file, open_files
from mlx_stream.packed.digests import Digester
from mlx_stream.packed.folder_lock import folder_lock
from mlx_stream.packed.layout import SHARD_NBYTES, FileLayout, PackPlan, plan_pack
from mlx_stream.packed.manifest_json import (
    journal_json,
    make_manifest,
    manifest_json,
    plan_id,
    source_files,
)
from mlx_stream.packed.output_file import OutputFile, write_whole
from mlx_stream.packed.pieces import PIECE_NBYTES
from mlx_stream.packed.renewal import renew_side_files
from mlx_stream.packed.side_files import copy_side_files, side_files
from mlx_stream.packed.source import PackSource, PieceMaker, SideFile, TensorError, open_plain
from mlx_stream.packed.target_folder import Found, prepare_target
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.packed_manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    PackedManifest,
    SourceFile,
)

SPARE_NBYTES = 64 << 20  # free space that stays free
Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done


@dataclass(frozen=True)
class PackOptions:
    """How a checkpoint is packed.

    Attributes:
        orders: by layer name, its experts in file order.
        verify: read everything again at the end.
        force: replace a folder that holds another packing.
        open: how the source is opened; another way converts its weights.
    """

    orders: Mapping[str, Sequence[int]] | None = None
    verify: bool = False
    force: bool = False
    io: IoChoice = "direct"
    threads: int = 4
    shard_nbytes: int = SHARD_NBYTES
    piece_nbytes: int = PIECE_NBYTES
    open: Callable[[Path], PackSource] = open_plain


@dataclass(frozen=True)
class PackReport:
    """What was done. `kept_nbytes` were there from an earlier run.

    `already` means that the weights were there, `renewed` which files beside them were not.
    `errors` are those of the weights that were quantized, by name.
    """

    manifest: PackedManifest
    nbytes: int
    kept_nbytes: int
    seconds: float
    already: bool = False
    renewed: tuple[str, ...] = ()
    errors: Mapping[str, TensorError] = field(default_factory=dict)


def nothing(done: int, total: int, what: str) -> None:
    """Progress that nobody sees."""


def pack(
    source: Path, target: Path, options: PackOptions, progress: Progress = nothing
) -> PackReport:
    """Pack the checkpoint `source` into the folder `target`; goes on where an earlier run stopped.

    Raises:
        PackError: no room, not writable, somebody else packs there, or the folder holds other
            things; nothing that was there is lost.
        CheckpointError, ReadError: the source cannot be used, or changed meanwhile.
        DamagedRecordError: `verify` found other bytes than were written.
    """
    started = time.perf_counter()
    opened = options.open(source)
    plan = plan_pack(opened.index, options.orders or {}, shard_nbytes=options.shard_nbytes)
    sources = source_files(opened.checkpoint)
    target = _make_folder(opened.checkpoint.path, target)
    with interrupts.deferred(), folder_lock(target):
        identity = plan_id(plan, sources, opened.conversion)
        found = prepare_target(
            target, identity, plan, sources, opened.conversion, force=options.force
        )
        if found.done is not None:
            done, renewed = renew_side_files(opened, found.done, target)
            seconds = time.perf_counter() - started
            return PackReport(
                done, plan.nbytes, plan.nbytes, seconds, already=True, renewed=renewed
            )
        packing = _Packing(opened, plan, sources, target, options, progress)
        manifest, kept = packing.run(identity, found)
    seconds = time.perf_counter() - started
    return PackReport(manifest, plan.nbytes, kept, seconds, errors=packing.errors)


def _make_folder(source: Path, target: Path) -> Path:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(
            "the folder cannot be made",
            file=target,
            expected="a folder, or a name for a new one",
            actual=error.strerror or str(error),
            remedy="choose another folder for -o",
        ) from error
    if target.resolve() == source.resolve():
        raise PackError(
            "source and target are the same folder",
            file=target,
            expected="another folder",
            remedy="choose another folder for -o",
        )
    return target


class _Packing:
    """One run, with the folder's lock held."""

    def __init__(
        self,
        source: PackSource,
        plan: PackPlan,
        sources: tuple[SourceFile, ...],
        target: Path,
        options: PackOptions,
        progress: Progress,
    ) -> None:
        self._source, self._plan, self._sources = source, plan, sources
        self._target, self._options, self._progress = target, options, progress
        self._id = ""
        self._digests: dict[str, list[int]] = {}
        self._errors: dict[str, dict[str, TensorError]] = {}  # by file, by weight
        self._done = 0
        self._total = plan.nbytes * (2 if options.verify else 1)

    @property
    def errors(self) -> dict[str, TensorError]:
        """Of all weights that were quantized, by name."""
        return {name: e for found in self._errors.values() for name, e in found.items()}

    def run(self, identity: str, found: Found) -> tuple[PackedManifest, int]:
        """Write what is missing. Returns the manifest and the bytes that were there."""
        self._id = identity
        kept = self._keep_finished(found)
        self._require_room(kept)
        self._write_journal()
        options = self._options
        origin = self._source.checkpoint.path
        with self._source.pieces(
            io=options.io, threads=options.threads, piece_nbytes=options.piece_nbytes
        ) as pieces:
            for layout in self._plan.files:
                if layout.name not in self._digests:
                    self._digests[layout.name] = self._write(layout, pieces)
                    self._errors[layout.name] = dict(pieces.take_errors())
                    self._write_journal()
            others = copy_side_files(self._sides(), self._target)
        if options.verify:
            self._verify(self._plan.files)
        manifest = make_manifest(
            origin.resolve(), self._sources, self._plan, self._digests, others, self._conversion()
        )
        write_whole(self._target / MANIFEST_NAME, manifest_json(manifest))
        with suppress(OSError):  # the manifest is there: a journal left beside it is no matter
            (self._target / JOURNAL_NAME).unlink(missing_ok=True)
        return manifest, kept

    def _sides(self) -> list[SideFile]:
        return self._source.side_files(side_files(self._source.checkpoint.path))

    def _conversion(self) -> dict[str, Any] | None:
        """For the manifest: what was asked for, and what it changed in each weight."""
        asked = self._source.conversion
        if asked is None:
            return None
        errors = {name: round(e.relative, 6) for name, e in self.errors.items()}
        return {**asked, "relative_errors": errors}

    def _write(self, layout: FileLayout, pieces: PieceMaker) -> list[int]:
        digester = Digester(layout)
        path = self._target / layout.name
        with OutputFile(path, layout.nbytes, io=self._options.io) as output:
            for piece in pieces.assemble(layout):
                interrupts.check()
                output.write(piece.at, piece.data)
                digester.add(piece)
                self._report(len(piece.data), layout.name)
            output.commit()
        return digester.finish()

    def _keep_finished(self, found: Found) -> int:
        """Take over the files that are as the journal says. Returns their bytes."""
        layouts = {f.name: f for f in self._plan.files}
        kept = 0
        for name, digests in found.digests.items():
            layout = layouts[name]
            if self._sound(layout, digests):
                self._digests[name] = digests
                self._errors[name] = found.errors.get(name, {})
                kept += layout.nbytes
                self._report(layout.nbytes, f"{name} is there")
        return kept

    def _sound(self, layout: FileLayout, digests: list[int]) -> bool:
        path = self._target / layout.name
        if len(digests) != len(layout.parts) or not path.is_file() or path.is_symlink():
            return False
        if path.stat().st_size != layout.nbytes:
            return False
        with open_files(self._target, [path], self._options.io) as pieces:
            return not check_file(layout, digests, pieces, 0).damaged

    def _verify(self, layouts: Sequence[FileLayout]) -> None:
        paths = [self._target / layout.name for layout in layouts]
        with open_files(self._target, paths, self._options.io) as pieces:
            for number, layout in enumerate(layouts):
                digests = self._digests[layout.name]
                result = check_file(
                    layout,
                    digests,
                    pieces,
                    number,
                    lambda n, name=layout.name: self._report(n, f"verifying {name}"),
                )
                result.require_sound(paths[number])

    def _require_room(self, kept: int) -> None:
        sides = sum(f.nbytes for f in self._sides())
        needed = self._plan.nbytes - kept + sides + SPARE_NBYTES
        free = shutil.disk_usage(self._target).free
        if needed > free:
            raise PackError(
                "there is not enough free space",
                file=self._target,
                expected=f"{needed} bytes ({kept} are there already)",
                actual=f"{free} bytes",
                remedy="free some space, or choose a folder on another disk",
            )

    def _write_journal(self) -> None:
        journal = journal_json(self._id, self._digests, self._errors)
        write_whole(self._target / JOURNAL_NAME, journal)

    def _report(self, nbytes: int, what: str) -> None:
        self._done += nbytes
        self._progress(self._done, self._total, what)
