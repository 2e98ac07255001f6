"""One ReadOp to its last byte: short reads continued, ends of files and failures told apart.

Runs in the calling thread and owns nothing: descriptor and buffer are the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from mlx_stream.errors import EndOfFileError, ReadError
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.read_plan import ReadOp

Fault = Callable[[int, int, int], None]  # (file index, offset, nbytes); may raise OSError

MAX_STALLS = 8  # reads without progress, although the file is long enough, before giving up


@dataclass(frozen=True)
class OpContext:
    """What all ops of one file share."""

    fd: int
    identity: FileIdentity
    align: int  # reads start at multiples of it
    fault: Fault | None
    count: Callable[[int, bool], None]  # told (bytes, is a retry) after each preadv


def execute_op(op: ReadOp, buffer: np.ndarray, context: OpContext) -> None:
    """Read until every byte of `op` that lies inside the file is in `buffer`.

    Raises:
        ReadError: the system failed the read, or returns nothing although the file is long enough.
        EndOfFileError: the file has become shorter.
    Raised errors carry no traceback: its frames would keep the buffer alive.
    """
    needed = min(op.nbytes, context.identity.size - op.offset)
    got = stalls = 0
    while got < needed:
        # O_DIRECT can only go on at an aligned place, so some bytes may be read again.
        start = got // context.align * context.align
        try:
            end = start + _preadv(op, start, buffer, context, retry=got > 0 or stalls > 0)
            stalls = stalls + 1 if end <= got else 0
            got = max(got, end)
            failure = _stalled(op, got, needed, stalls, context) if stalls else None
        except OSError as error:
            failure = read_error(op, context.identity, error, op.offset + start)
        if failure is not None:
            raise failure


def read_error(
    op: ReadOp, identity: FileIdentity, error: BaseException, offset: int | None = None
) -> ReadError:
    """The ReadError for a failure of `op` at `offset` (default: its start)."""
    at = op.offset if offset is None else offset
    failure = ReadError(
        "The system failed a read.",
        file=identity.path,
        expected=f"{op.nbytes} bytes at offset {op.offset}",
        actual=f"{error or type(error).__name__} at offset {at}",
        remedy="check the disk (system log, SMART); if it is sound, try buffered reads",
    )
    failure.__cause__ = error.with_traceback(None)
    return failure


def _preadv(op: ReadOp, start: int, buffer: np.ndarray, context: OpContext, *, retry: bool) -> int:
    offset = op.offset + start
    if context.fault is not None:
        context.fault(op.file, offset, op.nbytes - start)
    with ExitStack() as stack:
        whole = stack.enter_context(memoryview(buffer))
        views = [stack.enter_context(whole[a:b]) for a, b in _targets(op.parts, start)]
        count = os.preadv(context.fd, views, offset)
    context.count(count, retry)
    return count


def _targets(parts: Sequence[tuple[int, int]], start: int) -> list[tuple[int, int]]:
    """(begin, end) in the buffer of what is left of `parts` after `start` bytes."""
    left = []
    for slot, nbytes in parts:
        if start < nbytes:
            left.append((slot + start, slot + nbytes))
        start = max(0, start - nbytes)
    return left


def _stalled(
    op: ReadOp, got: int, needed: int, stalls: int, context: OpContext
) -> ReadError | None:
    """The error for a read without progress; None if it may be tried again."""
    identity, size = context.identity, os.fstat(context.fd).st_size
    if size < op.offset + needed:
        return EndOfFileError(
            "The file ends before the bytes its header promises.",
            file=identity.path,
            expected=f"{identity.size} bytes, as when its header was read",
            actual=f"{size} bytes now; {needed} bytes wanted at offset {op.offset}",
            remedy="download this file again, and do not change it during a run",
        )
    if stalls < MAX_STALLS:
        return None
    return ReadError(
        "Reads return no data although the file is long enough.",
        file=identity.path,
        expected=f"{needed} bytes at offset {op.offset}",
        actual=f"{got} bytes after {stalls} more tries",
        remedy="check the disk; if it is sound, try buffered reads",
    )
