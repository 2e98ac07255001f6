"""Fetched headers in the user's cache folder, one small file a commit, so a second plan is instant.

Owns the file's form. A commit never changes, so nothing here goes stale; whatever cannot be read,
or fails its checksum, counts as absent. Writing is best effort: a full disk costs speed only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_stream.config import cache_folder
from mlx_stream.whole_files import write_whole

VERSION = 2
MAX_FILE_NBYTES = 256 << 20
MAX_TEXT_NBYTES = 32 << 20  # one header or JSON, unpacked
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class RawShard:
    """A shard's size and its first bytes: length field and header."""

    name: str
    size: int
    header: bytes


@dataclass(frozen=True)
class RawHeaders:
    """What a repository says of its weights, as it was received."""

    config: bytes
    index: bytes | None
    shards: tuple[RawShard, ...]
    manifest: bytes | None = None  # of a packed repository


def default_folder() -> Path:
    """In the user's cache folder; follows XDG_CACHE_HOME."""
    return cache_folder() / "headers"


class HeaderCache:
    """Headers by repository and commit, of one hub endpoint."""

    def __init__(self, endpoint: str, folder: Path | None = None) -> None:
        self._endpoint = endpoint
        self._folder = folder or default_folder()

    def commit(self, repo: str, revision: str) -> str | None:
        """The commit that `revision` led to when it was last looked up."""
        try:
            with open(self._path(repo, revision, ".ref"), encoding="ascii") as file:
                text = file.read(100).strip()
        except (OSError, ValueError):
            return None
        return text if _COMMIT.fullmatch(text) else None

    def set_commit(self, repo: str, revision: str, commit: str) -> None:
        """Remember where `revision` leads, for offline use."""
        if self.commit(repo, revision) != commit:
            self._write(self._path(repo, revision, ".ref"), commit.encode())

    def load(self, repo: str, commit: str) -> RawHeaders | None:
        """What `store` kept, or None. The caller still has to validate the headers."""
        path = self._path(repo, commit, ".json")
        try:
            if path.stat().st_size > MAX_FILE_NBYTES:
                return None
            digest, _, body = path.read_bytes().partition(b"\n")
            if digest.decode() != hashlib.sha256(body).hexdigest():
                return None
            value = json.loads(body)
            if [value[k] for k in ("version", "repo", "commit")] != [VERSION, repo, commit]:
                return None
            return _unpack_all(value)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, zlib.error):
            return None

    def store(self, repo: str, commit: str, raw: RawHeaders) -> None:
        """Keep the headers of a commit."""
        value = {
            "version": VERSION,
            "repo": repo,
            "commit": commit,
            "config": _pack(raw.config),
            "index": None if raw.index is None else _pack(raw.index),
            "manifest": None if raw.manifest is None else _pack(raw.manifest),
            "shards": [[s.name, s.size, _pack(s.header)] for s in raw.shards],
        }
        body = json.dumps(value).encode()
        digest = hashlib.sha256(body).hexdigest().encode()
        self._write(self._path(repo, commit, ".json"), digest + b"\n" + body)

    def _path(self, repo: str, revision: str, suffix: str) -> Path:
        key = "\0".join((self._endpoint, repo, revision))
        return self._folder / (hashlib.sha256(key.encode()).hexdigest()[:40] + suffix)

    def _write(self, path: Path, data: bytes) -> None:
        """All or nothing, so that a plan running beside this one never reads half a file."""
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, data)


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def _unpack(text: str) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TEXT_NBYTES)
    if not unpacker.eof:
        raise ValueError("incomplete or too large")
    return data


def _unpack_all(value: dict[str, Any]) -> RawHeaders:
    shards = []
    for name, size, header in value["shards"]:
        if not isinstance(name, str) or type(size) is not int:
            raise ValueError("a shard needs a name and a size")
        shards.append(RawShard(name, size, _unpack(header)))
    index, manifest = (
        None if value[key] is None else _unpack(value[key]) for key in ("index", "manifest")
    )
    return RawHeaders(_unpack(value["config"]), index, tuple(shards), manifest)
