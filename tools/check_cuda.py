"""Check mlx_stream on an NVIDIA machine and print one JSON line; under eight minutes.

Four checks, each in a process of its own with a time limit, so that a crash or a hang of one is a
line of the report and not the end of it:

- ``tests``    the tests marked ``cuda``
- ``kernels``  our kernels against the stock paths: errors, and times by rows an expert
- ``prefill``  streamed prefill of a generated checkpoint: bytes read, seconds, and the ratio to
               stock mlx-lm with everything in memory; the last logits must agree
- ``copies``   pinned and pageable host-to-device rates of the copy stream

Exit status: 0 all checks passed, 1 a check failed, 2 wrong usage, 3 there is no NVIDIA GPU or no
CUDA build of MLX here (the JSON line says what is missing; nothing was checked).

    python tools/check_cuda.py                      the whole check
    python tools/check_cuda.py --only kernels
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.backends.base import ExpertMlp  # noqa: E402
from mlx_stream.backends.cuda.backend import CudaBackend  # noqa: E402
from mlx_stream.backends.cuda.cudart import CtypesCudart  # noqa: E402
from mlx_stream.backends.cuda.expert_paths import (  # noqa: E402
    DequantizePath,
    ExpertPath,
    GatherQmmPath,
    Rows,
    choose_path,
)
from mlx_stream.config import StreamConfig  # noqa: E402
from mlx_stream.engine import Engine  # noqa: E402
from mlx_stream.errors import MlxStreamError  # noqa: E402
from mlx_stream.storage.read_plan import plan_group  # noqa: E402

EXIT_FAILED, EXIT_NO_GPU = 1, 3
LIMITS = {"tests": 120, "kernels": 110, "prefill": 180, "copies": 30}  # seconds: 440 in all
TOLERANCE = 2e-2  # of bfloat16 results against each other, relative to the largest
LOGIT_TOLERANCE = 5e-2


def what_is_missing() -> list[str]:
    """What this machine lacks to run the check; empty if it can."""
    missing = []
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        missing.append("an NVIDIA driver (libcuda.so.1)")
    if not mx.cuda.is_available():
        missing.append("a CUDA device that MLX can use (pip install 'mlx-stream[cuda13]')")
    return missing


def environment() -> dict[str, Any]:
    """What the figures belong to."""
    info = mx.device_info()
    return {
        "mlx": mx.__version__,
        "device": info.get("device_name"),
        "architecture": info.get("architecture"),
        "total_memory": info.get("total_memory"),
    }


# ---- kernels


def load_planes(engine: Engine, mlp: ExpertMlp, experts: Sequence[int]) -> Any:
    """Planes of some experts on the device, and the buffer that keeps them there."""
    reader, backend = engine.reader, engine.backend
    read = plan_group(mlp.layer, experts, align=reader.align, file_sizes=reader.file_sizes)
    buffer = backend.allocate(read.slot_nbytes, reader.align)
    reader.submit(read.ops, buffer.array).wait()
    group = backend.publish(mlp, read, buffer).weights
    group.start(backend._uploader)
    return group.planes(), buffer


def run_path(path: ExpertPath, planes: Any, x: mx.array, rows: Rows) -> mx.array:
    """One whole group through a path, un-sorted parts joined."""
    outputs, start = [], 0
    for part, mlp in path.parts(planes, len(rows.counts)):
        counts = rows.counts[part]
        stop = start + int(counts.sum())
        outputs.append(mlp(x, Rows(rows.tokens[start:stop], counts)))
        start = stop
    return mx.concatenate(outputs)


def compare_paths(
    engine: Engine, dtype: mx.Dtype, rows_per_expert: int, repeats: int
) -> dict[str, Any]:
    """Error of our kernels against plan C, and milliseconds of every path."""
    mlp = engine._mlps[0]
    experts = min(16, mlp.layer.num_experts)
    planes, _buffer = load_planes(engine, mlp, range(experts))
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((512, mlp.layer.input_dims)).astype(np.float32)).astype(dtype)
    counts = np.full(experts, rows_per_expert)
    rows = Rows(rng.integers(0, len(x), counts.sum()), counts)
    backend = engine.backend
    fused, choice = choose_path(
        mlp, dtype, kernels="fused", refusal=backend._refusal, launcher=backend._launcher
    )
    paths = {"dequantize": DequantizePath(mlp), "gather_qmm": GatherQmmPath(mlp)}
    if choice.path == "fused":
        paths = {"fused": fused, **paths}
    milliseconds, results = {}, {}
    for name, path in paths.items():
        try:
            results[name] = np.array(run_path(path, planes, x, rows).astype(mx.float32))
            milliseconds[name] = _time(lambda p=path: run_path(p, planes, x, rows), repeats)
        except RuntimeError as error:  # gather_qmm refuses some shapes on CUDA
            milliseconds[name] = f"{type(error).__name__}: {str(error)[:120]}"
    expected = results.get("dequantize")
    error = None
    if "fused" in results and expected is not None:
        error = float(np.abs(results["fused"] - expected).max() / np.abs(expected).max())
    flops = 2 * int(counts.sum()) * 3 * mlp.layer.input_dims * mlp.layer.hidden_dims
    return {
        "rows_per_expert": rows_per_expert,
        "choice": f"{choice.path}: {choice.reason}",
        "error": error,
        "ms": milliseconds,
        "tflops": {n: flops / t / 1e9 for n, t in milliseconds.items() if isinstance(t, float)},
    }


def _time(run: Callable[[], mx.array], repeats: int) -> float:
    """Median milliseconds after one warm-up."""
    mx.eval(run())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        mx.eval(run())
        seconds.append(time.perf_counter() - started)
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def check_kernels(work: Path) -> dict[str, Any]:
    """Every format of our kernels at real widths."""
    results = {}
    for name, preset, options in (
        ("affine4-g64", "qwen3-30b-a3b", ()),
        ("affine8-g64", "qwen3-30b-a3b", ("--bits", "8")),
        ("mxfp4", "gpt-oss-20b", ("--mode", "mxfp4")),
    ):
        path = generate(work / name, preset, 1, options)
        engine = Engine(path, StreamConfig(memory_budget=8 << 30, backend="cuda"))
        try:
            results[name] = [compare_paths(engine, mx.bfloat16, r, 10) for r in (1, 16, 64, 256)]
        finally:
            engine.close()
    errors = [row["error"] for rows in results.values() for row in rows]
    ok = all(error is not None and error <= TOLERANCE for error in errors)
    return {"ok": ok, "formats": results}


# ---- prefill


def generate(path: Path, preset: str, layers: int, options: Sequence[str] = ()) -> Path:
    """A checkpoint of a real model's widths; small vocabulary, few layers."""
    command = [sys.executable, str(ROOT / "tools" / "make_checkpoint.py"), "--out", str(path)]
    command += ["--preset", preset, "--layers", str(layers), "--vocab", "4096", *options]
    subprocess.run(command, check=True, capture_output=True)
    return path


def stock_prefill(path: Path, ids: Sequence[int], chunk: int) -> tuple[float, np.ndarray]:
    """Seconds and last logits of stock mlx-lm, everything in memory, second of two runs."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(path)
    prompt, seconds, logits = mx.array(list(ids)), 0.0, mx.zeros(1)
    for _ in range(2):
        cache, started = make_prompt_cache(model), time.perf_counter()
        for start in range(0, len(ids), chunk):
            logits = model(prompt[None, start : start + chunk], cache=cache)[0, -1]
            mx.eval(logits, [c.state for c in cache])
        seconds = time.perf_counter() - started
    return seconds, np.array(logits.astype(mx.float32))


def check_prefill(work: Path, layers: int = 8, tokens: int = 8192) -> dict[str, Any]:
    """Streamed against stock."""
    path = generate(work / "model", "qwen3-30b-a3b", layers)
    ids = np.random.default_rng(0).integers(2, 4000, tokens).tolist()
    engine = Engine(path, StreamConfig(memory_budget=4 << 30, backend="cuda"))
    try:
        engine.prefill(ids[:1024])  # compiles the kernels
        result = engine.prefill(ids)
        logits = np.array(result.logits.astype(mx.float32))
        receipt, choices = result.receipt, set(engine.backend.choices.values())
    finally:
        engine.close()
    stock_seconds, expected = stock_prefill(path, ids, 2048)
    error = float(np.abs(logits - expected).max() / np.abs(expected).max())
    slower = max(receipt.read_seconds, receipt.compute_seconds)
    return {
        "ok": error <= LOGIT_TOLERANCE and receipt.bytes_read > 0,
        "tokens": tokens,
        "streamed_seconds": receipt.wall_seconds,
        "stock_seconds": stock_seconds,
        "streamed_over_stock": receipt.wall_seconds / stock_seconds,
        "read_seconds": receipt.read_seconds,
        "compute_seconds": receipt.compute_seconds,
        "wall_over_max": receipt.wall_seconds / slower,
        "bytes_read": receipt.bytes_read,
        "distinct_expert_bytes": receipt.distinct_expert_bytes,
        "io_mode": receipt.io_mode,
        "logit_error": error,
        "paths": sorted({f"{c.path}: {c.reason}" for c in choices}),
    }


# ---- copies and tests


def check_copies(nbytes: int = 256 << 20) -> dict[str, Any]:
    """Rates in GB/s of one group's copy, and that the bytes arrive."""
    cudart = CtypesCudart()
    backend = CudaBackend(cudart=cudart)
    buffer = backend.allocate(nbytes, 4096)
    buffer.array[:] = np.arange(nbytes, dtype=np.uint8)
    mirror = mx.zeros((nbytes,), dtype=mx.uint8)
    view = np.array(mirror, copy=False)
    cudart.prefer_device(view.ctypes.data, nbytes)
    stream, rates = cudart.stream_create(), []
    for _ in range(5):
        started = time.perf_counter()
        cudart.memcpy_async(view.ctypes.data, buffer.array.ctypes.data, nbytes, stream)
        cudart.stream_synchronize(stream)
        rates.append(nbytes / (time.perf_counter() - started) / 1e9)
    right = bool((mirror == mx.array(buffer.array)).all().item())
    started = time.perf_counter()
    mx.eval(mx.array(buffer.array).sum())
    pageable = nbytes / (time.perf_counter() - started) / 1e9
    cudart.stream_destroy(stream)
    backend.free(buffer)
    backend.close()
    return {
        "ok": right,
        "capabilities": sorted(backend.capabilities),
        "pinned_gb_per_s": max(rates),
        "first_pinned_gb_per_s": rates[0],
        "mx_array_gb_per_s": pageable,
        "cuda_runtime": cudart.version,
        "concurrent_managed_access": cudart.concurrent_managed,
    }


def check_tests() -> dict[str, Any]:
    """The tests marked cuda."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/backends/cuda"]
    exact = {**os.environ, "MLX_ENABLE_TF32": "0"}  # float32 models are compared closely
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=exact)
    lines = done.stdout.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"ok": done.returncode == 0, "summary": lines[-1] if lines else "", "failed": failed}


def run_check(name: str, work: Path) -> dict[str, Any]:
    """One check in this process."""
    if name == "tests":
        return check_tests()
    if name == "copies":
        return check_copies()
    return check_kernels(work) if name == "kernels" else check_prefill(work)


def in_a_process(name: str, limit: float) -> dict[str, Any]:
    """One check in a process of its own."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mlx_stream_check_") as work:
        command = [sys.executable, __file__, "--inner", name, "--work", work]
        # A session of its own, so that what the check started ends with it.
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return {"ok": False, "error": f"not done after {limit:.0f} s", "seconds": limit}
    try:
        result = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        tail = err.strip().splitlines()[-8:]
        result = {"ok": False, "error": f"exit status {process.returncode}", "stderr": tail}
    return {**result, "seconds": round(time.perf_counter() - started, 1)}


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(sorted(LIMITS)), multiple=True, help="Default: all.")
@click.option("--inner", type=click.Choice(sorted(LIMITS)), hidden=True)
@click.option("--work", type=click.Path(path_type=Path), hidden=True)
def main(only: tuple[str, ...], inner: str | None, work: Path | None) -> None:
    """See the module docstring."""
    if inner is not None:
        try:
            result = run_check(inner, work or Path(tempfile.gettempdir()))
        except (MlxStreamError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        click.echo(json.dumps(result))
        return
    if missing := what_is_missing():
        click.echo(f"nothing was checked, this machine lacks {' and '.join(missing)}", err=True)
        click.echo(json.dumps({"status": "no-gpu", "missing": missing}))
        sys.exit(EXIT_NO_GPU)
    started, checks = time.perf_counter(), {}
    for name in only or LIMITS:
        click.echo(f"{name} ...", err=True)
        checks[name] = in_a_process(name, LIMITS[name])
    ok = all(check["ok"] for check in checks.values())
    report = {
        "status": "passed" if ok else "failed",
        "seconds": round(time.perf_counter() - started, 1),
        **environment(),
        "checks": checks,
    }
    click.echo(json.dumps(report))
    sys.exit(0 if ok else EXIT_FAILED)


if __name__ == "__main__":
    main()
