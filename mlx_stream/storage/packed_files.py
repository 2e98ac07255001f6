"""The expert files of a packed folder against its manifest: paths, headers, tensor positions. Pure
but for looking at paths; nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from mlx_stream.errors import CheckpointError
from mlx_stream.storage.packed_manifest import JOURNAL_NAME, fail, is_packed
from mlx_stream.storage.record_layout import RECORD_ALIGN, RecordLayout
from mlx_stream.storage.safetensors_header import TensorInfo


def check_unfinished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose packing did not end."""
    if (folder / JOURNAL_NAME).exists() and not is_packed(folder):
        raise CheckpointError(
            "The folder is not packed to the end.",
            file=folder,
            expected="a finished mlx_stream pack",
            actual=f"{JOURNAL_NAME}, which stays until everything is written",
            remedy="run the same mlx_stream pack again: it goes on where it stopped",
        )


def expert_path(folder: Path, name: str) -> Path:
    """The path of an expert file. Raises PackedLayoutError if it leads out of the folder.

    A snapshot of the hub's cache may lead to the cache's own blobs.
    """
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        fail(path, "A packed file cannot be found.", "a file of the folder", error)
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parent.parent / "blobs")
    if target.parent not in roots:
        fail(path, "A packed file leads out of the folder.", f"a file in {home}", target)
    return path


def record_tensors(
    layers: Iterable[RecordLayout], found: Sequence[TensorInfo], size: int, path: Path
) -> list[TensorInfo]:
    """The source's tensors as they lie in one expert file.

    Args:
        layers: those that the manifest puts into this file.
        found: the tensors of the file's header.

    Raises:
        PackedLayoutError: a record tensor is missing, of another size, or not aligned.
    """
    by_name = {t.name: t for t in found}
    tensors = []
    for layer in layers:
        raw = by_name.pop(layer.tensor, None)
        wanted = ("U8", (layer.num_experts, layer.nbytes))
        if raw is None or (raw.dtype, raw.shape) != wanted:
            actual = "not there" if raw is None else f"{raw.dtype} {list(raw.shape)}"
            fail(path, "The records are not those of the manifest.", wanted, actual, layer.tensor)
        if raw.offset % RECORD_ALIGN or raw.offset + raw.nbytes > size:
            fail(path, "The records are not aligned.", RECORD_ALIGN, raw.offset, layer.tensor)
        tensors += [
            TensorInfo(
                t.name,
                raw.file,
                t.dtype,
                (layer.num_experts, *t.shape),
                raw.offset + t.offset,
                layer.num_experts * t.nbytes,
                layer.nbytes,
            )
            for t in layer.tensors
        ]
    if by_name:
        name = min(by_name)
        fail(path, "A tensor is in no layer of the manifest.", "records only", name, name)
    return tensors
