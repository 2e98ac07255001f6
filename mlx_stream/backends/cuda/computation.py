"""One expert layer over the chunks of a segment, group by group, as the bytes arrive."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import ChunkInput, ExpertMlp, Fence, PublishedGroup
from mlx_stream.backends.cuda.expert_paths import (
    Choice,
    ExpertPath,
    FusedPath,
    Launcher,
    PartMlp,
    Rows,
    combine_fused,
    combine_ops,
)
from mlx_stream.backends.cuda.upload import DeviceGroup, Upload, Uploader
from mlx_stream.backends.grouping import Routing, group_by_expert


class UploadFence:
    """A host slot may be refilled when the copies out of it are done (rule 4 of upload.py)."""

    def __init__(self, uploads: Sequence[Upload]) -> None:
        self._uploads = list(uploads)

    def passed(self) -> bool:
        """Asks the runtime."""
        return all(upload.passed() for upload in self._uploads)

    def wait(self) -> None:
        """Blocks."""
        for upload in self._uploads:
            upload.wait()


class CudaLayerComputation:
    """See :class:`mlx_stream.backends.base.LayerComputation`.

    The copies of all groups of one call start before the first is computed, and a call returns
    while the GPU still computes, so the next group's copy runs beside it.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        chunks: Sequence[ChunkInput],
        uploader: Uploader,
        path: tuple[ExpertPath, Choice],
        launcher: Launcher,
    ) -> None:
        self._mlp = mlp
        self._chunks = list(chunks)
        self._uploader = uploader
        self._path, self.choice = path
        self._launcher = launcher
        experts, name = mlp.layer.num_experts, mlp.layer.name
        self._routing = [group_by_expert([c.indices], experts, name) for c in chunks]
        self._outputs: list[mx.array | None] = [None] * len(self._chunks)
        self._seen = np.zeros(experts, dtype=bool)

    def add(self, groups: Sequence[PublishedGroup]) -> Fence:
        """Compute these groups for every chunk; work may still run when this returns."""
        uploads = [group.weights.start(self._uploader) for group in groups]
        for group in groups:
            self._seen[list(group.experts)] = True
            self._compute(group)
        return UploadFence([upload for upload in uploads if upload is not None])

    def outputs(self) -> list[mx.array]:
        """One array per chunk; every routed expert must have been added."""
        used = np.unique(np.concatenate([c.indices.reshape(-1) for c in self._chunks]))
        assert self._seen[used].all(), "an expert of this layer was never added"
        outputs = zip(self._chunks, self._outputs, strict=True)
        return [
            mx.zeros(self._flat_shape(c), dtype=c.x.dtype).reshape(self._shape(c))
            if y is None
            else y.reshape(self._shape(c))
            for c, y in outputs
        ]

    def _compute(self, group: PublishedGroup) -> None:
        device_group: DeviceGroup = group.weights
        markers: list[mx.array] = []
        for part, mlp in self._path.parts(device_group.planes(), len(group.experts)):
            experts = np.asarray(group.experts[part])
            touched = []
            for i, routing in enumerate(self._routing):
                rows = _rows_of(routing, experts)
                if rows.size:
                    self._outputs[i] = self._add_rows(i, rows, routing.counts()[experts], mlp)
                    touched.append(self._outputs[i])
            if not touched:
                continue
            # One value that depends on all outputs: kept until the mirror is overwritten, which
            # the outputs themselves must not be.
            markers.append(mx.concatenate([y.reshape(-1)[:1] for y in touched]).sum())
            mx.async_eval(touched, markers[-1])
            device_group.slot.read_by(markers[-1])
            if len(markers) > 1:  # at most two parts' unpacked weights at a time
                mx.eval(markers[-2])

    def _add_rows(self, i: int, rows: np.ndarray, counts: np.ndarray, mlp: PartMlp) -> mx.array:
        """Chunk i's output with these flat rows (token * K + k, sorted by expert) added."""
        chunk, y = self._chunks[i], self._outputs[i]
        k = chunk.indices.shape[1]
        if chunk.scores is None and y is None and len(rows) == chunk.indices.size:
            return mlp(chunk.x, Rows(rows // k, counts, rows)).astype(chunk.x.dtype)
        out = mlp(chunk.x, Rows(rows // k, counts)).astype(chunk.x.dtype)
        if chunk.scores is None:
            y = mx.zeros(self._flat_shape(chunk), dtype=out.dtype) if y is None else y
            y[mx.array(rows)] = out
            return y
        places, flat = place_table(rows, rows // k, len(chunk.indices))
        scores = chunk.scores.reshape(-1)[mx.array(flat)]
        if isinstance(self._path, FusedPath):
            return combine_fused(out, places, scores, y, self._launcher)
        return combine_ops(out, places, scores, y)

    def _flat_shape(self, chunk: ChunkInput) -> tuple[int, int]:
        tokens, k = chunk.indices.shape
        return (tokens if chunk.combined else tokens * k, self._mlp.layer.input_dims)

    def _shape(self, chunk: ChunkInput) -> tuple[int, ...]:
        dims = self._mlp.layer.input_dims
        return (len(chunk.indices), dims) if chunk.combined else (*chunk.indices.shape, dims)


def _rows_of(routing: Routing, experts: np.ndarray) -> np.ndarray:
    """Flat rows of these experts, one expert after the other."""
    if len(experts) and experts[-1] - experts[0] == len(experts) - 1:
        return routing.order[routing.offsets[experts[0]] : routing.offsets[experts[-1] + 1]]
    return np.concatenate([routing.rows(int(e)) for e in experts])


def place_table(rows: np.ndarray, tokens: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each token's rows are: ``places [count, width]`` int32, -1 for none.

    The second table holds the flat row (token * K + k) of each place, for its score; 0 for none.
    """
    order = np.argsort(tokens, kind="stable")
    by_token = tokens[order]
    place = np.arange(len(tokens)) - np.searchsorted(by_token, np.arange(count))[by_token]
    places = np.full((count, int(place.max()) + 1), -1, dtype=np.int32)
    places[by_token, place] = order
    return places, np.where(places < 0, 0, rows[places]).astype(np.int32)
