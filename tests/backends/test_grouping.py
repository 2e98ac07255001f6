"""Routing rows to experts, against plain loops."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.backends.base import ChunkInput
from mlx_stream.backends.grouping import group_by_expert
from mlx_stream.backends.mlx_ops import _sum_by_token
from mlx_stream.errors import TensorFormatError
from tests.support.checkpoints import random_tokens

FAST = settings(max_examples=150, deadline=None)


@st.composite
def routings(draw):
    experts, k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([np.uint32, np.int32, np.int64]))
    chunks = [rng.integers(0, experts, (size, k)).astype(dtype) for size in sizes]
    return chunks, experts, k


@FAST
@given(routings())
def test_rows_per_expert_equal_a_plain_loop(case):
    chunks, experts, k = case
    routing = group_by_expert(chunks, experts, "layer")
    naive = {e: [] for e in range(experts)}
    row = 0
    for chunk in chunks:
        for token in chunk:
            for expert in token:
                naive[int(expert)].append(row)
                row += 1
    for expert, rows in naive.items():
        assert routing.rows(expert).tolist() == rows, "ascending, each row once"
    assert routing.counts().tolist() == [len(naive[e]) for e in range(experts)]
    assert routing.used().tolist() == [e for e in range(experts) if naive[e]]
    assert routing.top_k == k


@FAST
@given(routings())
def test_chunk_slices_give_tokens_back_to_their_chunks(case):
    chunks, experts, k = case
    routing = group_by_expert(chunks, experts, "layer")
    for expert in range(experts):
        tokens, places = np.divmod(routing.rows(expert), k)
        found = []
        for chunk, part in routing.chunk_slices(tokens):
            local = tokens[part] - routing.chunk_starts[chunk]
            assert len(local)
            assert (chunks[chunk][local, places[part]] == expert).all()
            found += tokens[part].tolist()
        assert found == tokens.tolist()


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_ids_of_experts_that_do_not_exist(bad):
    good = np.array([[0, 1], [2, 3]])
    with pytest.raises(TensorFormatError, match=r"expert ids in 0\.\.3") as caught:
        group_by_expert([good, np.array([[1, bad]])], 4, "model.layers.7.mlp")
    assert caught.value.tensor == "model.layers.7.mlp"


def test_ids_that_would_wrap_around_in_32_bits():
    with pytest.raises(TensorFormatError):
        group_by_expert([np.array([[0, 2**32]])], 4, "layer")


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
@pytest.mark.parametrize("bad", [-1, 8])
def test_no_backend_computes_with_an_expert_that_does_not_exist(checkpoint, request, kind, bad):
    engine = request.getfixturevalue(kind)(checkpoint("qwen3_moe"))
    mlp = engine._mlps[0]
    x = mx.zeros((2, mlp.layer.input_dims))
    with pytest.raises(TensorFormatError):
        engine.backend.begin_layer(mlp, [ChunkInput(x, np.array([[0, 1], [bad, 2]]), None)])


def test_a_router_that_names_a_missing_expert_is_an_error(checkpoint, open_engine, monkeypatch):
    """Through the whole prefill: never expert 0 instead, and the next prompt works."""
    engine = open_engine(checkpoint("qwen3_moe"))
    prompt = random_tokens(160, 20)
    expected = np.array(engine.prefill(prompt).logits)
    real = mx.argpartition
    monkeypatch.setattr(mx, "argpartition", lambda *args, **kwargs: real(*args, **kwargs) + 3)
    with pytest.raises(TensorFormatError):
        engine.prefill(prompt)
    monkeypatch.undo()
    assert (np.array(engine.prefill(prompt).logits) == expected).all()


@FAST
@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_sum_by_token_equals_a_plain_loop(count, rows, seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, count, rows)
    values = rng.standard_normal((rows, 3)).astype(np.float32)
    expected = np.zeros((count, 3))
    np.add.at(expected, tokens, values)
    got = _sum_by_token(mx.array(values), tokens, count)
    np.testing.assert_allclose(got, expected, atol=1e-5)
