"""Small files written whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file atomically: a reader never sees half of it. Text is UTF-8.

    A link is followed. What exists and is no regular file (a device, a pipe) is written into.

    Raises:
        OSError: the folder is missing or not writable; nothing is left behind.
    """
    raw = data.encode() if isinstance(data, str) else data
    target = path.absolute().resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            file.write(raw)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(raw)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
