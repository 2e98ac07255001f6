"""`mlx_stream plan` and `info` of a hub repository, as a user starts them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.cli.conftest import Result
from tests.cli.runner import COMMAND, assert_failed, environment, run
from tests.packed.building import pack_checkpoint
from tests.support.hub_server import REPO, Answer, Hub, serve, server_environment, use_endpoint


@pytest.fixture
def hub(checkpoint) -> Iterator[Hub]:
    with serve(checkpoint("qwen3_moe", shard_bytes=150_000)) as hub:
        yield hub


@pytest.fixture
def remote(hub, tmp_path) -> Callable[..., Result]:
    """``remote(*args, **variables)`` runs `mlx_stream` in another process that talks to `hub`."""

    def start(*args: str, **variables: str) -> Result:
        env = environment(**(server_environment(hub, tmp_path) | variables))
        return run(*args, command=COMMAND, env=env)

    return start


@pytest.fixture
def here(hub, tmp_path, monkeypatch, invoke_cli) -> Callable[..., Result]:
    """The same in this process, quickly."""
    use_endpoint(monkeypatch, hub.endpoint, tmp_path)
    return invoke_cli


def test_plan_is_that_of_the_folder(hub, remote, tmp_path):
    options = ("-n", "1000", "--memory-budget", "1GB")
    local = remote("plan", str(hub.folder), *options)
    assert not hub.sent
    for args in (["plan", REPO], ["plan", "--model", f"{REPO}@main"]):
        result = remote(*args, *options)
        assert result.returncode == 0, result.stderr
        name, _, rest = result.stdout.partition(": ")
        assert name.startswith("owner/")
        assert rest == local.stdout.partition(": ")[2]
        assert result.stderr == ""
    assert hub.weight_requests
    assert not list(tmp_path.rglob("*.safetensors"))


def test_info_says_what_it_fetched(hub, here):
    result = here("info", "--model", REPO, "--revision", "v1")
    assert result.returncode == 0, result.stderr
    for word in (f"{REPO}@{hub.commit}", "affine, 4 bits", "KB of headers in 6 requests"):
        assert word in result.stdout
    assert hub.sent[0].revision == "v1"


def test_progress_is_for_terminals_and_many_shards(here, capsys, monkeypatch):
    from mlx_stream.cli import header_progress

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = header_progress()
    show(1, 10)
    show(11, 12)
    show(12, 12)
    assert capsys.readouterr().err == "\rheaders 11/12\rheaders 12/12\n"


@pytest.mark.parametrize(
    ("status", "word"),
    [(401, "HF_TOKEN"), (403, "token"), (404, "spelling"), (500, "later")],
)
def test_refusals(hub, here, status, word):
    def refuse(answer: Answer) -> None:
        answer.head(status, {"Content-Length": "0"})

    hub.faults["*"] = refuse
    for command in ("plan", "info"):
        assert_failed(here(command, REPO), REPO, "config.json", str(status), "what to do", word)


def test_an_unknown_repository(remote):
    result = remote("plan", "owner/nothing")
    assert_failed(result, "cannot find the model 'owner/nothing'", "404")


def test_a_slow_hub(hub, remote):
    hub.faults["*"] = lambda answer: time.sleep(4)
    result = remote("plan", REPO, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_failed(result, REPO, "did not answer in time", "within 1 s")


def test_nobody_listens(remote):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        assert_failed(
            remote("plan", REPO, HF_ENDPOINT=endpoint), REPO, endpoint, "cannot be reached"
        )


def test_offline_before_and_after(hub, remote):
    assert_failed(remote("plan", REPO, HF_HUB_OFFLINE="1"), REPO, "HF_HUB_OFFLINE is set")
    assert not hub.sent
    assert remote("plan", REPO).returncode == 0
    again = remote("plan", REPO, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr


def test_model_given_twice(here, bare):
    result = here("plan", str(bare), "--model", REPO)
    assert_failed(result, "two models", code=2)
    assert here("info", str(bare), "--model", str(bare)).returncode == 0


def test_no_arguments_show_help(here):
    result = here()
    assert result.returncode == 0
    assert result.stderr == ""
    assert "Commands:" in result.stdout
    assert "Examples:" in result.stdout


def test_a_packed_repository_is_planned_as_its_folder(here, hub, tmp_path):
    packed = tmp_path / "packed"
    pack_checkpoint(hub.folder, packed)
    hub.folder = packed
    options = ("-n", "1000", "--memory-budget", "1GB")
    remote, local = here("plan", REPO, *options), here("plan", packed, *options)
    assert remote.returncode == local.returncode == 0, remote.stderr
    assert remote.stdout.partition(": ")[2] == local.stdout.partition(": ")[2]
    shown = here("info", REPO)
    assert shown.returncode == 0, shown.stderr
    assert "of headers in" in shown.stdout
    layers = [line for line in here("info", packed).stdout.splitlines() if "expert layers" in line]
    assert layers[0] in shown.stdout
