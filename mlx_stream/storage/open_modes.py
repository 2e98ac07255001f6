"""Opening a file so that reads bypass the page cache, and finding out what was granted.

Linux: O_DIRECT, whose alignment is found by trial reads. macOS: F_NOCACHE, which needs none.
Every function owns the descriptor it opens until it returns it.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

IoChoice = Literal["direct", "buffered"]

TRIAL_ALIGNS = (512, 4096)
SAFE_ALIGN = TRIAL_ALIGNS[-1]
_F_RDAHEAD, _F_NOCACHE = 45, 48  # macOS <sys/fcntl.h>; Python's fcntl has no F_RDAHEAD


@dataclass(frozen=True)
class OpenFile:
    """A descriptor (owned by whoever holds this) and the way it reads."""

    fd: int
    io_mode: str  # 'O_DIRECT', 'F_NOCACHE', 'buffered' or 'buffered (refused ...)'
    align: int  # offsets, lengths and addresses must be multiples of it


def open_file(path: Path, io: IoChoice) -> OpenFile:
    """Open for reading. Raises OSError only for reasons other than a refused cache bypass."""
    if io == "buffered":
        return _open_buffered(path, "buffered")
    if sys.platform == "darwin":
        return _open_nocache(path)
    if not hasattr(os, "O_DIRECT"):
        return _open_buffered(path, "buffered (no O_DIRECT on this system)")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _open_buffered(path, "buffered (refused O_DIRECT: EINVAL)")
    try:
        align = find_alignment(fd)
    except BaseException:
        os.close(fd)
        raise
    if align is None:
        os.close(fd)
        return _open_buffered(path, "buffered (refused O_DIRECT: EINVAL)")
    return OpenFile(fd, "O_DIRECT", align)


def find_alignment(fd: int) -> int | None:
    """Smallest alignment of TRIAL_ALIGNS an O_DIRECT descriptor accepts; None if it takes none.

    Each trial reads `align` bytes at file offset `align` into memory that is aligned to `align`
    and to nothing larger. A file too short for that is not tried: SAFE_ALIGN is taken, after
    checking that it is accepted at offset 0.
    """
    size = os.fstat(fd).st_size
    with mmap.mmap(-1, 4 * SAFE_ALIGN) as memory, memoryview(memory) as view:
        for align in TRIAL_ALIGNS:
            offset = align if size >= 2 * align else 0
            if offset == 0 and align != SAFE_ALIGN:
                continue
            with view[align : 2 * align] as part:
                if _accepts(fd, part, offset):
                    return align
    return None


def _accepts(fd: int, part: memoryview, offset: int) -> bool:
    try:
        os.preadv(fd, [part], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _open_buffered(path: Path, io_mode: str) -> OpenFile:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):  # a longer kernel read-ahead
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return OpenFile(fd, io_mode, 1)


def _open_nocache(path: Path) -> OpenFile:
    import fcntl

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, _F_NOCACHE, 1)
        fcntl.fcntl(fd, _F_RDAHEAD, 0)
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        return OpenFile(fd, f"buffered (refused F_NOCACHE: {code})", 1)
    return OpenFile(fd, "F_NOCACHE", 1)
