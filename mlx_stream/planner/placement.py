"""Where each part of a model lives: resident, in RAM for a while, or on the SSD. And does it fit?

Bytes. A table conserves every component: what is split appears once in each place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mlx_stream.config import format_bytes
from mlx_stream.planner.apple_memory import WiredLimit, wired_limit
from mlx_stream.planner.checks import between, not_negative


class Place(StrEnum):
    """Where bytes live."""

    RESIDENT = "resident"  # in memory from load to close
    RAM = "ram"  # in memory while a prompt or an answer runs, within the budget
    SSD = "ssd"  # read when needed


@dataclass(frozen=True)
class Component:
    """One part of a model or of its state, in one place."""

    name: str
    place: Place
    nbytes: int

    def __post_init__(self) -> None:
        not_negative(**{self.name.replace(" ", "_"): self.nbytes})


@dataclass(frozen=True)
class ModelParts:
    """Sizes of a model and of the state of one prompt.

    Attributes:
        dense: attention, norms, shared experts, routers, embeddings: all but routed experts.
        experts: W, the routed experts.
        tables: lookup tables (N-gram embeddings), if the model has any.
        kv: keys and values of the prompt.
        held: activations of suspended chunks.
        staging: buffers of the read groups.
        transient: the widest moment inside a layer, and a backend's working memory.
    """

    dense: int
    experts: int
    tables: int = 0
    kv: int = 0
    held: int = 0
    staging: int = 0
    transient: int = 0


@dataclass(frozen=True)
class PlacementTable:
    """Components with their places."""

    components: tuple[Component, ...]

    def total(self, place: Place) -> int:
        """Bytes in one place."""
        return sum(part.nbytes for part in self.components if part.place is place)

    @property
    def memory(self) -> int:
        """Bytes that count against a memory budget."""
        return self.total(Place.RESIDENT) + self.total(Place.RAM)

    @property
    def ssd(self) -> int:
        """Bytes on the SSD."""
        return self.total(Place.SSD)

    def rows(self) -> tuple[tuple[str, int, int, int], ...]:
        """``(component, resident, ram, ssd)``, in order of first appearance."""
        names = dict.fromkeys(part.name for part in self.components)
        return tuple((name, *(self._of(name, place) for place in Place)) for name in names)

    def lines(self) -> list[str]:
        """A printable table with a line of totals."""
        head = f"  {'component':<16}" + "".join(f"{place.value:>12}" for place in Place)
        totals = ("total", *(self.total(place) for place in Place))
        return [head, *(_line(*row) for row in (*self.rows(), totals))]

    def _of(self, name: str, place: Place) -> int:
        parts = self.components
        return sum(part.nbytes for part in parts if part.name == name and part.place is place)


@dataclass(frozen=True)
class BudgetFit:
    """A placement against a memory budget.

    Attributes:
        needed: bytes in memory.
        budget: bytes allowed.
        largest: the component that takes most memory.
        wired: on a Mac, whether the GPU may use that much.
    """

    needed: int
    budget: int
    largest: str
    wired: WiredLimit | None = None

    @property
    def spare(self) -> int:
        """Bytes left; negative when it does not fit."""
        return self.budget - self.needed

    @property
    def fits(self) -> bool:
        """Whether it fits the budget and, on a Mac, the GPU's limit as it is set."""
        return self.spare >= 0 and (self.wired is None or self.wired.fits)

    def advice(self) -> tuple[str, ...]:
        """What to change so that it fits; empty when it does."""
        found = []
        if self.spare < 0:
            found.append(
                f"needs {format_bytes(self.needed)} of memory, {format_bytes(-self.spare)} more "
                f"than the budget; the largest part is {self.largest}"
            )
        if self.wired is not None and not self.wired.fits:
            command = self.wired.command
            found.append(
                "the GPU's working set is "
                + format_bytes(self.wired.working_set)
                + (f": run {command}" if command else ", and the machine has too little memory")
            )
        return tuple(found)


def place_model(
    parts: ModelParts,
    *,
    expert_cache: int = 0,
    table_cache: int = 0,
    kv_in_memory: int | None = None,
) -> PlacementTable:
    """The table of a streamed model: all experts on the SSD but for those cached.

    Args:
        expert_cache: bytes of experts kept for decoding; a copy of what the SSD holds is not
            counted twice, so the SSD column has the rest. ``parts.experts`` keeps all in memory.
        table_cache: bytes of the lookup tables kept in memory, likewise.
        kv_in_memory: bytes of keys and values in memory when layers are evicted; all by default.
    """
    kv = parts.kv if kv_in_memory is None else kv_in_memory
    between(0, parts.experts, expert_cache=expert_cache)
    between(0, parts.tables, table_cache=table_cache)
    between(0, parts.kv, kv_in_memory=kv)
    entries = (
        ("dense weights", Place.RESIDENT, parts.dense),
        ("experts", Place.RAM, expert_cache),
        ("experts", Place.SSD, parts.experts - expert_cache),
        ("tables", Place.RAM, table_cache),
        ("tables", Place.SSD, parts.tables - table_cache),
        ("kv cache", Place.RAM, kv),
        ("kv cache", Place.SSD, parts.kv - kv),
        ("activations", Place.RAM, parts.held),
        ("staging", Place.RAM, parts.staging),
        ("transient", Place.RAM, parts.transient),
    )
    return placement_table(Component(*entry) for entry in entries)


def placement_table(components: Iterable[Component]) -> PlacementTable:
    """A table without its empty components."""
    return PlacementTable(tuple(part for part in components if part.nbytes))


def fit_budget(
    table: PlacementTable, budget: int, *, apple_memory: int | None = None, wired_limit_mb: int = 0
) -> BudgetFit:
    """Whether a placement fits a memory budget.

    Args:
        apple_memory: unified memory of a Mac in bytes, to check its GPU's working set as well.
        wired_limit_mb: ``iogpu.wired_limit_mb`` as set there; 0 is the default.
    """
    not_negative(budget=budget)
    memory = {name: resident + ram for name, resident, ram, _ in table.rows()}
    wired = None
    if apple_memory is not None:
        wired = wired_limit(apple_memory, table.memory, wired_limit_mb=wired_limit_mb)
    largest = max(memory, key=memory.__getitem__, default="")
    return BudgetFit(table.memory, budget, largest, wired)


def largest_expert_cache(parts: ModelParts, budget: int) -> int:
    """Bytes of experts that may stay in memory once everything else has its place; may be 0."""
    not_negative(budget=budget)
    return min(parts.experts, max(0, budget - place_model(parts).memory))


def _line(name: str, *sizes: int) -> str:
    return f"  {name:<16}" + "".join(f"{format_bytes(n) if n else '-':>12}" for n in sizes)
