"""What cannot be converted as it is asked is refused by name, or said; never quietly left out."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_stream.cli import cli
from mlx_stream.convert.options import Conversion, conversion_of
from mlx_stream.errors import PackError, UnsupportedModelError
from mlx_stream.storage.quant_spec import QuantSpec
from tests.convert.building import convert
from tests.support.hf_layout import STYLES, edit_config, publish

FOUR = Conversion(QuantSpec("affine", 4, 64), QuantSpec("affine", 4, 64))
NAME = "model.layers.0.mlp.experts.5.up_proj.weight"


@pytest.fixture
def published(checkpoint, tmp_path):
    """``published(change, **config)``: a published checkpoint, each tensor by ``change``."""

    def make(change=lambda name, value: value, **config):
        def style(weights):
            made = STYLES["each"](weights)
            return {name: change(name, value) for name, value in made.items()}

        changes = {"changes": config} if config else {}
        plain = checkpoint("qwen3_moe", mode="none", dtype="bfloat16", **changes)
        return publish(plain, tmp_path / "published", style, shards=1)

    return make


@pytest.mark.parametrize("name", ["experts", "embed_tokens"])
def test_integers_are_not_quantized(published, tmp_path, name):
    folder = published(lambda n, v: v.astype(mx.int8) if name in n else v)
    with pytest.raises(UnsupportedModelError, match="neither floats nor scales") as caught:
        convert(folder, tmp_path / "packed", FOUR)
    assert "int8" in str(caught.value)
    assert not (tmp_path / "packed").exists()


def test_a_dtype_that_mlx_cannot_load_is_named(published, tmp_path):
    folder = published(lambda n, v: v.view(mx.uint8) if n == NAME else v)
    file = next(folder.glob("*.safetensors"))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[NAME]["dtype"] = "F8_E5M2"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(UnsupportedModelError, match="F8_E5M2") as caught:
        convert(folder, tmp_path / "packed")
    assert NAME in str(caught.value)


@pytest.mark.parametrize("found", ["fp8", [1], 8])
def test_a_malformed_quantization_config_is_refused(published, tmp_path, found):
    folder = published()
    edit_config(folder, quantization_config=found)
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        convert(folder, tmp_path / "packed")


@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [(None, 4, 0), ("mxfp4", 0, None), ("mxfp4", None, 0), ("nvfp4", 4, 0), (None, 0, None)],
)
def test_zero_does_not_pass_for_the_default(mode, bits, group_size):
    with pytest.raises(PackError, match="no such quantization"):
        conversion_of(mode, bits, None, None, group_size, False)


def test_a_part_of_which_nothing_fits_is_refused(published, tmp_path):
    """Rows of 96 and 64: groups of 128 fit the attention's output only."""
    folder = published(hidden_size=96, moe_intermediate_size=64)
    asked = Conversion(QuantSpec("affine", 2, 128), QuantSpec("affine", 4, 128))
    with pytest.raises(PackError, match="no weight of the routed experts"):
        convert(folder, tmp_path / "packed", asked)


def test_weights_that_do_not_fit_are_named(published, tmp_path):
    """Rows of 128 fit, down_proj's of 64 do not."""
    folder = published(moe_intermediate_size=64)
    flags = ["--expert-bits", "4", "--group-size", "128"]
    arguments = ["pack", str(folder), "-o", str(tmp_path / "p"), *flags]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    line = next(x for x in result.output.splitlines() if x.startswith("not quantized"))
    assert line.endswith("model.layers.mlp.switch_mlp.down_proj (3)")


def test_a_conversion_that_changes_nothing_says_so(published, tmp_path):
    """Refining what has its 3 bits already is nothing, too."""
    for source, target, flags in (("published", "3", []), ("3", "again", ["--refine"])):
        folder = published() if source == "published" else tmp_path / source
        arguments = ["pack", str(folder), "-o", str(tmp_path / target), "--expert-bits", "3"]
        result = CliRunner().invoke(cli, arguments + flags)
        assert result.exit_code == 0, result.output
        assert ("no weight was changed" in result.output) == (target == "again")
