"""The family's own router maths on logits that a head has predicted.

No family is known by name here. A copy of the model's MoE block gets logits in place of what its
router's linear map would give, and is left where it asks for the weighted sum: it has then said
which experts, and with which weights. One copy serves all consumer layers at once, as if they were
tokens of one prompt. What is copied shares all arrays with the model and changes nothing in it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.errors import CapabilityError, PrerouterError
from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import (
    ExecutorSlot,
    StreamedExperts,
    parent_block,
    set_executor,
)
from mlx_stream.prerouter.router_maths import select
from mlx_stream.prerouter.spec import RouterMaths

CHECK_SEED = 11
TOLERANCE = 1e-4


class _Routed(Exception):
    """Not an error: it carries the router's choice out of a block."""

    def __init__(self, indices: mx.array, scores: mx.array) -> None:
        super().__init__()
        self.indices, self.scores = indices, scores


class _Given(nn.Module):
    """Stands where logits are computed, and gives those that were put into it."""

    def __init__(self) -> None:
        super().__init__()
        self._logits: mx.array | None = None

    def put(self, logits: mx.array) -> None:
        self._logits = logits

    def __call__(self, x: mx.array, *args: Any) -> mx.array:
        assert self._logits is not None
        return self._logits


class _OnLogits(nn.Module):
    """A gate whose own weight is the identity, called with logits instead of the hidden state."""

    def __init__(self, gate: nn.Module, given: _Given) -> None:
        super().__init__()
        self._gate, self._given = gate, given

    def __call__(self, x: mx.array, *args: Any) -> Any:
        return self._gate(self._given(x))


class Selection:
    """Selects experts for several layers from their logits. C: the layers.

    Args:
        consumers: their expert modules, in the order of the logits' rows.
        hidden: width of the blocks' input.
        expert_bias: keep the layers' own biases; otherwise they are zero.

    Raises:
        CapabilityError: the model's blocks cannot be asked, or differ from each other.
    """

    def __init__(
        self,
        model: nn.Module,
        consumers: Sequence[StreamedExperts],
        slot: ExecutorSlot,
        *,
        hidden: int,
        expert_bias: bool,
    ) -> None:
        self._slot, self._given = slot, _Given()
        self._x = mx.zeros((1, len(consumers), hidden))
        self._experts = consumers[0].mlp.layer.num_experts
        blocks = []
        for experts in consumers:
            block = parent_block(model, experts)
            if block is None or not experts.combined:
                raise _cannot(experts, "a block that only sums its experts' weighted outputs")
            blocks.append(block)
        build = _Copies(self._given, self._experts, hidden, keep_bias=expert_bias)
        each = [
            self._working(build.of(block), e) for block, e in zip(blocks, consumers, strict=True)
        ]
        self._block = self._working(build.stacked(blocks), consumers[0])
        self._check_same(each, consumers)

    def __call__(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Lazy ``logits [C, E] -> (expert ids [C, K], weights [C, K])``."""
        ids, scores = self._ask(self._block, logits[None], self._x)
        return ids[0], scores[0]

    def check(self, maths: RouterMaths) -> None:
        """Compare with what a spec says.

        Raises:
            PrerouterError: the model routes in another way.
        """
        logits = self._some_logits(len(self._x[0]))
        ids, weights = self(logits)
        if maths.expert_bias:
            return  # the layers' own biases are the model's: there is nothing to compare with
        expected, scores = select(logits, maths, ids.shape[-1])
        if not _same((ids, weights), (expected, scores)):
            raise PrerouterError(
                "the model does not route as the Prerouter's spec says",
                expected=maths,
                actual=f"weights {_brief(weights)} instead of {_brief(scores)}",
                remedy="use the spec that belongs to this model",
            )

    # --- building ---------------------------------------------------------------------------

    def _working(self, candidates: Iterator[nn.Module], experts: StreamedExperts) -> nn.Module:
        """The first copy whose choice follows from the logits alone."""
        rows = self._x.shape[1]
        noise = mx.random.normal(self._x.shape, key=mx.random.key(3))
        logits = self._some_logits(rows)
        for block in candidates:
            try:
                quiet = self._ask(block, logits[None], self._x)
                loud = self._ask(block, logits[None], noise)
                other = self._ask(block, logits[:, ::-1][None], self._x)
                mx.eval(quiet, loud, other)
            except Exception:  # whatever a family's code makes of a question it does not expect
                continue
            shape = quiet[0].shape
            if shape[:-1] != (1, rows) or quiet[1].shape != shape:
                continue
            if _same(quiet, loud) and not _same(quiet, other):
                return block
        raise _cannot(experts, "a block whose router's logits can be replaced")

    def _ask(self, block: nn.Module, logits: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
        def leave(experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
            def resolve(scores: mx.array | None) -> mx.array:
                assert scores is not None, "the block asked for single outputs"
                raise _Routed(indices, scores)

            return DeferredExpertOutput((*indices.shape, x.shape[-1]), x.dtype, resolve)

        self._given.put(logits)
        restore = set_executor(self._slot, leave)
        try:
            block(x)
        except _Routed as routed:
            return routed.indices, routed.scores
        finally:
            restore()
        raise AssertionError("the block did not ask for its experts")

    def _check_same(self, each: Sequence[nn.Module], consumers: Sequence[StreamedExperts]) -> None:
        """One copy stands for all layers: it must answer as each of them."""
        logits = self._some_logits(len(each))
        ids, scores = self(logits)
        for n, (block, experts) in enumerate(zip(each, consumers, strict=True)):
            own_ids, own_scores = self._ask(block, logits[None], self._x)
            if not _same((ids[n], scores[n]), (own_ids[0, n], own_scores[0, n])):
                raise _cannot(experts, "layers that select experts in the same way")

    def _some_logits(self, rows: int) -> mx.array:
        shape = (rows, self._experts)
        return 2 * mx.random.normal(shape, key=mx.random.key(CHECK_SEED))


class _Copies:
    """Copies of MoE blocks, with `given` in the place of the router's linear map."""

    def __init__(self, given: _Given, experts: int, hidden: int, *, keep_bias: bool) -> None:
        self._given, self._experts, self._hidden = given, experts, hidden
        self._keep_bias = keep_bias

    def of(self, block: nn.Module) -> Iterator[nn.Module]:
        """Every way to do it, the likeliest first."""
        return self._copies(block, lambda array, path: array)

    def stacked(self, blocks: Sequence[nn.Module]) -> Iterator[nn.Module]:
        """The same of the first block, with every layer's bias ``[C, E]``."""

        def stack(array: mx.array, path: tuple[str, ...]) -> mx.array:
            return mx.stack([_at(block, path) for block in blocks])

        return self._copies(blocks[0], stack)

    def _copies(
        self, block: nn.Module, bias_of: Callable[[mx.array, tuple[str, ...]], mx.array]
    ) -> Iterator[nn.Module]:
        names = [n for n, child in block.items() if isinstance(child, nn.Module)]
        names = [n for n in names if not isinstance(block[n], StreamedExperts)]
        names.sort(key=lambda n: "shared" in n or not ("gate" in n or "router" in n))
        for name in names:
            for gate in self._gates(block[name], (name,), bias_of):
                clone = copy.copy(block)
                self._set_biases(clone, (), bias_of)
                clone[name] = gate
                yield clone

    def _gates(
        self,
        gate: nn.Module,
        path: tuple[str, ...],
        bias_of: Callable[[mx.array, tuple[str, ...]], mx.array],
    ) -> Iterator[nn.Module]:
        """What could replace a block's child: it gives logits, or makes its choice of them."""
        weight = gate.get("weight")
        maps = isinstance(weight, mx.array) and weight.shape == (self._experts, self._hidden)
        if not maps:
            for name, child in gate.items():
                if isinstance(child, nn.Module) and not isinstance(child, StreamedExperts):
                    clone = copy.copy(gate)
                    self._set_biases(clone, path, bias_of)
                    clone[name] = self._given
                    yield clone
        if maps:  # x @ weight.T and its choice in one module
            clone = copy.copy(gate)
            self._set_biases(clone, path, bias_of)
            clone["weight"] = mx.eye(self._experts)
            if not isinstance(gate, nn.Linear):
                yield _OnLogits(clone, self._given)
        yield self._given

    def _set_biases(
        self,
        module: nn.Module,
        path: tuple[str, ...],
        bias_of: Callable[[mx.array, tuple[str, ...]], mx.array],
    ) -> None:
        for name, value in list(module.items()):
            if isinstance(value, mx.array) and value.shape == (self._experts,):
                kept = bias_of(value, (*path, name)) if self._keep_bias else mx.zeros_like(value)
                module[name] = kept


def _at(module: Any, path: Sequence[str]) -> Any:
    for name in path:
        module = module[name]
    return module


def _same(a: tuple[mx.array, mx.array], b: tuple[mx.array, mx.array]) -> bool:
    """Equal sets of experts with equal weights, in whatever order."""
    if a[0].shape != b[0].shape:
        return False
    rows = []
    for ids, weights in (a, b):
        order = mx.argsort(ids, axis=-1)
        rows.append((mx.take_along_axis(ids, order, -1), mx.take_along_axis(weights, order, -1)))
    (ids_a, w_a), (ids_b, w_b) = rows
    if not bool((ids_a == ids_b).all()):
        return False
    return bool(mx.allclose(w_a, w_b, rtol=TOLERANCE, atol=TOLERANCE))


def _brief(weights: mx.array) -> list[float]:
    first = np.array(weights.astype(mx.float32)).reshape(-1, weights.shape[-1])[0]
    return [round(float(w), 4) for w in sorted(first, reverse=True)[:4]]


def _cannot(experts: StreamedExperts, expected: str) -> CapabilityError:
    return CapabilityError(
        "this model cannot run with predicted routing",
        tensor=experts.mlp.layer.name,
        expected=expected,
        actual="a block of another kind",
        remedy="run with --prerouter off",
    )
