"""What the hub says a downloaded file must hash to, as its client's cache records it.

In the cache a snapshot's files are links to blobs named by their hash; a download into a folder of
its own leaves the hash in ``.cache/huggingface/download``.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from mlx_stream import interrupts

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
CHUNK_NBYTES = 8 << 20
MAX_METADATA_NBYTES = 4096


def recorded_hash(path: Path) -> str | None:
    """sha256 (64 digits) or git's blob hash (40 digits) of a file; None if nothing is recorded."""
    names = []
    if path.is_symlink():
        names.append(Path(os.readlink(path)).name)
    metadata = path.parent / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    try:
        with open(metadata, encoding="utf-8") as file:
            lines = file.read(MAX_METADATA_NBYTES).splitlines()
        names += [lines[1].strip().strip('"')] if len(lines) > 1 else []
    except (OSError, UnicodeDecodeError):
        pass
    return next((n for n in names if _HASH.fullmatch(n)), None)


def file_hash(path: Path, like: str, progress: Callable[[int], None]) -> str:
    """The file's hash of the same kind as `like`. Raises OSError."""
    with open(path, "rb") as file:
        if len(like) == 64:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(usedforsecurity=False)
            digest.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while chunk := file.read(CHUNK_NBYTES):
            interrupts.check()
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()
