"""What a benchmark runs: arms and their order. Pure data, no clock and no disk.

An arm is one way to run one prompt. Arms are repeated in rounds; every round begins with another
arm, so that a machine that slows down or warms up hits all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_stream.config import ConfigError, format_bytes

LAYER_MAJOR, CHUNK_MAJOR, STOCK = "layer-major", "chunk-major", "stock mlx-lm"
READ_ONLY, COMPUTE_ONLY, DECODE = "read only", "compute only", "decode"
ORDERS = (LAYER_MAJOR, CHUNK_MAJOR, STOCK, READ_ONLY, COMPUTE_ONLY, DECODE)


@dataclass(frozen=True)
class Setting:
    """How an engine is opened; arms of one setting share it.

    Attributes:
        budget: bytes.
        io: ``"direct"`` or ``"buffered"``.
        throttle: rate of reads, or None.
        backend: as in ``--backend``.
    """

    budget: int
    io: str = "direct"
    throttle: str | None = None
    backend: str = "auto"

    def __str__(self) -> str:
        throttle = f", {self.throttle}" if self.throttle else ""
        return f"{format_bytes(self.budget)}, {self.io}{throttle}"


@dataclass(frozen=True)
class Arm:
    """One way to run one prompt.

    Attributes:
        order: one of ORDERS.
        tokens: of the prompt.
        chunk: most tokens in a chunk.
        new_tokens: decoded after the prompt, in the decode arm.
    """

    order: str
    tokens: int
    chunk: int
    setting: Setting
    new_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.order}, {self.tokens} tokens, chunks of {self.chunk}, {self.setting}"


def sweep(
    *,
    orders: Sequence[str],
    tokens: Sequence[int],
    chunks: Sequence[int],
    settings: Sequence[Setting],
    new_tokens: int,
    stock_tokens: int,
) -> list[Arm]:
    """All combinations that differ: what does not depend on the chunk is run for one of them.

    Args:
        stock_tokens: the longest prompt for stock mlx-lm, which may be slow or large.

    Raises:
        ConfigError: a list is empty or an order is unknown.
    """
    for name, values in (("orders", orders), ("tokens", tokens), ("chunks", chunks)):
        if not values:
            raise ConfigError(
                f"nothing to run: no {name}", expected="one or more", actual="none", remedy="-h"
            )
    if unknown := [o for o in orders if o not in ORDERS]:
        raise ConfigError(
            "unknown order", expected=", ".join(ORDERS), actual=unknown[0], remedy="choose another"
        )
    arms: dict[Arm, None] = {}
    for setting in settings:
        for n in tokens:
            for order in orders:
                if order == STOCK and n > stock_tokens:
                    continue
                # Layer-major reads the same whatever the chunk; a prompt of one chunk is neither.
                wanted = chunks if order in (LAYER_MAJOR, CHUNK_MAJOR) else chunks[:1]
                for chunk in wanted:
                    if order == CHUNK_MAJOR and chunk >= n:
                        continue
                    arms[Arm(order, n, chunk, setting, new_tokens if order == DECODE else 0)] = None
    return list(arms)


def rotate(arms: Sequence[Arm], rounds: int) -> list[list[Arm]]:
    """The arms of each round: grouped by setting, groups and arms beginning elsewhere each time."""
    groups: dict[Setting, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(arm.setting, []).append(arm)
    plan = []
    for n in range(rounds):
        order = [_turned(group, n) for group in _turned(list(groups.values()), n)]
        plan.append([arm for group in order for arm in group])
    return plan


def _turned(items: list, by: int) -> list:  # type: ignore[type-arg]
    by %= max(1, len(items))
    return items[by:] + items[:by]
