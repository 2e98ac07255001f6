"""A backend's self-test: its grouped expert MLP against MLX's plain operations, on this machine.

Each case makes random experts, puts their bytes into a staging slot as a read would, lets the
backend compute one layer, and compares with a float32 reference of dequantized weights. No file and
no model is needed, so it answers "is this machine healthy?" in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlx_stream.backends.base import (
    Backend,
    ChunkInput,
    ExpertMlp,
    HostBuffer,
    PublishedGroup,
)
from mlx_stream.storage.expert_index import ExpertLayer, ExpertTensor
from mlx_stream.storage.quant_spec import QuantSpec
from mlx_stream.storage.read_plan import GroupRead, plan_group

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_DTYPE_NAMES = {
    mx.uint32: "U32",
    mx.uint8: "U8",
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
}
# The largest relative difference to the float32 reference that counts as healthy.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """One shape and quantization. E experts of ``[F, D]``, T tokens, top-k K."""

    mode: str
    bits: int
    group_size: int
    experts: int = 8
    dims: int = 256
    hidden: int = 128
    tokens: int = 64
    top_k: int = 2

    def spec(self, float_bits: int) -> QuantSpec:
        """The packing; `float_bits` is the width of unquantized weights."""
        if self.mode == "none":
            return QuantSpec("none", float_bits, 0)
        return QuantSpec(self.mode, self.bits, self.group_size)


@dataclass(frozen=True)
class CaseResult:
    """What a case gave.

    Attributes:
        name: of the experts' format, or of a kernel: the name by which its use is decided.
        error: largest difference over the largest reference value.
        seconds: median of the backend's layer.
        stock_seconds: median of MLX's own operations in its place.
        kernel: the step that was computed, None for the grouped expert MLP.
    """

    name: str
    error: float
    tolerance: float
    seconds: float
    stock_seconds: float
    kernel: str | None = None

    @property
    def healthy(self) -> bool:
        """Whether the result is right; speed is information only."""
        return self.error <= self.tolerance


CASES = (
    Case("affine", 4, 64),
    Case("affine", 4, 32),
    Case("affine", 8, 64),
    Case("mxfp4", 4, 32),
    Case("mxfp8", 8, 32),
    Case("nvfp4", 4, 16),
    Case("none", 16, 0),
)


def run_selftest(backend: Backend, *, rounds: int = 3) -> Iterator[CaseResult]:
    """Run every case; yields results as they come.

    A GPU is timed on a layer of real size (128 rows an expert), or launches would be all there is.
    """
    for case in CASES:
        if backend.name != "cpu":
            case = replace(case, experts=16, dims=2048, hidden=768, tokens=512, top_k=4)
        yield run_case(backend, case, rounds)


def run_case(backend: Backend, case: Case, rounds: int = 3) -> CaseResult:
    """One case, timed `rounds` times after a first run."""
    bench = make_bench(case, backend.compute_dtype or mx.float16)
    stock = median_seconds(lambda: mx.eval(bench.module(bench.x, mx.array(bench.ids))), rounds)
    chunk = ChunkInput(bench.x, bench.ids, None)
    with filled_slots(backend, bench, [range(case.experts)]) as groups:

        def compute() -> mx.array:
            layer_run = backend.begin_layer(bench.mlp, [chunk])
            layer_run.add(groups).wait()
            (y,) = layer_run.outputs()
            mx.eval(y)
            return y

        actual = compute()
        seconds = median_seconds(compute, rounds)
    error = largest_error(actual, bench.reference())
    return CaseResult(bench.name, error, TOLERANCE[bench.x.dtype], seconds, stock)


@dataclass(frozen=True)
class Bench:
    """A layer to compute. `module` is stock mlx-lm's, `image` its experts as a file's bytes."""

    mlp: ExpertMlp
    module: SwitchGLU
    image: bytes
    x: mx.array  # [T, D]
    ids: np.ndarray  # [T, K]

    @property
    def name(self) -> str:
        """Of the experts' format."""
        return self.mlp.layer.quant[0][1].name

    def reference(self) -> np.ndarray:
        """``[T, K, D]`` in float32 numpy."""
        return _reference(self.module, self.x, self.ids)


def make_bench(case: Case, dtype: mx.Dtype) -> Bench:
    """Random experts, tokens and choices."""
    module = _random_experts(case, dtype)
    layer, image = _layer_image(case, module)
    x = mx.random.normal((case.tokens, case.dims), key=mx.random.key(1)).astype(dtype)
    ids = np.stack(
        [np.random.default_rng(t).permutation(case.experts)[: case.top_k] for t in range(len(x))]
    ).astype(np.uint32)
    mx.eval(x)
    return Bench(ExpertMlp(layer, module), module, image, x, ids)


@contextmanager
def filled_slots(
    backend: Backend, bench: Bench, groups: Sequence[Sequence[int]]
) -> Iterator[list[PublishedGroup]]:
    """A staging slot for each group of experts, filled and published; freed afterwards."""
    buffers: list[HostBuffer] = []
    try:
        published = []
        for experts in groups:
            read = plan_group(bench.mlp.layer, experts, align=1, file_sizes=(len(bench.image),))
            buffers.append(backend.allocate(read.slot_nbytes, 1))
            _fill(read, bench.image, buffers[-1].array)
            published.append(backend.publish(bench.mlp, read, buffers[-1]))
        yield published
    finally:
        for buffer in buffers:
            backend.free(buffer)


def largest_error(actual: mx.array, expected: np.ndarray) -> float:
    """Largest difference over the largest expected value."""
    difference = np.abs(np.array(actual.astype(mx.float32)) - expected).max()
    return float(difference / np.abs(expected).max())


def _random_experts(case: Case, dtype: mx.Dtype) -> SwitchGLU:
    """A switch layer of stock mlx-lm with random weights, quantized as the case says."""
    mx.random.seed(3)
    module = SwitchGLU(case.dims, case.hidden, case.experts)
    module.set_dtype(dtype)
    if case.mode != "none":
        for name in PROJECTIONS:
            linear = module[name].to_quantized(case.group_size, case.bits, case.mode)
            module[name] = linear
    mx.eval(module.parameters())
    return module


def _layer_image(case: Case, module: SwitchGLU) -> tuple[ExpertLayer, bytes]:
    """The experts as a checkpoint's bytes, and their index."""
    tensors, image = [], b""
    for projection in PROJECTIONS:
        for param in ("weight", "scales", "biases"):
            array = module[projection].get(param)
            if array is None:
                continue
            raw = bytes(memoryview(mx.contiguous(array).view(mx.uint8)))
            each = len(raw) // case.experts
            tensors.append(
                ExpertTensor(
                    key=(projection, param),
                    name=f"selftest.{projection}.{param}",
                    file=0,
                    dtype=_DTYPE_NAMES[array.dtype],
                    shape=tuple(array.shape[1:]),
                    offset=len(image),
                    stride=each,
                    nbytes=each,
                )
            )
            image += raw
    spec = case.spec(8 * module.gate_proj.weight.itemsize)
    quant = tuple((name, spec) for name in PROJECTIONS)
    layer = ExpertLayer(0, "selftest", "glu", case.experts, tuple(tensors), quant)
    return layer, image


def _fill(read: GroupRead, image: bytes, slot: np.ndarray) -> None:
    source = np.frombuffer(image, dtype=np.uint8)
    for op in read.ops:
        at = op.offset
        for offset, nbytes in op.parts:
            slot[offset : offset + nbytes] = source[at : at + nbytes]
            at += nbytes


def _reference(module: SwitchGLU, x: mx.array, ids: np.ndarray) -> np.ndarray:
    """``[T, K, D]`` in float32 numpy from dequantized weights."""
    weights = {name: np.array(_dequantized(module[name])) for name in PROJECTIONS}
    rows = np.array(x.astype(mx.float32))
    out = np.zeros((*ids.shape, rows.shape[1]), dtype=np.float32)
    for e in range(len(weights["gate_proj"])):
        tokens, places = np.nonzero(ids == e)
        gate = rows[tokens] @ weights["gate_proj"][e].T
        up = rows[tokens] @ weights["up_proj"][e].T
        out[tokens, places] = (gate / (1 + np.exp(-gate)) * up) @ weights["down_proj"][e].T
    return out


def _dequantized(linear: object) -> mx.array:
    """``[E, out, in]`` in float32."""
    if not hasattr(linear, "mode"):
        return linear["weight"].astype(mx.float32)  # type: ignore[index]
    scales, biases = linear["scales"], linear.get("biases")  # type: ignore[index,attr-defined]
    wide = scales if scales.dtype == mx.uint8 else scales.astype(mx.float32)
    return mx.dequantize(
        linear["weight"],  # type: ignore[index]
        wide,
        None if biases is None else biases.astype(mx.float32),
        group_size=linear.group_size,
        bits=linear.bits,
        mode=linear.mode,
    ).astype(mx.float32)


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    """Of `rounds` runs after a first one."""
    run()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
