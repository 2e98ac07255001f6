"""Predicted routing, in whole runs: the tokens of an independent reference, and nothing dropped."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.metal import MetalBackend
from mlx_stream.config import ConfigError
from mlx_stream.decode import prerouter
from mlx_stream.drafting import check_can_draft
from mlx_stream.errors import CapabilityError, PrerouterError, ReadError
from mlx_stream.kv.rewind import rewind
from mlx_stream.prefill.cache_views import CacheSnapshot
from mlx_stream.prerouter.spec import EDGE0_8B, RouterMaths
from mlx_stream.prerouter.spec_file import SPEC_NAME, write_spec
from mlx_stream.resume.options import KeepOptions
from tests.decode.running import answer, check_slots, hold, records, token_set
from tests.prefill.running import greedy
from tests.prerouter.making import Arrays, form, random_heads, save_heads, with_heads
from tests.prerouter.reference import Reference
from tests.support.checkpoints import random_tokens, stock_greedy, stock_prefill
from tests.support.faults import FailingReads, install_fault, time_limit

BIG = os.environ.get("MLX_STREAM_BIG") == "1"
STEPS = 40 if BIG else 10
HIDDEN, EXPERTS = 128, 8
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
# family: (owners, consumers, changes of its config); layer 0 of bailing_hybrid is dense.
MODELS = {
    "qwen3_moe": (range(3), range(1, 4), {"mlp_only_layers": []}),
    "bailing_hybrid": (range(1, 3), range(2, 4), GROUPED),
}


@pytest.fixture
def made(checkpoint, tmp_path):
    """``made(family, form, **changes) -> (plain folder, folder with heads, spec, heads)``."""

    def make(family="qwen3_moe", which="35b", heads=None, **changes):
        owners, consumers, config = MODELS[family]
        plain = checkpoint(family, changes=config)
        spec = form(which, owners, consumers, **changes)
        arrays = heads(spec) if heads else random_heads(spec, HIDDEN, EXPERTS, seed=3)
        number = len(list(tmp_path.iterdir()))
        return plain, with_heads(plain, tmp_path / f"model{number}", spec, arrays), spec, arrays

    return make


def constant_heads(rows):
    """Heads that always say the same of a layer: ``rows[n]`` are the logits of consumer n."""

    def heads(spec):
        arrays: Arrays = {}
        for row, owner in zip(rows, spec.active_owners, strict=True):
            linear = np.zeros((EXPERTS, HIDDEN + 2 * EXPERTS), np.float16)
            linear[:, HIDDEN : HIDDEN + EXPERTS] = np.array(row)[:, None] / 2  # K = 2 ones
            arrays[owner, "linear_init"] = linear
            arrays[owner, "fc1"] = np.zeros((4, HIDDEN + 2 * EXPERTS), np.float16)
            arrays[owner, "fc2"] = np.zeros((EXPERTS, 4), np.float16)
        return arrays

    return heads


FIXED = [np.roll(np.arange(EXPERTS), n).astype(np.float16) / 4 for n in (1, 4, 6)]


def decoded(engine, result, prompt, count):
    """Greedy tokens, and the generator closed, so that the receipt is there."""
    tokens = engine.decode(result, prompt, sampler=greedy)
    found = [token for token, _ in islice(tokens, count)]
    tokens.close()
    return found


def routing(engine):
    """By step, ``{model layer: experts}`` of decode."""
    steps = []
    first = engine._mlps[0].layer.index

    def observer(layer, ids, in_prefill):
        if not in_prefill:
            if layer == first:
                steps.append({})
            number = int(engine._mlps[layer].layer.name.split("layers.")[1].split(".")[0])
            steps[-1][number] = set(ids[0].tolist())

    engine.decoder.observer = observer
    return steps


@pytest.mark.parametrize("tokens", [30, 33] if BIG else [33])  # the last chunk has one token
@pytest.mark.parametrize("which", ["35b", "8b"])
@pytest.mark.parametrize("family", MODELS)
def test_tokens_and_routing_equal_the_reference(stock, made, open_engine, family, which, tokens):
    plain, folder, spec, arrays = made(family, which)
    prompt = random_tokens(stock(plain), tokens, seed=5)
    reference = Reference(stock(plain), spec, arrays)
    expected = reference.answer(prompt, STEPS)
    engine = open_engine(folder)
    steps = routing(engine)
    assert answer(engine, prompt, STEPS) == expected
    assert steps == reference.routed
    found = [s.predicted_layer_steps for s in engine.decode_metrics.history]
    assert found == reference.predicted
    every = len(spec.consumers)
    assert found == ([0] if which == "35b" else [every]) + [every] * (STEPS - 2)
    assert expected != stock_greedy(stock(plain), prompt, STEPS)  # or it would prove nothing


@pytest.mark.parametrize("first_previous", ["zeros", "prompt"])
@pytest.mark.parametrize("first_prediction", ["first_step", "second_step"])
@pytest.mark.parametrize("feature", ["executed", "teacher"])
def test_every_rule_of_the_spec(
    stock, made, open_engine, feature, first_prediction, first_previous
):
    rules = {"first_prediction": first_prediction, "first_previous": first_previous}
    plain, folder, spec, arrays = made(feature=feature, **rules)
    prompt = random_tokens(stock(plain), 21, seed=6)
    reference = Reference(stock(plain), spec, arrays)
    expected = reference.answer(prompt, 8)
    engine = open_engine(folder)
    steps = routing(engine)
    assert answer(engine, prompt, 8) == expected
    assert steps == reference.routed


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_a_declared_router_changes_nothing(stock, made, request, kind):
    """It is checked when the model is opened; the CPU backend then selects without the model."""
    plain, folder, spec, arrays = made(router=RouterMaths("softmax_topk"))
    prompt = random_tokens(stock(plain), 24, seed=8)
    engine = request.getfixturevalue(kind)(folder)
    asked, selection = [], engine.decoder.prerouter._opened.selection
    ask = selection._ask
    selection._ask = lambda *args: asked.append(args) or ask(*args)
    assert answer(engine, prompt, STEPS) == Reference(stock(plain), spec, arrays).answer(
        prompt, STEPS
    )
    assert len(asked) == (0 if kind == "open_engine" else STEPS - 1)


class _Fixed:
    """A router that says always the same."""

    def __init__(self, gate, row):
        self.gate, self.row, self.on = gate, row, False

    def __call__(self, x):
        if not self.on:
            return self.gate(x)
        return mx.broadcast_to(mx.array(self.row).astype(mx.float32), (*x.shape[:-1], EXPERTS))


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_given_indices_give_the_tokens_of_stock_with_these_indices(stock, made, request, kind):
    plain, folder, spec, _ = made(heads=constant_heads(FIXED), which="8b")
    model = stock(plain)
    prompt = random_tokens(model, 30, seed=7)
    blocks = [model.model.layers[n].mlp for n in spec.consumers]
    gates = [_Fixed(block.gate, row) for block, row in zip(blocks, FIXED, strict=True)]
    logits, cache = stock_prefill(model, prompt, 16)
    expected = [int(logits.argmax())]
    for block, gate in zip(blocks, gates, strict=True):
        block.gate, gate.on = gate, True
    try:
        while len(expected) < STEPS:
            step = model(mx.array([[expected[-1]]]), cache=cache)[0, -1]
            expected.append(int(mx.argmax(step).item()))
    finally:
        for block, gate in zip(blocks, gates, strict=True):
            block.gate = gate.gate
    engine = request.getfixturevalue(kind)(folder)
    steps = routing(engine)
    assert answer(engine, prompt, STEPS) == expected
    best = [set(np.argsort(-row.astype(np.float32))[:2].tolist()) for row in FIXED]
    assert all([step[n] for n in spec.consumers] == best for step in steps)


@pytest.mark.parametrize("options", [{"prerouter": "off"}, {"plain": True}, {"untrained": True}])
def test_off_gives_the_tokens_of_stock(stock, made, open_engine, options):
    plain, folder, _, _ = made(trained="untrained" not in options)
    prompt = random_tokens(stock(plain), 30, seed=5)
    config = {k: v for k, v in options.items() if k == "prerouter"}
    engine = open_engine(plain if "plain" in options else folder, **config)
    assert answer(engine, prompt, STEPS) == stock_greedy(stock(plain), prompt, STEPS)
    assert engine.decode_metrics.totals.predicted_layer_steps == 0
    assert engine.decode_metrics.prerouter.startswith("off: ")


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
@pytest.mark.parametrize("held", ["12%", "token", "3", "2", "1"] if BIG else ["12%", "1"])
def test_any_cache_gives_the_same_tokens_and_drops_nothing(made, request, monkeypatch, kind, held):
    _, folder, spec, _ = made(heads=constant_heads(FIXED))
    engine = request.getfixturevalue(kind)(folder)
    prompt = list(range(30))
    expected = answer(engine, prompt, STEPS)
    sizes = {"12%": max(1, records(engine) * 12 // 100), "token": token_set(engine)}
    hold(engine, monkeypatch, sizes.get(held) or int(held))
    assert answer(engine, prompt, STEPS) == expected
    check_slots(engine)
    totals = engine.decode_metrics.totals
    assert totals.dropped_experts == 0
    assert totals.predicted_layer_steps == 2 * (STEPS - 2) * len(spec.consumers)
    assert totals.misses > 0


def test_slots_that_need_bounce_buffers_and_caches_that_change(made, open_engine, monkeypatch):
    """Stacked slots read by O_DIRECT, and a budget that changes between steps."""
    _, folder, _, _ = made(heads=constant_heads(FIXED))
    expected = answer(open_engine(folder), list(range(30)), 14)
    backend = MetalBackend(require_device=False)
    monkeypatch.setattr("mlx_stream.engine.select_backend", lambda name: backend)
    engine = open_engine(folder, io="direct")
    assert engine.decoder.plan.stacked
    hold(engine, monkeypatch, 12)
    prompt = list(range(30))
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    found = []
    for n in range(14):
        found.append(next(tokens)[0])
        engine.decoder.cache.resize((12, 3, 7, 1)[n % 4])
    tokens.close()
    assert found == expected
    assert engine.decode_metrics.totals.dropped_experts == 0
    check_slots(engine)


def test_reads_begin_ahead_and_waits_are_avoided(made, open_engine, monkeypatch):
    _, folder, _, _ = made()
    off = open_engine(folder, prerouter="off", predict="off")
    on = open_engine(folder)
    for engine in (off, on):
        hold(engine, monkeypatch, token_set(engine) + 2)
        answer(engine, list(range(30)), STEPS)
    assert on.decode_metrics.totals.waits_avoided >= STEPS
    assert on.decode_metrics.totals.misses < off.decode_metrics.totals.misses
    assert on.decode_metrics.totals.wasted_bytes == 0
    assert off.decode_metrics.totals.waits_avoided == 0


def test_predicted_layers_read_nothing_back(made, open_metal):
    _, folder, spec, _ = made(heads=constant_heads(FIXED))
    engine = open_metal(folder)
    answer(engine, list(range(30)), STEPS)
    layers = len(engine.index.layers)
    first, *others = [s.syncs for s in engine.decode_metrics.history]
    assert first == layers + 1
    assert set(others) == {layers - len(spec.consumers) + 1}


def test_the_sampled_check_counts_what_agrees(stock, made, open_engine, monkeypatch):
    monkeypatch.setattr(prerouter, "CHECK_STEPS", 3)
    plain, folder, spec, arrays = made()
    prompt = random_tokens(stock(plain), 30, seed=5)
    reference = Reference(stock(plain), spec, arrays)
    agreed = []
    compute = reference._predict

    def predict(previous):
        agreed.append(
            sum(
                len(set(reference._real[n][-1]) & set(reference._executed[n][-1]))
                for n in spec.consumers
            )
        )
        compute(previous)

    reference._predict = predict
    steps = 9
    reference.answer(prompt, steps)
    engine = open_engine(folder)
    answer(engine, prompt, steps)
    history = engine.decode_metrics.history
    checked = [n for n, s in enumerate(history) if s.checked_experts]
    assert checked == [1, 4, 7]
    assert [history[n].agreed_experts for n in checked] == [agreed[n] for n in checked]
    assert {history[n].checked_experts for n in checked} == {2 * len(spec.consumers)}


# --- conversations -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["35b", "8b"])
def test_conversations_do_not_leak_into_each_other(made, open_engine, which):
    _, folder, _, _ = made(which=which)
    prompts = [random_tokens(160, n, seed=n) for n in (30, 25)]
    alone = [answer(open_engine(folder), prompt, STEPS) for prompt in prompts]
    engine = open_engine(folder)
    assert [answer(engine, prompt, STEPS) for prompt in prompts] == alone  # one after the other
    assert answer(engine, prompts[0], STEPS) == alone[0]
    running = [engine.decode(engine.prefill(p), p, sampler=greedy) for p in prompts]
    mixed = [[], []]
    for n in [0, 0, 1, 0, 1, 1, 1, 0] * 2:
        mixed[n].append(next(running[n])[0])
    assert mixed == [tokens[: len(m)] for tokens, m in zip(alone, mixed, strict=True)]


def test_a_conversation_is_forgotten_with_its_cache(made, open_engine):
    _, folder, _, _ = made()
    engine = open_engine(folder)
    for n in range(3):
        answer(engine, list(range(n, n + 20)), 4)
    gc.collect()
    assert len(engine.decoder.prerouter._tracks) <= 1


def paths(engine, count):
    return [s.path for s in engine.decode_metrics.history][-count:]


@pytest.mark.parametrize("which", ["35b", "8b"])
def test_another_turn_and_a_rewind_begin_anew(made, open_engine, which):
    _, folder, _, _ = made(which=which)
    engine = open_engine(folder)
    prompt = list(range(30))
    result = engine.prefill(prompt)
    decoded(engine, result, prompt, 5)
    first = "exact" if which == "35b" else "prerouted"
    assert paths(engine, 4) == [first, "prerouted", "prerouted", "prerouted"]
    rewind(result.cache, 2)  # no prompt follows: nothing is known of this position
    steps = engine.decoder.steps
    for token in (7, 8):
        steps(mx.array([[token]]), result.cache)
    assert paths(engine, 2) == ["exact", "prerouted"]
    again = engine.prefill([3, 4, 5], result.cache)  # a short turn, from the expert cache
    assert again.receipt.mode == "cached"
    decoded(engine, again, prompt, 3)
    assert paths(engine, 2) == [first, "prerouted"]


def test_a_short_turn_feeds_the_heads_as_a_long_one(stock, made, open_engine):
    """The same tokens in one prompt or in two: the first prediction is the same."""
    plain, folder, spec, arrays = made(which="8b")
    prompt = random_tokens(stock(plain), 30, seed=5)
    expected = Reference(stock(plain), spec, arrays).answer(prompt, STEPS)
    engine = open_engine(folder)
    result = engine.prefill(prompt[:-6])
    decoded(engine, result, prompt, 1)
    second = engine.prefill(prompt[-6:], result.cache)
    assert second.receipt.mode == "cached"
    assert decoded(engine, second, prompt, STEPS) == expected


def test_several_tokens_at_once_are_not_predicted(made, open_engine):
    _, folder, _, _ = made()
    engine = open_engine(folder)
    result = engine.prefill(list(range(30)))
    decoded(engine, result, list(range(30)), 3)
    engine.decoder.steps(mx.array([[3, 4]]), result.cache)
    engine.decoder.steps(mx.array([[5]]), result.cache)
    engine.decoder.steps(mx.array([[6]]), result.cache)
    assert paths(engine, 4) == ["prerouted", "exact", "exact", "prerouted"]


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_a_step_that_fails_can_be_taken_again(made, request, kind, monkeypatch):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    _, folder, _, _ = made(heads=constant_heads(FIXED))
    engine = request.getfixturevalue(kind)(folder)
    hold(engine, monkeypatch, 3)
    prompt = list(range(30))
    expected = answer(engine, prompt, 8)
    result = engine.prefill(prompt)
    found = decoded(engine, result, prompt, 5)
    step, snapshot = mx.array([[found[-1]]]), CacheSnapshot(result.cache, append_only=True)
    engine.decoder.cache.resize(1)  # something must be read
    engine.decoder.cache.resize(3)
    fault.arm()
    with time_limit(20), pytest.raises(ReadError):
        engine.decoder.steps(step, result.cache)
    snapshot.restore()
    fault.disarm()
    for _ in range(3):
        logits = engine.decoder.steps(mx.array([[found[-1]]]), result.cache)
        found.append(int(mx.argmax(logits[-1]).item()))
    assert found == expected
    check_slots(engine)


# --- what goes with it, and what does not ---------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
def test_another_k_holds_in_prefill_too(stock, made, open_engine, k):
    plain, folder, spec, arrays = made(top_k=k)
    model = stock(plain)
    prompt = random_tokens(model, 30, seed=5)
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:
        block.top_k = k
    try:
        expected = Reference(model, spec, arrays).answer(prompt, STEPS)
    finally:
        for block in blocks:
            block.top_k = 2
    engine = open_engine(folder)
    widths = set()
    engine.decoder.observer = lambda layer, ids, in_prefill: widths.add((in_prefill, ids.shape[1]))
    assert answer(engine, prompt, STEPS) == expected
    assert widths == {(True, k), (False, k)}
    assert engine._shape.top_k == k
    assert open_engine(folder, prerouter="off")._shape.top_k == 2


def test_the_receipt_says_what_was_predicted(made, open_engine):
    _, folder, spec, _ = made()
    engine = open_engine(folder)
    prompt = list(range(30))
    decoded(engine, engine.prefill(prompt), prompt, STEPS)
    found = engine.last_receipt.decode
    assert found["prerouter"] == "on: test 35b"
    assert found["predicted_layer_steps"] == (STEPS - 2) * len(spec.consumers)
    assert found["dropped_experts"] == 0
    assert 0 <= found["agreement"] <= 1
    assert found["checked_experts"] > 0
    table = engine.request_metrics.table()
    assert "prerouter        on: test 35b" in table
    assert "dropped          0 experts" in table


def test_heads_are_in_the_budget(made, open_engine):
    _, folder, _, _ = made()
    on, off = open_engine(folder), open_engine(folder, prerouter="off")
    heads = on.decoder.prerouter._opened.nbytes
    assert on.budget.owner("prerouter heads") == heads > 0
    assert on.plan(30).memory.resident == off.plan(30).memory.resident + heads


def test_options_that_exclude_it(made, open_engine):
    _, folder, _, _ = made()
    for options in ({"decode_path": "whole-layer"}, {"predict": "lookahead"}):
        with pytest.raises(ConfigError, match="exclude the Prerouter"):
            open_engine(folder, prerouter="on", **options)
        engine = open_engine(folder, **options)
        assert engine.decoder.prerouter is None
        assert next(iter(options.values())) in engine.decode_metrics.prerouter
    with pytest.raises(ConfigError, match="Prerouter mode"):
        open_engine(folder, prerouter="maybe")


def test_drafts_and_checkpoints_are_refused(made, open_engine, tmp_path):
    _, folder, _, _ = made(which="8b")
    engine = open_engine(folder)
    with pytest.raises(CapabilityError, match="draft"):
        check_can_draft(engine.model, engine.decoder.plan)
    engine.runner.keep = KeepOptions(tmp_path / "kept")
    with pytest.raises(CapabilityError, match="cannot be resumed"):
        engine.prefill(list(range(30)))
    engine.runner.keep = None
    assert engine.prefill(list(range(30))).logits is not None


def test_heads_that_overflow_are_an_error_not_a_routing(made, open_metal):
    rows = [np.full(EXPERTS, 60000, np.float16)] * 3

    def heads(spec):
        arrays = constant_heads(rows)(spec)
        for owner in spec.owners:
            arrays[owner, "fc1"][:] = 60000
            arrays[owner, "fc2"][:] = 60000
        return arrays

    _, folder, _, _ = made(heads=heads)
    engine = open_metal(folder)
    with pytest.raises(PrerouterError, match="not numbers"):
        answer(engine, list(range(30)), 4)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"owners": (0, 7), "consumers": (1, 8)}, "no expert layer"),
        ({"top_k": 9}, "8 experts"),
        ({"router": EDGE0_8B.router}, "does not route"),
    ],
)
def test_specs_of_other_models_are_refused(made, open_engine, changes, word):
    _, folder, spec, _ = made()
    spec = replace(spec, **changes)
    write_spec(folder / SPEC_NAME, spec)
    save_heads(folder / spec.heads_file, random_heads(spec, HIDDEN, EXPERTS))
    with pytest.raises((PrerouterError, CapabilityError), match=word):
        open_engine(folder)
