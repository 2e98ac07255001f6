"""``mlx_stream doctor``: right numbers are healthy, wrong ones are named and fail."""

import json

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_stream.backends.cpu.backend import CpuBackend
from mlx_stream.backends.kernels.selection import load_profile, save_profile
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.backends.mlx_ops import MlxLayerComputation
from mlx_stream.backends.selftest import CASES, run_case, run_selftest
from mlx_stream.doctor import doctor


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
