"""Which MoE blocks let the stream do the weighted sum, and that the verdict is never a guess."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.experts.combine_probe import probe_combination
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from tests.prefill.running import relative
from tests.support.checkpoints import random_tokens

# Read off mlx-lm's sources: these blocks end in (y * scores[..., None]).sum(axis=-2) ...
COMBINED = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "phixtral", "kimi_k3")
# ... and these do not: llama4 weighs the input of its one expert, gemma4 has the scores on the
# left, bailing adds up in a compiled function and longcat by mx.sum.
PLAIN = ("llama4", "gemma4_text", "bailing_moe", "longcat_flash")


@pytest.mark.parametrize("name", [*COMBINED, *PLAIN])
def test_known_blocks(checkpoint, open_engine, name):
    engine = open_engine(checkpoint(name))
    receipt = engine.prefill([1, 2, 3]).receipt
    layers = len(engine.index.layers)
    assert receipt.weighted_layers == (layers if name in COMBINED else 0)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "kimi_k3"])
def test_both_paths_give_the_same_logits(checkpoint, open_engine, monkeypatch, name):
    """Combining is an optimisation: switched off, the answer stays."""
    prompt = random_tokens(160, 40)
    combined = open_engine(checkpoint(name)).prefill(prompt)
    monkeypatch.setattr("mlx_stream.loader.probe_combination", lambda *args, **kwargs: 0)
    plain = open_engine(checkpoint(name)).prefill(prompt)
    assert combined.receipt.weighted_layers > plain.receipt.weighted_layers == 0
    assert relative(combined.logits, plain.logits) < 1e-5


class Block(nn.Module):
    """A MoE block that reduces its experts' output in the way under test."""

    def __init__(self, experts, reduce):
        super().__init__()
        self.experts = experts
        self._reduce = reduce

    def __call__(self, x):
        ids = mx.broadcast_to(mx.array([0, 1]), (*x.shape[:-1], 2))
        scores = mx.softmax(x[..., :2], axis=-1)
        return self._reduce(self.experts(x, ids), scores)


def weighted(y, scores):
    return (y * scores[..., None]).sum(axis=-2)


def two_kinds(y, scores):
    """Uses the weighted sum and the plain outputs."""
    return weighted(y, scores) + y.max(axis=-2)


def twice(y, scores):
    return weighted(y, scores) + weighted(y, scores)


def fails(y, scores):
    if not isinstance(y, mx.array):
        raise TypeError("only arrays here")
    return weighted(y, scores)


def looks_at_the_type(y, scores):
    """Other maths when it is not given an array: the probe must see the difference."""
    return weighted(y, scores) * (1.0 if isinstance(y, mx.array) else 2.0)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (weighted, True),
        (lambda y, s: y.sum(axis=-2), False),
        (two_kinds, False),
        (twice, False),
        (lambda y, s: (s[..., None] * y).sum(axis=-2), False),
        (fails, False),
        (looks_at_the_type, False),
    ],
)
def test_any_surprise_leaves_the_plain_path(reduce, expected):
    class Layer:
        index, num_experts, input_dims, name = 0, 4, 16, "layer"

    slot = ExecutorSlot()
    experts = StreamedExperts(ExpertMlp(Layer(), SwitchGLU(16, 8, 4)), slot)
    model = nn.Sequential(Block(experts, reduce))
    found = probe_combination(model, [experts], slot, hidden=16, dtype=mx.float32)
    assert (found, experts.combined) == (int(expected), expected)
    assert slot.executor is None, "the probe leaves no executor behind"
