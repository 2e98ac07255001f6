"""A byte-budgeted cache of experts, one budget over all layers.

Who leaves is the policy's choice, where records lie is the store's. A record in use by a running
computation, or still arriving, is never evicted. Guesses (reads ahead on a prediction) have few
slots of their own and never push out what was really used.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress

from mlx_stream.backends.base import ExpertMlp, HostBuffer
from mlx_stream.decode.policy import EvictionPolicy
from mlx_stream.decode.residency import Residency
from mlx_stream.decode.slots import Key, Record, SlotStore, stop_arrival
from mlx_stream.decode.spared import SparedLayers
from mlx_stream.decode.step_counts import CacheCounts
from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.read_plan import GroupRead


class ExpertCache:
    """Holds at most `capacity` records. Compute thread only.

    The cache owns its slots until :meth:`close`; slots are taken from the store when needed.
    """

    def __init__(self, store: SlotStore, policy: EvictionPolicy, *, capacity: int) -> None:
        assert capacity >= 1, "a cache needs room for one expert"
        self.store = store
        self.policy = policy
        self.capacity = capacity
        self.guess_limit = 0
        self.counts = CacheCounts()
        self.residency = Residency()
        self.spared = SparedLayers(self.residency)
        self._records: dict[Key, Record] = {}
        self._guesses: OrderedDict[Key, Record] = OrderedDict()
        self._arriving: set[Key] = set()
        self._free: list[object] = []
        self._slots = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one record's slot."""
        return self.store.slot_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the slots in being."""
        return self._slots * self.store.slot_nbytes

    @property
    def evictable(self) -> int:
        """Records that guesses leave to what was really used."""
        return max(1, self.capacity - self.guess_limit)

    @property
    def guessed(self) -> int:
        """Records read ahead and not used yet."""
        return len(self._guesses)

    @property
    def room(self) -> int:
        """Slots that hold nothing."""
        return self.capacity - len(self._records)

    def keys(self) -> frozenset[Key]:
        """What is in memory or arriving."""
        return frozenset(self._records)

    def record(self, key: Key) -> Record | None:
        """Without counting or touching."""
        return self._records.get(key)

    def lookup(self, mlp: ExpertMlp, expert: int) -> Record | None:
        """The record of an expert that is needed now; counts a hit or a miss."""
        key = (mlp.layer.index, expert)
        record = self._records.get(key)
        if record is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._use(record)
        return record

    def start_read(self, mlp: ExpertMlp, expert: int, pinned: Collection[Key]) -> Record | None:
        """Begin reading an expert; None when every slot holds a record that must stay.

        The caller waits with :meth:`finish_read` before it uses the record.
        """
        slot = self._take_slot(pinned)
        if slot is None:
            return None
        record = self._start(mlp, expert, slot)
        self.policy.admit(record.key)
        return record

    def guess(self, mlp: ExpertMlp, expert: int, pinned: Collection[Key]) -> bool:
        """Begin reading an expert that may be needed; False when there is no slot to spare."""
        key = (mlp.layer.index, expert)
        if key in self._records:
            return False
        if len(self._guesses) >= self.guess_limit and not self._drop_oldest_guess(pinned):
            return False
        slot = self._take_slot(pinned)
        if slot is None:
            return False
        record = self._start(mlp, expert, slot)
        record.guess, record.started = True, time.perf_counter()
        self._guesses[key] = record
        self.counts.guesses += 1
        return True

    def finish_read(self, record: Record) -> None:
        """Wait until the record's bytes are there; a failed record leaves the cache."""
        if record.arrival is None:
            return
        try:
            record.arrival.wait()
        except BaseException:
            self._abandon(record)
            raise
        self._arrived(record)

    def collect_guesses(self) -> None:
        """Note the guesses whose bytes have come; one that failed leaves, silently: it was a hint.

        The error comes back when the expert is really needed and is read again.
        """
        for record in [r for r in self._guesses.values() if r.arrival and r.arrival.done()]:
            with suppress(MlxStreamError):
                self.finish_read(record)

    def drop_guesses(self) -> None:
        """Nothing read ahead is waited for any more."""
        for record in list(self._guesses.values()):
            self._discard_guess(record)

    def abandon_pending(self) -> None:
        """Drop every record whose read has not finished; returns when no thread writes.

        A Ctrl-C meanwhile is raised at the end: a record half dropped would look like one in
        memory.
        """
        interrupt: KeyboardInterrupt | None = None
        for key in list(self._arriving):
            try:
                self._abandon(self._records[key])
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def copy_in(
        self, mlp: ExpertMlp, expert: int, read: GroupRead, source: HostBuffer, weight: float = 0.0
    ) -> bool:
        """Copy an expert out of a filled staging slot; False when no slot is to be had.

        Args:
            weight: the seed's score, for policies that use one.
        """
        key = (mlp.layer.index, expert)
        known = self._records.get(key)
        if known is not None:
            self._use(known)
            return True
        slot = self._take_slot(())
        if slot is None:
            return False
        try:
            record = self.store.copy_in(mlp, expert, read, source, slot)
        except BaseException:
            self._free.append(slot)
            raise
        self._records[key] = record
        self._arrived(record)
        self.policy.admit(key, weight)
        return True

    def resize(self, capacity: int, spare_nbytes: int = 0) -> None:
        """Hold at most `capacity` records from now on; the policy says who leaves.

        Nothing may be in use or arriving.

        Args:
            spare_nbytes: of the budget, for stores that must move what stays.
        """
        assert capacity >= 1
        assert not any(r.arrival and not r.guess for r in self._records.values()), "still reading"
        self.drop_guesses()
        self.capacity = capacity
        self.policy.resize(capacity)
        while len(self._records) > capacity:
            self._free.append(self._evict(()))
        while self._free:  # a store that moves would not know these slots any more
            self.store.drop(self._free.pop())
        self._move(capacity, spare_nbytes)

    def close(self) -> None:
        """Give all memory back."""
        self.abandon_pending()
        for record in self._records.values():
            self.store.drop(record.slot)
        for slot in self._free:
            self.store.drop(slot)
        self._records.clear()
        self._guesses.clear()
        self._free.clear()
        self.residency.clear()
        self.policy.clear()
        self._slots = 0
        self.store.close()

    # --- slots ------------------------------------------------------------------------------

    def _take_slot(self, pinned: Collection[Key]) -> object | None:
        if self._free:
            return self._free.pop()
        if self._slots < self.capacity:
            slot = self.store.take()
            self._slots += 1
            return slot
        if len(self._records) - len(self._guesses) < self.evictable and self._drop_oldest_guess(
            pinned
        ):
            return self._free.pop()
        slot = self._evict(pinned)
        if slot is None and self._drop_oldest_guess(pinned):
            slot = self._free.pop()
        return slot

    def _evict(self, pinned: Collection[Key]) -> object | None:
        stay = self._arriving.union(pinned) if self._arriving else pinned
        key = self.spared.victim(self.policy, stay)
        if key is None:
            return None
        record = self._records.pop(key)
        self.policy.forget(key)
        self.residency.left(key[0])
        self.counts.evictions += 1
        return record.slot

    def _move(self, capacity: int, spare_nbytes: int) -> None:
        """The store may have to move what stays, or lose it."""
        live = list(self._records.values())
        kept = {record.key for record in self.store.resize(capacity, live, spare_nbytes)}
        for key in [key for key in self._records if key not in kept]:
            del self._records[key]
            self.policy.forget(key)
            self.residency.left(key[0])
        self._slots = len(self._records)
        self.residency.moved()

    # --- records ----------------------------------------------------------------------------

    def _start(self, mlp: ExpertMlp, expert: int, slot: object) -> Record:
        try:
            record = self.store.start_read(mlp, expert, slot)
        except BaseException:
            self._free.append(slot)
            raise
        self._records[record.key] = record
        self._arriving.add(record.key)
        return record

    def _arrived(self, record: Record) -> None:
        record.arrival = None
        self._arriving.discard(record.key)
        self.residency.arrived(record.key[0])

    def _abandon(self, record: Record) -> None:
        """Take out a record that never arrived, once no thread writes to its slot."""
        interrupt = stop_arrival(record)
        self._arriving.discard(record.key)
        self._guesses.pop(record.key, None)
        if self._records.pop(record.key, None) is not None:
            if not record.guess:
                self.policy.forget(record.key)
            self._free.append(record.slot)
        if interrupt is not None:
            raise interrupt

    def _use(self, record: Record) -> None:
        """A guess that came true is a record like any other."""
        if not record.guess:
            self.policy.touch(record.key)
            return
        record.guess = False
        del self._guesses[record.key]
        self.counts.guesses_used += 1
        self.policy.admit(record.key)

    def _drop_oldest_guess(self, pinned: Iterable[Key]) -> bool:
        for key, record in self._guesses.items():
            if key not in pinned and (record.arrival is None or record.arrival.done()):
                self._discard_guess(record)
                return True
        return False

    def _discard_guess(self, record: Record) -> None:
        self.counts.wasted_nbytes += record.read_nbytes
        if record.arrival is not None:
            self._abandon(record)
            return
        del self._guesses[record.key]
        del self._records[record.key]
        self.residency.left(record.key[0])
        self._free.append(record.slot)
