"""Tensors of one module, or of a few experts, as they are written: cast, quantized, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_stream.convert.arrays import TO_FILE, to_bytes
from mlx_stream.convert.options import refinable
from mlx_stream.convert.plan import ConversionPlan
from mlx_stream.convert.quantize import quantize
from mlx_stream.convert.widths import ModuleWidth
from mlx_stream.errors import PackError, TensorFormatError
from mlx_stream.packed.layout import record_layout
from mlx_stream.packed.source import TensorError
from mlx_stream.storage.expert_index import ExpertLayer

Parts = dict[str, np.ndarray]  # bytes by tensor name
FLOAT_NBYTES = 4
PARTS = ("weight", "scales", "biases")


class ModuleMaker:
    """Makes the tensors of a plan. Keeps the errors that quantization makes."""

    def __init__(self, plan: ConversionPlan, *, refine: bool) -> None:
        self._plan, self._refine = plan, refine
        self._errors: dict[str, TensorError] = {}
        self._offsets = lru_cache(maxsize=2)(self._find_offsets)

    def take_errors(self) -> dict[str, TensorError]:
        """By weight, over all that was made since the last call."""
        errors, self._errors = self._errors, {}
        return errors

    def float_nbytes(self, layer: ExpertLayer) -> int:
        """Bytes of one expert's weights as float32."""
        return len(layer.quant) * layer.input_dims * layer.hidden_dims * FLOAT_NBYTES

    def record_offsets(self, layer: ExpertLayer) -> list[tuple[str, int]]:
        """``(tensor, offset in a record)``, ascending."""
        return self._offsets(layer.name, layer)

    def _find_offsets(self, name: str, layer: ExpertLayer) -> list[tuple[str, int]]:
        record = record_layout(self._plan.index.checkpoint, layer, "", None)
        return [(t.name, t.offset) for t in record.tensors]

    def expert_tensors(self, layer: ExpertLayer, outputs: Mapping[str, mx.array]) -> Parts:
        """A few experts' tensors, rows ``[experts, bytes]``.

        Args:
            outputs: arrays ``[experts, ...]`` as mlx-lm sanitized them.

        Raises:
            TensorFormatError: they are not those that the plan says.
        """
        arrays: dict[str, mx.array] = {}
        for path in dict.fromkeys(name.rpartition(".")[0] for name in outputs):
            arrays |= self._module(path, outputs)
        found = {}
        for name, _ in self.record_offsets(layer):
            array = arrays.get(name)
            self._check(name, array, lead=1)
            assert array is not None
            found[name] = to_bytes(array).reshape(array.shape[0], -1)
        return found

    def module_tensors(self, name: str, lazy: dict[str, mx.array]) -> Parts:
        """The bytes of a tensor, and of those that are computed with it; takes them from `lazy`.

        Raises:
            TensorFormatError: they are not those that the plan says.
        """
        path = name.rpartition(".")[0]
        width = self._plan.widths.get(path)
        together = width is not None and width.changes and name.rpartition(".")[2] in PARTS
        names = [f"{path}.{part}" for part in PARTS] if together else [name]
        given = {n: lazy.pop(n) for n in names if n in lazy}
        made = self._module(path, given)
        for key, array in made.items():
            self._check(key, array, lead=0)
        return {key: to_bytes(array) for key, array in made.items()}

    def _module(self, path: str, given: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """All tensors of a module that are given, cast, its weight quantized if that is planned."""
        own = {n: self._cast(n, a) for n, a in given.items() if n.rpartition(".")[0] == path}
        width = self._plan.widths.get(path)
        weight = own.get(f"{path}.weight")
        if width is None or not width.changes or weight is None:
            return own
        made = self._quantize(path, width, weight, own)
        kept = {n: a for n, a in own.items() if n.rpartition(".")[2] not in PARTS}
        return made | kept

    def _quantize(
        self, path: str, width: ModuleWidth, weight: mx.array, own: Mapping[str, mx.array]
    ) -> dict[str, mx.array]:
        then, now = width.then, width.now
        assert then is not None
        if now is not None:
            scales, biases = own[f"{path}.scales"], own.get(f"{path}.biases")
            floats = scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else mx.bfloat16
            weight = mx.dequantize(
                weight, scales, biases, now.group_size, now.bits, now.mode, dtype=floats
            )
        try:
            made = quantize(weight, then, refine=self._refine and refinable(then))
        except PackError as error:
            raise PackError(
                error.problem,
                file=self._plan.index.checkpoint.path,
                tensor=f"{path}.weight",
                expected=error.expected,
                actual=error.actual,
                remedy=error.remedy,
            ) from error
        self._add_error(f"{path}.weight", TensorError(made.squared_error, made.squared_norm))
        found = {f"{path}.weight": made.weight, f"{path}.scales": made.scales}
        return found if made.biases is None else found | {f"{path}.biases": made.biases}

    def _add_error(self, name: str, error: TensorError) -> None:
        before = self._errors.get(name, TensorError(0.0, 0.0))
        self._errors[name] = before + error

    def _cast(self, name: str, array: mx.array) -> mx.array:
        names, dtype = self._plan.cast
        return array.astype(dtype) if name in names and dtype is not None else array

    def _check(self, name: str, array: mx.array | None, *, lead: int) -> None:
        """What is made is what the headers say. `lead` leading dimensions are not looked at."""
        t = self._plan.index.checkpoint.tensors.get(name)
        expected = None if t is None else (t.dtype, t.shape[lead:])
        actual = None
        if array is not None:
            actual = (TO_FILE.get(array.dtype, str(array.dtype)), tuple(array.shape[lead:]))
        if expected is None or actual != expected:
            raise TensorFormatError(
                "A converted tensor is not what was planned.",
                file=self._plan.index.checkpoint.path,
                tensor=name,
                expected=expected,
                actual=actual,
                remedy="convert the checkpoint with mlx_lm.convert, then pack the result",
            )
