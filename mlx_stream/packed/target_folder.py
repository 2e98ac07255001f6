"""What a packer finds in its target folder, and what it may do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlx_stream.errors import CheckpointError, PackError
from mlx_stream.packed.folder_lock import LOCK_NAME
from mlx_stream.packed.layout import PackPlan
from mlx_stream.packed.manifest_json import parse_journal
from mlx_stream.packed.output_file import TEMPORARY
from mlx_stream.storage.packed_manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    PackedManifest,
    SourceFile,
    is_packed,
    read_manifest,
)


@dataclass(frozen=True)
class Found:
    """A folder that may be packed into.

    Attributes:
        done: the manifest, if this very packing is there already.
        digests: by file, of those that the journal calls finished; to be checked.
    """

    done: PackedManifest | None = None
    digests: dict[str, list[int]] = field(default_factory=dict)


def prepare_target(
    target: Path, identity: str, plan: PackPlan, sources: Sequence[SourceFile], *, force: bool
) -> Found:
    """Look at the folder; what another packing left is removed with `force`. The lock is held.

    Args:
        identity: `plan_id` of the plan.

    Raises:
        PackError: the folder holds other things; with `force` only if they are no packing.
    """
    journal = target / JOURNAL_NAME
    raw = journal.read_bytes() if journal.is_file() else b""
    known, digests = parse_journal(raw)
    for stale in target.glob(f".*{TEMPORARY}"):
        stale.unlink(missing_ok=True)
    if is_packed(target):
        manifest = _read_or_none(target)
        if not force and manifest is not None and _same(manifest, plan, sources):
            journal.unlink(missing_ok=True)
            return Found(done=manifest)
        _refuse_unless(force, "another packing", target / MANIFEST_NAME)
        _clear(target, manifest)
    elif raw and known != identity:
        _refuse_unless(force, "a packing of something else, not finished", journal)
        _clear(target, None)
    elif not raw:
        _refuse_foreign(target)
    names = {f.name for f in plan.files}
    same = known == identity and journal.is_file()
    return Found(digests={n: d for n, d in digests.items() if n in names} if same else {})


def _same(found: PackedManifest, plan: PackPlan, sources: Sequence[SourceFile]) -> bool:
    theirs = [(r.layer, r.order, r.file) for r in found.layers]
    sizes = {f.name: f.size for f in found.files}
    return (
        found.sources == tuple(sources)
        and theirs == [(r.layer, r.order, r.file) for r in plan.records]
        and sizes == {f.name: f.nbytes for f in plan.files}
    )


def _read_or_none(folder: Path) -> PackedManifest | None:
    try:
        return read_manifest(folder)
    except CheckpointError:
        return None


def _refuse_unless(force: bool, what: str, path: Path) -> None:
    if not force:
        raise PackError(
            f"the folder holds {what}",
            file=path,
            expected="an empty folder, or one of this source and order",
            remedy="choose another folder, or pass --force to replace it",
        )


def _refuse_foreign(target: Path) -> None:
    """Never write among files that are not ours, with --force or without."""
    found = sorted(p.name for p in target.iterdir() if p.name != LOCK_NAME)
    if found:
        raise PackError(
            "the folder holds other files",
            file=target,
            expected="an empty folder, or an unfinished packing",
            actual=", ".join(found[:5]),
            remedy="choose another folder for -o",
        )


def _clear(target: Path, old: PackedManifest | None) -> None:
    """Unmake another packing: the manifest first, so that nobody uses the rest."""
    (target / MANIFEST_NAME).unlink(missing_ok=True)
    names = [f.name for f in (*old.files, *old.others)] if old is not None else []
    names += [p.name for p in target.glob("experts-*-of-*.safetensors")]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (target / name).unlink()
    (target / JOURNAL_NAME).unlink(missing_ok=True)
