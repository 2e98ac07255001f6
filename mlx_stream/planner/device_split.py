"""Experts split over several devices: what each brings, and the host memory traffic it adds.

FLOP/s, bytes, seconds. Devices on one host share its SSDs, or bring one each; so FLOPS and read
bandwidth scale on their own, and N* moves with their ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_stream.planner.checks import between, not_negative, positive
from mlx_stream.planner.cost_model import (
    BreakEven,
    PrefillTime,
    Rates,
    TokenWork,
    break_even,
    prefill_time,
)

FACTORS = (1, 2)


@dataclass(frozen=True)
class ScaleCase:
    """One prompt on a machine with so many times the FLOPS and the read bandwidth."""

    flops_factor: float
    read_factor: float
    time: PrefillTime
    break_even: BreakEven


@dataclass(frozen=True)
class HostTraffic:
    """Bytes that one prompt moves through host memory, writes and reads counted each.

    Attributes:
        weights_in: experts written by the SSD.
        weights_out: experts read by the devices, each by the one that owns it.
        activations: token vectors to other devices and partial results back.
    """

    weights_in: float
    weights_out: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.weights_in + self.weights_out + self.activations

    def seconds(self, bytes_per_second: float) -> float:
        """Time at a host memory bandwidth; the prompt takes no less."""
        positive(bytes_per_second=bytes_per_second)
        return self.total / bytes_per_second


def scaled_rates(rates: Rates, *, flops_factor: float = 1, read_factor: float = 1) -> Rates:
    """The rates of several devices together: FLOPS by device, bandwidth by SSD."""
    positive(flops_factor=flops_factor, read_factor=read_factor)
    attention = rates.attention_flops
    return Rates(
        read=rates.read * read_factor,
        flops=rates.flops * flops_factor,
        attention_flops=None if attention is None else attention * flops_factor,
    )


def scale_cases(
    nbytes: float, work: TokenWork, tokens: float, rates: Rates
) -> tuple[ScaleCase, ...]:
    """The four cases of FLOPS and read bandwidth, once or twice each: 1x1, 1x2, 2x1, 2x2.

    Args:
        nbytes: W, bytes of all routed experts.
        rates: of one device and one SSD.
    """
    cases = []
    for flops_factor in FACTORS:
        for read_factor in FACTORS:
            scaled = scaled_rates(rates, flops_factor=flops_factor, read_factor=read_factor)
            cases.append(
                ScaleCase(
                    flops_factor,
                    read_factor,
                    prefill_time(nbytes, work, tokens, scaled),
                    break_even(nbytes, work, scaled),
                )
            )
    return tuple(cases)


def split_experts(experts: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Experts of each device, in proportion to its FLOP/s; they sum to `experts`.

    Rounded by largest remainder, ties to the earlier device.
    """
    not_negative(experts=experts)
    positive(devices=len(speeds), **{f"speed_{i}": speed for i, speed in enumerate(speeds)})
    shares = [experts * speed / sum(speeds) for speed in speeds]
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(speeds)), key=lambda i: counts[i] - shares[i])
    for i in order[: experts - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def split_seconds(counts: Sequence[int], speeds: Sequence[float], expert_flops: float) -> float:
    """Seconds of the slowest device when every expert takes `expert_flops` FLOPs."""
    positive(**{f"speed_{i}": speed for i, speed in enumerate(speeds)})
    not_negative(expert_flops=expert_flops)
    return max(n * expert_flops / speed for n, speed in zip(counts, speeds, strict=True))


def expected_devices_used(counts: Sequence[int], top_k: int) -> float:
    """Expected devices that own at least one of a token's `top_k` experts, uniform routing.

    Hypergeometric: a device with n of E experts is missed with ``C(E - n, K) / C(E, K)``.
    """
    experts = sum(counts)
    between(0, experts, top_k=top_k)
    ways = math.comb(experts, top_k)
    return sum(1.0 - math.comb(experts - n, top_k) / ways for n in counts)


def host_traffic(
    nbytes: float,
    *,
    tokens: int,
    layers: int,
    hidden: int,
    itemsize: int,
    counts: Sequence[int],
    top_k: int,
) -> HostTraffic:
    """What one prompt moves through host memory with so many experts of a layer on each device.

    Experts are written once and read once, on one device or many: a split adds no weight traffic.
    It adds activations. Tokens are spread evenly over the devices; a token's vector goes to every
    other device that owns one of its experts, and a partial sum comes back. Each of the two is one
    write and one read of host memory.

    Args:
        nbytes: W, bytes of all routed experts.
        counts: experts of a layer on each device.
        layers: expert layers.
    """
    not_negative(nbytes=nbytes, tokens=tokens, layers=layers, hidden=hidden, itemsize=itemsize)
    used = expected_devices_used(counts, top_k)
    others = used * (len(counts) - 1) / len(counts)
    return HostTraffic(
        weights_in=nbytes,
        weights_out=nbytes,
        activations=4.0 * others * tokens * layers * hidden * itemsize,
    )


def split_prefill_seconds(
    time: PrefillTime, traffic: HostTraffic, host_bytes_per_second: float
) -> float:
    """T_max with the host memory as a third resource beside SSD and compute."""
    return max(time.overlapped_seconds, traffic.seconds(host_bytes_per_second))
