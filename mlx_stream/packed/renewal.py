"""A folder that is packed already, whose source has other files beside the same weights by now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlx_stream.packed.digests import digest_bytes
from mlx_stream.packed.manifest_json import manifest_json
from mlx_stream.packed.output_file import write_whole
from mlx_stream.packed.side_files import copy_side_files, side_bytes, side_files
from mlx_stream.packed.source import PackSource
from mlx_stream.storage.packed_manifest import MANIFEST_NAME, PackedManifest


def renew_side_files(
    source: PackSource, done: PackedManifest, target: Path
) -> tuple[PackedManifest, tuple[str, ...]]:
    """Make config, tokenizer and the like those of the source again. The folder's lock is held.

    Returns:
        the manifest as it is now, and the names of what was written or removed.

    Raises:
        PackError: a file cannot be read or written; the same command goes on from there.
    """
    files = source.side_files(side_files(source.checkpoint.path))
    known = {f.name: f.digest for f in done.others}
    now = {f.name: digest_bytes(side_bytes(f)) for f in files}
    differing = tuple(sorted(n for n in known.keys() | now.keys() if known.get(n) != now.get(n)))
    if not differing:
        return done, ()
    others = copy_side_files(files, target)
    made = replace(done, others=tuple(others))
    write_whole(target / MANIFEST_NAME, manifest_json(made))
    for name in known.keys() - now.keys():  # after the manifest, which no longer asks for them
        (target / name).unlink(missing_ok=True)
    return made, differing
