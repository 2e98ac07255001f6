"""Balls into bins: how long a batch of random reads takes on a device with parallel units.

k requests fall on S independent units (dies, planes); the batch is done when the fullest unit is.
Expectations are exact, by Poissonization, not by simulation: loads of S bins with k balls are
independent Poisson loads, given that they sum to k. So with f_m the Poisson(k * p) weights cut off
at m, ``P(max <= m) = [x^k] prod f_m(x) / Poisson(k; k)``, a product of polynomials with positive
coefficients: the exponential generating function ``k! [x^k] (sum_{j<=m} (p x)^j / j!)^S``, scaled
so that nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlx_stream.planner.checks import between, not_negative, positive

_FLAT = 1.0 + 1e-14  # growth from which on the rest is below rounding


@dataclass(frozen=True)
class BatchTime:
    """Expected completion of a batch of requests.

    Attributes:
        unit_load: expected requests on the fullest unit.
        channel_load: expected requests on the fullest channel.
        seconds: ``fixed + unit time * unit_load + transfer time * channel_load``.
    """

    unit_load: float
    channel_load: float
    seconds: float


def max_load_distribution(requests: int, bins: int | Sequence[int]) -> tuple[float, ...]:
    """``P(fullest bin <= m)`` for m = 0, 1, ... up to where it is 1 within rounding.

    Args:
        requests: k, each on a random bin.
        bins: as many equal bins, or the relative size of each bin.
    """
    sizes = (1,) * bins if isinstance(bins, int) else tuple(bins)
    positive(bins=len(sizes), total_size=sum(sizes))
    not_negative(requests=requests, smallest_size=min(sizes))
    return _distribution(int(requests), tuple(sorted(sizes)))


def expected_max_load(requests: int, bins: int | Sequence[int]) -> float:
    """Expected requests on the fullest bin: ``sum over m of 1 - P(max <= m)``."""
    return sum(1.0 - p for p in max_load_distribution(requests, bins))


def max_load_quantile(requests: int, bins: int | Sequence[int], share: float) -> int:
    """The smallest load that the fullest bin does not exceed in `share` of all batches."""
    between(0, 1, share=share)
    chances = max_load_distribution(requests, bins)
    return next(m for m, chance in enumerate(chances) if chance >= share)


def channel_sizes(units: int, channels: int) -> tuple[int, ...]:
    """Units behind each channel, as even as they go; no more channels than units."""
    positive(units=units, channels=channels)
    used = min(units, channels)
    return tuple(units // used + (i < units % used) for i in range(used))


def batch_time(
    requests: int,
    units: int,
    *,
    channels: int,
    fixed_seconds: float,
    unit_seconds: float,
    transfer_seconds: float,
) -> BatchTime:
    """Expected seconds until `requests` random reads are all done.

    An upper estimate: the fullest unit and the fullest channel are added, though a channel
    transfers while its units sense the next page.

    Args:
        units: S, what can sense a page at the same time.
        channels: shared by the units evenly; one transfer at a time each.
        fixed_seconds: command, interrupt and driver.
        unit_seconds: tR, sensing one page.
        transfer_seconds: moving one page over its channel.
    """
    not_negative(fixed_seconds=fixed_seconds, unit_seconds=unit_seconds)
    not_negative(transfer_seconds=transfer_seconds)
    unit_load = expected_max_load(requests, units)
    channel_load = expected_max_load(requests, channel_sizes(units, channels))
    seconds = fixed_seconds + unit_seconds * unit_load + transfer_seconds * channel_load
    return BatchTime(unit_load, channel_load, seconds)


@lru_cache(maxsize=256)
def _distribution(requests: int, sizes: tuple[int, ...]) -> tuple[float, ...]:
    if requests == 0:
        return (1.0,)
    total = sum(sizes)
    kinds = [(size / total, sizes.count(size)) for size in dict.fromkeys(sizes) if size]
    least = -(-requests // sum(count for _, count in kinds))  # some bin has its fair share
    raw = [0.0] * least
    for most in range(least, requests + 1):
        product = np.ones(1)
        for share, count in kinds:
            factor = _poisson(requests * share, most)
            product = _multiply(product, _power(factor, count, requests), requests)
        raw.append(max(raw[-1], float(product[requests])))
        if 0 < raw[-1] <= raw[-2] * _FLAT:
            break
    # The last value is Poisson(k; k); dividing by it takes the rounding of the logarithms out.
    return tuple(chance / raw[-1] for chance in raw)


def _poisson(mean: float, most: int) -> np.ndarray:
    """Poisson weights of 0 to `most`. -> [most + 1] float64"""
    logs = [j * math.log(mean) - mean - math.lgamma(j + 1) for j in range(most + 1)]
    return np.exp(logs)


def _power(polynomial: np.ndarray, count: int, degree: int) -> np.ndarray:
    """``polynomial ** count`` up to `degree`, by squaring."""
    result = np.ones(1)
    while count:
        if count & 1:
            result = _multiply(result, polynomial, degree)
        count >>= 1
        if count:
            polynomial = _multiply(polynomial, polynomial, degree)
    return result


def _multiply(a: np.ndarray, b: np.ndarray, degree: int) -> np.ndarray:
    return np.convolve(a, b)[: degree + 1]
