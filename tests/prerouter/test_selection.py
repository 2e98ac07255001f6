"""Selection equals the family's own router code given the same logits; K can be overridden."""

import os
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import bailing_hybrid, deepseek_v3, glm4_moe

from mlx_stream.errors import CapabilityError, PrerouterError
from mlx_stream.experts.streamed_experts import parent_block
from mlx_stream.prerouter.router_maths import select, select_on_host
from mlx_stream.prerouter.selection import Selection
from mlx_stream.prerouter.spec import RouterMaths
from mlx_stream.prerouter.top_k import override_top_k

BIG = os.environ.get("MLX_STREAM_BIG") == "1"
# mlx-lm compiles some of their routers, which takes a second each on a CPU.
SIGMOID_FAMILIES = ["bailing_hybrid", "deepseek_v3", *(["glm4_moe"] if BIG else [])]
K_FAMILIES = ["qwen3_moe", "gpt_oss", "kimi_linear"]
K_FAMILIES += ["qwen3_next", "deepseek_v3", "mixtral"] if BIG else []
SIGMOID = RouterMaths("sigmoid_group", scaling=2.5, n_group=4, topk_group=2)


def opened(engine, *, expert_bias=False, layers=None):
    loaded = engine._loaded
    streamed = loaded.streamed if layers is None else [loaded.streamed[n] for n in layers]
    return Selection(
        loaded.model, streamed, loaded.slot, hidden=loaded.shape.hidden, expert_bias=expert_bias
    )


def logits_for(engine, layers=None, seed=0):
    count = len(engine._loaded.streamed) if layers is None else len(layers)
    experts = engine._mlps[0].layer.num_experts
    values = np.random.default_rng(seed).standard_normal((count, experts), np.float32)
    return mx.array(3 * values)


def pairs(ids, weights):
    """``{expert: weight}`` of every row."""
    return [
        dict(zip(i, w, strict=True))
        for i, w in zip(np.array(ids).tolist(), np.array(weights).tolist(), strict=True)
    ]


def assert_same(found, expected):
    for a, b in zip(pairs(*found), pairs(*expected), strict=True):
        assert a.keys() == b.keys()
        assert [a[k] for k in a] == pytest.approx([b[k] for k in a], abs=1e-6)


def softmax_of(engine, logits):
    """qwen's lines, written out."""
    gates = np.array(mx.softmax(logits, axis=-1, precise=True))
    k = engine._shape.top_k
    ids = np.argsort(-gates, axis=-1)[:, :k]
    scores = np.take_along_axis(gates, ids, axis=-1)
    return ids, scores / scores.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_softmax_families(checkpoint, open_engine, family):
    engine = open_engine(checkpoint(family))
    logits, selection = logits_for(engine), opened(engine)
    selection.check(RouterMaths("softmax_topk"))
    assert_same(selection(logits), softmax_of(engine, logits))
    # The block itself, its router replaced by one that gives these logits.
    block = parent_block(engine.model, engine._loaded.streamed[0])
    gate, seen = block.gate, []
    block.gate = lambda x: logits[:1][None]
    block.switch_mlp, experts = (
        (lambda x, ids: seen.append(ids) or x[..., None, :]),
        block.switch_mlp,
    )
    try:
        block(mx.zeros((1, 1, engine._shape.hidden)))
    finally:
        block.gate, block.switch_mlp = gate, experts
    assert set(np.array(seen[0]).ravel()) == set(np.array(selection(logits)[0][0]))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_the_hosts_twin_of_softmax_topk(norm, top_k):
    maths = RouterMaths("softmax_topk", norm=norm, scaling=1.5)
    logits = 5 * np.random.default_rng(1).standard_normal((40, 8), np.float32)
    logits[0] = 80 * logits[0] / np.abs(logits[0]).max()  # exp overflows without a shift
    found = select_on_host(logits, maths, top_k)
    assert [part.shape for part in found] == [(40, top_k)] * 2
    assert found[1].dtype == np.float32
    assert_same([mx.array(part) for part in found], select(mx.array(logits), maths, top_k))
    with pytest.raises(AssertionError, match="in MLX"):
        select_on_host(logits, SIGMOID, top_k)


GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}


def family_select(family, gate, logits, bias):
    """The family's own function on logits."""
    names = ("top_k", "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    if family == "bailing_hybrid":
        fields = {n: getattr(gate, n) for n in (*names, "score_function")}
        fake = SimpleNamespace(gate_proj=lambda x: x, expert_bias=bias, **fields)
        return bailing_hybrid.Gate.__call__(fake, logits)
    module = {"deepseek_v3": deepseek_v3, "glm4_moe": glm4_moe}[family]
    return module.group_expert_select(logits, bias, *(getattr(gate, n) for n in names))


@pytest.mark.parametrize("keep_bias", [False, True])
@pytest.mark.parametrize("family", SIGMOID_FAMILIES)
def test_sigmoid_group_families(checkpoint, open_engine, family, keep_bias):
    engine = open_engine(checkpoint(family, changes=GROUPED))
    streamed = engine._loaded.streamed
    gates = [parent_block(engine.model, s).gate for s in streamed]
    name = "expert_bias" if family == "bailing_hybrid" else "e_score_correction_bias"
    for n, gate in enumerate(gates):  # biases that change the choice, of every layer its own
        noise = np.random.default_rng(n).uniform(0, 0.6, 8).astype(np.float32)
        gate[name] = mx.array(noise)
    selection, logits = opened(engine, expert_bias=keep_bias), logits_for(engine)
    found = selection(logits)
    zero = mx.zeros(8)
    rows = [
        family_select(family, gate, logits[n][None], gate[name] if keep_bias else zero)
        for n, gate in enumerate(gates)
    ]
    expected = [mx.concatenate([row[part] for row in rows]) for part in range(2)]
    assert_same(found, expected)
    other = [
        set(
            np.array(
                family_select(family, g, logits[n][None], zero if keep_bias else g[name])[0][0]
            )
        )
        for n, g in enumerate(gates)
    ]
    assert other != [set(row) for row in np.array(found[0]).tolist()]  # the bias matters here
    if not keep_bias:
        selection.check(SIGMOID)
        assert_same(found, select(logits, SIGMOID, engine._shape.top_k))
        assert all(bool((g[name] != 0).any()) for g in gates)  # the model's own are untouched


def test_a_spec_that_says_otherwise_is_refused(checkpoint, open_engine):
    selection = opened(open_engine(checkpoint("bailing_hybrid", changes=GROUPED)))
    for maths in (
        RouterMaths("softmax_topk"),
        RouterMaths("sigmoid_group", scaling=1.0, n_group=4, topk_group=2),
        RouterMaths("sigmoid_group", scaling=2.5),
        RouterMaths("sigmoid_group", norm=False, scaling=2.5, n_group=4, topk_group=2),
    ):
        with pytest.raises(PrerouterError, match="does not route"):
            selection.check(maths)


@pytest.mark.parametrize("family", ["llama4", "bailing_moe"])
def test_blocks_that_cannot_be_asked_are_refused_by_name(checkpoint, open_engine, family):
    with pytest.raises(CapabilityError, match="prerouter off") as caught:
        opened(open_engine(checkpoint(family)))
    assert "layers." in caught.value.tensor


def test_layers_that_select_in_different_ways_are_refused(checkpoint, open_engine):
    engine = open_engine(checkpoint("bailing_hybrid", changes=GROUPED))
    parent_block(engine.model, engine._loaded.streamed[-1]).gate.routed_scaling_factor = 1.0
    with pytest.raises(CapabilityError, match="same way"):
        opened(engine)


@pytest.mark.parametrize("family", K_FAMILIES)
def test_another_k(checkpoint, open_engine, family):
    engine = open_engine(checkpoint(family))
    loaded = engine._loaded
    options = {"hidden": loaded.shape.hidden, "dtype": loaded.dtype}
    for k in (3, 1):
        override_top_k(loaded.model, loaded.streamed, loaded.slot, top_k=k, **options)
        ids, weights = opened(engine)(logits_for(engine))
        assert ids.shape == weights.shape == (len(loaded.streamed), k)
    with pytest.raises(CapabilityError, match="8 experts"):
        override_top_k(loaded.model, loaded.streamed, loaded.slot, top_k=9, **options)


def test_the_model_is_left_as_it_was(checkpoint, open_engine):
    engine = open_engine(checkpoint("bailing_hybrid", changes=GROUPED))
    block = parent_block(engine.model, engine._loaded.streamed[0])
    before = dict(block.items()), dict(block.gate.items())
    opened(engine, expert_bias=True)(logits_for(engine))
    assert all(block[k] is v for k, v in before[0].items())
    assert all(block.gate[k] is v for k, v in before[1].items())
    assert type(block.gate) is bailing_hybrid.Gate
