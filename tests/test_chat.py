"""Conversations: every turn as stock mlx-lm on the whole history, and only the new is prefilled."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache

import mlx_stream
from mlx_stream.errors import BudgetError, KvCacheError, MlxStreamError, PromptFileError, ReadError
from mlx_stream.kv.options import KvOptions
from tests.support.checkpoints import random_tokens, stock_greedy, stock_prefill
from tests.support.faults import FailingReads, copy_checkpoint, install_fault

# Plain KV, windows with sinks, windows with shared keys and values, chunks, recurrent, latent.
NAMES = ("qwen3_moe", "gpt_oss", "gemma4_text", "llama4", "qwen3_next", "deepseek_v3")
ALPHABET = [f"w{n}" for n in range(156)]
# Answers lose every w7 when templated again, as some templates drop the reasoning.
FORGETS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot> "
    "{{ m['content'].split(' ')[0] }} {% else %}<user> {{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot> {% endif %}"
)
KEEPS = FORGETS.replace(".split(' ')[0]", "")


@pytest.fixture
def open_runtime():
    runtimes = []

    def load(path, **options):
        defaults = {"memory_budget": "1GiB", "backend": "cpu", "chunk_tokens": 16}
        runtimes.append(mlx_stream.load(path, **(defaults | options)))
        return runtimes[-1]

    yield load
    for runtime in runtimes:
        runtime.close()


@pytest.fixture(scope="module")
def templated(checkpoint, tmp_path_factory):
    """``templated(family, template) -> folder`` with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    def make(name, template):
        folder = copy_checkpoint(checkpoint(name), tmp_path_factory.mktemp("chat") / "checkpoint")
        words = {w: n for n, w in enumerate(["<unk>", "<eos>", "<user>", "<bot>", *ALPHABET])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<eos>", "<user>", "<bot>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        }
        if template is not None:
            config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    return make


class Watched:
    """A runtime's prefills, counted."""

    def __init__(self, runtime, monkeypatch):
        self.lengths = []
        prefill = runtime.engine.prefill

        def counted(tokens, *args, **options):
            self.lengths.append(len(tokens))
            return prefill(tokens, *args, **options)

        monkeypatch.setattr(runtime.engine, "prefill", counted)


def is_settled(model, tokens, count):
    """Whether no greedy step is a near tie."""
    logits, cache = stock_prefill(model, tokens, 16)
    for _ in range(count):
        second, first = np.partition(logits, -2)[-2:]
        if first - second < 1e-3 * np.abs(logits).max():
            return False
        logits = np.array(model(mx.array([[int(logits.argmax())]]), cache=cache)[0, -1])
    return True


def turns(talk, model, sizes, answer, seed=0):
    """Random turns as token ids; each answer must be stock mlx-lm's on the whole history."""
    history = []
    for n, size in enumerate(sizes):
        for attempt in range(20):
            said = random_tokens(model, size, 100 * seed + 20 * n + attempt)
            if is_settled(model, history + said, answer):
                break
        expected = stock_greedy(model, history + said, answer, 16)
        got = [r.token for r in talk.send(said, answer)]
        assert got == expected
        history += said + got
        assert list(talk.tokens) == history[:-1]
    return history


@pytest.mark.parametrize("name", NAMES)
def test_turns_equal_stock_on_the_whole_history(checkpoint, stock, open_runtime, monkeypatch, name):
    path = checkpoint(name)
    runtime = open_runtime(path)
    watched = Watched(runtime, monkeypatch)
    turns(runtime.chat(), stock(path), (20, 9, 30), 4)
    assert watched.lengths == [20, 10, 31]  # with the last token of the answer before


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize(("size", "mode"), [(12, "cached"), (100, "union"), (600, "stream")])
def test_long_and_short_turns_take_their_paths(checkpoint, open_runtime, name, size, mode):
    runtime = open_runtime(checkpoint(name))
    talk = runtime.chat()
    talk.ask([1, 2, 3], 2)
    talk.ask(random_tokens(160, size), 1)
    receipt = runtime.last_receipt
    assert receipt.mode == mode
    if mode == "cached":
        assert receipt.bytes_read < receipt.distinct_expert_bytes, "some experts were cached"
    else:
        assert receipt.bytes_read >= receipt.distinct_expert_bytes


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded_by_another_engine(checkpoint, stock, open_runtime, tmp_path, name):
    path, model = checkpoint(name), stock(checkpoint(name))
    talk = open_runtime(path).chat()
    history = turns(talk, model, (20, 9), 3)
    file = talk.save(tmp_path / "talk")

    other = open_runtime(path).chat(prompt_cache_file=file)
    assert list(other.tokens) == history[:-1]
    said = random_tokens(model, 8, 99)
    # The token that was chosen last was never in the cache, and is not in the file.
    assert [r.token for r in other.send(said, 3)] == stock_greedy(model, history[:-1] + said, 3, 16)

    cache = load_prompt_cache(str(file))
    logits = model(mx.array([said]), cache=cache)[0, -1]
    assert int(mx.argmax(logits)) == stock_greedy(model, history[:-1] + said, 1, 16)[0]


# --- chat templates: what is shared stays, what differs goes


def templated_turns(folder, open_runtime, monkeypatch, **options):
    """Three turns by text; yields ``(all ids of a turn, tokens prefilled)``, answers checked."""
    runtime = open_runtime(folder)
    watched = Watched(runtime, monkeypatch)
    talk = runtime.chat(system="w1 w2", **options)
    fresh = open_runtime(folder)
    seen = []
    for text in ("w3 w4 w5 w6", "w8", "w9 w10 w11"):
        ids = runtime.encode([*talk.messages, {"role": "user", "content": text}])
        got = [r.token for r in talk.send(text, 5)]
        assert got == [r.token for r in fresh.stream_generate(ids, 5)]
        assert list(talk.tokens) == (ids + got)[:-1]
        seen.append((ids, watched.lengths[-1]))
    return seen, talk


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next", "llama4"])
def test_a_template_that_keeps_answers(templated, open_runtime, monkeypatch, name):
    seen, talk = templated_turns(templated(name, KEEPS), open_runtime, monkeypatch)
    (first, all_new), (second, new), (third, newer) = seen
    assert all_new == len(first)
    assert second[: len(first)] == first
    assert new == len(second) - len(first) - 4
    assert newer == len(third) - len(second) - 4
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 3]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next", "llama4", "deepseek_v3"])
def test_a_template_that_drops_parts_of_answers(templated, open_runtime, monkeypatch, name):
    """Plain caches are trimmed to what is shared; others go back to the end of the prompt."""
    seen, _ = templated_turns(templated(name, FORGETS), open_runtime, monkeypatch)
    (first, _), (second, new), (_, newer) = seen
    shared = len(first) + 1  # the answer's first word stays
    assert new in (len(second) - shared, len(second) - len(first))
    assert newer < len(seen[2][0])
    if name in ("qwen3_moe", "deepseek_v3"):
        assert new == len(second) - shared


def test_a_limited_cache_starts_again_when_it_has_to(templated, open_runtime, monkeypatch):
    """Its window moved on, and there is no room planned for a copy of it."""
    folder = templated("qwen3_moe", FORGETS)
    runtime = open_runtime(folder)
    watched = Watched(runtime, monkeypatch)
    talk = runtime.chat(kv=KvOptions(max_kv_size=8))
    for text in ("w3 w4 w5 w6 w7 w8 w9", "w10"):
        ids = runtime.encode([*talk.messages, {"role": "user", "content": text}])
        talk.ask(text, 5)
        assert watched.lengths[-1] == len(ids)


def test_without_a_template_turns_follow_each_other(templated, open_runtime):
    runtime = open_runtime(templated("qwen3_moe", None))
    talk = runtime.chat(system="w1 w2")
    first = [r.token for r in talk.send("w3 w4", 3)]
    second = [r.token for r in talk.send("w5", 3)]
    head = runtime.encode("w1 w2") + runtime.encode("w3 w4")
    assert first == [r.token for r in runtime.stream_generate(head, 3)]
    ids = head + first + runtime.encode("w5")
    assert second == [r.token for r in runtime.stream_generate(ids, 3)]
    assert talk.messages == ()


def test_a_saved_conversation_remembers_what_was_said(templated, open_runtime, tmp_path):
    folder = templated("qwen3_moe", KEEPS)
    talk = open_runtime(folder).chat(system="w1")
    talk.ask("w2 w3", 4)
    file = talk.save(tmp_path / "talk.safetensors")
    other = open_runtime(folder).chat(prompt_cache_file=file)
    assert other.messages == talk.messages
    assert other.tokens == talk.tokens
    assert other.ask("w4", 5) == talk.ask("w4", 5)
    system = open_runtime(folder).chat(system="w9", prompt_cache_file=file)
    assert [m["content"] for m in system.messages if m["role"] == "system"] == ["w9"]


# --- interrupted and failed turns


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("leave", ["close", "interrupt", "forget"])
def test_an_answer_cut_short_stays_as_far_as_it_went(
    checkpoint, stock, open_runtime, monkeypatch, name, leave
):
    path, model = checkpoint(name), stock(checkpoint(name))
    runtime = open_runtime(path)
    talk = runtime.chat()
    said = random_tokens(model, 20, 3)
    answer = talk.send(said, 50)
    got = [next(answer).token, next(answer).token, next(answer).token]
    if leave == "close":
        answer.close()
    elif leave == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            answer.throw(KeyboardInterrupt)
    more = random_tokens(model, 5, 4)
    again = [r.token for r in talk.send(more, 3)]
    assert again == stock_greedy(model, said + got + more, 3, 16)


def test_an_interrupt_inside_a_step_undoes_the_step(checkpoint, stock, open_runtime, monkeypatch):
    path, model = checkpoint("qwen3_next"), stock(checkpoint("qwen3_next"))
    runtime = open_runtime(path)
    talk = runtime.chat()
    said = random_tokens(model, 20, 3)
    answer = talk.send(said, 50)
    got = [next(answer).token for _ in range(3)]
    layer = runtime.model.layers[2]
    call = type(layer).__call__

    def interrupted(self, *args, **options):
        if self is layer:
            raise KeyboardInterrupt
        return call(self, *args, **options)

    monkeypatch.setattr(type(layer), "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    monkeypatch.setattr(type(layer), "__call__", call)
    assert list(talk.tokens) == (said + got)[:-1]
    more = random_tokens(model, 5, 4)
    assert [r.token for r in talk.send(more, 3)] == stock_greedy(model, said + got + more, 3, 16)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss"])
def test_a_turn_that_fails_leaves_no_trace(checkpoint, stock, open_runtime, monkeypatch, name):
    path, model = checkpoint(name), stock(checkpoint(name))
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    talk = open_runtime(path).chat()
    history = turns(talk, model, (20,), 3)
    before = talk.tokens
    fault.arm(skip=3)
    with pytest.raises(ReadError):
        talk.ask(random_tokens(model, 40, 8), 3)
    fault.disarm()
    assert talk.tokens == before
    said = random_tokens(model, 6, 9)
    assert [r.token for r in talk.send(said, 3)] == stock_greedy(model, history + said, 3, 16)


def test_a_turn_that_does_not_fit(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("qwen3_moe"), memory_budget="90MB")
    talk = runtime.chat()
    talk.ask([1, 2, 3], 2)
    before = talk.tokens
    with pytest.raises(BudgetError):
        talk.ask(random_tokens(160, 50_000), 2)
    assert talk.tokens == before
    talk.ask([4], 1)


# --- trim, reset, and what is refused


def test_trim(checkpoint, stock, open_runtime):
    path, model = checkpoint("qwen3_moe"), stock(checkpoint("qwen3_moe"))
    talk = open_runtime(path).chat()
    history = turns(talk, model, (20,), 4)
    assert talk.trim(10) == 13
    assert list(talk.tokens) == history[:13]
    said = random_tokens(model, 6, 9)
    assert [r.token for r in talk.send(said, 3)] == stock_greedy(model, history[:13] + said, 3, 16)
    assert talk.trim(10**6) == 0


def test_trim_where_only_the_prompts_end_is_known(checkpoint, open_runtime):
    talk = open_runtime(checkpoint("qwen3_next")).chat()
    talk.ask(list(range(20)), 5)
    with pytest.raises(KvCacheError, match="cannot go back"):
        talk.trim(1)
    assert len(talk.tokens) == 24
    assert talk.trim(4) == 20
    with pytest.raises(KvCacheError):
        talk.trim(-1)


def test_reset(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("gpt_oss"))
    talk = runtime.chat()
    first = [r.token for r in talk.send([1, 2, 3], 4)]
    talk.reset()
    assert talk.tokens == ()
    assert [r.token for r in talk.send([1, 2, 3], 4)] == first


def test_an_empty_message(checkpoint, open_runtime):
    with pytest.raises(MlxStreamError, match="empty"):
        open_runtime(checkpoint("qwen3_moe")).chat().ask([], 1)


def test_options_are_refused_before_anything_is_said(checkpoint, open_runtime):
    with pytest.raises(KvCacheError):
        open_runtime(checkpoint("gpt_oss")).chat(kv=KvOptions(kv_bits=8, kv_group_size=32))


def test_a_file_of_mlx_lm_has_no_tokens(checkpoint, stock, open_runtime, tmp_path):
    from mlx_lm.models.cache import save_prompt_cache

    path = checkpoint("qwen3_moe")
    _, cache = stock_prefill(stock(path), [1, 2, 3], 16)
    save_prompt_cache(str(tmp_path / "s.safetensors"), cache)
    with pytest.raises(PromptFileError, match="which tokens"):
        open_runtime(path).chat(prompt_cache_file=tmp_path / "s.safetensors")


def test_quantized_conversation(checkpoint, open_runtime, tmp_path):
    """The cache turns quantized in the middle, and stays so in a file."""
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=30)
    path = checkpoint("qwen3_moe")
    talk = open_runtime(path).chat(kv=kv)
    for n in range(3):
        talk.ask(random_tokens(160, 12, n), 4)
    assert all(type(c).__name__ == "QuantizedKVCache" for c in talk.cache)
    other = open_runtime(path).chat(prompt_cache_file=talk.save(tmp_path / "q"), kv=kv)
    assert other.tokens == talk.tokens
    talk.trim(0)
    assert [r.token for r in other.send([5], 3)] == [r.token for r in talk.send([5], 3)]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_the_same_message_again_after_a_failure_before_the_first_token(
    templated, open_runtime, monkeypatch, name
):
    """The whole prompt is in the cache then; its last token has to run again for its logits."""
    runtime = open_runtime(templated(name, KEEPS))
    talk = runtime.chat()

    def broken(logprobs):
        raise RuntimeError("no sampler")

    with pytest.raises(RuntimeError, match="no sampler"):
        talk.ask("w1 w2 w3", 4, sampler=broken)
    ids = runtime.encode([{"role": "user", "content": "w1 w2 w3"}])
    assert list(talk.tokens) == ids
    assert talk.messages == ()
    got = [r.token for r in talk.send("w1 w2 w3", 4)]
    assert got == [r.token for r in runtime.stream_generate(ids, 4)]
