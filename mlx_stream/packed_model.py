"""A packed folder as mlx-lm builds its model: the expert tensors stand in as zeros.

mlx-lm sanitizes, quantizes and checks a model by the names and shapes of its weights. The experts
of a packed folder are in no file that it reads, so they are added as lazy zeros, which are dropped
before anything evaluates them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import _get_classes

from mlx_stream.backends.mlx_ops import DTYPES
from mlx_stream.errors import UnsupportedModelError
from mlx_stream.storage.checkpoint import Checkpoint

Classes = tuple[type, type]


def packed_arguments(checkpoint: Checkpoint, trust_remote_code: bool) -> dict[str, Any]:
    """Arguments of mlx-lm's ``load_model`` for a checkpoint; none for a plain one.

    Raises:
        UnsupportedModelError: an expert dtype that MLX has not.
    """
    if checkpoint.packed is None:
        return {}
    weights = _stand_ins(checkpoint)
    code = checkpoint.config.get("model_file") if trust_remote_code else None

    def classes(config: dict[str, Any]) -> Classes:
        found = _get_classes if code is None else _custom_classes(checkpoint.path / str(code))
        model, arguments = found(config)
        return _with_weights(model, weights), arguments

    arguments: dict[str, Any] = {"get_model_classes": classes}
    # mlx-lm asks for classes only where the config names no code of its own.
    return arguments if code is None else arguments | {"model_config": {"model_file": None}}


def _stand_ins(checkpoint: Checkpoint) -> dict[str, mx.array]:
    names = {t.name for record in checkpoint.records.values() for t in record.tensors}
    found = {name: checkpoint.tensors[name] for name in names}
    for t in found.values():
        if t.dtype not in DTYPES:
            raise UnsupportedModelError(
                "a packed expert tensor has a dtype that MLX has not",
                file=checkpoint.files[t.file].path,
                tensor=t.name,
                expected=sorted(DTYPES),
                actual=t.dtype,
                remedy="convert the model again with mlx_lm.convert, then pack it",
            )
    return {name: mx.zeros(t.shape, dtype=DTYPES[t.dtype]) for name, t in found.items()}


def _with_weights(model: type, stand_ins: dict[str, mx.array]) -> type:
    """The model's class, whose `sanitize` sees the experts too."""

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = weights | stand_ins
        inner = getattr(super(packed, self), "sanitize", None)
        return weights if inner is None else inner(weights)

    names = {"sanitize": sanitize, "__module__": model.__module__, "__doc__": model.__doc__}
    packed = type(model.__name__, (model,), names)
    return packed


def _custom_classes(path: Path) -> Callable[[dict[str, Any]], Classes]:
    """A repository's own model code, as mlx-lm runs it; only where it is trusted."""
    spec = importlib.util.spec_from_file_location("custom_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda config: (module.Model, module.ModelArgs)
