"""The public surface: load, plan, generate, close; what mlx-lm users expect of the responses."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_stream
from mlx_stream.errors import MlxStreamError, ReadCancelled
from tests.prefill.running import settled_prompt
from tests.support.checkpoints import random_tokens
from tests.support.faults import copy_checkpoint

N, STEPS = 30, 6
ALPHABET = [f"w{n}" for n in range(157)]


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def case(path, stock):
    """A prompt, and the tokens that stock mlx-lm answers."""
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    return prompt, [int(row.argmax()) for row in rows]


@pytest.fixture
def runtime(path):
    with mlx_stream.load(path, memory_budget="1GiB", backend="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def with_tokenizer(path, tmp_path_factory):
    """The same weights with a word-level tokenizer and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = copy_checkpoint(path, tmp_path_factory.mktemp("tokenizer") / "checkpoint")
    words = {w: n for n, w in enumerate(["<unk>", "<eos>", "<user>", *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>", "<user>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "unk_token": "<unk>",
                "chat_template": "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}",
            }
        )
    )
    return folder


# --- responses


def test_responses_have_the_fields_of_mlx_lm(runtime, case):
    prompt, answer = case
    responses = list(runtime.stream_generate(prompt, STEPS))
    names = [f.name for f in dataclasses.fields(GenerationResponse)]
    for n, r in enumerate(responses, start=1):
        assert isinstance(r, GenerationResponse)
        assert all(hasattr(r, name) for name in names)
        assert (r.prompt_tokens, r.generation_tokens, r.from_draft) == (N, n, False)
        assert r.prompt_tps > 0
        assert r.generation_tps > 0
        assert r.peak_memory > 0
        assert r.logprobs.shape == (160,)
        assert float(mx.exp(r.logprobs).sum()) == pytest.approx(1, abs=1e-4)
        assert int(r.logprobs.argmax()) == r.token
    assert [r.token for r in responses] == answer
    assert [r.finish_reason for r in responses] == [None] * (STEPS - 1) + ["length"]


def test_logprobs_are_those_of_stock_mlx_lm(runtime, stock, path, case):
    from mlx_lm.generate import generate_step

    prompt, _ = case
    ours = [np.array(r.logprobs) for r in runtime.stream_generate(prompt, STEPS)]
    steps = generate_step(mx.array(prompt), stock(path), max_tokens=STEPS)
    for got, (token, logprobs) in zip(ours, steps, strict=True):
        assert int(got.argmax()) == token
        np.testing.assert_allclose(got, np.array(logprobs), atol=1e-3)


def test_a_stop_token_ends_the_answer(runtime, case):
    prompt, answer = case
    end = answer[3]
    responses = list(runtime.stream_generate(prompt, 50, stop_tokens=[end]))
    assert [r.token for r in responses] == answer[: answer.index(end) + 1]
    assert [r.finish_reason for r in responses][-1] == "stop"
    assert all(r.finish_reason is None for r in responses[:-1])


def test_a_stop_token_at_the_limit_is_a_stop(runtime, case):
    prompt, answer = case
    last = list(runtime.stream_generate(prompt, 1, stop_tokens=[answer[0]]))
    assert [(r.token, r.finish_reason) for r in last] == [(answer[0], "stop")]


def test_no_limit_goes_on_until_a_stop(runtime, case):
    prompt, _ = case
    tokens = runtime.stream_generate(prompt, -1)
    assert [next(tokens).finish_reason for _ in range(12)] == [None] * 12
    tokens.close()


def test_zero_tokens_are_refused(runtime, case):
    with pytest.raises(MlxStreamError, match="max_tokens"):
        list(runtime.stream_generate(case[0], 0))


def test_the_sampler_chooses(runtime, case):
    prompt, _ = case
    shapes = []

    def least(logprobs):
        shapes.append(logprobs.shape)
        return mx.argmin(logprobs, axis=-1)

    response = next(iter(runtime.stream_generate(prompt, 3, sampler=least)))
    assert shapes == [(1, 160)]
    assert response.token == int(response.logprobs.argmin())


def test_a_seeded_sampler_of_mlx_lm_repeats_itself(runtime, case):
    prompt, _ = case
    runs = []
    for seed in (7, 7, 8):
        mx.random.seed(seed)
        sampler = make_sampler(temp=1.5, top_k=50)
        runs.append([r.token for r in runtime.stream_generate(prompt, 8, sampler=sampler)])
    assert runs[0] == runs[1] != runs[2]


def test_logits_processors_see_prompt_and_answer(runtime, case):
    prompt, answer = case
    seen = []

    def forbid_first(tokens, logits):
        seen.append(tokens.tolist())
        assert logits.shape == (1, 160)
        return logits.at[:, answer[0]].add(-1e9)

    got = [r.token for r in runtime.stream_generate(prompt, 3, logits_processors=[forbid_first])]
    assert answer[0] not in got
    assert seen == [prompt, prompt + got[:1], prompt + got[:2]]


def test_a_logit_bias_of_mlx_lm(runtime, case):
    processors = make_logits_processors(logit_bias={42: 1e6})
    got = runtime.stream_generate(case[0], 3, logits_processors=processors)
    assert [r.token for r in got] == [42] * 3


def test_a_conversation_goes_on_in_one_cache(runtime, stock, path):
    from mlx_lm.models.cache import make_prompt_cache

    prompt, rows = settled_prompt(stock(path), N, 1)
    cache = make_prompt_cache(runtime.model)
    list(runtime.stream_generate(prompt[:17], 1, prompt_cache=cache))
    (response,) = runtime.stream_generate(prompt[17:], 1, prompt_cache=cache)
    assert response.token == int(rows[0].argmax())
    assert cache[0].offset == N
    assert runtime.last_receipt.prompt_tokens == N - 17


# --- prompts


@pytest.mark.parametrize("kind", [list, tuple, np.array, mx.array])
def test_token_ids_of_any_kind(runtime, case, kind):
    prompt, answer = case
    assert next(iter(runtime.stream_generate(kind(prompt), 1))).token == answer[0]


def test_token_ids_need_no_tokenizer_but_text_does(runtime, case):
    assert runtime.tokenizer is None
    assert [r.text for r in runtime.stream_generate(case[0], 2)] == ["", ""]
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(MlxStreamError, match="no tokenizer"):
            list(runtime.stream_generate(prompt, 1))


@pytest.mark.parametrize("empty", [[], np.array([], dtype=np.int64), ()])
def test_an_empty_prompt(runtime, empty):
    with pytest.raises(MlxStreamError, match="empty"):
        list(runtime.stream_generate(empty, 1))


@pytest.mark.parametrize("bad", [-1, 160, 2**40])
def test_ids_outside_the_vocabulary(runtime, case, bad):
    with pytest.raises(MlxStreamError, match="outside the vocabulary"):
        runtime.prefill([1, bad, 2])
    prompt, answer = case
    assert next(iter(runtime.stream_generate(prompt, 1))).token == answer[0]


def test_text_and_messages(with_tokenizer, case):
    prompt, answer = case
    with mlx_stream.load(with_tokenizer, memory_budget="1GiB", backend="cpu") as runtime:
        text = "w5 w9 w0 w31"
        assert runtime.encode(text) == [8, 12, 3, 34]
        assert runtime.encode([{"role": "user", "content": text}]) == [2, 8, 12, 3, 34]
        by_id = [r.token for r in runtime.stream_generate([8, 12, 3, 34], 5)]
        responses = list(runtime.stream_generate(text, 5))
        assert [r.token for r in responses] == by_id
        expected = runtime.tokenizer.decode(by_id)
        assert "".join(r.text for r in responses).strip() == expected.strip()
        assert runtime.generate(text, max_tokens=5).strip() == expected.strip()
        assert [r.token for r in runtime.stream_generate(prompt, 3)] == answer[:3]


def test_the_tokenizers_end_of_sequence_stops_and_is_not_printed(with_tokenizer):
    force_end = make_logits_processors(logit_bias={1: 1e6})
    with mlx_stream.load(with_tokenizer, memory_budget="1GiB", backend="cpu") as runtime:
        (response,) = runtime.stream_generate("w5 w9", 9, logits_processors=force_end)
    assert (response.token, response.finish_reason) == (1, "stop")
    assert "<eos>" not in response.text


def test_messages_without_a_template(with_tokenizer, tmp_path):
    folder = copy_checkpoint(with_tokenizer, tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with mlx_stream.load(folder, memory_budget="1GiB", backend="cpu") as runtime:
        assert runtime.encode("w1") == [4]
        with pytest.raises(MlxStreamError, match="no chat template"):
            runtime.encode([{"role": "user", "content": "w1"}])


# --- life and death


def test_receipts_add_up(runtime, case):
    assert runtime.last_receipt is None
    runtime.prefill(case[0])
    receipt = runtime.last_receipt
    data = json.loads(json.dumps(receipt.as_dict()))
    assert data["prompt_tokens"] == N
    assert data["read_amplification"] == pytest.approx(
        receipt.bytes_read / receipt.distinct_expert_bytes
    )
    assert data["bound"] in ("read", "compute")
    assert receipt.wall_seconds == pytest.approx(receipt.compute_seconds + receipt.stall_seconds)
    assert receipt.budget_bytes == runtime.memory_budget == 1 << 30
    assert 0 < receipt.peak_bytes <= receipt.budget_bytes
    assert f"prefill {N} tokens" in receipt.summary()
    assert "1 segment " in receipt.summary()


def test_it_says_what_it_is(runtime):
    text = repr(runtime)
    assert "3 expert layers" in text
    assert "cpu" in text
    assert "as asked" in text
    assert runtime.budget_reason == "as asked"


def test_closing_twice_is_fine_and_a_closed_runtime_says_so(path, case):
    runtime = mlx_stream.load(path, memory_budget="1GiB", backend="cpu")
    runtime.close()
    runtime.close()
    with pytest.raises(ReadCancelled):
        runtime.prefill(case[0])


def test_the_with_block_closes_on_errors_too(path, case):
    with pytest.raises(KeyError), mlx_stream.load(path, memory_budget="1GiB", backend="cpu") as r:
        raise KeyError
    with pytest.raises(ReadCancelled):
        r.prefill(case[0])


def test_an_abandoned_answer_leaves_the_runtime_usable(runtime, case):
    prompt, answer = case
    for _ in range(3):
        tokens = runtime.stream_generate(prompt, 10)
        assert next(tokens).token == answer[0]
        tokens.close()
    assert [r.token for r in runtime.stream_generate(prompt, STEPS)] == answer


def test_two_runtimes_at_once(path, case):
    prompt, answer = case
    options = {"memory_budget": "1GiB", "backend": "cpu"}
    with mlx_stream.load(path, **options) as a, mlx_stream.load(path, **options) as b:
        pairs = zip(a.stream_generate(prompt, 4), b.stream_generate(prompt, 4), strict=True)
        assert [(x.token, y.token) for x, y in pairs] == [(t, t) for t in answer[:4]]


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "tpu"},
        {"io": "mmap"},
        {"chunk_tokens": 0},
        {"memory_budget": "lots"},
        {"memory_budget": 0},
        {"memory_budget": "4XB"},
    ],
)
def test_bad_options_are_named(path, options):
    with pytest.raises(MlxStreamError, match="what to do"):
        mlx_stream.load(path, **options)


# --- the package


def test_lazy_exports():
    assert set(mlx_stream.__all__) <= set(dir(mlx_stream))
    for name in mlx_stream.__all__:
        assert getattr(mlx_stream, name) is not None
    assert mlx_stream.errors.BudgetError.__mro__[1] is mlx_stream.errors.MlxStreamError
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mlx_stream.nothing


def test_import_is_free_of_mlx_until_something_is_loaded():
    code = (
        "import sys, mlx_stream\n"
        "mlx_stream.errors.BudgetError, mlx_stream.StreamConfig, mlx_stream.plan\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)\n"
        "mlx_stream.load\n"
        "assert 'mlx.core' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prefill_leaves_random_state_alone(runtime, case):
    """Probing and planning draw no numbers: a seed set before load still decides the answer."""
    mx.random.seed(11)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(11)
    runtime.prefill(random_tokens(160, 12))
    assert mx.random.uniform(shape=(4,)).tolist() == expected


@pytest.mark.parametrize("cut", [lambda c: c[:2], lambda c: [None] * len(c), lambda c: [], str])
def test_a_cache_of_another_model_is_refused(runtime, cut):
    cache = cut(make_prompt_cache(runtime.model))
    with pytest.raises(MlxStreamError, match="prompt cache"):
        runtime.prefill([1, 2, 3], cache)


@pytest.mark.parametrize("tokens", [[[1, 2], [3, 4]], [1.5, 2], 5, "hi", [float("nan")]])
def test_only_one_prompt_of_integers_is_taken(runtime, tokens):
    with pytest.raises(MlxStreamError):
        runtime.prefill(tokens)


THREADS = ("mlx-stream-reader", "cpu-worker")


def threads_and_files() -> tuple[list[str], int]:
    names = sorted(t.name for t in threading.enumerate() if t.name.startswith(THREADS))
    return names, len(os.listdir("/dev/fd"))


def test_a_runtime_that_is_dropped_leaves_no_thread_and_no_file(path, case):
    limit, before = mx.set_cache_limit(0), threads_and_files()
    mx.set_cache_limit(limit)
    try:
        loaded = mlx_stream.load(path, memory_budget="1GiB", backend="cpu")
        stream = loaded.stream_generate(case[0], STEPS)
        assert next(stream).token == case[1][0]
        assert threads_and_files() != before
        del loaded, stream
        gc.collect()
        deadline = time.monotonic() + 10
        while threads_and_files() != before:  # the threads end on their own
            assert time.monotonic() < deadline, threads_and_files()
            time.sleep(0.01)
    finally:
        mx.set_cache_limit(limit)


def test_throttled_reads_take_their_time_and_the_receipt_says_so(path, case):
    with mlx_stream.load(path, memory_budget="1GiB", backend="cpu") as plain:
        free = plain.prefill(case[0]).receipt
    rate = free.bytes_read / 0.3
    with mlx_stream.load(
        path, memory_budget="1GiB", backend="cpu", throttle=f"{rate:.0f}/s:100us"
    ) as slow:
        result = slow.prefill(case[0])
    assert int(result.logits.argmax()) == case[1][0]
    assert result.receipt.bytes_read == free.bytes_read
    assert result.receipt.wall_seconds >= 0.29
    assert result.receipt.io_mode.startswith(f"{free.io_mode}, throttled to ")
    assert result.receipt.io_mode.endswith("/s + 100 us")
