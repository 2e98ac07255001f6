"""KvOptions: values that mlx-lm takes, and sizes that the plan counts."""

import pytest

from mlx_stream.config import ConfigError
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.planner.kv_size import kv_size
from mlx_stream.planner.model_shape import ModelShape

SHAPE = ModelShape("m", 64, 4, 4, 2, 32, 100, 2, 1, 512, 640, False)


def size(kv, **changes):
    sizes = {"total_tokens": 4096, "decode_tokens": 256, "chunk_tokens": 512, "segments": 1}
    return kv_size(SHAPE, kv, 4, **(sizes | changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_kv_size": 4},
        {"max_kv_size": True},
        {"kv_bits": 7},
        {"kv_bits": "8"},
        {"kv_group_size": 48},
        {"quantized_kv_start": -1},
        {"kv_bits": 4, "max_kv_size": 100},
    ],
)
def test_bad_values_are_refused(wrong):
    with pytest.raises(ConfigError) as error:
        KvOptions(**wrong)
    assert error.value.expected
    assert error.value.remedy


def test_options_by_name_or_as_one():
    assert KvOptions.of(PLAIN, {}) is PLAIN
    assert KvOptions.of(PLAIN, {"kv_bits": 4}) == KvOptions(kv_bits=4)
    for kv, named in ((PLAIN, {"kv_bit": 4}), (KvOptions(kv_bits=4), {"kv_bits": 4})):
        with pytest.raises(ConfigError, match="not known"):
            KvOptions.of(kv, named)


def test_defaults_are_those_of_mlx_lm():
    import inspect

    from mlx_lm.generate import generate_step

    stock = inspect.signature(generate_step).parameters
    for name in ("max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start"):
        assert getattr(PLAIN, name) == stock[name].default


def test_a_limit_bounds_the_plan():
    assert size(KvOptions(max_kv_size=512)).held == 512 * 4 * 1024
    assert size(KvOptions(max_kv_size=100_000)).held == size(PLAIN).held


def test_quantized_counts_when_the_start_is_reached():
    plain = size(PLAIN).held
    assert size(KvOptions(kv_bits=4, quantized_kv_start=0)).held < plain / 3
    assert size(KvOptions(kv_bits=4, quantized_kv_start=4096)).held == plain
    assert size(KvOptions(kv_bits=4, quantized_kv_start=0), segments=2).held == plain


def test_quantized_attention_holds_scores():
    kv = KvOptions(kv_bits=8, quantized_kv_start=0)
    assert size(PLAIN).scores == 0
    assert size(kv).scores == 3 * 512 * 4096 * 4 * 4
    assert size(kv, chunk_tokens=4096).scores == 3 * 4096 * 4 * 4
