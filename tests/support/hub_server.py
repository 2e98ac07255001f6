"""A hub on 127.0.0.1: resolve URLs of one repository, weights behind a redirect to a second server.

It counts what it sends, and `faults` replaces its answer for a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

REPO = "owner/tiny-moe"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BLOCK = 1 << 16


@dataclass
class Sent:
    """One answered request."""

    host: str  # "hub" or "store"
    file: str
    asked: str | None  # the Range header
    token: str | None
    revision: str
    status: int = 0
    nbytes: int = 0


Fault = Callable[["Answer"], None]


@dataclass
class Hub:
    """The state both servers share."""

    folder: Path
    repo: str = REPO
    sent: list[Sent] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)  # by file name, "*" for all
    commit: str | None = COMMIT
    endpoint: str = ""
    store: str = ""

    def bytes_of(self, file: str) -> int:
        """Body bytes sent for a file."""
        return sum(s.nbytes for s in self.sent if s.file == file)

    @property
    def weight_requests(self) -> list[Sent]:
        """Requests for weights that the store answered."""
        return [s for s in self.sent if s.host == "store"]


class Answer(BaseHTTPRequestHandler):
    """Answers one connection; faults call its methods."""

    hub: Hub
    host: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """A file, a redirect, or what a fault makes of it."""
        path = self.path.split("?")[0]
        if self.host == "store":
            revision, self.file = "", path.rsplit("/", 1)[1]
        else:
            repo, _, rest = path.strip("/").partition("/resolve/")
            revision, _, self.file = rest.partition("/")
            if repo != self.hub.repo:
                self.file = ""
        headers = self.headers
        self.entry = Sent(
            self.host, self.file, headers["Range"], headers["Authorization"], revision
        )
        self.hub.sent.append(self.entry)
        with suppress(BrokenPipeError, ConnectionResetError):
            fault = self.hub.faults.get(self.file) or self.hub.faults.get("*")
            if fault is not None and (self.host == "store" or not self.is_weight):
                fault(self)
            else:
                self.usual()

    @property
    def is_weight(self) -> bool:
        """Weights are what the hub keeps in its store."""
        return self.file.endswith(".safetensors")

    @property
    def path_on_disk(self) -> Path:
        """The file that was asked for."""
        return self.hub.folder / self.file

    def usual(self) -> None:
        """As the hub answers."""
        if not self.file:
            self.head(404, {"Content-Length": "0", "X-Error-Code": "RepoNotFound"})
        elif not self.path_on_disk.is_file():
            self.head(404, {"Content-Length": "0", "X-Error-Code": "EntryNotFound"})
        elif self.host == "hub" and self.is_weight:
            where = f"{self.hub.store}/blobs/{self.file}?signature=secret"
            size = str(self.path_on_disk.stat().st_size)
            self.head(302, {"Location": where, "X-Linked-Size": size, "Content-Length": "0"})
        elif self.headers["Range"]:
            begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.part(begin, end + 1)
        else:
            self.whole()

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Status line and headers."""
        self.entry.status = status
        self.send_response(status)
        if self.hub.commit and self.host == "hub":
            self.send_header("X-Repo-Commit", self.hub.commit)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def part(self, begin: int, end: int, content_range: str | None = None) -> None:
        """206 with bytes [begin, end)."""
        size = self.path_on_disk.stat().st_size
        end = min(end, size)
        stated = f"bytes {begin}-{end - 1}/{size}" if content_range is None else content_range
        self.head(206, {"Content-Length": str(end - begin), "Content-Range": stated})
        self.body(begin, end)

    def whole(self) -> None:
        """200 with the whole file, whatever was asked."""
        size = self.path_on_disk.stat().st_size
        self.head(200, {"Content-Length": str(size)})
        self.body(0, size)

    def body(self, begin: int, end: int) -> None:
        """Bytes [begin, end) of the file, counted block by block."""
        with open(self.path_on_disk, "rb") as file:
            file.seek(begin)
            while begin < end:
                data = file.read(min(BLOCK, end - begin))
                self.wfile.write(data)
                self.entry.nbytes += len(data)
                begin += len(data)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


class QuietServer(ThreadingHTTPServer):
    """Clients that hang up are part of the tests."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Silent."""


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """A hub with the files of `folder` as repository `REPO`."""
    hub = Hub(folder)
    servers = []
    for host in ("hub", "store"):
        handler = type("Handler", (Answer,), {"hub": hub, "host": host, "timeout": 30})
        server = QuietServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.endpoint, hub.store = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def use_endpoint(patch: pytest.MonkeyPatch, endpoint: str, home: Path) -> None:
    """Make this process talk to `endpoint`, keep its caches in `home`, and not wait long."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        patch.delenv(name, raising=False)
    patch.setenv("XDG_CACHE_HOME", str(home / "xdg"))
    patch.setenv("HF_TOKEN", "hf_of_the_test")
    patch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
    patch.setattr("mlx_stream.storage.remote_fetch.BACKOFF_SECONDS", 0.01)
    close_session()


def server_environment(hub: Hub, home: Path) -> dict[str, str]:
    """Variables that make another process talk to `hub`."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "xdg"),
        "NO_PROXY": "127.0.0.1",
    }
