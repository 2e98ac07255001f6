"""N-gram table lookups: small random reads per token, from tables too large for memory.

Such a model hashes the last tokens (2-grams, 3-grams, ...) with several hash functions, reads one
row per hash from a table on the SSD and adds it in some of its layers. A token costs no FLOPs but
random reads; what bounds it are IOPS and latency. Reads, bytes, seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_stream.planner.checks import between, not_negative, positive

BLOCK_NBYTES = 4096
_EXACT_TERMS = 10_000  # of a harmonic number; the rest by Euler-Maclaurin, exact to rounding


@dataclass(frozen=True)
class LookupTables:
    """The tables of a model.

    Attributes:
        orders: N-gram lengths that are looked up (2 for 2-grams and 3-grams).
        hashes: hash functions per N-gram length, with a table each.
        layers: layers with tables of their own.
        rows: rows of one table.
        row_nbytes: bytes of a row.
    """

    orders: int
    hashes: int
    layers: int
    rows: int
    row_nbytes: int

    def __post_init__(self) -> None:
        positive(orders=self.orders, hashes=self.hashes, layers=self.layers)
        positive(rows=self.rows, row_nbytes=self.row_nbytes)

    @property
    def reads_per_token(self) -> int:
        """Rows that a token looks up: one per order, hash and layer."""
        return self.orders * self.hashes * self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return self.reads_per_token * self.rows * self.row_nbytes

    def blocks_per_read(self, block_nbytes: int = BLOCK_NBYTES) -> float:
        """Mean blocks that a row touches when rows lie back to back from a block's start on.

        ``1 + (row - gcd(row, block)) / block``: 1 for rows that divide a block.
        """
        positive(block_nbytes=block_nbytes)
        return 1.0 + (self.row_nbytes - math.gcd(self.row_nbytes, block_nbytes)) / block_nbytes


@dataclass(frozen=True)
class LookupDemand:
    """What looking up costs the SSD at some speed of decoding or prefill.

    Attributes:
        reads_per_token: rows read from the SSD per token, those cached taken off.
        iops: reads per second.
        bytes_per_second: in whole blocks.
    """

    reads_per_token: float
    iops: float
    bytes_per_second: float


def lookup_demand(
    tables: LookupTables,
    tokens_per_second: float,
    *,
    hit_rate: float = 0.0,
    block_nbytes: int = BLOCK_NBYTES,
) -> LookupDemand:
    """Reads per token, IOPS and bandwidth needed at `tokens_per_second`."""
    not_negative(tokens_per_second=tokens_per_second)
    between(0, 1, hit_rate=hit_rate)
    reads = tables.reads_per_token * (1.0 - hit_rate)
    iops = reads * tokens_per_second
    traffic = iops * tables.blocks_per_read(block_nbytes) * block_nbytes
    return LookupDemand(reads, iops, traffic)


def tokens_per_second_by_iops(tables: LookupTables, iops: float, hit_rate: float = 0.0) -> float:
    """The bound that an SSD's IOPS set; infinite when all rows are cached."""
    positive(iops=iops)
    reads = lookup_demand(tables, 1.0, hit_rate=hit_rate).reads_per_token
    return math.inf if reads == 0 else iops / reads


def exposed_seconds(batch_seconds: float, hidden_seconds: float) -> float:
    """Latency of a token's lookups that it waits for.

    Args:
        batch_seconds: until all of the token's reads are done, see `max_load.batch_time`.
        hidden_seconds: compute between knowing the token and needing the rows: the layers before
            the first one with a table.
    """
    not_negative(batch_seconds=batch_seconds, hidden_seconds=hidden_seconds)
    return max(0.0, batch_seconds - hidden_seconds)


def token_seconds(compute_seconds: float, batch_seconds: float, hidden_share: float) -> float:
    """Seconds of a decoded token with its lookups.

    Args:
        hidden_share: share of the compute that runs before the rows are needed.
    """
    between(0, 1, hidden_share=hidden_share)
    return compute_seconds + exposed_seconds(batch_seconds, hidden_share * compute_seconds)


def zipf_coverage(rows: int, cached: int, exponent: float) -> float:
    """Hit rate of a cache with the `cached` most frequent of `rows` rows, Zipf frequencies.

    ``H(cached, s) / H(rows, s)`` with generalized harmonic numbers; exponent 0 is uniform.
    """
    positive(rows=rows)
    between(0, rows, cached=cached)
    not_negative(exponent=exponent)
    if cached == rows:
        return 1.0
    return harmonic(cached, exponent) / harmonic(rows, exponent)


def rows_for_coverage(rows: int, share: float, exponent: float) -> int:
    """The fewest cached rows whose coverage reaches `share`."""
    between(0, 1, share=share)
    low, high = -1, rows
    while high - low > 1:
        middle = (low + high) // 2
        if zipf_coverage(rows, middle, exponent) >= share:
            high = middle
        else:
            low = middle
    return high


def harmonic(terms: int, exponent: float) -> float:
    """``sum of i ** -exponent for i = 1 .. terms``; fast for billions of terms."""
    not_negative(terms=terms, exponent=exponent)
    first = min(int(terms), _EXACT_TERMS)
    head = math.fsum(i**-exponent for i in range(1, first + 1))
    return head if terms <= first else head + _tail(first, int(terms), exponent)


def _tail(start: int, stop: int, s: float) -> float:
    """``sum of i ** -s for i = start + 1 .. stop`` by Euler-Maclaurin."""
    span = math.log(stop / start)
    power = 1.0 - s
    # start ** power * expm1(power * span) / power, which stays exact where power is near 0
    ratio = math.expm1(power * span) / power if abs(power) > 1e-12 else span
    integral = start**power * ratio
    ends = (stop**-s - start**-s) / 2.0
    slope = s * (start ** (-s - 1.0) - stop ** (-s - 1.0)) / 12.0
    return integral + ends + slope
