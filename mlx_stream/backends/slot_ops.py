"""The expert MLP of a few tokens over stacked slots, with the slot map on the device.

What the hot and staged paths compute, in plain MLX operations. The router's choice stays on the
device: ``slot_map[ids]`` says where each expert lies. An expert that is not in memory computes with
slot 0, and the caller must throw the result away (see decode/mapped.py).
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.backends.base import ExpertMlp, ResidentSlots
from mlx_stream.backends.mlx_ops import Planes, projection


class MappedOnMlx:
    """The part of a Backend that computes stacked slots with MLX operations."""

    def mapped_mlp(
        self, mlp: ExpertMlp, slots: ResidentSlots, x: mx.array, ids: mx.array
    ) -> mx.array:
        """See :meth:`mlx_stream.backends.base.Backend.mapped_mlp`."""
        return slot_mlp_ops(mlp.module, slots, x, ids)


def slot_mlp_ops(module: nn.Module, slots: ResidentSlots, x: mx.array, ids: mx.array) -> mx.array:
    """``x [T, D], ids [T, K] -> [T, K, D]``, as mlx-lm's switch layers compute a few tokens."""
    where, planes = mx.maximum(slots.slot_map[ids], 0), slots.planes
    if _must_cast(planes, x):
        # Casting the planes would touch the whole cache: take out the few experts first.
        planes = {key: plane[where.reshape(-1)] for key, plane in planes.items()}
        where = mx.arange(ids.size).reshape(ids.shape)
    x = mx.expand_dims(x, (-2, -3))

    def project(name: str, y: mx.array) -> mx.array:
        return projection(module[name], planes, name, y, where, sorted_rows=False)

    if "fc1" in module:
        return project("fc2", module.activation(project("fc1", x))).squeeze(-2)
    up, gate = project("up_proj", x), project("gate_proj", x)
    return project("down_proj", module.activation(up, gate)).squeeze(-2)


def _must_cast(planes: Planes, x: mx.array) -> bool:
    return any(
        plane.dtype != x.dtype and mx.issubdtype(plane.dtype, mx.floating)
        for (_, part), plane in planes.items()
        if part != "global_scale"
    )
