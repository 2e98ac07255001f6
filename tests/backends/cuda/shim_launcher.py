"""Runs the CUDA kernels of a whole model on the CPU shim, in place of ``mx.fast.cuda_kernel``."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_stream.backends.kernels.launch import Launch
from mlx_stream.backends.kernels.source import KernelSource
from tests.backends.cuda.cases import as_input
from tests.kernel_shim.run import run_on_cpu


class ShimLauncher:
    """Counts launches by kernel and by template; any finding of the checker is an error."""

    def __init__(self, *, check: bool = True) -> None:
        self.check = check
        self.launches: dict[str, int] = {}
        self.input_dtypes: dict[str, set[tuple[str, ...]]] = {}

    def __call__(
        self, source: KernelSource, launch: Launch, inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        kernel = source.name.rpartition("_")[0]
        self.launches[kernel] = self.launches.get(kernel, 0) + 1
        # What MLX names a compiled kernel by, and what it does not look at.
        name = f"{source.name} {sorted(launch.template.items(), key=str)}"
        self.input_dtypes.setdefault(name, set()).add(tuple(str(a.dtype) for a in inputs))
        arrays = [as_input(array) for array in inputs]
        outputs, findings = run_on_cpu(source, launch, arrays, check=self.check)
        assert not findings, f"{source.name}: {findings[0]}"
        return [
            mx.array(values).astype(getattr(mx, dtype))
            for values, dtype in zip(outputs, launch.output_dtypes, strict=True)
        ]
