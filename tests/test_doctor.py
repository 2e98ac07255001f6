"""``mlx_stream doctor``: right numbers are healthy, wrong ones are named and fail."""

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_stream.backends.cpu.backend import CpuBackend
from mlx_stream.backends.kernels.selection import load_profile, machine_name, save_profile
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.backends.mlx_ops import MlxLayerComputation
from mlx_stream.backends.selftest import CASES, Case, run_case, run_selftest
from mlx_stream.backends.selftest_kernels import combine_case, decode_case
from mlx_stream.doctor import doctor
from tests.backends.kernels.running import ShimRunner
from tests.kernel_shim import needs_clang


def test_the_cpu_backend_is_healthy_in_every_format():
    backend = CpuBackend()
    try:
        results = list(run_selftest(backend, rounds=1))
    finally:
        backend.close()
    assert [r.healthy for r in results] == [True] * len(CASES)
    assert len({r.name for r in results}) == len(CASES)


def test_a_wrong_backend_is_unhealthy():
    class Wrong(MetalBackend):
        """One output value is off."""

        compute_dtype = mx.float32

        def begin_layer(self, mlp, chunks):
            computation = MlxLayerComputation(mlp, chunks)
            outputs = computation.outputs
            computation.outputs = lambda: [y * 1.01 for y in outputs()]
            return computation

    backend = Wrong(require_device=False)
    try:
        assert not run_case(backend, CASES[0], 1).healthy
    finally:
        backend.close()


def test_the_command_prints_a_verdict(monkeypatch):
    monkeypatch.setenv("MLX_STREAM_KERNELS", "auto")
    result = CliRunner().invoke(doctor, ["--backend", "cpu", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "healthy: 7 expert formats" in result.output


@pytest.fixture
def shim_backend(monkeypatch, tmp_path):
    """A metal backend whose kernels run on the CPU shim; doctor's profile goes to a folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fused")
    run = ShimRunner()
    yield MetalBackend(require_device=False, run=run)
    assert run.findings == []


DECODE = Case("affine", 4, 64, experts=5, dims=64, hidden=64, tokens=1, top_k=3)


@needs_clang
def test_the_metal_kernels_that_are_chosen_apart_are_checked(shim_backend):
    results = [
        combine_case(shim_backend, tokens=20, top_k=3, dims=40, rounds=1),
        decode_case(shim_backend, DECODE, rounds=1),
    ]
    assert [(r.name, r.kernel, r.healthy) for r in results] == [
        ("combine", "combine", True),
        ("decode affine 4-bit g64", "decode", True),
    ]
    shim_backend.close()


@needs_clang
@pytest.mark.parametrize("kernel", ["combine", "decode"])
def test_a_wrong_kernel_is_unhealthy(shim_backend, kernel):
    right = shim_backend._run
    shim_backend._run = lambda *launch: [y * 1.02 for y in right(*launch)]
    if kernel == "combine":
        result = combine_case(shim_backend, tokens=20, top_k=3, dims=40, rounds=1)
    else:
        result = decode_case(shim_backend, DECODE, rounds=1)
    assert not result.healthy
    shim_backend.close()


@needs_clang
@pytest.mark.parametrize("forced", ["fused", "stock"])
def test_the_command_keeps_what_the_kernels_gained(shim_backend, monkeypatch, forced):
    """On a Mac. Only our kernels' times are kept, not those of what was forced in their place."""

    def small(backend, rounds):
        yield combine_case(backend, tokens=20, top_k=3, dims=40, rounds=rounds)
        yield decode_case(backend, DECODE, rounds)

    monkeypatch.setattr("mlx_stream.backends.select.select_backend", lambda name: shim_backend)
    monkeypatch.setattr("mlx_stream.backends.selftest_kernels.run_kernel_selftest", small)
    monkeypatch.setattr("mlx_stream.backends.selftest.run_selftest", lambda backend, rounds: [])
    monkeypatch.setenv("MLX_STREAM_KERNELS", forced)
    result = CliRunner().invoke(doctor, ["--backend", "metal", "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "kernels for combine and decode" in result.output
    kept = {"combine", "decode affine 4-bit g64"} if forced == "fused" else set()
    assert set(load_profile(machine_name())) == kept
    assert ("not measured" in result.output) == (forced == "stock")


def test_profiles_of_several_machines_live_together(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_profile("a") == {}
    path = save_profile("a", {"affine 4-bit g64": 1.2})
    save_profile("b", {"mxfp4 4-bit g32": 0.8})
    assert load_profile("a") == {"affine 4-bit g64": 1.2}
    assert set(json.loads(path.read_text())) == {"a", "b"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 3}', '{"a": {"x": "y"}}'])
def test_a_damaged_profile_counts_as_none(monkeypatch, tmp_path, text):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_profile("b", {}).write_text(text)
    assert load_profile("a") == {}
