"""Opens files that may have been put where a file is expected."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read, links followed. Raises OSError, also for anything else."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would block for ever
        raise OSError(f"{path.name} is not a regular file")
    return open(path, "rb")
