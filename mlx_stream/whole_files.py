"""Small files written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically: a reader never sees half of it.

    A link is followed. What exists and is no regular file (a device, a pipe) is written into.

    Raises:
        OSError: the folder is missing or not writable; nothing is left behind.
    """
    target = path.absolute().resolve()
    if target.exists() and not target.is_file():
        with target.open("w", encoding="utf-8") as file:
            file.write(text)
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
