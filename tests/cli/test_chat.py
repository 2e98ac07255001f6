"""Conversations from the command line: piped input, commands, files that go on elsewhere."""

import io
import os
import signal
import subprocess
import sys

import pytest

from mlx_stream.cache_prompt import cache_prompt
from mlx_stream.chat import chat
from mlx_stream.hub import demo_path
from tests.cli.runner import COMMAND, environment, run
from tests.support.checkpoints import random_tokens, stock_greedy, stock_model

CHAT = (sys.executable, "-m", "mlx_stream.chat")

needs_demo = pytest.mark.skipif(
    not (demo_path() / "tokenizer.json").is_file(), reason="the demo model is not built"
)


def ids(text):
    return [int(word) for word in text.split()]


def words(tokens):
    return " ".join(map(str, tokens))


@pytest.fixture
def talk(invoke, monkeypatch):
    """``talk(lines, *flags)``: a conversation with piped input, in this process."""

    def run_chat(lines, *flags):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return invoke(*flags, command=chat)

    return run_chat


@pytest.fixture(scope="module")
def model(bare):
    return stock_model(bare)


def test_turns_of_token_ids(talk, bare, model):
    first, second = random_tokens(model, 12, 1), random_tokens(model, 5, 2)
    result = talk([words(first), "", words(second)], "--model", bare, "-m", "4")
    assert result.returncode == 0, result.stderr
    one, two = map(ids, result.stdout.splitlines())
    assert one == stock_greedy(model, first, 4)
    assert two == stock_greedy(model, first + one + second, 4)


def test_reset_quit_and_what_follows_it(talk, bare, model):
    said = words(random_tokens(model, 12, 1))
    result = talk([said, "/reset", said, "/quit", said], "--model", bare, "-m", "4")
    assert result.returncode == 0, result.stderr
    one, two = result.stdout.splitlines()
    assert one == two


def test_save_and_go_on(talk, bare, model, tmp_path):
    first, second = random_tokens(model, 12, 1), random_tokens(model, 5, 2)
    file = tmp_path / "my talk.safetensors"
    saved = talk([words(first), f"/save {file}"], "--model", bare, "-m", "4")
    assert "15 tokens" in saved.stderr
    one = ids(saved.stdout)
    result = talk([words(second)], "--model", bare, "-m", "4", "--prompt-cache-file", file)
    assert result.returncode == 0, result.stderr
    assert ids(result.stdout) == stock_greedy(model, first + one[:3] + second, 4)


@pytest.mark.parametrize("line", ["/nonsense", "/save"])
def test_unknown_commands(talk, bare, line):
    result = talk([line], "--model", bare)
    assert result.returncode == 1
    assert "no such command" in result.stderr
    assert "/quit" in result.stderr


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--kv-bits", "7"], "kv_bits"),
        (["--kv-bits", "4", "--max-kv-size", "99"], "max_kv_size 99"),
        (["--max-tokens", "0"], "--max-tokens"),
    ],
)
def test_bad_flags(talk, invoke, bare, flags, word):
    for result in (talk([], "--model", bare, *flags), invoke("--model", bare, *flags)):
        assert result.returncode == 2
        assert word in result.stderr


def test_kv_flags_reach_the_cache(invoke, bare, model):
    prompt = words(random_tokens(model, 30, 2))
    common = ("--model", bare, "--prompt", prompt, "-m", "8")
    plain = invoke(*common)
    quantized = ("--kv-bits", "2", "--kv-group-size", "32", "--quantized-kv-start", "0")
    for flags in (("--max-kv-size", "8"), quantized):
        result = invoke(*common, *flags)
        assert result.returncode == 0, result.stderr
        assert len(ids(result.stdout)) == 8
        assert result.stdout != plain.stdout
    refused = invoke(*common, "--kv-bits", "8")  # groups of 64 in heads of 32
    assert refused.returncode == 1
    assert "kv_group_size" in refused.stderr


def test_cache_prompt_then_generate(invoke, bare, model, tmp_path):
    head, tail = random_tokens(model, 20, 1), random_tokens(model, 6, 2)
    file = tmp_path / "head.safetensors"
    made = invoke(
        "--model", bare, "-p", words(head), "--prompt-cache-file", file, command=cache_prompt
    )
    assert made.returncode == 0, made.stderr
    assert "20 tokens" in made.stderr
    result = invoke("--model", bare, "-p", words(tail), "-m", "5", "--prompt-cache-file", file)
    assert result.returncode == 0, result.stderr
    assert ids(result.stdout) == stock_greedy(model, head + tail, 5)


def test_a_damaged_file(invoke, bare, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"nothing of the kind")
    result = invoke("--model", bare, "-p", "1 2", "--prompt-cache-file", file)
    assert result.returncode == 1
    assert "prompt cache file" in result.stderr
    assert "what to do" in result.stderr


# --- with words


@needs_demo
def test_a_cached_beginning_and_its_end_are_one_prompt(invoke, tmp_path):
    file = tmp_path / "begin.safetensors"
    made = invoke("-p", "And it came to", "--prompt-cache-file", file, command=cache_prompt)
    assert made.returncode == 0, made.stderr
    result = invoke("-p", " pass", "-m", "8", "--prompt-cache-file", file)
    whole = invoke("-p", "And it came to pass", "-m", "8")
    assert result.stdout == whole.stdout


@needs_demo
@pytest.mark.parametrize("command", [CHAT, (*COMMAND, "chat")])
def test_piped_conversation(command):
    result = run("-m", "6", command=command, stdin="And it came to pass\nthat the\n")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert ">>" not in result.stderr
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.parametrize("name", ["chat", "cache-prompt"])
def test_help(name):
    result = run(name, "--help", command=COMMAND)
    assert result.returncode == 0
    assert "Examples:\n" in result.stdout
    assert "--kv-bits" in result.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_ctrl_c_at_a_terminal_stops_the_answer_only(bare):
    """Then the next line is answered, and the end of the input ends the program."""
    import pty

    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [*CHAT, "--model", str(bare), "-m", "-1"],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=environment(),
    )
    os.close(follower)
    try:
        os.write(leader, b"1 2 3\n")
        for _ in range(6):
            assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        os.write(leader, b"/save\n/quit\n")
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(leader)
    assert process.returncode == 0, err
    assert "(stopped)" in err
    assert "no such command" in err
    assert "Traceback" not in err
