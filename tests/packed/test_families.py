"""Every family from a packed folder: the same logits as from the checkpoint it was made of."""

from __future__ import annotations

import os

import numpy as np
import pytest

from mlx_stream.storage.checkpoint import open_checkpoint
from tests.packed.building import index_of, random_orders
from tests.prefill.running import decode, relative
from tests.support.checkpoints import random_tokens
from tests.support.families import FAMILIES

PROMPT, STEPS = 37, 4
BIG = os.environ.get("MLX_STREAM_BIG") == "1"  # all families; otherwise every third


def logits_and_tokens(engine, prompt):
    result = engine.prefill(prompt)
    logits = np.array(result.logits)
    return logits, decode(engine, result, prompt, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES)[:: 1 if BIG else 3])
def test_packed_equals_plain(checkpoint, packed, open_engine, name):
    plain = checkpoint(name)
    engine = open_engine(plain)
    prompt = random_tokens(engine.model, PROMPT)
    expected, tokens = logits_and_tokens(engine, prompt)
    engine.close()
    folder = packed(plain)
    assert open_checkpoint(folder).packed is not None
    found, same = logits_and_tokens(open_engine(folder), prompt)
    assert np.array_equal(found, expected)
    assert same == tokens


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("mode", ["stream", "union"])
def test_another_order_gives_the_same_answer(checkpoint, packed, open_engine, name, mode):
    plain = checkpoint(name)
    union = 512 if mode == "union" else 0
    engine = open_engine(plain, union_tokens=union)
    prompt = random_tokens(engine.model, PROMPT)
    expected, tokens = logits_and_tokens(engine, prompt)
    folder = packed(plain, orders=random_orders(index_of(plain)))
    found, same = logits_and_tokens(open_engine(folder, union_tokens=union), prompt)
    assert relative(found, expected) < 1e-5
    assert same == tokens
