"""What the hub's refusals mean: HTTP status and network failure in, one typed error out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from mlx_stream.errors import HubEntryError, HubError, MlxStreamError, ModelNotFoundError

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def refused(status: int, headers: Mapping[str, str], file: Path, url: str) -> MlxStreamError:
    """The error for an answer that is neither 200 nor 206.

    Args:
        file: ``owner/name@revision/file``, for the message.
        url: what was asked for; shown without its query, which may hold a signature.
    """
    code = headers.get("x-error-code", "")
    actual = f"{_status_text(status)}{f' ({code[:40]})' if code else ''} from {url.split('?')[0]}"
    if code == "GatedRepo":
        return HubError(
            "The repository is gated: its owner grants access to each user.",
            file=file,
            expected="an account that may read it",
            actual=actual,
            remedy=f"ask for access on the model's page, then {LOGIN}",
        )
    if status in (401, 404) or code in ("RepoNotFound", "RevisionNotFound"):
        return _not_found(status, code, file, actual)
    if status == 403:
        remedy = f"check what your token may read, then {LOGIN}"
    elif status in TRANSIENT:
        remedy = "try again later; HF_ENDPOINT names another server"
    else:
        remedy = "check HF_ENDPOINT and your proxy, or download the model and pass its folder"
    return HubError(
        "The hub refused a request.",
        file=file,
        expected="the bytes asked for (200 or 206)",
        actual=actual,
        remedy=remedy,
    )


def _not_found(status: int, code: str, file: Path, actual: str) -> MlxStreamError:
    """Repository, revision or file. The hub answers 401 for a repository it will not admit to."""
    model = str(file).split("@")[0]
    if code == "RevisionNotFound":
        return ModelNotFoundError(
            f"cannot find the model {model!r}: the repository has no such revision",
            file=file,
            expected="a branch, a tag or a commit hash",
            actual=actual,
            remedy="check the revision on the model's page",
        )
    if status == 401 or code == "RepoNotFound":
        return ModelNotFoundError(
            f"cannot find the model {model!r}: no such repository, or it is private",
            file=file,
            expected="a public repository, or a token that may read it",
            actual=actual,
            remedy=f"check the spelling; for a private or gated repository {LOGIN}",
        )
    return HubEntryError(
        "The repository has no such file.",
        file=file,
        expected="a model in mlx layout: config.json and model*.safetensors",
        actual=actual,
        remedy="check the spelling and the file list; GGUF and adapters cannot be streamed",
    )


def _status_text(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def unreachable(file: Path, endpoint: str, reason: str) -> HubError:
    """No connection, or one that broke."""
    return HubError(
        "The hub cannot be reached.",
        file=file,
        expected=f"an answer from {endpoint}",
        actual=reason,
        remedy="check your connection, proxy and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses only what "
        "was fetched before",
    )


def timed_out(file: Path, endpoint: str, seconds: float) -> HubError:
    """The server took too long."""
    return HubError(
        "The hub did not answer in time.",
        file=file,
        expected=f"an answer from {endpoint} within {seconds:g} s",
        actual="a timeout",
        remedy="try again, or allow more seconds: HF_HUB_DOWNLOAD_TIMEOUT=60",
    )


def offline(file: Path) -> HubError:
    """HF_HUB_OFFLINE is set and nothing usable is here."""
    return HubError(
        "The hub is switched off and this model is not here.",
        file=file,
        expected="a complete download, or headers fetched before",
        actual="HF_HUB_OFFLINE is set; neither was found",
        remedy="unset HF_HUB_OFFLINE, or pass a local folder",
    )


def bad_answer(file: Path, problem: str, expected: object, actual: object) -> HubError:
    """An answer that breaks the rules of range requests, or is larger than it may be."""
    return HubError(
        problem,
        file=file,
        expected=expected,
        actual=actual,
        remedy="check HF_ENDPOINT and your proxy, or download the model and pass its folder",
    )
