"""The headers of a model, wherever it is: a folder, the hub's cache, or the hub itself."""

from __future__ import annotations

from pathlib import Path

from mlx_stream.hub import cached_snapshot, find_model
from mlx_stream.storage.checkpoint import Checkpoint, open_checkpoint
from mlx_stream.storage.remote_checkpoint import Progress, open_remote


def open_headers(
    path_or_repo: str | Path | None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """A Checkpoint to plan with. Downloads no weights.

    A folder is opened, and so is a complete snapshot in the hub's cache, even if the branch has
    moved on since. Of any other repository the headers are fetched by range requests (kept in the
    user's cache folder); such a checkpoint cannot be opened for reading.

    Args:
        path_or_repo: a folder, ``owner/name``, ``owner/name@revision``, or None for the demo.
        revision: branch, tag or commit, when not in `path_or_repo`.
        progress: called with (shards done, shards) as headers arrive, from the calling thread.

    Raises:
        ModelNotFoundError, HubError, CheckpointError.
    """
    found = find_model(path_or_repo, revision=revision)
    if not isinstance(found, Path):
        snapshot = cached_snapshot(found)
        if snapshot is None:
            return open_remote(found.repo, found.revision or "main", progress=progress)
        found = snapshot
    return open_checkpoint(found)
