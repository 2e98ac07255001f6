"""A machine made up for tests of what is planned on one."""

from __future__ import annotations

from mlx_stream.planner.machine_profile import (
    COPY,
    ELEMENTWISE,
    VERSION,
    ComputeRate,
    MachineProfile,
    ReadRate,
)

KIB, MIB = 1 << 10, 1 << 20


def read_rate(nbytes: int, rate: float, depth: int = 4, order: str = "sequential") -> ReadRate:
    """One arm; latencies follow from the rate."""
    seconds = nbytes / rate
    return ReadRate(order, nbytes, depth, rate, seconds, 2 * seconds, rate / nbytes, "O_DIRECT")


def machine(
    *, read: float = 2e9, flops: float = 1e11, elementwise: float = 1e9, overlap_cost: float = 0.0
) -> MachineProfile:
    """Constant rates: everything of one kind runs at the same speed, whatever its shape."""
    reads = tuple(
        read_rate(n, read, order=order)
        for order in ("sequential", "random")
        for n in (16 * KIB, MIB, 8 * MIB)
    )
    computes = (
        ComputeRate("experts", "affine 4-bit g64", 64, (2048, 768), flops),
        ComputeRate("linear", "affine 4-bit g64", 64, (2048, 2048), flops),
        ComputeRate("attention", "head 128", 64, (2048,), flops),
        ComputeRate("overhead", ELEMENTWISE, 64, (20000,), elementwise),
        ComputeRate("overhead", COPY, 1, (1 << 26,), 1e10),
    )
    return MachineProfile(
        VERSION,
        "test",
        "cpu",
        "O_DIRECT",
        "2026-11-30T00:00:00+00:00",
        reads,
        computes,
        overlap_cost=overlap_cost,
    )
