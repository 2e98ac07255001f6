"""The manifest and the journal as JSON, and the identity of a source."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mlx_stream.errors import CheckpointError
from mlx_stream.packed.digests import digest_bytes
from mlx_stream.packed.layout import FileLayout, PackPlan
from mlx_stream.packed.source import TensorError
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.packed_manifest import (
    CHECKSUM,
    FORMAT,
    VERSION,
    PackedFile,
    PackedManifest,
    SourceFile,
)
from mlx_stream.storage.record_layout import RECORD_ALIGN, TENSOR_ALIGN, RecordLayout
from mlx_stream.storage.safetensors_header import header_nbytes, read_header

Digests = Mapping[str, Sequence[int]]  # by file: one for each part


def source_files(checkpoint: Checkpoint) -> tuple[SourceFile, ...]:
    """What identifies a source: names, sizes, times and header hashes of its shards."""
    found = []
    for identity in checkpoint.files:
        try:
            with open(identity.path, "rb") as file:
                head = read_header(file, identity.size, identity.path)
            if len(head) != (wanted := header_nbytes(head, identity.size, identity.path)):
                raise OSError(errno.EIO, f"{len(head)} bytes of a header of {wanted}")
        except OSError as error:
            raise CheckpointError(
                "A shard cannot be read.",
                file=identity.path,
                expected="a readable file",
                actual=error.strerror or str(error),
                remedy="check the disk and permissions, then run the same command again",
            ) from error
        name, digest = identity.path.name, digest_bytes(head)
        found.append(SourceFile(name, identity.size, identity.mtime_ns, digest))
    return tuple(found)


def plan_id(
    plan: PackPlan, sources: Sequence[SourceFile], conversion: Mapping[str, Any] | None = None
) -> str:
    """The same for the same source, order, layout and conversion; ties a journal to its packing."""
    parts = {
        "version": VERSION,
        "sources": [asdict(s) for s in sources],
        "records": [asdict(r) for r in plan.records],
        "files": [[f.name, f.nbytes] for f in plan.files],
        "conversion": asked(conversion),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_manifest(
    source: Path,
    sources: Sequence[SourceFile],
    plan: PackPlan,
    digests: Digests,
    others: Sequence[PackedFile],
    conversion: dict[str, Any] | None = None,
) -> PackedManifest:
    """The manifest of a finished packing."""
    files = tuple(_packed_file(layout, digests[layout.name]) for layout in plan.files)
    records = with_digests(plan, digests)
    return PackedManifest(str(source), tuple(sources), files, tuple(others), records, conversion)


def asked(conversion: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of a conversion that was asked for, without what came of it."""
    if conversion is None:
        return None
    return {key: value for key, value in conversion.items() if key != "relative_errors"}


def requantized(conversion: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What was asked for if weights were quantized; None if they have their values still."""
    found = asked(conversion)
    return found if found and (found.get("experts") or found.get("rest")) else None


def _packed_file(layout: FileLayout, digests: Sequence[int]) -> PackedFile:
    resident = layout.name.startswith("model")
    pairs = zip(layout.parts[1:], digests[1:], strict=True) if resident else ()
    tensors = tuple((part.label, digest) for part, digest in pairs)
    return PackedFile(layout.name, layout.nbytes, digests[0], len(layout.header), tensors)


def with_digests(plan: PackPlan, digests: Digests) -> tuple[RecordLayout, ...]:
    """The plan's records with the checksum of each expert, by id."""
    taken = {layout.name: 1 for layout in plan.experts}  # after the header
    made = []
    for record in plan.records:
        start = taken[record.file]
        found = digests[record.file][start : start + record.num_experts]
        taken[record.file] = start + record.num_experts
        by_id = tuple(found[record.position(e)] for e in range(record.num_experts))
        made.append(replace(record, digests=by_id))
    return tuple(made)


def part_digests(manifest: PackedManifest, layout: FileLayout) -> list[int]:
    """What every part of a file must hash to, the header first."""
    file = next(f for f in manifest.files if f.name == layout.name)
    if file.tensors:
        known = dict(file.tensors)
        return [file.digest, *(known.get(part.label, -1) for part in layout.parts[1:])]
    records = [r for r in manifest.layers if r.file == layout.name]
    each = (r.digests[r.expert_at(p)] for r in records for p in range(r.num_experts))
    return [file.digest, *each]


def manifest_json(manifest: PackedManifest) -> bytes:
    """``packed.json``."""
    value = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": CHECKSUM,
        "record_alignment": RECORD_ALIGN,
        "tensor_alignment": TENSOR_ALIGN,
        "source": {
            "path": manifest.source,
            "files": [
                {
                    "name": s.name,
                    "size": s.size,
                    "mtime_ns": s.mtime_ns,
                    "header": hex64(s.header_digest),
                }
                for s in manifest.sources
            ],
        },
        "files": [
            {
                "name": f.name,
                "size": f.size,
                "header_nbytes": f.header_nbytes,
                "header": hex64(f.digest),
                "tensors": {name: hex64(d) for name, d in f.tensors},
            }
            for f in manifest.files
        ],
        "others": [
            {"name": f.name, "size": f.size, "digest": hex64(f.digest)} for f in manifest.others
        ],
        "layers": [_layer_json(r) for r in manifest.layers],
    }
    if manifest.conversion is not None:
        value["conversion"] = manifest.conversion
    return json.dumps(value, indent=1).encode()


def _layer_json(r: RecordLayout) -> dict[str, Any]:
    return {
        "name": r.layer,
        "kind": r.kind,
        "file": r.file,
        "tensor": r.tensor,
        "num_experts": r.num_experts,
        "record_nbytes": r.nbytes,
        "tensors": [asdict(t) for t in r.tensors],
        "order": None if r.order is None else list(r.order),
        "checksums": [hex64(d) for d in r.digests],
    }


Errors = Mapping[str, Mapping[str, TensorError]]  # by file, by weight


def journal_json(identity: str, digests: Digests, errors: Errors) -> bytes:
    """``packing.json``: which files are finished, what their parts hash to, and the errors of the
    weights that were quantized."""
    finished = {name: [hex64(d) for d in found] for name, found in digests.items()}
    return json.dumps({"plan": identity, "finished": finished, "errors": errors}).encode()


def parse_journal(raw: bytes) -> tuple[str, dict[str, list[int]], dict[str, dict]]:
    """``(plan id, digests by file, errors by file)``; empty for a journal that cannot be used."""
    try:
        found = json.loads(raw)
        finished = {str(n): [int(d, 16) for d in ds] for n, ds in found["finished"].items()}
        errors = {
            str(file): {str(n): TensorError(float(a), float(b)) for n, (a, b) in by_name.items()}
            for file, by_name in found.get("errors", {}).items()
        }
        return str(found["plan"]), finished, errors
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", {}, {}


def hex64(digest: int) -> str:
    """16 digits."""
    return f"{digest:016x}"
