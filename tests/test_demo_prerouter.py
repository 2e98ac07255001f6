"""The demo model's trained heads and LoRA: small, sound, and as good as the record says."""

import json
import math
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_stream import prompt_caches
from mlx_stream.adapters.lora_file import open_adapter
from mlx_stream.errors import CapabilityError, MlxStreamError, PromptFileError
from mlx_stream.hub import demo_path
from mlx_stream.prerouter.head_file import open_heads
from mlx_stream.prerouter.spec_file import read_spec
from mlx_stream.runtime import load
from tests.prefill.running import decode, relative

TIERS = {"own": ("prerouter.json", 4), "k2": ("prerouter_k2.json", 2)}
CHECK_TOKENS = 160  # what the record's "check" is of


@pytest.fixture(scope="module")
def record():
    return json.loads((demo_path() / "prerouter_metrics.json").read_text())


@pytest.mark.parametrize("tier", TIERS)
def test_the_files_are_sound(tier):
    name, top_k = TIERS[tier]
    spec = read_spec(demo_path() / name)
    assert (spec.trained, spec.top_k) == (True, top_k)
    assert spec.consumers == tuple(n + 1 for n in spec.owners)
    file = open_heads(demo_path() / spec.heads_file, spec, hidden=256, experts=32)
    assert len(file.tensors) == 3 * len(spec.owners)
    adapter = open_adapter(demo_path() / spec.lora.file, spec.lora.scale)
    assert len(adapter.pairs) == 6 * 4
    assert all(".self_attn." in module for module in adapter.pairs)
    assert {pair.rank for pair in adapter.pairs.values()} == {spec.lora.rank}


def test_they_are_small():
    names = [n for n in demo_path().iterdir() if n.name.startswith(("prerouter", "lora"))]
    assert len(names) == 7
    assert sum(name.stat().st_size for name in names) <= 2_000_000


@pytest.mark.parametrize("tier", TIERS)
def test_the_record_says_that_training_helped(record, tier):
    first, second, third = (record[tier][f"phase_{n}"] for n in (1, 2, 3))
    for layer, share in first["recall"]["heads"].items():
        assert share > 1.3 * first["recall"]["copy"][layer]
        assert share > 1.3 * first["recall"]["warm start"][layer]
    base, heads = (second["perplexity"][n] for n in ("base", "predicted, heads before"))
    lora, distilled = (r["perplexity"]["predicted with LoRA"] for r in (second, third))
    assert base < distilled <= lora < heads
    assert math.log(heads / lora) >= 0.6 * math.log(heads / base)  # recovered by phase 2


def losses(runtime, ids):
    """Negative log-likelihood of tokens 2.. of the ids, each but the first by a decode step."""
    found, rest = [], iter(ids[1:])

    def forced(logprobs):
        token = next(rest)
        found.append(-logprobs[0, token].item())
        return mx.array([token])

    tokens = runtime.engine.decode(runtime.engine.prefill(ids[:1]), ids[:1], sampler=forced)
    while len(found) < len(ids) - 1:
        next(tokens)
    tokens.close()
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_the_runtime_decodes_as_well_as_the_trainer_measured(record, tier):
    spec = demo_path() / TIERS[tier][0]
    with load(memory_budget="90MB", backend="cpu", prerouter="on", prerouter_spec=spec) as runtime:
        text = (demo_path() / "heldout.txt").read_text(encoding="utf-8")
        found = losses(runtime, runtime.encode(text)[:CHECK_TOKENS])[1:]
        counts = runtime.engine.decode_metrics.as_dict()
    wanted = record[tier]["phase_3"]["perplexity"]["check, predicted with LoRA"]
    assert math.exp(sum(found) / len(found)) == pytest.approx(wanted, rel=1e-3)
    layers = len(read_spec(spec).consumers)
    assert counts["predicted_layer_steps"] == layers * (CHECK_TOKENS - 3)
    assert counts["dropped_experts"] == 0


def test_auto_turns_it_on_and_off_leaves_the_plain_model():
    with load(memory_budget="90MB", backend="cpu") as runtime:
        assert runtime.engine.adapters.default is not None
        assert runtime.engine.decoder.plan.path == "prerouted"
    with load(memory_budget="90MB", backend="cpu", prerouter="off") as runtime:
        assert runtime.engine.adapters.default is None
        assert runtime.engine.decoder.plan.path == "exact"


def test_it_runs_through_the_metal_backends_code(open_engine, open_metal):
    """The heads are float16 there, the LoRA keeps its own dtype and its scale."""
    cpu, metal = open_engine(demo_path()), open_metal(demo_path())
    prompt = list(range(20, 60))
    results = [engine.prefill(prompt) for engine in (cpu, metal)]
    assert relative(results[1].logits, results[0].logits) < 1e-3
    assert len(decode(metal, results[1], prompt, 12)) == 12
    counts = metal.decode_metrics.as_dict()
    assert counts["predicted_layer_steps"] == 4 * (12 - 2)
    assert counts["dropped_experts"] == 0


@pytest.mark.parametrize("at", [2, 5, 6, 11])
def test_a_step_that_failed_at_its_end_is_taken_again_as_it_was(open_engine, at):
    """The sampler fails after the heads have run; the prompt cache is as before the step."""
    engine, prompt = open_engine(demo_path()), list(range(20, 60))
    wanted = decode(engine, engine.prefill(prompt), prompt, 14)
    calls = iter(range(1000))

    def sampler(logprobs):
        if next(calls) == at:
            raise ValueError("once")
        return mx.argmax(logprobs, axis=-1)

    result, tokens = engine.prefill(prompt), []
    logits = result.logits
    stream = engine.decode(result, prompt, sampler=sampler)
    while len(tokens) < 14:
        try:
            token, logits = next(stream)
            tokens.append(token)
        except ValueError:
            stream = engine.decode(replace(result, logits=logits), prompt, sampler=sampler)
            next(stream)  # the last token once more
    assert tokens == wanted


def test_a_stream_outlives_its_runtime_quietly():
    with load(memory_budget="90MB", backend="cpu") as runtime:
        stream, other = (runtime.stream_generate("In the beginning", 5) for _ in range(2))
        next(stream), next(other)
    with pytest.raises(MlxStreamError):
        next(stream)
    other.close()


def test_a_draft_model_turns_auto_off():
    """Verified tokens are several at once, and heads speak of one; asked for, both is an error."""
    with load(memory_budget="150MB", backend="cpu", draft_model=demo_path()) as runtime:
        assert runtime.engine.decoder.plan.path != "prerouted"
    with pytest.raises(CapabilityError, match="predicted routing"):
        load(memory_budget="150MB", backend="cpu", draft_model=demo_path(), prerouter="on")


def test_prompts_of_another_number_of_experts_are_refused(tmp_path):
    spec, ids = demo_path() / "prerouter_k2.json", [5, 6, 7, 8]
    common = {"memory_budget": "90MB", "backend": "cpu", "adapter": "off"}
    with load(prerouter="on", prerouter_spec=spec, **common) as halved:
        cache = halved.engine.prefill(ids).cache
        path = prompt_caches.save(halved.engine, tmp_path / "two.safetensors", cache, ids)
        assert prompt_caches.load(halved.engine, path).tokens == ids
    with (
        load(prerouter="off", **common) as whole,
        pytest.raises(PromptFileError, match="2 experts a token"),
    ):
        prompt_caches.load(whole.engine, path)
