"""An mlx-lm model whose weights are not read yet, with errors that say what is wrong."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model

from mlx_stream.errors import MissingTensorError, ReadError, UnsupportedModelError


def load_lazy(
    path: Path, trust_remote_code: bool = False, **extra: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """The model and its config as mlx-lm's ``load_model`` gives them; no weight is read yet.

    Args:
        extra: further arguments of ``load_model``.

    Raises:
        MissingTensorError: the model needs a tensor that the checkpoint lacks.
        UnsupportedModelError: mlx-lm cannot build this model.
        ReadError: a file cannot be read.
    """
    try:
        model, config = load_model(path, lazy=True, trust_remote_code=trust_remote_code, **extra)
    except ValueError as error:
        text = str(error)
        if text.startswith(("Missing", "Received")):
            raise MissingTensorError(
                "the checkpoint's tensors are not those of the model",
                file=path,
                expected="the tensors that mlx_lm's model definition names",
                actual=" ".join(text.split())[:300],
                remedy="download the checkpoint again, or convert it with mlx_lm.convert",
            ) from error
        raise UnsupportedModelError(
            "mlx_lm cannot build this model",
            file=path / "config.json",
            actual=text.splitlines()[0][:300] if text else type(error).__name__,
            remedy="check model_type; --trust-remote-code runs a repository's own model code",
        ) from error
    except (KeyError, TypeError, AttributeError, AssertionError, ArithmeticError) as error:
        key = error.args[0] if isinstance(error, KeyError) and error.args else None
        if isinstance(key, str) and key.endswith((".weight", ".scales", ".biases")):
            raise MissingTensorError(
                "a tensor that the model needs is in no file of the checkpoint",
                file=path,
                tensor=key,
                expected="in a shard, next to its scales",
                actual="missing",
                remedy="download the checkpoint again, or convert it with mlx_lm.convert",
            ) from error
        raise UnsupportedModelError(
            "config.json does not describe a model that mlx_lm can build",
            file=path / "config.json",
            actual=f"{type(error).__name__}: {error}",
            remedy="download config.json again",
        ) from error
    except OSError as error:
        raise ReadError(
            "a file of the model cannot be read",
            file=error.filename or path,
            expected="readable files",
            actual=error.strerror or str(error),
            remedy="check the disk and permissions, then run the same command again",
        ) from error
    # Modules draw their initial weights lazily, each from the state that the one before left: until
    # that state is evaluated the chain stays in memory (0.2 MB a load of the demo model).
    try:
        mx.eval(mx.random.state)
    except RuntimeError:  # a compiled sampler that failed leaves a state without a value
        mx.random.seed(time.time_ns())
    return model, config
