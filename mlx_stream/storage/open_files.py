"""The files of a checkpoint as one set: opened in one mode, each proved to be the file we indexed.

Owns the identity check between header read and later use. Leaks no descriptor on failure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from mlx_stream.errors import FileChangedError, ReadError
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.open_modes import IoChoice, OpenFile, open_file


def open_all(identities: Sequence[FileIdentity], io: IoChoice) -> list[OpenFile]:
    """Open every file in one mode: if one refuses the cache bypass, all are buffered.

    The caller owns the descriptors and gives them back with `close_all`. Raises FileChangedError
    for a file that is not the one indexed, ReadError for one that cannot be opened.
    """
    files: list[OpenFile] = []
    try:
        for identity in identities:
            files.append(_open_checked(identity, io))
    except BaseException:
        close_all(files)
        raise
    refused = next((f.io_mode for f in files if f.io_mode.startswith("buffered (")), None)
    if refused is None or all(f.io_mode == refused for f in files):
        return files
    close_all(files)
    return [OpenFile(f.fd, refused, f.align) for f in open_all(identities, "buffered")]


def _open_checked(identity: FileIdentity, io: IoChoice) -> OpenFile:
    identity.require_local()
    try:
        file = open_file(identity.path, io)
    except FileNotFoundError as error:
        raise _changed(identity, error.strerror) from error
    except OSError as error:
        raise ReadError(
            "A file of the checkpoint cannot be opened.",
            file=identity.path,
            expected="a readable file",
            actual=error.strerror or str(error),
            remedy="check permissions; for too many open files raise the limit: ulimit -n 4096",
        ) from error
    try:
        check_identity(identity, os.fstat(file.fd))
    except BaseException:
        os.close(file.fd)
        raise
    return file


def close_all(files: Sequence[OpenFile]) -> None:
    """Close the descriptors; nobody may be reading from them."""
    for file in files:
        os.close(file.fd)


def check_path(identity: FileIdentity) -> None:
    """Raises FileChangedError if the path now leads to another file, or to none."""
    try:
        status = os.stat(identity.path)
    except OSError as error:
        raise _changed(identity, error.strerror) from error
    check_identity(identity, status)


def check_identity(identity: FileIdentity, status: os.stat_result) -> None:
    """Raises FileChangedError if `status` is of another file, or of a modified one."""
    if not identity.matches(status):
        found = type(identity).of(identity.path, status)
        raise _changed(identity, _identity_text(found), _identity_text(identity))


def _identity_text(f: FileIdentity) -> str:
    return f"{f.size} bytes, mtime {f.mtime_ns} ns, inode {f.inode}, device {f.device}"


def _changed(identity: FileIdentity, actual: object, expected: object = None) -> FileChangedError:
    return FileChangedError(
        "A file changed after its header was read.",
        file=identity.path,
        expected=expected or _identity_text(identity),
        actual=actual,
        remedy="do not change a checkpoint while it is in use; load the model again",
    )
