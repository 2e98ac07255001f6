"""The family table itself: stock mlx-lm runs every entry, so a parity failure is ours."""

import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from tests.support.checkpoints import (
    cached_checkpoint,
    random_tokens,
    stock_greedy,
    stock_model,
    stock_prefill,
    vocab_size,
)
from tests.support.families import EXPERTS, FAMILIES

PROMPT, CHUNK = 50, 16


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_stock_mlx_lm_runs_the_family(tmp_path_factory, name):
    family = FAMILIES[name]
    model = stock_model(cached_checkpoint(tmp_path_factory, name))
    kind = SwitchMLP if "mlp" in family.tags else SwitchGLU
    switches = [m for _, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    assert len(switches) >= 2
    assert {type(s) for s in switches} == {kind}
    first = switches[0]["fc1" if kind is SwitchMLP else "gate_proj"]
    assert first.num_experts == EXPERTS

    tokens = random_tokens(model, PROMPT)
    logits, cache = stock_prefill(model, tokens, CHUNK)
    assert logits.shape == (vocab_size(model),)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    whole, _ = stock_prefill(model, tokens, PROMPT)
    np.testing.assert_allclose(logits, whole, atol=1e-4 * np.abs(whole).max())

    changed = tokens.copy()
    changed[2] = (changed[2] + 7) % vocab_size(model)
    other, _ = stock_prefill(model, changed, CHUNK)
    assert np.abs(other - logits).max() > 1e-2, "an early token must matter"

    rotating = [c for c in cache if isinstance(c, RotatingKVCache)]
    if rotating:
        assert family.wraps_at == rotating[0].max_size + 1 < PROMPT
    assert len(stock_greedy(model, tokens, 8, CHUNK)) == 8
