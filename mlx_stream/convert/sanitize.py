"""mlx-lm's own rewriting of a family's weights, for a few experts at a time.

Every mlx-lm model class has a `sanitize` that turns the names and shapes of the original checkpoint
into its own: it stacks experts, splits fused tensors, unpacks 8-bit blocks. It works on a whole
checkpoint. Here it gets a checkpoint with a few experts: a config that says so, and stand-ins for
all tensors that are not wanted, which nothing evaluates.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import _get_classes

from mlx_stream.convert.expert_inputs import ExpertInputs
from mlx_stream.errors import UnsupportedModelError
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.expert_count import COUNT_KEYS

_TOP_K = ("experts_per_tok", "experts_per_token")


class FewExperts:
    """Sanitizes chosen experts of chosen layers.

    Args:
        config: of the model, as mlx-lm reads it.
        counts: by layer number, how many experts it has.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        counts: Mapping[int, int],
        inputs: ExpertInputs,
    ) -> None:
        self._checkpoint, self._config = checkpoint, config
        self._counts = set(counts.values())
        self._inputs = inputs
        self._models: dict[int, tuple[nn.Module, dict[str, mx.array]]] = {}

    def sanitize(
        self, arrays: Mapping[str, mx.array], experts: int, prefix: str
    ) -> dict[str, mx.array]:
        """The expert tensors ``[experts, ...]`` of one layer, lazily.

        Args:
            arrays: the source's tensors of the chosen experts, renumbered from 0.
            prefix: of the layer in the model, such as ``model.layers.3.mlp.switch_mlp``.

        Raises:
            UnsupportedModelError: the family's `sanitize` does not work on a few experts.
        """
        model, stand_ins = self._model(experts)
        given = stand_ins | dict(arrays)
        try:
            found = model.sanitize(given) if hasattr(model, "sanitize") else given
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise self.unfit(prefix, f"{type(error).__name__}: {error}") from error
        made = {name: a for name, a in found.items() if name.startswith(f"{prefix}.")}
        for name, array in made.items():
            if array.shape[:1] != (experts,):
                raise self.unfit(name, f"shape {list(array.shape)} for {experts} experts")
        return made

    def _model(self, experts: int) -> tuple[nn.Module, dict[str, mx.array]]:
        if experts not in self._models:
            config = self._with_experts(copy.deepcopy(dict(self._config)), experts)
            model_class, args_class = _get_classes(config)
            try:
                model = model_class(args_class.from_dict(config))
            except (ValueError, TypeError, ArithmeticError, AssertionError) as error:
                raise self.unfit("config.json", f"{type(error).__name__}: {error}") from error
            mx.eval(mx.random.state)  # the chain of draws of first weights would stay in memory
            self._models[experts] = (model, self._inputs.stand_ins(experts))
        return self._models[experts]

    def _with_experts(self, config: dict[str, Any], experts: int) -> dict[str, Any]:
        for key, value in config.items():
            if isinstance(value, dict):
                self._with_experts(value, experts)
            elif key in COUNT_KEYS:
                config[key] = self._fewer(value, experts)
            elif key.endswith(_TOP_K) and type(value) is int:  # some check it against the count
                config[key] = min(value, experts)
        return config

    def _fewer(self, value: Any, experts: int) -> Any:
        if isinstance(value, list):
            return [self._fewer(v, experts) for v in value]
        return experts if type(value) is int and value in self._counts else value

    def unfit(self, tensor: str, actual: str) -> UnsupportedModelError:
        """The error for a family that must be converted as a whole."""
        return UnsupportedModelError(
            "mlx-lm's conversion of this family does not work on a few experts at a time",
            file=self._checkpoint.path,
            tensor=tensor,
            expected="tensors whose first dimension is the expert",
            actual=actual[:300],
            remedy="convert it with mlx_lm.convert, then pack the result",
        )


def check_independence(
    few: FewExperts, layer: int, prefix: str, sources: Mapping[tuple[int, ...], Mapping]
) -> None:
    """Two experts must come out the same together and one by one.

    Args:
        sources: the arrays of experts (0, 1), (0,) and (1,) of the layer.

    Raises:
        UnsupportedModelError: they do not, so that experts cannot be converted one by one.
    """
    both = few.sanitize(sources[0, 1], 2, prefix)
    for row in (0, 1):
        single = few.sanitize(sources[row,], 1, prefix)
        for name, array in both.items():
            same = name in single and mx.array_equal(array[row], single[name][0], equal_nan=True)
            if not (same and single.keys() == both.keys()):
                raise few.unfit(name, f"expert {row} of layer {layer} depends on its neighbours")
