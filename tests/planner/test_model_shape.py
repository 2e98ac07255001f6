"""The planner's idea of a model, from its config, against the model that mlx-lm builds."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream.planner.kv_size import KV_STEP
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.prefill.cache_views import cache_arrays
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from tests.prefill.running import recorded_routing
from tests.support.checkpoints import vocab_size
from tests.support.families import FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shape_bounds_what_the_model_needs(checkpoint, stock, name):
    path = checkpoint(name)
    opened = open_checkpoint(path)
    shape = model_shape(opened.config, build_expert_index(opened))
    model = stock(path)
    cache = make_prompt_cache(model)
    with recorded_routing() as calls:
        logits = model(mx.array([[1, 2, 3]]), cache=cache)
        mx.eval(logits)
    held = sum(a.nbytes for a in cache_arrays(cache))
    assert held <= shape.kv_values * KV_STEP * 4, "caches grow by whole steps, in float32"
    assert shape.vocab == vocab_size(model)
    assert shape.top_k >= max(ids.shape[1] for _, ids in calls)
    assert shape.hidden == 128
