"""Many adapters over one read-only base model, one of them in force at a time.

Replaces linear layers in the tree of a model that was loaded here, in one place, and puts them
back. Bytes are asked of the memory budget before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.adapters.lora import AdaptedLinear, InForce, LowRankPath
from mlx_stream.adapters.lora_file import AdapterFile, LowRank, refuse_routed
from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.errors import AdapterError
from mlx_stream.experts.streamed_experts import StreamedExperts

OWNER = "adapters"


class AdapterSet:
    """The adapters of one engine. Compute thread only.

    Low-rank products run in the backend's dtype, or in each file's where it has none of its own.
    """

    def __init__(self, model: nn.Module, backend: Backend, budget: MemoryBudget) -> None:
        self._model, self._backend, self._budget = model, backend, budget
        self._dtype = backend.compute_dtype
        self._in_force = InForce()
        self._files: dict[str, AdapterFile] = {}
        self._swapped: list[tuple[Any, Any, nn.Module]] = []
        self._undo: list[Callable[[], None]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def in_force(self) -> str | None:
        """The adapter that the model runs with now."""
        return self._in_force.name

    def fingerprint(self, name: str | None) -> str | None:
        """Of an adapter's bytes and scale; None for the base."""
        return None if name is None else self._files[name].fingerprint

    def scale(self, name: str) -> float:
        """Of an adapter that is held."""
        return self._files[name].scale

    def nbytes(self, file: AdapterFile) -> int:
        """What :meth:`add` will hold for it."""
        values = sum(p.rank * (p.inputs + p.outputs) for p in file.pairs.values())
        if self._dtype is not None:
            return values * self._dtype.size
        return sum(p.a.nbytes + p.b.nbytes for p in file.pairs.values())

    def add(self, name: str, file: AdapterFile) -> None:
        """Hold an adapter; it is not in force yet.

        Raises:
            AdapterError: it does not fit this model, or has values that are not numbers.
            BudgetError: no room for it. In both cases nothing changes.
        """
        places = {module: self._place(file, module, pair) for module, pair in file.pairs.items()}
        nbytes = self.nbytes(file)
        self._budget.reserve(OWNER, nbytes)
        try:
            paths = self._read(file)
        except BaseException:
            self._budget.release(OWNER, nbytes)
            raise
        for module, (container, key) in places.items():
            if not isinstance(container[key], AdaptedLinear):
                self._swapped.append((container, key, container[key]))
                container[key] = AdaptedLinear(container[key], self._in_force)
            container[key].paths[name] = paths[module]
        self._files[name] = file

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """While open, the model runs with this adapter, or with none. Nests."""
        assert name is None or name in self._files, f"adapter {name} was not added"
        before, self._in_force.name = self._in_force.name, name
        try:
            yield
        finally:
            self._in_force.name = before

    def close(self) -> None:
        """Put the model's own layers back and give the bytes back."""
        while self._swapped:
            container, key, layer = self._swapped.pop()
            container[key] = layer
        while self._undo:
            self._undo.pop()()
        self._files.clear()
        self._budget.release(OWNER)

    # --- places

    def _place(self, file: AdapterFile, module: str, pair: LowRank) -> tuple[Any, Any]:
        """``(container, key)`` of the linear layer that a path names."""
        container: Any = None
        found: Any = self._model
        key: Any = None
        for word in module.split("."):
            container, key = found, int(word) if isinstance(found, list | tuple) else word
            found = _child(container, key)
            if isinstance(found, StreamedExperts):
                refuse_routed(file.path, module)
            if found is None:
                raise self._misfit(file, module, "a linear layer of this model", "no such module")
        shape = _linear_shape(found)
        if shape is None or isinstance(container, tuple):
            raise self._misfit(file, module, "a linear layer", type(found).__name__)
        if shape != (pair.outputs, pair.inputs):
            actual = f"{[pair.outputs, pair.inputs]} of rank {pair.rank}"
            raise self._misfit(file, module, f"a delta of {list(shape)}", actual)
        return container, key

    def _misfit(
        self, file: AdapterFile, module: str, expected: object, actual: object
    ) -> AdapterError:
        return AdapterError(
            "the adapter does not fit this model",
            file=file.path,
            tensor=module,
            expected=expected,
            actual=actual,
            remedy="take the adapter that belongs to this model",
        )

    # --- values

    def _read(self, file: AdapterFile) -> dict[str, LowRankPath]:
        try:
            arrays = mx.load(str(file.path))
        except (RuntimeError, ValueError) as error:
            raise self._misfit(file, file.path.name, "a readable file", error) from error
        holder = nn.Module()
        # Where the host computes, a product between the two maps would be one more wait for it.
        on_host = self._dtype is not None  # mlx's dtypes cannot be compared with None
        folded, scale = (file.scale, 1.0) if on_host else (1.0, file.scale)
        holder.layers = [
            [
                self._linear(file, arrays[pair.a.name]),
                self._linear(file, arrays[pair.b.name], folded),
            ]
            for pair in file.pairs.values()
        ]
        bad = [
            module
            for module, pair in zip(file.pairs, holder.layers, strict=True)
            if not all(mx.isfinite(layer.weight).all().item() for layer in pair)
        ]
        if bad:
            raise self._misfit(file, bad[0], "finite values", "NaN or infinity")
        dtypes = [pair[0].weight.dtype for pair in holder.layers]
        self._undo.append(self._backend.prepare_model(holder, 0))
        return {
            module: LowRankPath(down, up, scale, dtype)
            for module, (down, up), dtype in zip(file.pairs, holder.layers, dtypes, strict=True)
        }

    def _linear(self, file: AdapterFile, array: mx.array, scale: float = 1.0) -> nn.Linear:
        layer = nn.Linear(1, 1, bias=False)
        weight = mx.contiguous(array.T) if file.transposed else array
        layer.weight = weight.astype(self._dtype or array.dtype)
        if scale != 1.0:
            layer.weight = layer.weight * scale
        mx.eval(layer.weight)
        return layer


def _child(container: Any, key: Any) -> Any:
    if isinstance(container, list | tuple):
        return container[key] if 0 <= key < len(container) else None
    return container.get(key) if isinstance(container, dict) else None


def _linear_shape(module: Any) -> tuple[int, int] | None:
    """``(out, in)`` of a linear layer, plain or quantized, whoever wraps it."""
    while isinstance(module, nn.Module) and isinstance(module.get("inner"), nn.Module):
        module = module["inner"]
    if type(module) is nn.QuantizedLinear:
        return module.weight.shape[0], module.weight.shape[1] * 32 // module.bits
    return tuple(module.weight.shape) if type(module) is nn.Linear else None
