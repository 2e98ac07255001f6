"""An adapter at run time: mlx-lm's own LoRALinear is the reference, prefill and decode."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.utils import load_adapters

from mlx_stream.errors import KvCacheError
from mlx_stream.runtime import Runtime
from tests.adapters.making import ATTENTION, SCALE, publish, random_pairs, save_mlx, shapes
from tests.prefill.running import decode, relative, stock_decode
from tests.support.checkpoints import random_tokens, stock_model, stock_prefill

STEPS = 4
# family: which linear layers carry a delta; full and linear attention, shared experts.
FAMILIES = {
    "qwen3_moe": lambda path: path.rsplit(".", 1)[-1] in ATTENTION,
    "qwen3_5_moe": lambda path: "shared_expert." in path or "_attn." in path,
    "bailing_hybrid": lambda path: "shared_experts." in path or ".attention." in path,
}


@pytest.fixture
def adapted(checkpoint, tmp_path):
    """``adapted(family, seed) -> (checkpoint, pairs, stock model with them)``."""

    def make(family, seed):
        path = checkpoint(family)
        model = stock_model(path)
        pairs = random_pairs(shapes(model, FAMILIES[family]), seed)
        folder = save_mlx(tmp_path / f"mlx{seed}", pairs, len(model.layers))
        return path, pairs, folder, load_adapters(model, str(folder))

    return make


def reference(model, prompt):
    logits, cache = stock_prefill(model, prompt, 16)
    return stock_decode(model, logits, cache, STEPS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("published", [False, True], ids=["mlx-lm", "published"])
def test_prefill_and_decode_equal_mlx_lms_adapter(
    adapted, open_engine, stock, tmp_path, family, published
):
    path, pairs, folder, model = adapted(family, 1)
    prompt = random_tokens(model, 37)
    rows = reference(model, prompt)
    file = publish(tmp_path / "lora.safetensors", pairs) if published else folder
    engine = open_engine(path, adapter=str(file), adapter_scale=SCALE if published else None)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 2e-5
    plain, _ = stock_prefill(stock(path), prompt, 16)
    assert relative(plain, rows[0]) > 0.05  # the adapter matters
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    base = engine.prefill(prompt, adapter="off")
    assert relative(base.logits, plain) < 2e-5


def test_the_metal_path_runs_adapters(adapted, open_metal, tmp_path):
    """In the file's dtype, and with the scale beside the weights: no host computes there."""
    path, pairs, folder, model = adapted("qwen3_moe", 1)
    prompt = random_tokens(model, 37)
    rows = reference(model, prompt)
    file = publish(tmp_path / "lora.safetensors", pairs)
    engine = open_metal(path, adapter=str(folder))
    for adapter in (folder, engine.adapters.load(file, SCALE)):
        result = engine.prefill(prompt, adapter=adapter)
        assert relative(result.logits, rows[0]) < 2e-3
        assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]


def test_two_adapters_and_the_base_alternate_without_leaking(adapted, open_engine, stock):
    path, _, first, one = adapted("qwen3_moe", 1)
    _, _, second, two = adapted("qwen3_moe", 2)
    prompt = random_tokens(one, 30)
    wanted = {a: reference(m, prompt) for a, m in ((first, one), (second, two))}
    wanted[None] = reference(stock(path), prompt)
    engine = open_engine(path)
    results = {a: engine.prefill(prompt, adapter=a) for a in (first, None, second)}
    streams = {a: decode_stream(engine, r, prompt) for a, r in results.items()}
    tokens = {a: [] for a in streams}
    for _ in range(STEPS):  # every step another adapter
        for a, stream in streams.items():
            tokens[a].append(next(stream)[0])
    for a, rows in wanted.items():
        assert relative(results[a].logits, rows[0]) < 2e-5
        assert tokens[a] == [int(row.argmax()) for row in rows]
    assert len({tuple(t) for t in tokens.values()}) == 3


def decode_stream(engine, result, prompt):
    return engine.decode(result, prompt, sampler=lambda logprobs: mx.argmax(logprobs, axis=-1))


def test_a_prompt_cache_stays_with_its_adapter(adapted, open_engine, tmp_path):
    path, _, folder, _ = adapted("qwen3_moe", 1)
    engine = open_engine(path)
    result = engine.prefill(random_tokens(engine._shape.vocab, 20), adapter=folder)
    more = random_tokens(engine._shape.vocab, 5)
    with pytest.raises(KvCacheError, match="another adapter"):
        engine.prefill(more, result.cache)
    assert np.isfinite(np.array(engine.prefill(more, result.cache, adapter=folder).logits)).all()


def test_conversations_and_saved_caches_stay_with_their_adapter(checkpoint, adapted, tmp_path):
    from mlx_stream.config import StreamConfig
    from mlx_stream.errors import PromptFileError

    path, _, folder, _ = adapted("qwen3_moe", 1)
    with _runtime(path, StreamConfig(memory_budget=1 << 30, backend="cpu")) as runtime:
        talk, plain = runtime.chat(adapter=folder), runtime.chat()
        said = random_tokens(runtime.engine._shape.vocab, 12)
        answers = [[r.token for r in c.send(said, 4)] for c in (talk, plain, talk)]
        assert answers[0] != answers[1]
        saved = talk.save(tmp_path / "talk.safetensors")
        with pytest.raises(PromptFileError):
            runtime.load_prompt_cache(saved)
        again = runtime.chat(prompt_cache_file=saved, adapter=folder)
        assert again.tokens == talk.tokens
        assert len(list(again.send(said[:3], 2))) == 2


def _runtime(path, config):
    return Runtime(path, config)
