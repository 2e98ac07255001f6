"""The module swap: mlx-lm's SwitchGLU and SwitchMLP become StreamedExperts.

SwitchLinear alone is left in place: one family uses it inside its attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.errors import (
    DenseModelError,
    ExpertCountError,
    MissingTensorError,
    TensorFormatError,
    UnsupportedQuantizationError,
)
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer


class Executor(Protocol):
    """Computes an expert layer's call: prefill and decode each provide one."""

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        """Return ``[..., K, D]`` or something that behaves like it."""


class ExecutorSlot:
    """Shared by all StreamedExperts of a model; holds the executor in charge."""

    def __init__(self) -> None:
        self.executor: Executor | None = None


class StreamedExperts(nn.Module):
    """Takes the place of a switch layer; owns no weights.

    ``__call__(x [..., D], indices [..., K]) -> [..., K, D]`` as the module it replaces.
    """

    def __init__(self, mlp: ExpertMlp, slot: ExecutorSlot) -> None:
        super().__init__()
        # Leading underscores keep these out of parameters().
        self._mlp = mlp
        self._slot = slot
        self._combined = False

    @property
    def mlp(self) -> ExpertMlp:
        """The layer's bytes and maths."""
        return self._mlp

    @property
    def combined(self) -> bool:
        """Whether the block around it lets the stream do the weighted sum (set by the probe)."""
        return self._combined

    @combined.setter
    def combined(self, value: bool) -> None:
        self._combined = value

    def __call__(self, x: mx.array, indices: mx.array) -> Any:
        executor = self._slot.executor
        assert executor is not None, "no executor installed"
        return executor(self, x, indices)


def install_streamed_experts(
    model: nn.Module, index: ExpertIndex, slot: ExecutorSlot
) -> list[StreamedExperts]:
    """Replace every switch layer of `model` and drop its (lazy) expert arrays.

    Returns the new modules in the order of their layers.

    Raises:
        DenseModelError: the model has no switch layers.
        MissingTensorError: a switch layer has no expert tensors in the checkpoint.
        TensorFormatError, ExpertCountError, UnsupportedQuantizationError: module and file disagree.
    """
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    if not found:
        raise DenseModelError(
            "the model has no routed experts to stream",
            file=index.checkpoint.path,
            expected="SwitchGLU or SwitchMLP modules",
            actual=type(model).__module__,
            remedy="use mlx_lm directly for dense models",
        )
    installed = []
    for name, module in found:
        layer = _layer_for(name, index)
        _check_module(module, layer, index)
        _drop_arrays(module)
        streamed = StreamedExperts(ExpertMlp(layer, module), slot)
        _replace(model, name, streamed)
        installed.append(streamed)
    return sorted(installed, key=lambda s: s.mlp.layer.index)


def _layer_for(name: str, index: ExpertIndex) -> ExpertLayer:
    """The expert layer whose prefix is the module's path, give or take a wrapper's prefix."""
    exact = [layer for layer in index.layers if layer.name == name]
    if exact:
        return exact[0]
    near = [
        layer
        for layer in index.layers
        if layer.name.endswith("." + name) or name.endswith("." + layer.name)
    ]
    if len(near) != 1:
        raise MissingTensorError(
            "the checkpoint has no expert tensors for a layer of the model",
            file=index.checkpoint.path,
            tensor=name,
            expected=f"tensors named {name}.<projection>.weight",
            actual=f"{len(near)} candidates of {len(index.layers)} expert layers",
            remedy="download the checkpoint again, or convert it with mlx_lm.convert",
        )
    return near[0]


def _check_module(module: nn.Module, layer: ExpertLayer, index: ExpertIndex) -> None:
    """mlx-lm's idea of the layer must be what the file holds."""
    for projection, linear in module.children().items():
        if "weight" not in linear:
            continue
        if layer.num_experts != linear["weight"].shape[0]:
            raise ExpertCountError(
                "model and checkpoint disagree on the number of experts",
                file=index.checkpoint.path,
                tensor=f"{layer.name}.{projection}.weight",
                expected=linear["weight"].shape[0],
                actual=layer.num_experts,
                remedy="config.json does not belong to these weights; download both again",
            )
        _check_quantization(linear, layer, projection, index)
        for param in ("weight", "scales", "biases", "bias"):
            if linear.get(param) is not None:
                _check_shape(linear[param], layer, (projection, param), index)


def _check_quantization(
    linear: nn.Module, layer: ExpertLayer, projection: str, index: ExpertIndex
) -> None:
    spec = layer.spec(projection)
    expected: tuple[Any, ...] = ("none",)
    actual: tuple[Any, ...] = (spec.mode,)
    if hasattr(linear, "mode"):
        expected = (linear.mode, linear.bits, linear.group_size)
        actual = (spec.mode, spec.bits, spec.group_size)
    if expected != actual:
        raise UnsupportedQuantizationError(
            "model and checkpoint disagree on an expert's quantization",
            file=index.checkpoint.path,
            tensor=f"{layer.name}.{projection}.weight",
            expected=expected,
            actual=actual,
            remedy='check "quantization" in config.json',
        )


def _check_shape(
    array: mx.array, layer: ExpertLayer, key: tuple[str, str], index: ExpertIndex
) -> None:
    tensor = layer.tensor(key)
    if tuple(array.shape[1:]) != tuple(tensor.shape):
        raise TensorFormatError(
            "an expert tensor has the wrong shape",
            file=index.checkpoint.files[tensor.file].path,
            tensor=tensor.name,
            expected=[layer.num_experts, *array.shape[1:]],
            actual=[layer.num_experts, *tensor.shape],
            remedy="config.json does not belong to these weights; download both again",
        )


def _drop_arrays(module: nn.Module) -> None:
    for linear in module.children().values():
        for param in ("weight", "scales", "biases", "bias", "global_scale"):
            if linear.get(param) is not None:
                linear[param] = None


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` at a dotted path that may go through lists and dicts."""
    parent: Any = model
    *path, leaf = name.split(".")
    for part in path:
        parent = parent[int(part)] if isinstance(parent, list) else parent[part]
    if isinstance(parent, list):
        parent[int(leaf)] = new
    else:
        parent[leaf] = new


def parent_block(model: nn.Module, streamed: StreamedExperts) -> nn.Module | None:
    """The module that directly holds `streamed`, or None when it sits in a bare list."""
    for _, module in model.named_modules():
        if any(child is streamed for child in module.children().values()):
            return module
    return None


def set_executor(slot: ExecutorSlot, executor: Executor) -> Callable[[], None]:
    """Put an executor in charge; the returned function puts the previous one back."""
    previous = slot.executor
    slot.executor = executor

    def restore() -> None:
        slot.executor = previous

    return restore
