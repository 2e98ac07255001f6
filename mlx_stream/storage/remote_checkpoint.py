"""A checkpoint in a hub repository, from its headers alone: no weights are read.

Owns which files are asked for and how much of each, and builds the Checkpoint that a local folder
would give. Its files cannot be opened for reading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_stream.errors import (
    CheckpointError,
    HeaderError,
    HeadersOnlyError,
    HubEntryError,
)
from mlx_stream.storage.checkpoint import (
    INDEX_NAME,
    SHARD_PATTERN,
    Checkpoint,
    FileIdentity,
    TensorInfo,
    add_tensors,
    check_index,
    weight_map,
)
from mlx_stream.storage.packed_files import record_tensors
from mlx_stream.storage.packed_manifest import (
    MANIFEST_NAME,
    PackedManifest,
    fail,
    parse_manifest,
)
from mlx_stream.storage.remote_cache import HeaderCache, RawHeaders, RawShard
from mlx_stream.storage.remote_errors import offline
from mlx_stream.storage.remote_fetch import HubFetcher, Traffic
from mlx_stream.storage.safetensors_header import header_nbytes, parse_header, parse_json_object

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
FIRST_NBYTES = 64 << 10  # of each shard; most headers are shorter
MAX_REMOTE_HEADER_NBYTES = 800_000  # keeps a shard under 1 MB, whatever the server sends
MAX_JSON_NBYTES = 32 << 20
MAX_SHARDS = 4096
THREADS = 8
_COMMIT = re.compile(r"[0-9a-f]{40}")

Progress = Callable[[int, int], None]  # shards done, shards


@dataclass(frozen=True)
class RemoteFile(FileIdentity):
    """A shard in a hub repository: its size is known, its data is not here."""

    def require_local(self) -> None:
        """Raises HeadersOnlyError."""
        raise HeadersOnlyError(
            "Only the headers of this file were fetched.",
            file=self.path,
            expected="a downloaded file",
            actual="a file in a hub repository",
            remedy="load the model by its name (it is downloaded then), or pass a local folder",
        )


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """A Checkpoint for planning. `path` is ``owner/name@revision`` and leads nowhere on disk."""

    traffic: Traffic = field(default_factory=Traffic, compare=False)


def open_remote(
    repo: str,
    revision: str = "main",
    *,
    cache: HeaderCache | None = None,
    progress: Progress | None = None,
    fetcher: HubFetcher | None = None,
) -> RemoteCheckpoint:
    """The checkpoint of a hub repository, from `cache` where it holds the commit.

    A commit hash that is cached needs no request; a branch needs one, to learn its commit.

    Raises:
        HubError, ModelNotFoundError: offline, refused, timed out, or not in the repository.
        CheckpointError: as `open_checkpoint`.
    """
    fetcher = fetcher or HubFetcher(repo, revision)
    cache = cache or HeaderCache(fetcher.endpoint)
    commit: str | None = revision if _COMMIT.fullmatch(revision) else None
    if fetcher.offline:
        commit = commit or cache.commit(repo, revision)
    if commit and (found := _cached(cache, repo, commit, fetcher)):
        return found
    if fetcher.offline:
        raise offline(fetcher.name())
    config = fetcher.whole(CONFIG_NAME, MAX_JSON_NBYTES)
    if config.commit:
        # From here on one commit, even when the branch moves meanwhile.
        cache.set_commit(repo, revision, config.commit)
        fetcher.revision = config.commit
        if config.commit != commit and (found := _cached(cache, repo, config.commit, fetcher)):
            return found
    raw = _fetch(fetcher, config.data, progress)
    checkpoint = build_checkpoint(raw, fetcher.name(), fetcher.traffic)
    if config.commit:
        cache.store(repo, config.commit, raw)
    return checkpoint


def _cached(
    cache: HeaderCache, repo: str, commit: str, fetcher: HubFetcher
) -> RemoteCheckpoint | None:
    raw = cache.load(repo, commit)
    if raw is None:
        return None
    try:
        return build_checkpoint(raw, Path(f"{repo}@{commit}"), fetcher.traffic)
    except CheckpointError:
        return None  # only what was valid is stored: the file is damaged, fetch again


def build_checkpoint(raw: RawHeaders, path: Path, traffic: Traffic) -> RemoteCheckpoint:
    """Parse and validate, exactly as for a local folder. Pure. Raises as `open_checkpoint`."""
    config = parse_json_object(raw.config, path / CONFIG_NAME)
    packed = None if raw.manifest is None else _manifest(raw.manifest, path)
    records = set() if packed is None else {f.name for f in packed.expert_files}
    files: list[FileIdentity] = []
    tensors: dict[str, TensorInfo] = {}
    for number, shard in enumerate(raw.shards):
        file = path / shard.name
        files.append(RemoteFile(file, shard.size, mtime_ns=0, inode=0, device=0))
        found: Sequence[TensorInfo] = parse_header(shard.header, shard.size, file, file=number)
        if packed is not None and shard.name in records:
            layers = [r for r in packed.layers if r.file == shard.name]
            found = record_tensors(layers, found, shard.size, file)
        add_tensors(tensors, found, files)
    if raw.index is not None:
        index = path / INDEX_NAME
        check_index(index, parse_json_object(raw.index, index), files, tensors)
    return RemoteCheckpoint(path, config, tuple(files), tensors, traffic, packed=packed)


def _fetch(fetcher: HubFetcher, config: bytes, progress: Progress | None) -> RawHeaders:
    parse_json_object(config, fetcher.name(CONFIG_NAME))  # before more is asked for
    index, manifest = _optional(fetcher, INDEX_NAME), None
    if index is not None:
        names = _shard_names(index, fetcher.name(INDEX_NAME))
    else:
        # A packed folder has no index: its manifest says where every tensor is.
        manifest = _optional(fetcher, MANIFEST_NAME)
        names = [SINGLE_NAME] if manifest is None else _packed_names(manifest, fetcher.name())
    with ThreadPoolExecutor(THREADS, "mlx_stream-headers") as pool:
        futures = {pool.submit(_fetch_shard, fetcher, name): name for name in names}
        shards = {}
        try:
            for future in as_completed(futures):
                shards[futures[future]] = future.result()
                if progress is not None:
                    progress(len(shards), len(names))
        except BaseException:
            fetcher.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return RawHeaders(config, index, tuple(shards[name] for name in names), manifest)


def _optional(fetcher: HubFetcher, name: str) -> bytes | None:
    """A small file, or None if the repository has none of this name."""
    try:
        return fetcher.whole(name, MAX_JSON_NBYTES).data
    except HubEntryError:
        return None


def _manifest(raw: bytes, path: Path) -> PackedManifest:
    """The manifest of the repository `path`. Raises PackedLayoutError."""
    return parse_manifest(parse_json_object(raw, path / MANIFEST_NAME), path / MANIFEST_NAME)


def _packed_names(raw: bytes, path: Path) -> list[str]:
    """The files of a packed repository, in the order of `open_checkpoint`.

    Raises:
        PackedLayoutError: the manifest is not one to trust, or names no resident weights.
    """
    manifest = _manifest(raw, path)
    resident = sorted(f.name for f in manifest.resident_files)
    if not resident:
        fail(path / MANIFEST_NAME, "The packed model has no resident weights.", SHARD_PATTERN, 0)
    return [*resident, *(f.name for f in manifest.expert_files)]


def _shard_names(raw: bytes, path: Path) -> list[str]:
    """The shards an index names, in name order. Raises CheckpointError for a name to distrust."""
    names = sorted(set(weight_map(path, parse_json_object(raw, path)).values()))
    wrong = next((name for name in names if not fnmatchcase(name, SHARD_PATTERN)), None)
    if wrong is not None or not 1 <= len(names) <= MAX_SHARDS:
        raise CheckpointError(
            "The index names files that are not shards of a model.",
            file=path,
            expected=f"1 to {MAX_SHARDS} files named {SHARD_PATTERN}",
            actual=f"{len(names)} files" if wrong is None else repr(wrong)[:200],
            remedy="pass a repository in mlx layout, or download it and pass its folder",
        )
    return names


def _fetch_shard(fetcher: HubFetcher, name: str) -> RawShard:
    first = fetcher.piece(name, 0, FIRST_NBYTES)
    end = header_nbytes(first.data, first.total, fetcher.name(name))
    if end > MAX_REMOTE_HEADER_NBYTES:
        raise HeaderError(
            "The header is too long to be fetched from the hub.",
            file=fetcher.name(name),
            expected=f"at most {MAX_REMOTE_HEADER_NBYTES} bytes",
            actual=f"{end} bytes",
            remedy="download the model and pass its folder, if you trust it",
        )
    header = first.data[:end]
    if len(header) < end:
        rest = fetcher.piece(name, len(header), end)
        if rest.total != first.total:
            raise CheckpointError(
                "A file changed while its header was fetched.",
                file=fetcher.name(name),
                expected=f"{first.total} bytes",
                actual=f"{rest.total} bytes",
                remedy="try again",
            )
        header += rest.data
    return RawShard(name, first.total, header)
