"""Held activations and KV: by family, against the plan's own figures, monotone."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.hub import resolve_model
from mlx_stream.planner.held_state import (
    held_state,
    held_vectors_bytes,
    kv_state,
    tokens_that_fit,
)
from mlx_stream.planner.model_shape import ModelShape, model_shape
from mlx_stream.planner.plan import plan
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index

SHAPE = ModelShape(
    model_type="test",
    hidden=4096,
    layers=60,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=1000,
    top_k=6,
    streams=1,
    kv_values=60 * 2 * 8 * 128,
    attention_values=0,
    full_masks=False,
)


def test_held_bytes_are_those_of_the_plan():
    checkpoint = open_checkpoint(resolve_model(None))
    shape = model_shape(checkpoint.config, build_expert_index(checkpoint))
    for itemsize in (2, 4):
        found = plan(None, 300, memory_budget="2GB", activation_itemsize=itemsize)
        assert len(found.segments) == 1
        assert held_state(shape, 300, itemsize).total == found.memory.held


def test_hyper_connections_hold_every_stream():
    plain = held_state(SHAPE, 1000, 2).total
    assert held_state(replace(SHAPE, streams=4), 1000, 2).total == 4 * plain
    assert held_vectors_bytes(1000, 4096, 2, streams=4, vectors=1) == 4 * 4096 * 2 * 1000


def test_masks_and_deferred_outputs_come_on_top():
    latent = held_state(replace(SHAPE, full_masks=True), 1000, 2, past_tokens=500)
    assert latent.masks == 1000 * 1500 // 2
    part = held_state(replace(SHAPE, full_masks=True), 1000, 2, prompt_tokens=4000)
    assert part.masks == 1000 * 4000 // 2
    deferred = held_state(SHAPE, 1000, 2, combined=False)
    assert deferred.deferred == 1000 * 6 * 4096 * 2
    assert deferred.total == deferred.vectors + deferred.deferred


def test_about_one_gigabyte_at_32k_tokens():
    """design.md, section 2: hidden 4,096 in bfloat16."""
    assert held_state(SHAPE, 32_768, 2).total == pytest.approx(1.2e9, rel=0.05)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 200))
def test_evicting_keeps_two_layers_and_costs_traffic(tokens, layers):
    kv = kv_state(replace(SHAPE, layers=layers), tokens, 2)
    assert kv.kept == pytest.approx(SHAPE.kv_values * tokens * 2)
    assert kv.evicted() <= kv.kept
    assert kv.evicted(layers) == kv.kept
    assert kv.evicted(1) == kv.layer_nbytes
    assert kv.traffic(decodes_after=False) == kv.kept
    assert kv.traffic(decodes_after=True) == 2 * kv.kept


@settings(deadline=None)
@given(st.integers(0, 10**12), st.booleans(), st.booleans())
def test_the_longest_prompt_is_the_longest(memory, masks, keep):
    shape = replace(SHAPE, full_masks=masks)

    def needed(tokens):
        kv = kv_state(shape, tokens, 2)
        return held_state(shape, tokens, 2).total + (kv.kept if keep else kv.evicted())

    found = tokens_that_fit(shape, memory, 2, keep_kv=keep)
    assert needed(found) <= memory < needed(found + 1)
    assert tokens_that_fit(shape, memory, 2, keep_kv=False) >= found
