"""What a packer finds in its target folder, and what it may do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_stream.errors import CheckpointError, PackError
from mlx_stream.packed.folder_lock import LOCK_NAME
from mlx_stream.packed.layout import PackPlan
from mlx_stream.packed.manifest_json import asked, parse_journal
from mlx_stream.packed.output_file import TEMPORARY
from mlx_stream.packed.source import TensorError
from mlx_stream.storage.packed_manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
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
        errors: by file, what quantizing its weights changed.
    """

    done: PackedManifest | None = None
    digests: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, dict[str, TensorError]] = field(default_factory=dict)


def prepare_target(
    target: Path,
    identity: str,
    plan: PackPlan,
    sources: Sequence[SourceFile],
    conversion: Mapping[str, Any] | None = None,
    *,
    force: bool,
) -> Found:
    """Look at the folder; what another packing left is removed with `force`. The lock is held.

    Args:
        identity: `plan_id` of the plan.

    Raises:
        PackError: the folder holds other things; with `force` only if they are no packing.
    """
    with _told(target):
        return _prepare(target, identity, plan, sources, conversion, force=force)


def _prepare(
    target: Path,
    identity: str,
    plan: PackPlan,
    sources: Sequence[SourceFile],
    conversion: Mapping[str, Any] | None,
    *,
    force: bool,
) -> Found:
    journal = target / JOURNAL_NAME
    raw = _read_journal(journal)
    known, digests, errors = parse_journal(raw)
    for stale in target.glob(f".*{TEMPORARY}"):
        stale.unlink(missing_ok=True)
    if is_packed(target):
        manifest = _read_or_none(target)
        if not force and manifest is not None and _same(manifest, plan, sources, conversion):
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
    if not same:
        return Found()
    return Found(None, {n: d for n, d in digests.items() if n in names}, errors)


def _read_journal(path: Path) -> bytes:
    """Its bytes; one that is no regular file is nobody's, one that is too large is another's."""
    if path.is_symlink() or not path.is_file():
        return b""
    with open(path, "rb") as file:
        raw = file.read(MAX_MANIFEST_NBYTES + 1)
    return raw if len(raw) <= MAX_MANIFEST_NBYTES else b"{}"


@contextlib.contextmanager
def _told(target: Path) -> Iterator[None]:
    """OSErrors become PackErrors that say what to do."""
    try:
        yield
    except OSError as error:
        raise PackError(
            "the folder cannot be prepared",
            file=error.filename or target,
            expected="a folder whose files can be read and removed",
            actual=error.strerror or str(error),
            remedy="check its permissions and the disk, or choose another folder for -o",
        ) from error


def _same(
    found: PackedManifest,
    plan: PackPlan,
    sources: Sequence[SourceFile],
    conversion: Mapping[str, Any] | None,
) -> bool:
    theirs = [(r.layer, r.order, r.file) for r in found.layers]
    sizes = {f.name: f.size for f in found.files}
    return (
        found.sources == tuple(sources)
        and asked(found.conversion) == asked(conversion)
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
