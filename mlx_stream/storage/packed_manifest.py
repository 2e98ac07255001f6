"""``packed.json``: what a packed folder holds and what every part of it must hash to.

The manifest is untrusted: sizes are bounded before they are used, names cannot leave the folder,
and every offset is checked against the file it points into. Pure but for reading that one file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mlx_stream.errors import PackedLayoutError
from mlx_stream.storage.record_layout import RECORD_ALIGN, TENSOR_ALIGN, RecordLayout, RecordTensor
from mlx_stream.storage.safetensors_header import DTYPE_BITS, parse_json_object

MANIFEST_NAME = "packed.json"
JOURNAL_NAME = "packing.json"  # there while a folder is being packed
FORMAT = "mlx_stream.packed"
VERSION = 1
CHECKSUM = "xxh3-64"
MAX_MANIFEST_NBYTES = 128 << 20
MAX_LAYERS = 4096
MAX_EXPERTS = 32767
MAX_TENSORS = 64  # of one record
MAX_NAME = 1024
MAX_SIZE = 2**62
EXPERT_FILE = re.compile(r"experts-\d{5}-of-\d{5}\.safetensors")
_RESIDENT_FILE = re.compile(r"model[A-Za-z0-9_.-]*\.safetensors")
_HEX64 = re.compile(r"[0-9a-f]{16}")
REMEDY = "run mlx_stream verify on the folder; mlx_stream repair or pack writes it anew"


@dataclass(frozen=True)
class PackedFile:
    """A file of the folder.

    Attributes:
        digest: xxh3-64 of its header (safetensors), or of all of it (other files).
        header_nbytes: 0 for files that are no safetensors.
        tensors: digest of each tensor, for files with resident weights.
    """

    name: str
    size: int
    digest: int
    header_nbytes: int = 0
    tensors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class SourceFile:
    """A shard of the checkpoint that was packed."""

    name: str
    size: int
    mtime_ns: int
    header_digest: int


@dataclass(frozen=True)
class PackedManifest:
    """A parsed manifest; `files` are safetensors, `others` all the rest.

    `conversion` says how the weights were changed on the way; None if they were not.
    """

    source: str
    sources: tuple[SourceFile, ...]
    files: tuple[PackedFile, ...]
    others: tuple[PackedFile, ...]
    layers: tuple[RecordLayout, ...]
    conversion: dict[str, Any] | None = None

    @property
    def expert_files(self) -> tuple[PackedFile, ...]:
        """Those with expert records."""
        return tuple(f for f in self.files if EXPERT_FILE.fullmatch(f.name))

    @property
    def resident_files(self) -> tuple[PackedFile, ...]:
        """Those with all other weights."""
        return tuple(f for f in self.files if not EXPERT_FILE.fullmatch(f.name))


def is_packed(folder: Path) -> bool:
    """Whether a folder has a manifest."""
    return (folder / MANIFEST_NAME).is_file()


def read_manifest(folder: Path) -> PackedManifest:
    """Parse and validate the manifest of a folder.

    Raises:
        PackedLayoutError: unreadable, too large, of another version, or not consistent.
    """
    path = folder / MANIFEST_NAME
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_MANIFEST_NBYTES + 1)
    except OSError as error:
        fail(path, "The manifest cannot be read.", "a readable file", error.strerror or error)
    if len(raw) > MAX_MANIFEST_NBYTES:
        fail(path, "The manifest is too large.", f"at most {MAX_MANIFEST_NBYTES} bytes", "more")
    return parse_manifest(parse_json_object(raw, path), path)


def parse_manifest(found: Mapping[str, Any], path: Path) -> PackedManifest:
    """Validate a decoded manifest; `path` is named in errors. Raises PackedLayoutError."""
    said = (found.get("format"), found.get("version"), found.get("checksum"))
    if said != (FORMAT, VERSION, CHECKSUM):
        fail(
            path,
            "The manifest is not one this release reads.",
            f"{FORMAT} version {VERSION} with {CHECKSUM}",
            said,
        )
    files = tuple(_file(f, path) for f in _list(found, "files", path, MAX_LAYERS))
    others = tuple(_other(f, path) for f in _list(found, "others", path, MAX_LAYERS))
    layers = tuple(_layer(x, path) for x in _list(found, "layers", path, MAX_LAYERS))
    source = found.get("source")
    if not isinstance(source, dict):
        fail(path, "The manifest names no source.", "an object", source)
    sources = tuple(_source(f, path) for f in _list(source, "files", path, MAX_LAYERS))
    conversion = found.get("conversion")
    if conversion is not None and not isinstance(conversion, dict):
        fail(path, "The conversion is malformed.", "an object", type(conversion).__name__)
    name = str(source.get("path"))[:4096]
    manifest = PackedManifest(name, sources, files, others, layers, conversion)
    _check_unique(manifest, path)
    return manifest


def _check_unique(manifest: PackedManifest, path: Path) -> None:
    names = [f.name for f in (*manifest.files, *manifest.others)]
    experts = {f.name for f in manifest.expert_files}
    tensors = [t.name for layer in manifest.layers for t in layer.tensors]
    tensors += [name for f in manifest.files for name, _ in f.tensors]
    places = [(layer.file, layer.tensor) for layer in manifest.layers]
    for what, values in (("file", names), ("tensor", tensors), ("record tensor", places)):
        if len(set(values)) != len(values):
            twice = next(v for v, count in Counter(values).items() if count > 1)
            fail(path, f"A {what} is named twice.", "unique names", twice)
    if len({layer.layer for layer in manifest.layers}) != len(manifest.layers):
        fail(path, "A layer is named twice.", "unique layers", "twice")
    for layer in manifest.layers:
        if layer.file not in experts:
            fail(path, "A layer's file is not listed.", sorted(experts), layer.file, layer.layer)


def _file(found: Any, path: Path) -> PackedFile:
    name = _text(found, "name", path)
    if not (EXPERT_FILE.fullmatch(name) or _RESIDENT_FILE.fullmatch(name)):
        fail(path, "A file name is not allowed.", "model*.safetensors or experts-*", repr(name))
    size, header = _whole(found, "size", path), _whole(found, "header_nbytes", path)
    if not 8 <= header <= size:
        fail(path, "A header size is impossible.", f"8 to {size} bytes", header, name)
    tensors = found.get("tensors", {})
    if not isinstance(tensors, dict) or len(tensors) > 1_000_000:
        fail(path, "The tensors of a file are not listed.", "an object", type(tensors).__name__)
    pairs = tuple((t, _digest(v, path)) for t, v in tensors.items())
    return PackedFile(name, size, _digest(found.get("header"), path), header, pairs)


def _other(found: Any, path: Path) -> PackedFile:
    name = _text(found, "name", path)
    if name in (".", "..") or name == MANIFEST_NAME or any(c in name for c in "/\\\0"):
        fail(path, "A file name leaves the folder.", "a plain file name", repr(name))
    return PackedFile(name, _whole(found, "size", path), _digest(found.get("digest"), path))


def _source(found: Any, path: Path) -> SourceFile:
    digest = _digest(found.get("header") if isinstance(found, dict) else None, path)
    size, mtime = _whole(found, "size", path), found.get("mtime_ns")
    if type(mtime) is not int or abs(mtime) >= 2**63:  # before 1970 is a time too
        fail(path, "The manifest's 'mtime_ns' is malformed.", "a time in nanoseconds", mtime)
    return SourceFile(_text(found, "name", path), size, mtime, digest)


def _layer(found: Any, path: Path) -> RecordLayout:
    name = _text(found, "name", path)
    kind = found.get("kind")
    if kind not in ("glu", "mlp"):
        fail(path, "A layer is of no known kind.", "glu or mlp", kind, name)
    file = _text(found, "file", path)
    if not EXPERT_FILE.fullmatch(file):
        fail(path, "A file name is not allowed.", "experts-NNNNN-of-NNNNN", repr(file), name)
    experts = _whole(found, "num_experts", path)
    nbytes = _whole(found, "record_nbytes", path)
    if not 1 <= experts <= MAX_EXPERTS:
        fail(path, "The number of experts is impossible.", f"1 to {MAX_EXPERTS}", experts, name)
    if nbytes == 0 or nbytes % RECORD_ALIGN:
        fail(path, "A record is not aligned.", f"a multiple of {RECORD_ALIGN}", nbytes, name)
    tensors = [_tensor(t, name, path) for t in _list(found, "tensors", path, MAX_TENSORS)]
    _check_inside(tensors, nbytes, name, path)
    order = _order(found.get("order"), experts, name, path)
    digests = found.get("checksums")
    if not isinstance(digests, list) or len(digests) != experts:
        fail(path, "A checksum is missing.", f"{experts} checksums", type(digests).__name__, name)
    checked = tuple(_digest(d, path) for d in digests)
    tensor = _text(found, "tensor", path)
    return RecordLayout(name, kind, file, tensor, experts, nbytes, tuple(tensors), order, checked)


def _order(found: Any, experts: int, layer: str, path: Path) -> tuple[int, ...] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(type(e) is int for e in found):
        fail(path, "An order is no list of experts.", "a list or null", found, layer)
    if sorted(found) != list(range(experts)):
        fail(path, "An order does not name every expert once.", f"0..{experts - 1}", found, layer)
    return tuple(found)


def _tensor(found: Any, layer: str, path: Path) -> RecordTensor:
    name = _text(found, "name", path)
    if not name.startswith(layer + "."):
        fail(path, "A tensor is not of its layer.", f"{layer}.*", name, layer)
    dtype, shape = found.get("dtype"), found.get("shape")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fail(path, "Unknown dtype.", ", ".join(DTYPE_BITS), dtype, name)
    dims = isinstance(shape, list) and len(shape) <= 8
    if not dims or not all(type(n) is int and 0 < n <= MAX_SIZE for n in shape):
        fail(path, "Bad shape.", "up to 8 positive integers", shape, name)
    offset, nbytes = _whole(found, "offset", path), _whole(found, "nbytes", path)
    if math.prod(shape) * DTYPE_BITS[dtype] != nbytes * 8:
        fail(path, "Shape and size disagree.", f"{dtype} {shape}", f"{nbytes} bytes", name)
    return RecordTensor(name, dtype, tuple(shape), offset, nbytes)


def _check_inside(tensors: list[RecordTensor], nbytes: int, layer: str, path: Path) -> None:
    end = 0
    for t in tensors:
        if t.offset % TENSOR_ALIGN or not end <= t.offset <= t.offset + t.nbytes <= nbytes:
            where = f"[{t.offset}, {t.offset + t.nbytes})"
            fail(path, "A tensor lies wrong.", f"{end} to {nbytes} in {layer}", where, t.name)
        end = t.offset + t.nbytes
    if not tensors:
        fail(path, "A layer has no tensors.", "at least one", 0, layer)


def _list(found: Any, key: str, path: Path, most: int) -> list[Any]:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, list) or len(value) > most:
        fail(path, f"The manifest's {key!r} is malformed.", f"a list of up to {most}", value)
    return value


def _text(found: Any, key: str, path: Path) -> str:
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        fail(path, f"The manifest's {key!r} is malformed.", f"up to {MAX_NAME} letters", value)
    return value


def _whole(found: Any, key: str, path: Path) -> int:
    value = found.get(key) if isinstance(found, dict) else None
    if type(value) is not int or not 0 <= value <= MAX_SIZE:
        fail(path, f"The manifest's {key!r} is malformed.", "a whole number of bytes", value)
    return value


def _digest(value: Any, path: Path) -> int:
    if not isinstance(value, str) or not _HEX64.fullmatch(value):
        fail(path, "A checksum is malformed.", "16 hexadecimal digits", value)
    return int(value, 16)


def fail(
    path: Path, problem: str, expected: object, actual: object, tensor: str | None = None
) -> NoReturn:
    """Raise PackedLayoutError with a shortened `actual`."""
    shown = str(actual)
    raise PackedLayoutError(
        problem,
        file=path,
        tensor=tensor,
        expected=expected,
        actual=shown if len(shown) <= 200 else shown[:200] + "...",
        remedy=REMEDY,
    )
