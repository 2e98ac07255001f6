"""Grouped expert MLPs against mlx-lm's SwitchGLU / SwitchMLP in float32."""

import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from mlx_stream.backends.cpu import grouped_mlp as module
from mlx_stream.backends.cpu.activations import resolve_activation
from mlx_stream.backends.cpu.grouped_mlp import ExpertJob, MlpSpec, grouped_mlp, scratch_nbytes
from mlx_stream.backends.cpu.pool import WorkerPool
from mlx_stream.storage.quant_spec import QuantSpec
from tests.backends.cpu.support import AFFINE, MODES, expert_tensors, spec_id, unaligned

D, F = 256, 384
PLAIN = QuantSpec("none", 32, 0)
Q4 = QuantSpec("affine", 4, 64)


class Unknown(nn.Module):
    """An activation without a twin."""

    def __call__(self, x, gate):
        return nn.silu(gate) * (x + 1)


class Case:
    """A small switch layer, its raw tensors and per-expert inputs."""

    def __init__(self, counts, quant=Q4, *, glu=True, bias=False, activation=None, down=None):
        mx.random.seed(1)
        self.counts = counts
        if activation is None:  # not `or`: a module without parameters is false
            activation = SwiGLU() if glu else nn.ReLU2()
        switch = SwitchGLU if glu else SwitchMLP
        self.switch = switch(D, F, len(counts), activation, bias=bias)
        for projection in self.switch.children().values():
            if bias and "bias" in projection:
                projection.bias = mx.random.normal(projection.bias.shape)
        inner = ("up_proj", "gate_proj") if glu else ("fc1",)
        outer = "down_proj" if glu else "fc2"
        self.quant = dict.fromkeys(inner, quant) | {outer: down or quant}
        for name, spec in self.quant.items():
            if spec.mode != "none":
                projection = getattr(self.switch, name)
                packed = projection.to_quantized(spec.group_size, spec.bits, spec.mode)
                setattr(self.switch, name, packed)
        self.experts, self.dtypes = expert_tensors(self.switch)
        rng = np.random.default_rng(2)
        self.x = [rng.standard_normal((count, D)).astype(np.float32) for count in counts]
        twin = resolve_activation(self.switch.activation)
        kind = "glu" if glu else "mlp"
        self.spec = MlpSpec(kind, self.quant, twin, self.switch.activation, D, F)

    def run(self, threads=2, make=lambda array: array):
        outputs = []
        jobs = [
            ExpertJob(
                weights={key: make(array) for key, array in expert.items()},
                rows=len(x),
                load=lambda out, x=x: np.copyto(out, x),
                store=lambda y: outputs.append(y.copy()),
            )
            for expert, x in zip(self.experts, self.x, strict=True)
        ]
        with WorkerPool(threads) as pool:
            grouped_mlp(jobs, self.spec, self.dtypes, pool)
        return outputs

    def expected(self):
        rows = mx.array(np.concatenate(self.x))
        experts = mx.array(np.repeat(np.arange(len(self.counts)), self.counts))[:, None]
        y = np.array(self.switch(rows, experts))[:, 0]
        parts = np.split(y, np.cumsum(self.counts)[:-1])
        return [part for part in parts if len(part)]

    def check(self, threads=2, **options):
        expected = self.expected()
        outputs = self.run(threads, **options)
        assert [y.shape for y in outputs] == [y.shape for y in expected]
        for actual, wanted in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, atol=2e-6 * np.abs(wanted).max(), rtol=2e-5)


SPECS = [*AFFINE, *MODES, Q4, PLAIN]


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_every_packing(spec):
    Case([3, 1, 2, 1, 2], spec).check()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_row_counts(threads):
    Case([1, 0, 2, 5, 31, 32, 33, 63, 64, 65, 7]).check(threads)


def test_mixed_packings_of_one_expert():
    Case([4, 40, 1, 2], Q4, down=QuantSpec("affine", 6, 128)).check()
    case = Case([4, 40, 1, 2], QuantSpec("affine", 8, 32), down=QuantSpec("affine", 2, 64))
    case.check()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_parameters(dtype):
    """float32 rows over half-precision scales, biases and weights, as MLX promotes them."""
    for spec in (Q4, PLAIN):
        case = Case([3, 2, 40, 1], spec, bias=True)
        case.switch.set_dtype(dtype)
        case.experts, case.dtypes = expert_tensors(case.switch)
        case.check()


def test_expert_biases():
    Case([3, 40, 1, 2], bias=True).check()


@pytest.mark.parametrize("activation", [nn.ReLU2(), nn.GELU("precise")])
def test_two_layer_experts(activation):
    Case([3, 40, 1, 2], glu=False, bias=True, activation=activation).check()


@pytest.mark.parametrize("counts", [[3], [2, 3, 0, 40, 1]])
def test_an_activation_without_twin_goes_through_mlx(counts):
    case = Case(counts, activation=Unknown())
    assert case.spec.activation is None
    case.check()


def test_unaligned_weights():
    Case([3, 40, 1, 2, 5]).check(make=unaligned)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_beyond_one_block(threads, monkeypatch):
    monkeypatch.setattr(module, "ROW_BLOCK", 48)
    Case([100, 48, 49, 1, 7]).check(threads)
    Case([100]).check(threads)


def test_bit_equal_whatever_the_threads_and_the_grouping():
    counts = [1, 4, 33, 70, 2, 130]
    case = Case(counts)
    first = case.run(threads=2)
    for threads in (1, 2, 4, 8):  # 4 and 8 split each expert over the threads
        again = case.run(threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    for index in range(len(counts)):  # one expert a call
        alone = Case(counts)
        alone.experts, alone.x = [alone.experts[index]], [alone.x[index]]
        assert np.array_equal(alone.run()[0], first[index])


def test_no_jobs():
    case = Case([2, 1])
    with WorkerPool(2) as pool:
        grouped_mlp([], case.spec, case.dtypes, pool)


@pytest.mark.parametrize("count", [1, 8])
def test_an_error_in_load_or_store_propagates(count):
    case = Case([2] * count)

    def fail(array):
        raise OSError("no rows")

    for load, store in ((fail, lambda y: None), (lambda x: x.fill(0), fail)):
        jobs = [ExpertJob(expert, 2, load, store) for expert in case.experts]
        with WorkerPool(2) as pool, pytest.raises(OSError, match="no rows"):
            grouped_mlp(jobs, case.spec, case.dtypes, pool)


def test_store_is_serial_and_in_job_order():
    case, order, active = Case([2] * 12), [], threading.Lock()

    def store(index):
        assert active.acquire(blocking=False)
        order.append(index)
        active.release()

    jobs = [
        ExpertJob(expert, 2, lambda x: x.fill(1), lambda y, index=index: store(index))
        for index, expert in enumerate(case.experts)
    ]
    with WorkerPool(3) as pool:
        grouped_mlp(jobs, case.spec, case.dtypes, pool)
    assert order == list(range(12))


def test_scratch_bound_holds(monkeypatch):
    """What the threads' scratch and the rows take stays under the stated bound."""
    case = Case([300, 20, 600, 1, 64, 2])
    taken = []
    scratch = WorkerPool.scratch
    monkeypatch.setattr(
        WorkerPool, "scratch", lambda pool, nbytes: (taken.append(nbytes), scratch(pool, nbytes))[1]
    )
    case.run(threads=2)
    rows_nbytes = 3 * 600 * D * 4
    assert 2 * max(taken) + rows_nbytes <= scratch_nbytes(case.spec, 2, max_rows=600)
    assert scratch_nbytes(case.spec, 2) < scratch_nbytes(case.spec, 4)
