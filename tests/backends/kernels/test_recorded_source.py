"""What the production call hands to MLX, recorded by mx.export_function: it needs no GPU."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.kernels.decode import decode_mlp_metal, slot_table
from mlx_stream.backends.kernels.grouped import combine_metal, grouped_mlp_metal
from mlx_stream.backends.kernels.launch import run_metal
from mlx_stream.backends.kernels.source import load_kernel
from tests.kernel_shim.arrays import Buf, storage_dtype
from tests.kernel_shim.generate import metal_kernel

from .running import ExpertLayer, make_layer, packed_slots, routed_rows, tokens_of
from .test_decode_kernels import decode_layer


@pytest.fixture(scope="module")
def layer() -> ExpertLayer:
    return make_layer(("affine", 4, 32), 4, (32, 64), SwiGLU(), mx.float16, bias=True)


@dataclass
class Recorder:
    """`run_metal` on a Mac's stream; keeps the text that the shim would compile for the call."""

    texts: dict[str, str] = field(default_factory=dict)

    def __call__(self, source, launch, inputs):
        shapes = [shape_of(array) for array in inputs]
        self.texts[source.name] = metal_kernel(source, launch, shapes).text
        return run_metal(source, launch, inputs, stream=mx.gpu)


def shape_of(array: mx.array) -> Buf:
    """Traced arrays have no values: only the shape and the type enter the text."""
    name = str(array.dtype).rpartition(".")[2]
    return Buf(np.empty(array.shape, storage_dtype(name)), name)


def check(recorder: Recorder, path, function, *arrays):
    """MLX recorded, word for word, the file's text inside the function that the shim compiles."""
    mx.export_function(str(path), function, *arrays)
    recorded = path.read_bytes().decode(errors="replace")
    for name, text in recorder.texts.items():
        kernel = load_kernel(name, "metal")
        assert kernel.header in text
        assert kernel.body in text
        assert text in recorded, name
    return set(recorder.texts)


def test_grouped(layer, tmp_path):
    rows, ids = routed_rows((3, 0, 9, 1), tokens=6)
    recorder = Recorder()

    def prefill(x, scores):
        y = grouped_mlp_metal(layer.module, layer.planes, x, rows, ids, run=recorder)
        return combine_metal(y, np.arange(12).reshape(6, 2), scores, run=recorder)

    x, scores = tokens_of(6, 32, mx.float16), mx.ones((6, 2))
    seen = check(recorder, tmp_path / "prefill.mlxfn", prefill, x, scores)
    assert seen == {"expert_gate_up", "expert_down", "expert_combine"}


def test_decode(layer, tmp_path):
    words, places = packed_slots(layer, range(4))
    table, spec = mx.array(slot_table(4, places)), decode_layer(layer, mx.float16)
    recorder = Recorder()

    def decode(x, ids, words):
        return decode_mlp_metal(spec, x, ids, words, table, mx.ones((1, 2)), run=recorder)

    ids = mx.array([[2, 0]], dtype=mx.int32)
    x = tokens_of(1, 32, mx.float16)
    seen = check(recorder, tmp_path / "decode.mlxfn", decode, x, ids, words)
    assert seen == {"expert_decode_up", "expert_decode_down"}
