"""How much unified memory a Mac's GPU may use, when Metal cannot be asked.

On the Mac itself ask Metal (`max_recommended_working_set_size` of mlx's `device_info`); this rule
of thumb is for planning elsewhere. Sources:

- Apple, MTLDevice.recommendedMaxWorkingSetSize: "an approximation of how much memory, in bytes,
  this GPU device can allocate without affecting its runtime performance". No formula is published.
- Two thirds below 36 GiB, three quarters from there on, as seen in public logs: 16 GiB gives
  10,922.67 MiB (abetlen/llama-cpp-python#687), 32 GiB 21,845.34 (ollama/ollama#434), an M4 Max with
  its smallest memory of 36 GiB 27 GiB, 64 GiB 49,152 (ggml-org/llama.cpp#1870), 96 GiB 73,728
  (ggml-org/llama.cpp#3213).
- Later systems give more: 128 GiB 107.52 GiB, or 84% (antirez/ds4#893), 16 GiB 11.84 GiB, or 74%
  (AlexsJones/llmfit#754). So the rule is the cautious side.
- mlx.core.set_wired_limit: macOS 15 or later; raise the system's limit with
  ``sudo sysctl iogpu.wired_limit_mb=<size_in_megabytes>``. It counts in MiB (114,688 showed as
  112.00 GiB in antirez/ds4#893), 0 is the system's default, and a restart resets it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from mlx_stream.planner.checks import between, not_negative, positive

MIB = 1 << 20
GIB = 1 << 30
LARGE_MAC = 36 * GIB
SMALL_SHARE = Fraction(2, 3)
LARGE_SHARE = Fraction(3, 4)
SYSTEM_RESERVE = 8 * GIB  # what to leave to macOS and other programs when the limit is raised


@dataclass(frozen=True)
class WiredLimit:
    """What it takes for a Mac's GPU to use `needed` bytes.

    Attributes:
        needed: bytes that the GPU must reach.
        working_set: bytes that the system recommends as it is.
        ceiling: bytes that may be asked for at most, the system's reserve taken off.
    """

    needed: int
    working_set: int
    ceiling: int

    @property
    def fits(self) -> bool:
        """Whether it fits without any change."""
        return self.needed <= self.working_set

    @property
    def possible(self) -> bool:
        """Whether it fits, the limit raised if need be."""
        return self.needed <= max(self.working_set, self.ceiling)

    @property
    def megabytes(self) -> int:
        """The value of ``iogpu.wired_limit_mb``, in MiB; 0, the default, where it fits anyway."""
        return 0 if self.fits else math.ceil(self.needed / MIB)

    @property
    def command(self) -> str | None:
        """The command that raises the limit; None when needless or not possible."""
        if self.fits or not self.possible:
            return None
        return f"sudo sysctl iogpu.wired_limit_mb={self.megabytes}"


def recommended_working_set(memory_nbytes: int, wired_limit_mb: int = 0) -> int:
    """Bytes the GPU may use: the limit that is set, else 2/3 of memory, or 3/4 from 36 GiB on.

    Args:
        memory_nbytes: unified memory of the machine.
        wired_limit_mb: ``iogpu.wired_limit_mb`` as set, in MiB; 0 is the default.
    """
    positive(memory_nbytes=memory_nbytes)
    between(0, memory_nbytes / MIB, wired_limit_mb=wired_limit_mb)
    if wired_limit_mb:
        return wired_limit_mb * MIB
    return int(memory_nbytes * (LARGE_SHARE if memory_nbytes >= LARGE_MAC else SMALL_SHARE))


def wired_limit(
    memory_nbytes: int,
    needed: int,
    *,
    wired_limit_mb: int = 0,
    reserve: int = SYSTEM_RESERVE,
) -> WiredLimit:
    """Whether `needed` bytes fit a Mac's GPU, and the limit to set when they do not.

    Args:
        reserve: bytes to leave to the system; wired memory cannot be swapped out.
    """
    not_negative(needed=needed, reserve=reserve)
    ceiling = max(0, memory_nbytes - reserve) // MIB * MIB
    return WiredLimit(needed, recommended_working_set(memory_nbytes, wired_limit_mb), ceiling)
