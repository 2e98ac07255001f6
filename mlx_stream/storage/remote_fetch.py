"""Bounded reads of files in a hub repository: a small file whole, or a byte range of a large one.

Owns HTTP: URLs, token and session are huggingface_hub's; bounds, byte counts, retries and errors
are ours. No call reads more than it was asked for, whatever the server sends.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers

from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.remote_errors import (
    TRANSIENT,
    bad_answer,
    offline,
    refused,
    timed_out,
    unreachable,
)

# httpx or httpx2, whichever the installed huggingface_hub speaks.
_httpx = importlib.import_module(
    next(c for c in HfHubHTTPError.__mro__ if c.__name__ == "HTTPError").__module__.split(".")[0]
)

ATTEMPTS = 3
BACKOFF_SECONDS = 0.25  # doubled from one attempt to the next
MAX_WAIT_SECONDS = 10.0  # of what a server may ask for with Retry-After
DEADLINE_TIMEOUTS = 12  # one request as a whole may take this many timeouts
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
_NUMBER = re.compile(r"[0-9]{1,19}")

Response = Any  # of httpx or httpx2


@dataclass(frozen=True)
class Piece:
    """Bytes of a file in a repository.

    Attributes:
        total: bytes of the whole file.
        commit: the commit that the hub resolved the revision to, if it said so.
    """

    data: bytes
    total: int
    commit: str | None


@dataclass
class Traffic:
    """What was received; retries count."""

    requests: int = 0
    nbytes: int = 0
    by_file: dict[str, int] = field(default_factory=dict)


class _TransientError(Exception):
    """Worth another attempt. `error` is what to raise when there is none left."""

    def __init__(self, error: MlxStreamError, wait: float | None = None) -> None:
        self.error, self.wait = error, wait
        super().__init__(str(error))


class HubFetcher:
    """Reads files of one repository at one revision. Calls may run in several threads.

    Args:
        timeout: seconds to wait for a connection and for each read; default
            HF_HUB_DOWNLOAD_TIMEOUT.
        endpoint: default HF_ENDPOINT.
    """

    def __init__(
        self,
        repo: str,
        revision: str,
        *,
        timeout: float | None = None,
        endpoint: str | None = None,
    ) -> None:
        self.repo, self.revision = repo, revision
        self.endpoint = endpoint or constants.ENDPOINT
        self.traffic = Traffic()
        self._timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT if timeout is None else timeout
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def offline(self) -> bool:
        """Whether HF_HUB_OFFLINE forbids every request."""
        return bool(constants.HF_HUB_OFFLINE)

    @cached_property
    def _headers(self) -> dict[str, str]:
        # Not before the first request: huggingface_hub may ask its hub what to say here.
        headers = build_hf_headers(library_name="mlx_stream")
        # Ranges and sizes are of the file itself.
        return headers | {"Accept-Encoding": "identity"}

    def name(self, file: str = "") -> Path:
        """``owner/name@revision/file``: what messages call a file."""
        return Path(f"{self.repo}@{self.revision}") / file

    def stop(self) -> None:
        """Makes calls that run in other threads fail soon."""
        self._stop.set()

    def whole(self, file: str, most: int) -> Piece:
        """A file of at most `most` bytes. Raises HubError and ModelNotFoundError."""
        return self._get(file, {}, lambda response: self._read_whole(response, file, most))

    def piece(self, file: str, begin: int, end: int) -> Piece:
        """Bytes `[begin, end)`, or up to the end of a shorter file. Raises as `whole`."""
        asked = {"Range": f"bytes={begin}-{end - 1}"}
        return self._get(file, asked, lambda response: self._read(response, file, begin, end))

    def _get(self, file: str, headers: dict[str, str], read: Callable[[Response], Piece]) -> Piece:
        for attempt in range(ATTEMPTS):
            try:
                with self._open(file, headers) as response:
                    return read(response)
            except _TransientError as failure:
                last = failure
            if attempt + 1 < ATTEMPTS:
                self._stop.wait(last.wait or BACKOFF_SECONDS * 2**attempt)
        raise last.error from last.__cause__

    @contextmanager
    def _open(self, file: str, headers: dict[str, str]) -> Iterator[Response]:
        """One request, its answer good; network failures inside become typed."""
        if self.offline:
            raise offline(self.name(file))
        if self._stop.is_set():
            raise unreachable(self.name(file), self.endpoint, "cancelled: another file failed")
        url = hf_hub_url(self.repo, file, revision=self.revision, endpoint=self.endpoint)
        with self._lock:
            self.traffic.requests += 1
        try:
            with get_session().stream(
                "GET",
                url,
                headers=self._headers | headers,
                timeout=self._timeout,
                follow_redirects=True,
            ) as response:
                self._check_status(response, file)
                yield response
        except _httpx.TimeoutException as error:
            failure = timed_out(self.name(file), self.endpoint, self._timeout)
            raise _TransientError(failure) from error
        except OfflineModeIsEnabled as error:
            raise offline(self.name(file)) from error
        except (_httpx.HTTPError, _httpx.InvalidURL, OSError, UnicodeError) as error:
            reason = f"{type(error).__name__}: {error}".strip(": ")
            failure = unreachable(self.name(file), self.endpoint, reason)
            if isinstance(error, _httpx.NetworkError | _httpx.RemoteProtocolError):
                raise _TransientError(failure) from error
            raise failure from error

    def _check_status(self, response: Response, file: str) -> None:
        status = response.status_code
        if status not in (200, 206):
            error = refused(status, response.headers, self.name(file), str(response.url))
            if status in TRANSIENT:
                raise _TransientError(error, _retry_after(response))
            raise error
        if response.headers.get("content-encoding", "identity") != "identity":
            raise bad_answer(
                self.name(file),
                "The server compressed what it was asked to send as it is.",
                "no Content-Encoding",
                response.headers["content-encoding"][:40],
            )

    def _read_whole(self, response: Response, file: str, most: int) -> Piece:
        size = _length(response)
        data = b"" if size and size > most else self._body(response, file, most + 1)
        if len(data) > most or (size or 0) > most:
            raise bad_answer(
                self.name(file), "The file is too large.", f"at most {most} bytes", size or "more"
            )
        self._check_length(file, data, size)
        return Piece(data, len(data), _commit(response))

    def _read(self, response: Response, file: str, begin: int, end: int) -> Piece:
        if response.status_code == 200:
            return self._read_ignored_range(response, file, begin, end)
        found = response.headers.get("content-range", "")
        match = _CONTENT_RANGE.fullmatch(found.strip())
        first, last, total = map(int, match.groups()) if match else (-1, -1, -1)
        linked = _linked_size(response)
        if first != begin or last != min(end, total) - 1 or linked not in (None, total):
            of = "its size" if linked is None else linked
            raise bad_answer(
                self.name(file),
                "The server answered a range request with another range.",
                f"Content-Range: bytes {begin}-{end - 1}/{of}",
                f"Content-Range: {found[:80] or 'none'}",
            )
        data = self._body(response, file, last + 1 - begin)
        self._check_length(file, data, last + 1 - begin)
        return Piece(data, total, _commit(response))

    def _read_ignored_range(self, response: Response, file: str, begin: int, end: int) -> Piece:
        """The server sends the whole file: read up to `end`, then hang up."""
        total = _length(response)
        if total is None:
            raise bad_answer(
                self.name(file),
                "The server ignores range requests and does not say how long the file is.",
                "206 with Content-Range, or 200 with Content-Length",
                "200 without Content-Length",
            )
        data = self._body(response, file, min(end, total))
        self._check_length(file, data, min(end, total))
        return Piece(data[begin:], total, _commit(response))

    def _body(self, response: Response, file: str, most: int) -> bytes:
        """At most `most` bytes of the body, counted."""
        parts, held = [], 0
        deadline = time.monotonic() + DEADLINE_TIMEOUTS * self._timeout
        for part in response.iter_raw():
            with self._lock:
                self.traffic.nbytes += len(part)
                self.traffic.by_file[file] = self.traffic.by_file.get(file, 0) + len(part)
            parts.append(part)
            held += len(part)
            if held >= most:
                break
            if time.monotonic() > deadline or self._stop.is_set():
                raise timed_out(self.name(file), self.endpoint, DEADLINE_TIMEOUTS * self._timeout)
        return b"".join(parts)[:most]

    def _check_length(self, file: str, data: bytes, expected: int | None) -> None:
        if expected is not None and len(data) != expected:
            raise _TransientError(
                unreachable(
                    self.name(file),
                    self.endpoint,
                    f"the connection ended after {len(data)} of {expected} bytes",
                )
            )


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _length(response: Response) -> int | None:
    return _number(response.headers.get("content-length", ""))


def _linked_size(response: Response) -> int | None:
    """The file's size as the hub itself states it when it redirects to its storage."""
    name = constants.HUGGINGFACE_HEADER_X_LINKED_SIZE
    sizes = (_number(answer.headers.get(name, "")) for answer in response.history)
    return next((size for size in sizes if size is not None), None)


def _commit(response: Response) -> str | None:
    for answer in (*response.history, response):
        found = answer.headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT, "")
        if re.fullmatch(r"[0-9a-f]{40}", found):
            return found
    return None


def _retry_after(response: Response) -> float | None:
    seconds = _number(response.headers.get("retry-after", ""))
    return None if seconds is None else min(float(seconds), MAX_WAIT_SECONDS)
