"""Compile every CUDA kernel with nvcc and write the table of what each needs.

The text is what ``mx.fast.cuda_kernel`` generates; MLX's own header is replaced by the few lines of
it that a kernel can see. Nothing is run, so no GPU is needed::

    python tools/build_cuda.py           all variants and architectures; docs/cuda_kernels.md
    python tools/build_cuda.py --arch sm_90a --only moe_up --out -
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from mlx_stream.backends.kernels.grouped_cuda import (  # noqa: E402
    ROW_TILES,
    CudaActivation,
    Projection,
    combine_launch,
    cuda_kernel_source,
    down_launch,
    up_launch,
)
from mlx_stream.backends.kernels.launch import Launch  # noqa: E402
from mlx_stream.backends.kernels.source import KernelSource  # noqa: E402
from mlx_stream.storage.quant_spec import QuantSpec  # noqa: E402
from tests.kernel_shim.arrays import Buf, storage_dtype  # noqa: E402
from tests.kernel_shim.generate import cuda_kernel  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120")
FLAGS = ("-std=c++17", "-cubin", "-Xptxas", "-v", "-w")
TABLE = ROOT / "docs" / "cuda_kernels.md"
HEADING = "## Registers, shared memory, spills"

# What of MLX's default header (utils.cuh) a kernel can see.
PRELUDE = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cooperative_groups.h>
#define inf cuda::std::numeric_limits<float>::infinity()
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}  // namespace mlx::core::cu
"""

AFFINE4, AFFINE8 = QuantSpec("affine", 4, 64), QuantSpec("affine", 8, 64)
MXFP4 = QuantSpec("mxfp4", 4, 32)
SWIGLU, OAI = CudaActivation(0, True), CudaActivation(3, True, 7.0, 1.702)
RELU2 = CudaActivation(21, False)


@dataclass(frozen=True, eq=False)
class Variant:
    """One instantiation of a kernel."""

    label: str
    kernel: str
    launch: Launch
    inputs: tuple[Buf, ...]

    @property
    def source(self) -> KernelSource:
        """The kernel it instantiates."""
        return cuda_kernel_source(self.kernel)

    @property
    def text(self) -> str:
        """What the compiler sees."""
        return PRELUDE + cuda_kernel(self.source, self.launch, self.inputs).text


@dataclass(frozen=True)
class Usage:
    """What ptxas reports for one kernel on one architecture."""

    registers: int
    shared_nbytes: int
    spill_nbytes: int
    seconds: float

    def __str__(self) -> str:
        spills = f", {self.spill_nbytes} B spilled" if self.spill_nbytes else ""
        return f"{self.registers} / {self.shared_nbytes / 1024:.1f} KiB{spills}"


def _name(spec: QuantSpec) -> str:
    return f"{spec.mode} {spec.bits}-bit g{spec.group_size}"


def _buf(dtype: str, *shape: int) -> Buf:
    return Buf(np.zeros(shape, storage_dtype(dtype)), dtype)


def _planes(dtype: str, p: Projection) -> tuple[Buf, Buf, Buf]:
    scale = dtype if p.spec.mode == "affine" else "uint8"
    words, groups = p.k * p.spec.bits // 32, p.k // p.spec.group_size
    return (
        _buf("uint32", 1, p.n, words),
        _buf(scale, 1, p.n, groups),
        _buf(dtype, 1, p.n, groups),
    )


def up_variant(dtype: str, p: Projection, activation: CudaActivation, tile: int) -> Variant:
    """``moe_up`` for one projection."""
    w = _planes(dtype, p)
    bias = _buf(dtype, 1, p.n)
    inputs = (
        *(_buf(dtype, tile, p.k), _buf("int32", tile), _buf("int32", 1, 4)),
        *(*w, *w, bias, bias, _buf("float32", 2)),
    )
    label = f"{_name(p.spec)}, {'gated' if activation.gated else 'plain'}, {tile} rows, {dtype}"
    return Variant(label, "moe_up", up_launch(dtype, p, activation, tile, 1, tile), inputs)


def down_variant(dtype: str, p: Projection, tile: int) -> Variant:
    """``moe_down`` for one projection."""
    inputs = (
        *(_buf(dtype, tile, p.k), _buf("int32", tile), _buf("int32", 1, 4)),
        *(*_planes(dtype, p), _buf(dtype, 1, p.n)),
    )
    label = f"{_name(p.spec)}, {tile} rows, {dtype}"
    return Variant(label, "moe_down", down_launch(dtype, p, tile, 1, tile), inputs)


def combine_variant(dtype: str) -> Variant:
    """``moe_combine``."""
    x = _buf(dtype, 8, 2048)
    inputs = (x, _buf("int32", 8, 8), _buf("float32", 8, 8), x)
    return Variant(dtype, "moe_combine", combine_launch(dtype, 8, 2048, True), inputs)


def variants() -> Iterator[Variant]:
    """Formats, tiles and dtypes at the widths of Qwen3-30B-A3B and gpt-oss."""
    for dtype in ("bfloat16", "float16"):
        for tile in ROW_TILES:
            for spec in (AFFINE4, AFFINE8, MXFP4):
                dims, hidden = (2880, 2880) if spec is MXFP4 else (2048, 768)
                bias, activation = (True, OAI) if spec is MXFP4 else (False, SWIGLU)
                yield up_variant(dtype, Projection(spec, dims, hidden, bias), activation, tile)
                yield down_variant(dtype, Projection(spec, hidden, dims, bias), tile)
        yield combine_variant(dtype)
    yield up_variant("bfloat16", Projection(AFFINE4, 2048, 768, True), RELU2, 64)
    for group in (32, 128):
        yield up_variant(
            "bfloat16", Projection(QuantSpec("affine", 4, group), 2048, 768, False), SWIGLU, 64
        )


MAIN = up_variant("bfloat16", Projection(AFFINE4, 2048, 768, False), SWIGLU, 64)


def find_nvcc() -> str | None:
    """The compiler, or None."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def compile_variant(variant: Variant, arch: str, nvcc: str) -> Usage:
    """Build one kernel for one architecture.

    Raises:
        click.ClickException: nvcc refused it.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.cu"
        source.write_text(variant.text)
        started = time.perf_counter()
        command = [nvcc, *FLAGS, f"-arch={arch}", str(source), "-o", str(source) + ".cubin"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(
                f"{variant.kernel}, {variant.label}, {arch}:\n{done.stderr[:4000]}"
            )
        return parse_usage(done.stderr, time.perf_counter() - started)


def parse_usage(log: str, seconds: float = 0.0) -> Usage:
    """ptxas's report of one kernel."""
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = re.search(r"Used (\d+) registers", log)
    shared = re.search(r"(\d+) bytes smem", log)
    if registers is None:
        raise click.ClickException(f"ptxas reported no registers:\n{log[:2000]}")
    shared_nbytes = int(shared[1]) if shared else 0
    return Usage(int(registers[1]), shared_nbytes, max(spills, default=0), seconds)


def table(results: dict[tuple[Variant, str], Usage], archs: Sequence[str]) -> str:
    """Markdown: one row a variant, one column an architecture."""
    lines = [
        f"| kernel | variant | {' | '.join(archs)} |",
        f"|---|---|{'---|' * len(archs)}",
    ]
    for variant in dict.fromkeys(v for v, _ in results):
        cells = " | ".join(str(results[variant, arch]) for arch in archs)
        lines.append(f"| `{variant.kernel}` | {variant.label} | {cells} |")
    return "\n".join(lines)


def document(
    results: dict[tuple[Variant, str], Usage], archs: Sequence[str], version: str, prose: str
) -> str:
    """The text of docs/cuda_kernels.md: its prose up to HEADING, then the table."""
    spilled = sum(usage.spill_nbytes > 0 for usage in results.values())
    return (
        f"{prose.partition(HEADING)[0].rstrip()}\n\n{HEADING}\n\n"
        f"Written by `tools/build_cuda.py` with {version}: {len(results)} builds, {spilled} with "
        "spills. A cell is registers of a thread / static shared memory of a block (128 threads; "
        "256 for `moe_combine`).\n\n"
        f"{table(results, archs)}\n"
    )


@click.command()
@click.option("--arch", "archs", multiple=True, default=ARCHITECTURES, show_default=True)
@click.option("--only", help="Kernel name; default all.")
@click.option("--out", default=str(TABLE), show_default=True, help="'-' prints the table only.")
@click.option("--jobs", default=2, show_default=True)
def main(archs: tuple[str, ...], only: str | None, out: str, jobs: int) -> None:
    """See the module docstring."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise click.ClickException("nvcc is not on PATH; install the CUDA toolkit")
    chosen = [v for v in variants() if only in (None, v.kernel)]
    pairs = [(v, arch) for v in chosen for arch in archs]
    with ThreadPoolExecutor(jobs) as pool:
        usages = list(pool.map(lambda pair: compile_variant(*pair, nvcc), pairs))
    results = dict(zip(pairs, usages, strict=True))
    if out == "-":
        click.echo(table(results, archs))
        return
    lines = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", lines)
    compiler = f"nvcc {release[1] if release else '?'}"
    file = Path(out)
    prose = file.read_text() if file.exists() else "# CUDA kernels"
    file.write_text(document(results, archs, compiler, prose))
    click.echo(f"{len(results)} builds in {sum(u.seconds for u in usages):.0f} s; wrote {out}")


if __name__ == "__main__":
    main()
