"""Generation from the command line: prompts from everywhere, sampling, receipts."""

from __future__ import annotations

import io
import itertools
import json
import os

import pytest

from mlx_stream import load
from mlx_stream.hub import demo_path
from mlx_stream.telemetry import Receipt
from tests.cli.runner import assert_failed, run
from tests.support.checkpoints import random_tokens, stock_greedy, stock_model
from tests.support.faults import FailingReads, install_fault

PROMPT = "In the beginning God created the heaven"
SHORT = ("--max-tokens", "8")

needs_demo = pytest.mark.skipif(
    not (demo_path() / "tokenizer.json").is_file(), reason="the demo model is not built"
)


# --- a folder without a tokenizer


def test_token_ids_in_and_out(invoke, bare):
    model = stock_model(bare)
    prompt = random_tokens(model, 30, seed=2)
    result = invoke("--model", bare, "--prompt", " ".join(map(str, prompt)), "--max-tokens", "6")
    assert result.returncode == 0, result.stderr
    assert list(map(int, result.stdout.split())) == stock_greedy(model, prompt, 6)
    assert result.stdout.endswith("\n")


def test_text_without_a_tokenizer(invoke, bare):
    result = invoke("--model", bare, "--prompt", "hello world")
    assert result.returncode == 1
    assert "no tokenizer" in result.stderr
    assert "'1 2 3'" in result.stderr


def test_token_id_outside_the_vocabulary(invoke, bare):
    result = invoke("--model", bare, "--prompt", "1 2 999999")
    assert result.returncode == 1
    assert "outside the vocabulary" in result.stderr


def test_empty_prompt(invoke, bare):
    result = invoke("--model", bare, "--prompt", "")
    assert result.returncode == 1
    assert "the prompt is empty" in result.stderr


# --- the demo model


@needs_demo
def test_prompt_sources_agree(invoke, tmp_path, monkeypatch):
    """--prompt, --prompt-file and standard input are the same prompt."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    by_flag = invoke("--prompt", PROMPT, *SHORT)
    by_file = invoke("--prompt-file", file, *SHORT)
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    by_stdin = invoke("-p", "-", "-m", "8")
    assert by_flag.returncode == by_file.returncode == by_stdin.returncode == 0
    assert by_flag.stdout == by_file.stdout == by_stdin.stdout
    assert len(by_flag.stdout.strip()) >= 5


@needs_demo
def test_standard_input_through_a_pipe():
    result = run("--prompt", "-", *SHORT, stdin=PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == run("--prompt", PROMPT, *SHORT).stdout
    assert "RuntimeWarning" not in result.stderr


@needs_demo
def test_escapes_in_a_prompt_are_line_breaks(invoke, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("one\ntwo\tthree")
    by_flag = invoke("--prompt", r"one\ntwo\tthree", *SHORT)
    assert by_flag.stdout == invoke("--prompt-file", file, *SHORT).stdout


@needs_demo
def test_the_newcomers_command(invoke):
    """No flags at all: the demo model answers something."""
    result = invoke("--max-tokens", "12")
    assert result.returncode == 0
    assert result.stdout.strip()
    assert "prefill" in result.stderr


@needs_demo
def test_system_prompt_and_template(invoke, tmp_path):
    receipts = []
    for n, extra in enumerate(([], ["--system-prompt", "Answer as a king."])):
        path = tmp_path / f"{n}.json"
        result = invoke("--prompt", PROMPT, *SHORT, *extra, "--receipt", path)
        assert result.returncode == 0, result.stderr
        receipts.append(json.loads(path.read_text()))
    assert receipts[1]["prompt_tokens"] > receipts[0]["prompt_tokens"] + 3


@needs_demo
def test_ignored_template_takes_the_text_as_it_is(invoke, tmp_path):
    tokens = []
    for n, extra in enumerate(([], ["--ignore-chat-template"])):
        path = tmp_path / f"{n}.json"
        assert invoke("--prompt", PROMPT, *SHORT, *extra, "--receipt", path).returncode == 0
        tokens.append(json.loads(path.read_text())["prompt_tokens"])
    assert tokens[1] < tokens[0]


@needs_demo
def test_greedy_is_repeatable_and_seeds_are_too(invoke):
    def text(*flags: str) -> str:
        result = invoke("--prompt", PROMPT, "--max-tokens", "24", *flags)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert text() == text()
    warm = ("--temp", "1.2")
    assert text(*warm, "--seed", "5") == text(*warm, "--seed", "5")
    assert len({text(*warm, "--seed", str(seed)) for seed in range(4)}) > 1


@needs_demo
@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens(invoke, count):
    result = invoke("--prompt", PROMPT, "--max-tokens", count)
    assert f"decode {count} tokens" in result.stderr


@needs_demo
def test_extra_eos_token_ends_the_answer(invoke):
    with load(memory_budget="500MB") as runtime:
        messages = [{"role": "user", "content": PROMPT}]
        answer = list(runtime.stream_generate(messages, 30))
    end = answer[-1].token if answer[-1].finish_reason == "length" else answer[-2].token
    before = itertools.takewhile(lambda r: r.token != end, answer)
    expected = "".join(r.text for r in before)
    result = invoke("--prompt", PROMPT, "--max-tokens", "30", "--extra-eos-token", end)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip() == expected.rstrip()


@needs_demo
def test_quiet_run_prints_the_answer_only(invoke):
    result = invoke("--prompt", PROMPT, *SHORT, "--verbose", "false")
    assert result.stderr == ""
    assert result.stdout == invoke("--prompt", PROMPT, *SHORT).stdout


@needs_demo
def test_receipt(invoke, tmp_path):
    path = tmp_path / "receipt.json"
    path.write_text("an older one")
    result = invoke(
        "--prompt",
        PROMPT,
        *SHORT,
        "--receipt",
        path,
        "--memory-budget",
        "500MB",
        "--io",
        "buffered",
    )
    assert result.returncode == 0, result.stderr
    receipt = json.loads(path.read_text())
    fields = set(Receipt.__dataclass_fields__)
    assert fields | {"read_amplification", "bound", "tokens_per_second"} == set(receipt)
    assert receipt["budget_bytes"] == 500_000_000
    assert receipt["io_mode"] == "buffered"
    assert receipt["segments"] == 1
    assert 0 < receipt["distinct_expert_bytes"] <= receipt["bytes_read"]
    assert receipt["bound"] in ("read", "compute")
    assert receipt["wall_seconds"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


def test_throttled_reads_show_in_the_receipt(invoke, bare, tmp_path):
    path = tmp_path / "receipt.json"
    args = ("--model", bare, "--prompt", "1 2 3", "--max-tokens", "2", "--receipt", path)
    result = invoke(*args, "--throttle-reads", "0.5GB/s:100us")
    assert result.returncode == 0, result.stderr
    assert json.loads(path.read_text())["io_mode"].endswith(", throttled to 500.00 MB/s + 100 us")


# --- what goes wrong


def test_a_rate_that_is_none(invoke, bare):
    result = invoke("--model", bare, "--prompt", "1 2 3", "--throttle-reads", "fast")
    assert result.returncode == 2
    assert "not a read rate" in result.stderr
    assert "2GB/s" in result.stderr


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--bogus"], "--bogus"),
        (["--max-tokens", "many"], "'many'"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--max-tokens", "-2"], "--max-tokens"),
        (["--temp", "-1"], "--temp"),
        (["--backend", "abacus"], "abacus"),
        (["--io", "psychic"], "psychic"),
        (["--prompt", "a", "--prompt-file", __file__], "--prompt-file"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["surplus"], "surplus"),
    ],
)
def test_usage_errors_are_one_line(invoke, args, word):
    result = invoke(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert word in result.stderr
    assert "--help" in result.stderr


@pytest.mark.parametrize(
    "args", [["--memory-budget", "12XB"], ["--memory-budget", "0"], ["--chunk-tokens", "0"]]
)
def test_values_out_of_range_are_usage_errors(invoke, args):
    result = invoke(*args)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "what to do:" in result.stderr


@needs_demo
@pytest.mark.parametrize("text", ["nonsense", "[1]"])
def test_template_arguments_must_be_an_object(invoke, text):
    result = invoke("--chat-template-config", text)
    assert result.returncode == 2
    assert "--chat-template-config" in result.stderr


@pytest.mark.parametrize("model", ["/no/such/folder", "./missing", "a/b/c", "noslash", __file__])
def test_model_not_found(invoke, model):
    result = invoke("--model", model)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: cannot find the model")
    assert "what to do:" in result.stderr


def test_unknown_repository_offline():
    """HF_HUB_OFFLINE=1: no network, so an answer at once, as a subprocess sees it."""
    result = run("--model", "nobody/no-such-model")
    assert_failed(result, "nobody/no-such-model", "HF_HUB_OFFLINE", "what to do:")


def test_prompt_file_that_is_not_text(invoke, tmp_path):
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"\xff\xfe\x00binary")
    result = invoke("--prompt-file", path)
    assert result.returncode == 1
    assert "UTF-8" in result.stderr


def test_receipt_folder_is_checked_before_any_work(invoke, tmp_path):
    result = invoke("--receipt", tmp_path / "missing" / "receipt.json")
    assert result.returncode == 1
    assert "the receipt cannot be written" in result.stderr
    assert "Runtime(" not in result.stderr


@needs_demo
def test_full_disk_leaves_no_partial_receipt(invoke, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    path = tmp_path / "receipt.json"
    result = invoke("--prompt", PROMPT, *SHORT, "--receipt", path)
    assert result.returncode == 1
    assert "No space left on device" in result.stderr
    assert list(tmp_path.iterdir()) == []


@needs_demo
def test_budget_too_small_names_one_that_works(invoke):
    result = invoke("--prompt", PROMPT, "--memory-budget", "5MB")
    assert result.returncode == 1
    needed = result.stderr.split("set memory_budget to ")[1].split(" or more")[0]
    again = invoke("--prompt", PROMPT, *SHORT, "--memory-budget", needed.replace(" ", ""))
    assert again.returncode == 0, again.stderr


def test_disk_error_in_the_middle_of_an_answer(invoke, bare, monkeypatch, tmp_path):
    """Tokens printed so far stay, then one message; a shell sees that it failed."""
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    prompt = "1 2 3 4 5 6 7 8"
    options = ("--model", bare, "--prompt", prompt, "--max-tokens", "60")
    assert invoke(*options, "--memory-budget", "1GB").returncode == 0
    fault.arm(skip=fault.calls - 1)  # the last read of the same run
    result = invoke(*options, "--memory-budget", "1GB", "--receipt", tmp_path / "receipt.json")
    assert result.returncode == 1
    assert result.stdout
    assert "error: The system failed a read." in result.stderr
    assert "Input/output error" in result.stderr
    assert str(bare) in result.stderr
    assert list(tmp_path.iterdir()) == []
