"""Read volumes, unused experts and bundles: published examples, simulation, conservation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.read_volume import (
    bundle,
    chunk_major_bytes,
    double_buffer_bytes,
    expected_unused,
    expected_unused_skewed,
    experts_per_bundle,
    inclusion_probabilities,
    layer_major_bytes,
    read_volume,
    segments_needed,
    used_chunk_major_bytes,
    zipf_weights,
)
from mlx_stream.prefill.schedule import cut_groups

W = 147e9


def test_chunk_major_reads_once_per_chunk_and_layer_major_once():
    volume = read_volume(32_768, 512, W)
    assert volume.chunk_major == 64 * W
    assert volume.layer_major == W
    assert volume.ratio == 64
    assert chunk_major_bytes(513, 512, W) == 2 * W
    assert read_volume(1000, 512, W, segment_tokens=300).layer_major == 4 * W


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 10**6))
def test_layer_major_never_reads_more_when_its_segments_are_no_shorter(tokens, chunk, segment):
    volume = read_volume(tokens, chunk, W, segment_tokens=max(chunk, segment))
    assert volume.layer_major <= volume.chunk_major
    assert volume.ratio >= 1
    assert chunk_major_bytes(tokens + 1, chunk, W) >= volume.chunk_major
    assert chunk_major_bytes(tokens, chunk + 1, W) <= volume.chunk_major
    assert layer_major_bytes(W, segments_needed(tokens, tokens)) == W


@pytest.mark.parametrize(("tokens", "published"), [(64, 56), (256, 0.6), (1024, 0)])
def test_published_unused_experts(tokens, published):
    found = expected_unused(256, 6, tokens)
    assert round(found, 0 if tokens == 64 else 1) == published


@settings(deadline=None)
@given(st.integers(1, 512), st.data())
def test_unused_experts_shrink_with_tokens_and_top_k(experts, data):
    top_k = data.draw(st.integers(0, experts))
    tokens = data.draw(st.integers(0, 5000))
    found = expected_unused(experts, top_k, tokens)
    assert 0 <= found <= experts
    assert expected_unused(experts, top_k, 0) == experts
    assert expected_unused(experts, top_k, 1) == pytest.approx(experts - top_k, abs=1e-9 * experts)
    assert expected_unused(experts, top_k, tokens + 1) <= found
    if top_k < experts:
        assert expected_unused(experts, top_k + 1, tokens) <= found


def test_unused_experts_agree_with_random_routing():
    rng, experts, top_k, tokens = np.random.default_rng(0), 64, 4, 40
    unused = [
        experts - len(np.unique(rng.random((tokens, experts)).argsort(1)[:, :top_k]))
        for _ in range(400)
    ]
    assert np.mean(unused) == pytest.approx(expected_unused(experts, top_k, tokens), rel=0.05)


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_skewed_routing_agrees_with_random_picks_by_weight(exponent):
    rng, experts, top_k, tokens = np.random.default_rng(1), 64, 4, 100
    weights = zipf_weights(experts, exponent)
    keys = np.log(weights) + rng.gumbel(size=(300, tokens, experts))  # top-k by weight
    picks = np.argpartition(-keys, top_k, axis=-1)[..., :top_k]
    unused = np.mean([experts - len(np.unique(prompt)) for prompt in picks])
    used = np.bincount(picks.ravel(), minlength=experts) / picks[..., 0].size
    chances = inclusion_probabilities(weights, top_k)
    assert chances == pytest.approx(used, abs=0.03)
    assert expected_unused_skewed(chances, tokens) == pytest.approx(unused, rel=0.1)


@settings(deadline=None)
@given(st.integers(2, 300), st.floats(0, 2), st.data())
def test_chances_sum_to_top_k_and_skew_leaves_more_unused(experts, exponent, data):
    top_k = data.draw(st.integers(1, experts))
    chances = inclusion_probabilities(zipf_weights(experts, exponent), top_k)
    assert chances.sum() == pytest.approx(top_k)
    assert np.all((chances >= 0) & (chances <= 1))
    assert np.all(np.diff(chances) <= 1e-12)
    tokens = data.draw(st.integers(0, 2000))
    uniform = expected_unused(experts, top_k, tokens)
    assert expected_unused_skewed(chances, tokens) >= uniform * (1 - 1e-6) - 1e-9
    flat = inclusion_probabilities(zipf_weights(experts, 0), top_k)
    assert expected_unused_skewed(flat, tokens) == pytest.approx(uniform, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 4096))
def test_reading_used_experts_only_saves_little_with_large_chunks(tokens, chunk):
    found = used_chunk_major_bytes(tokens, chunk, W, experts=256, top_k=6)
    assert found <= chunk_major_bytes(tokens, chunk, W) * (1 + 1e-12)
    if tokens >= chunk >= 512:
        assert found >= 0.99 * (tokens // chunk) * W


@settings(deadline=None)
@given(st.integers(1, 10**8), st.integers(1, 512), st.integers(1, 10**9), st.integers(1, 2**20))
def test_bundles_cover_a_layer_and_their_buffers_fit(expert, experts, memory, align):
    count = experts_per_bundle(expert, experts, target_nbytes=48 << 20, memory_nbytes=memory)
    assert double_buffer_bytes(count, expert) <= memory
    assert count <= experts_per_bundle(expert, experts, target_nbytes=48 << 20) <= experts
    if count:
        sizes = bundle(expert, experts, count, align=align)
        groups = cut_groups(experts, count)
        assert sizes.per_layer == len(groups)
        assert groups[0] == (0, count)
        assert sizes.nbytes == count * expert
        assert 0 <= sizes.buffer_nbytes - 2 * sizes.nbytes < 2 * align
        assert sizes.buffer_nbytes % align == 0


def test_a_bundle_holds_at_least_one_expert_unless_memory_forbids():
    assert experts_per_bundle(100, 8, target_nbytes=10) == 1
    assert experts_per_bundle(100, 8, target_nbytes=350) == 3
    assert experts_per_bundle(100, 8, target_nbytes=10**6) == 8
    assert experts_per_bundle(100, 8, target_nbytes=350, memory_nbytes=450) == 2
    assert experts_per_bundle(100, 8, target_nbytes=350, memory_nbytes=199) == 0


@pytest.mark.parametrize(
    "build",
    [
        lambda: expected_unused(8, 9, 1),
        lambda: expected_unused(0, 0, 1),
        lambda: expected_unused(8, 2, -1),
        lambda: chunk_major_bytes(0, 1, 1),
        lambda: layer_major_bytes(1, 0),
        lambda: bundle(1, 8, 9),
        lambda: inclusion_probabilities([1.0, 0.0], 1),
    ],
)
def test_values_without_meaning_are_refused(build):
    with pytest.raises(ConfigError, match="cannot be used"):
        build()
