"""The files of a prefill's checkpoints: array files first, a manifest with their checksums last.

A checkpoint exists once its manifest has been renamed into place. Two generations are kept, with
the files that they name; whatever else has one of our names is removed. One process at a time has
the folder, and nothing is unpickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_stream.config import format_bytes
from mlx_stream.errors import ResumeError
from mlx_stream.kv.array_file import TEMPORARY, FileSum, file_sum, write_arrays

FORMAT = 1
GENERATIONS = 2
SPARE_NBYTES = 16 << 20
MANIFEST_NBYTES = 256 << 20  # none is larger
_OURS = re.compile(r"(kv-\d+-\d+|held-\d+)\.safetensors|manifest-\d+\.json")
_TEMPORARIES = re.compile(r"\.(kv|held|manifest)-[\d-]+\.[\d-]+\.tmp(\.safetensors)?")


class CheckpointFolder:
    """A folder of checkpoints, held by a lock until :meth:`close`.

    Raises:
        ResumeError: the folder cannot be used, or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._lock = os.open(folder / ".lock", flags, 0o600)
        except OSError as error:
            raise self._error("cannot be used", actual=error.strerror or str(error)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise self._error(
                "is in use by another process",
                actual=error.strerror or str(error),
                remedy="wait for it, or choose another folder",
            ) from error
        try:
            for path in self._matching(_TEMPORARIES):
                path.unlink(missing_ok=True)  # of a process that was killed
        except (OSError, ResumeError) as error:
            self.close()
            raise self._error("cannot be used", actual=_reason(error)) from error

    def close(self) -> None:
        """Give the folder back."""
        os.close(self._lock)

    # --- writing

    def write(self, name: str, arrays: dict[str, mx.array], metadata: dict[str, str]) -> FileSum:
        """Write an array file under one of our names. Raises OSError; nothing is left then."""
        assert _OURS.fullmatch(name)
        return write_arrays(self.folder / name, arrays, metadata)

    def write_manifest(self, number: int, content: dict[str, Any]) -> None:
        """Make checkpoint `number`, and drop what the last two do not need. Raises OSError."""
        text = json.dumps({"format": FORMAT} | content)
        signed = json.dumps({"content": text, "digest": _digest(text)})
        target = self.folder / f"manifest-{number:06d}.json"
        temporary = target.with_name(f".{target.stem}.{os.getpid()}.tmp")
        try:
            with temporary.open("w") as file:
                file.write(signed)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        self._sync()
        self.prune()

    def prune(self) -> None:
        """Remove every file of ours that the last generations do not name."""
        manifests = self._manifests()[-GENERATIONS:]
        needed = {path.name for path in manifests}
        for path in manifests:
            needed |= set(self._read(path)["files"])
        for path in self._matching(_OURS):
            if path.name not in needed:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove every file of ours; manifests first, so that none names a missing file."""
        for path in [*self._manifests(), *self._matching(_OURS)]:
            path.unlink(missing_ok=True)

    def require_room(self, nbytes: int) -> None:
        """Refuse to begin what the disk cannot hold. Raises ResumeError."""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise self._error("cannot be looked at", actual=_reason(error)) from error
        if free < nbytes + SPARE_NBYTES:
            raise self._error(
                "has no room for the checkpoints of this prompt",
                expected=f"{format_bytes(nbytes + SPARE_NBYTES)} free",
                actual=f"{format_bytes(free)} free",
                remedy="free some space, or choose another disk",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of our files. Raises ResumeError."""
        try:
            return sum(path.stat().st_size for path in self._matching(_OURS))
        except OSError as error:
            raise self._error("cannot be looked at", actual=_reason(error)) from error

    # --- reading

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Number and content of the newest checkpoint, every file of it verified; None without.

        Raises:
            ResumeError: something is damaged or missing.
        """
        manifests = self._manifests()
        if not manifests:
            return None
        content = self._read(manifests[-1])
        for name, (nbytes, digest) in content["files"].items():
            self._verify(name, FileSum(nbytes, digest))
        return int(manifests[-1].stem.split("-")[1]), content

    def load(self, name: str) -> dict[str, mx.array]:
        """The arrays of a verified file, into memory. Raises ResumeError."""
        try:
            arrays = mx.load(str(self.folder / name), format="safetensors")
            mx.eval(arrays)
        except (OSError, RuntimeError, ValueError) as error:
            raise self._damaged(name, "arrays that can be read", str(error)) from error
        assert isinstance(arrays, dict)
        return arrays

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            if path.stat().st_size > MANIFEST_NBYTES:
                raise self._damaged(path.name, "a manifest", format_bytes(path.stat().st_size))
            signed = json.loads(path.read_bytes())
            text = signed["content"]
            if signed["digest"] != _digest(text):
                raise self._damaged(path.name, "its checksum", "another one")
            content = json.loads(text)
            files = content["files"]
            good = all(_OURS.fullmatch(name) and len(entry) == 2 for name, entry in files.items())
            good = good and content["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._damaged(path.name, "a manifest", str(error)) from error
        if not good:
            raise self._damaged(path.name, f"format {FORMAT}", content.get("format"))
        return content

    def _verify(self, name: str, wanted: FileSum) -> None:
        try:
            nbytes = (self.folder / name).stat().st_size
            if nbytes != wanted.nbytes:  # said before anything of that size is read
                raise self._damaged(name, f"{wanted.nbytes} bytes", f"{nbytes} bytes")
            found = file_sum(self.folder / name)
        except OSError as error:
            raise self._damaged(name, "a readable file", error.strerror or str(error)) from error
        if found != wanted:
            raise self._damaged(name, f"{wanted.nbytes} bytes, as they were written", "others")

    def _manifests(self) -> list[Path]:
        """Ours, oldest first; whatever else is named like one stays as it is."""
        ours = [p for p in self._matching(_OURS) if p.suffix == ".json"]
        return sorted(ours, key=lambda path: int(path.stem.split("-")[1]))

    def _matching(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in sorted(self.folder.iterdir()) if pattern.fullmatch(path.name)]
        except OSError as error:
            raise self._error("cannot be looked at", actual=_reason(error)) from error

    def _sync(self) -> None:
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _damaged(self, name: str, expected: str, actual: object) -> ResumeError:
        return ResumeError(
            "this checkpoint of a prefill is damaged",
            file=self.folder / name,
            expected=expected,
            actual=str(actual)[:200],
            remedy="remove the folder, and run the prompt from the beginning",
        )

    def _error(self, problem: str, **details: Any) -> ResumeError:
        details.setdefault("remedy", "choose another folder")
        return ResumeError(f"the checkpoint folder {problem}", file=self.folder, **details)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "actual", None) or str(error)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


assert TEMPORARY == ".tmp.safetensors"  # what _TEMPORARIES expects
