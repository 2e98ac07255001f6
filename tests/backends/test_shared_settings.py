"""Process-wide settings: in force while a backend is open, back as they were after the last."""

import itertools

import mlx.core as mx
import pytest

from mlx_stream.backends.cpu.backend import MLX_CACHE_NBYTES, CpuBackend
from mlx_stream.backends.metal import CACHE_LIMIT_NBYTES, MetalBackend
from mlx_stream.backends.shared_settings import SharedSetting

ORIGINAL = 123 << 20


def current_limit() -> int:
    limit = mx.set_cache_limit(ORIGINAL)
    mx.set_cache_limit(limit)
    return limit


@pytest.fixture(autouse=True)
def limit():
    previous = mx.set_cache_limit(ORIGINAL)
    yield
    mx.set_cache_limit(previous)


class Setting:
    """A process-wide value."""

    def __init__(self, value: str) -> None:
        self.value = value

    def swap(self, value: str) -> str:
        previous, self.value = self.value, value
        return previous


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_closing_ends_with_the_original(order):
    setting = Setting("original")
    shared = SharedSetting(setting.swap)
    releases = [shared.hold(str(n)) for n in range(3)]
    still_open = [0, 1, 2]
    for n in order:
        assert setting.value == str(still_open[-1])
        releases[n]()
        releases[n]()  # once is enough
        still_open.remove(n)
    assert setting.value == "original"


def test_a_value_that_cannot_be_set_is_not_held():
    setting = Setting("original")

    def swap(value: str) -> str:
        if value == "bad":
            raise ValueError(value)
        return setting.swap(value)

    shared = SharedSetting(swap)
    release = shared.hold("good")
    with pytest.raises(ValueError, match="bad"):
        shared.hold("bad")
    release()
    assert setting.value == "original"


def test_backends_closed_in_the_order_they_were_opened():
    device = mx.default_device()
    first, second = MetalBackend(require_device=False), CpuBackend(threads=1)
    try:
        assert current_limit() == MLX_CACHE_NBYTES
        first.close()
        assert current_limit() == MLX_CACHE_NBYTES  # the second's, still
        assert mx.default_device() == mx.cpu
        second.close()
        assert current_limit() == ORIGINAL
        assert mx.default_device() == device
        first.close()
        assert current_limit() == ORIGINAL
    finally:
        first.close()
        second.close()


def test_backends_closed_the_other_way_round():
    first, second = MetalBackend(require_device=False), CpuBackend(threads=1)
    second.close()
    assert current_limit() == CACHE_LIMIT_NBYTES
    first.close()
    assert current_limit() == ORIGINAL
