"""A sampler is somebody else's code: what it returns is checked before it is used."""

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_sampler

from mlx_stream.config import StreamConfig
from mlx_stream.decode.loop import draw
from mlx_stream.engine import Engine
from mlx_stream.errors import MlxStreamError
from mlx_stream.hub import demo_path

ROW = mx.array([[0.0, -1.0, -2.0]])


def test_a_token_of_the_vocabulary():
    assert draw(lambda row: mx.argmax(row, axis=-1), ROW) == 0


@pytest.mark.parametrize("bad", [[3], [10**9], [-1], [0, 1], []])
def test_anything_else(bad):
    with pytest.raises(MlxStreamError, match="did not draw a token"):
        draw(lambda row: mx.array(bad), ROW)


def test_a_failed_sampler_does_not_break_later_loads():
    """mlx-lm's compiled samplers leave MLX's random state without a value when they fail."""
    sampler = make_sampler(1.0, top_k=10**6)
    with pytest.raises(ValueError, match=r".+"):
        mx.eval(sampler(ROW))
    Engine(demo_path(), StreamConfig(memory_budget=200_000_000, backend="cpu")).close()
    mx.eval(mx.random.normal((2,)))
