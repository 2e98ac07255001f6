"""Where a model comes from: a local folder, a hub repository, or the embedded demo."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from mlx_stream.errors import ModelNotFoundError

# What mlx-lm itself downloads, less *.py: code of a repository is fetched only when trusted.
_PATTERNS = [
    "*.json",
    "model*.safetensors",
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
    if path_or_repo is None:
        return demo_path()
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise _not_found(path_or_repo, "a file; pass the folder that holds config.json")
    if str(path_or_repo).startswith((".", "/", "~")) or str(path_or_repo).count("/") != 1:
        raise _not_found(path_or_repo, "no such folder")
    patterns = [*_PATTERNS, "*.py"] if trust_remote_code else _PATTERNS
    try:
        return Path(
            snapshot_download(str(path_or_repo), revision=revision, allow_patterns=patterns)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()
        raise _not_found(path_or_repo, reason[0] if reason else type(error).__name__) from error


def _not_found(model: str | Path, actual: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"cannot find the model {str(model)!r}",
        expected="a folder with config.json and model*.safetensors, or a hub repository id",
        actual=actual,
        remedy="check the spelling, your connection and HF_TOKEN; HF_HUB_OFFLINE=1 uses only "
        "what is downloaded already",
    )
