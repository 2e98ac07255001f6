"""Where a model comes from: a local folder, a hub repository, or the embedded demo."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from mlx_stream.errors import ModelNotFoundError

# What mlx-lm itself downloads, less *.py: code of a repository is fetched only when trusted.
_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "experts-*.safetensors",  # of packed folders
    "prerouter*.safetensors",
    "lora*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]


def demo_path() -> Path:
    """The checkpoint that ships in the package."""
    return Path(__file__).parent / "demo"


@dataclass(frozen=True)
class HubReference:
    """A repository at a revision; written ``owner/name`` or ``owner/name@revision``."""

    repo: str
    revision: str | None = None


def find_model(
    path_or_repo: str | Path | None, *, revision: str | None = None
) -> Path | HubReference:
    """The local folder that is meant, or the repository. Asks nobody.

    Raises:
        ModelNotFoundError: neither a folder nor the form of a repository id.
    """
    if path_or_repo is None:
        return demo_path()
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise _not_found(path_or_repo, "a file; pass the folder that holds config.json")
    repo, _, suffix = str(path_or_repo).partition("@")
    if repo.startswith((".", "/", "~")) or repo.count("/") != 1:
        raise _not_found(path_or_repo, "no such folder")
    if suffix and revision and suffix != revision:
        raise _not_found(path_or_repo, f"two revisions: {suffix!r} and {revision!r}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise _not_found(path_or_repo, _first_line(error)) from error
    return HubReference(repo, suffix or revision or None)


def cached_snapshot(reference: HubReference) -> Path | None:
    """The folder in the hub's cache, if config and all weights are there. Asks nobody."""

    def cached(name: str) -> Path | None:
        found = try_to_load_from_cache(reference.repo, name, revision=reference.revision)
        return Path(found) if isinstance(found, str) else None

    config, index = cached("config.json"), cached("model.safetensors.index.json")
    manifest = cached("packed.json")
    if config is None:
        return None
    shards = {"model.safetensors"}
    try:
        if index is not None:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        elif manifest is not None:
            shards = {f["name"] for f in json.loads(manifest.read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    folder = config.parent
    complete = all(isinstance(s, str) and (folder / s).is_file() for s in shards)
    return folder if shards and complete else None


def resolve_model(
    path_or_repo: str | Path | None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """A local folder with the checkpoint; hub repositories are downloaded to the hub's cache.

    Follows huggingface_hub's conventions: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.

    Raises:
        ModelNotFoundError: neither a folder nor a repository that can be had.
    """
    found = find_model(path_or_repo, revision=revision)
    if isinstance(found, Path):
        return found
    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else _PATTERNS
    try:
        return Path(snapshot_download(found.repo, revision=found.revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise _not_found(path_or_repo, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _not_found(model: str | Path | None, actual: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"cannot find the model {str(model)!r}",
        expected="a folder with config.json and model*.safetensors, or a hub repository id",
        actual=actual,
        remedy="check the spelling, your connection and HF_TOKEN; HF_HUB_OFFLINE=1 uses only "
        "what is downloaded already",
    )
