"""Checkpoints of a running prefill, and going on from one after the process was killed.

At a boundary between decoder layers all chunks of a segment have passed the layers before it. What
they hand on there, the finished layers' caches, and what each chunk saw of the caches when it
began are all that the rest of the model needs (the boundary probe has tried it). A cache file is
written once per segment, however many checkpoints name it.

A failing disk ends the checkpoints, not the prefill: what was asked for is the answer. The last
checkpoint before stays valid, `notes` says so, and no half-written file is left.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_stream.errors import MlxStreamError, ResumeError
from mlx_stream.prefill.boundary import ChunkRun, Kept, LayerBoundaries
from mlx_stream.prefill.boundary_probe import check_boundaries
from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.prefill.hooks import PrefillHooks
from mlx_stream.prefill.schedule import PrefillPlan, Segment
from mlx_stream.prefill.stand_ins import stand_in
from mlx_stream.resume.kept_caches import cache_entries
from mlx_stream.resume.options import KeepOptions
from mlx_stream.resume.restore import START, Checkpoint, KeeperModel, check_identity
from mlx_stream.resume.store import CheckpointFolder

log = logging.getLogger(__name__)


class PrefillKeeper(PrefillHooks):
    """Writes checkpoints of one prefill; :meth:`close` it in any case.

    Args:
        identity: what must be the same for a checkpoint to fit; names appear in messages.
        restored: called with every entry of the cache that a checkpoint filled, and whether the
            segment is through with it.

    Attributes:
        notes: what did not go as usual.
        resumed_layers: expert layers that need not be computed again, over all segments.

    Raises:
        CapabilityError: the model cannot be resumed.
        ResumeError: the folder cannot be used.
    """

    def __init__(
        self,
        options: KeepOptions,
        plan: PrefillPlan,
        model: KeeperModel,
        identity: dict[str, str],
        *,
        restored: Callable[[Any, bool], None],
    ) -> None:
        self._options, self._plan, self._of, self._identity = options, plan, model, identity
        self._restored = restored
        self.notes: list[str] = []
        self.resumed_layers = 0
        self._layers = LayerBoundaries(model.model, model.streamed)
        self._boundaries = self._choose_boundaries()
        self._folder: CheckpointFolder | None = CheckpointFolder(options.folder)
        self._layers.__enter__()
        self._runs: list[ChunkRun] = []
        self._number = 0  # of the next checkpoint
        self._caches: dict[int, str] = {}  # entry -> file, as of the last checkpoint
        self._sums: dict[str, list[Any]] = {}
        self._from: tuple[int, int] = (0, START)
        self._kept: list[Kept] = []
        self._seen: list[Any] = []
        self._writing = True

    def _choose_boundaries(self) -> list[int]:
        """Behind every K-th expert layer; none behind the last."""
        owners, every = self._layers.owners, self._options.every
        chosen = {owners[n] for n in range(every - 1, len(owners), every)}
        return sorted(b for b in chosen if self._layers.done_experts(b) < len(owners))

    # --- hooks

    def begin(self, cache: list[Any]) -> tuple[int, int]:
        """See PrefillHooks."""
        if cache_offset(cache):
            raise ResumeError(
                "only a prompt that starts from an empty cache can be checkpointed",
                expected="no tokens in the cache",
                actual=f"{cache_offset(cache)} tokens",
                remedy="leave out --checkpoint-dir or the prompt cache",
            )
        folder, plan = self._folder, self._plan
        assert folder is not None
        found = folder.latest()
        if not self._options.resume and found is not None:
            raise ResumeError(
                "the checkpoint folder holds a prefill that was not finished",
                file=folder.folder,
                remedy="add --resume to go on with it, or remove the folder",
            )
        if found is not None:
            check_identity(folder, found[1], self._identity)
        folder.require_room(max(0, plan.kv_stored + 2 * plan.memory.held - folder.nbytes))
        self._probe(cache)
        self._layers.capture = frozenset(self._boundaries)
        if found is not None:
            return self._restore(*found, cache)
        if self._options.resume:
            self.notes.append("no checkpoint to resume from: started from the beginning")
        return 0, 0

    def _probe(self, cache: list[Any]) -> None:
        of, empty = self._of, copy.deepcopy(cache)
        where = (self._layers, self._boundaries)
        check_boundaries(
            of.model, of.family, *where, of.slot, of.scope, lambda: copy.deepcopy(empty)
        )

    def _restore(self, number: int, content: dict[str, Any], cache: list[Any]) -> tuple[int, int]:
        assert self._folder is not None
        fresh = self._of.make_cache()
        found = Checkpoint.read(self._folder, content, self._boundaries)
        found.require_chunks(self._plan, len(cache))
        finished = set(self._layers.finished(found.boundary))
        entries = {n for n, entry in enumerate(cache) if entry is not None}
        found.require_entries(entries if found.segment else entries & finished)
        for entry in found.caches:
            pair = (fresh[entry], self._of.probed[entry])
            found.restore_entry(entry, *pair, into=cache[entry])
            self._restored(cache[entry], entry in finished)
        self._caches, self._sums = found.caches, found.sums
        self._number, self._from = number + 1, (found.segment, found.boundary)
        self._kept, self._seen = found.kept, found.seen
        done = self._layers.done_experts(found.boundary)
        self.resumed_layers = found.segment * len(self._layers.owners) + done
        self.notes.append(f"resumed behind {self.resumed_layers} expert layers")
        return found.segment, done

    def enter_chunk(self, number: int, chunk: int, views: list[Any]) -> list[Any]:
        """See PrefillHooks."""
        run = ChunkRun(views)
        segment, boundary = self._from
        if number == segment and boundary != START:
            views = list(views)
            for entry in self._layers.finished(boundary):
                views[entry] = stand_in(views[entry], self._seen[chunk][entry])
            run = ChunkRun(views, boundary, self._kept[chunk])
        if chunk == 0:
            self._runs = []
        self._runs.append(run)
        self._layers.enter(run)
        return views

    def meeting(self, number: int, segment: Segment, layer: int, cache: list[Any]) -> None:
        """See PrefillHooks."""
        self._kept = []
        for boundary in self._boundaries:
            if self._layers.done_experts(boundary) == layer and (number, boundary) != self._from:
                self._save(number, boundary, cache)

    def end_segment(self, number: int, segment: Segment, cache: list[Any]) -> None:
        """See PrefillHooks."""
        if number + 1 < len(self._plan.segments):
            self._save(number + 1, START, cache)
        self._layers.forget()
        self._runs = []

    def finish(self) -> None:
        """The prompt is through: its checkpoints are of no use any more."""
        try:
            if self._folder is not None:
                self._folder.clear()
        except (OSError, ResumeError) as error:  # the answer is there, and was asked for
            reason = " ".join(str(error).split())[:200]
            self.notes.append(f"the checkpoints cannot be removed: {reason}")
            log.warning(self.notes[-1])

    def close(self) -> None:
        """Put the model's layers back, and release the folder; checkpoints stay in it."""
        self._layers.__exit__()
        self._runs, self._kept = [], []
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # --- writing

    def _save(self, number: int, boundary: int, cache: list[Any]) -> None:
        """Write the checkpoint of segment `number` behind `boundary`."""
        if not self._writing:
            return
        try:
            self._write(number, boundary, cache)
        except (OSError, MlxStreamError) as error:
            self._give_up(error)
        for run in self._runs:
            run.outputs.clear()

    def _write(self, number: int, boundary: int, cache: list[Any]) -> None:
        assert self._folder is not None
        whole = boundary == START
        part = number - 1 if whole else number
        finished = range(len(cache)) if whole else self._layers.finished(boundary)
        caches, sums = dict(self._caches), {}
        for entry in finished:
            name = f"kv-{part:04d}-{entry:05d}.safetensors"
            if caches.get(entry) != name and cache[entry] is not None:
                total = self._folder.write(name, *cache_entries(cache[entry]))
                self._sums[name] = [total.nbytes, total.digest]
                caches[entry] = name
        held: dict[str, Any] = {}
        if not whole:
            held = self._write_held(boundary)
        sums = {name: self._sums[name] for name in [*caches.values(), *held.get("files", ())]}
        self._folder.write_manifest(
            self._number,
            {
                "identity": self._identity,
                "budget": self._plan.memory.budget,
                "segment": number,
                "boundary": boundary,
                "caches": sorted(caches.items()),
                "held": held,
                "files": sums,
            },
        )
        self._caches = caches
        self._number += 1

    def _write_held(self, boundary: int) -> dict[str, Any]:
        """The chunks' outputs and what they saw."""
        assert self._folder is not None
        name = f"held-{self._number:06d}.safetensors"
        kept = [run.outputs[boundary] for run in self._runs]
        arrays = {f"{n}.{k}": a for n, one in enumerate(kept) for k, a in enumerate(one.arrays)}
        mx.eval(arrays)
        total = self._folder.write(name, arrays, {})
        self._sums[name] = [total.nbytes, total.digest]
        forms = [[one.output, one.changed, len(one.arrays)] for one in kept]
        seen = [run.seen for run in self._runs]
        return {"files": [name], "chunks": forms, "seen": seen}

    def _give_up(self, error: Exception) -> None:
        self._writing = False
        self._layers.capture = frozenset()
        reason = " ".join(str(error).split())[:200]
        self.notes.append(f"checkpoints ended, they cannot be written: {reason}")
        log.warning(self.notes[-1])
        try:
            assert self._folder is not None
            self._folder.prune()
        except (OSError, MlxStreamError) as again:
            log.warning("the checkpoint folder cannot be cleaned: %s", again)
