"""The memory budget: bytes are asked for here before they are allocated."""

from __future__ import annotations

from mlx_stream.config import format_bytes
from mlx_stream.errors import BudgetError


class MemoryBudget:
    """A hard cap in bytes, divided among named owners. Used from the compute thread only."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        self._owners: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Bytes granted now."""
        return sum(self._owners.values())

    @property
    def available(self) -> int:
        """Bytes that can still be granted."""
        return self.total - self.used

    def owner(self, name: str) -> int:
        """Bytes granted to one owner now."""
        return self._owners.get(name, 0)

    def reserve(self, owner: str, nbytes: int) -> None:
        """Grant `nbytes` more to `owner`.

        Raises:
            BudgetError: the grant would exceed the budget; nothing changes.
        """
        if nbytes > self.available:
            raise BudgetError(
                f"the memory budget cannot hold {format_bytes(nbytes)} more for {owner}",
                expected=f"at most {format_bytes(self.available)} ({self.describe()})",
                actual=format_bytes(nbytes),
                remedy=f"raise memory_budget to {format_bytes(self.used + nbytes)} or more, "
                "or shorten the prompt",
            )
        self._owners[owner] = self._owners.get(owner, 0) + nbytes
        self.peak = max(self.peak, self.used)

    def release(self, owner: str, nbytes: int | None = None) -> None:
        """Take back `nbytes` from `owner`, or all of its grant."""
        held = self._owners.get(owner, 0)
        give = held if nbytes is None else nbytes
        assert 0 <= give <= held, f"{owner} releases {give} of {held} bytes"
        self._owners[owner] = held - give

    def describe(self) -> str:
        """One line: the total and who holds what."""
        held = ", ".join(f"{k} {format_bytes(v)}" for k, v in self._owners.items() if v)
        return f"budget {format_bytes(self.total)}: {held or 'nothing held'}"
