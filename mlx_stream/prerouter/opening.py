"""Whether a checkpoint runs with predicted routing, and everything that takes, from its folder.

``auto`` says yes only where the folder has a spec with ``trained: true`` and the heads file it
names, or a heads file with one of the published names. A spec may also be given by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.errors import PrerouterError
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from mlx_stream.prerouter.head_file import open_heads
from mlx_stream.prerouter.heads import Heads
from mlx_stream.prerouter.selection import Selection
from mlx_stream.prerouter.spec import PUBLISHED, PrerouterSpec
from mlx_stream.prerouter.spec_file import SPEC_NAME, read_spec
from mlx_stream.prerouter.top_k import override_top_k

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class PrerouterChoice:
    """What a folder and a mode come to.

    Attributes:
        spec: None when predicted routing stays off.
        folder: where its heads are.
        reason: for people.
    """

    spec: PrerouterSpec | None
    folder: Path
    reason: str


@dataclass(frozen=True)
class OpenPrerouter:
    """A Prerouter in memory. H owners, C = H consumers, in the order of the layers.

    Attributes:
        owners, consumers: indices of expert layers (their order among expert layers).
    """

    spec: PrerouterSpec
    heads: Heads
    selection: Selection
    owners: tuple[int, ...]
    consumers: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of the heads."""
        return self.heads.nbytes


def choose_prerouter(folder: Path, mode: str, spec_file: Path | None) -> PrerouterChoice:
    """Follow ``--prerouter`` and ``--prerouter-spec``; reads at most the spec.

    Args:
        mode: ``auto``, ``on`` or ``off``.

    Raises:
        PrerouterError: the spec is bad, or `mode` is on and there is none, or no heads.
    """
    if mode == "off":
        return PrerouterChoice(None, folder, "off: as asked")
    where = folder if spec_file is None else spec_file.absolute().parent
    spec = _find_spec(folder, spec_file)
    if spec is None:
        if mode == "on":
            raise PrerouterError(
                "this checkpoint has no Prerouter",
                file=folder,
                expected=f"{SPEC_NAME} and the heads that it names, or published heads: "
                + ", ".join(s.heads_file for s in PUBLISHED),
                actual="neither",
                remedy="train heads (tools/train_prerouter.py), or run with --prerouter auto",
            )
        return PrerouterChoice(None, folder, f"off: the folder has no {SPEC_NAME}")
    if mode == "auto" and not spec.trained:
        return PrerouterChoice(None, where, f"off: {spec.name} is not trained to be used")
    if not (where / spec.heads_file).is_file():
        if mode == "on":
            raise PrerouterError(
                "the Prerouter's heads are missing",
                file=where / spec.heads_file,
                expected=f"the heads of {spec.name}",
                actual="no such file",
                remedy="download or train them, or run with --prerouter off",
            )
        return PrerouterChoice(None, where, f"off: {spec.heads_file} is missing")
    return PrerouterChoice(spec, where, f"on: {spec.name}")


def _find_spec(folder: Path, spec_file: Path | None) -> PrerouterSpec | None:
    path = folder / SPEC_NAME if spec_file is None else spec_file
    if spec_file is not None or path.exists():
        return read_spec(path)
    found = (spec for spec in PUBLISHED if (folder / spec.heads_file).is_file())
    return next(found, None)


def open_prerouter(
    spec: PrerouterSpec,
    folder: Path,
    model: nn.Module,
    streamed: Sequence[StreamedExperts],
    slot: ExecutorSlot,
    *,
    backend: Backend,
    budget: MemoryBudget,
    hidden: int,
    dtype: mx.Dtype,
) -> OpenPrerouter:
    """Load the heads, and fit the model to them: its number of experts a token is the spec's.

    Raises:
        PrerouterError: spec, heads and model do not fit each other.
        CapabilityError: this model cannot run with predicted routing.
        CheckpointError: the heads file is damaged.
        BudgetError: the heads do not fit the memory budget.
    """
    place = _places(spec, streamed, folder)
    owners = tuple(place[n] for n in spec.active_owners)
    consumers = tuple(place[n] for n in spec.consumers)
    used = [streamed[n] for n in (*owners, *consumers)]
    experts = used[0].mlp.layer.num_experts
    odd = [
        e for e in used if (e.mlp.layer.num_experts, e.mlp.layer.input_dims) != (experts, hidden)
    ]
    if odd:
        raise PrerouterError(
            "the Prerouter's layers differ from each other",
            tensor=odd[0].mlp.layer.name,
            expected=f"{experts} experts that see {hidden} values",
            actual=f"{odd[0].mlp.layer.num_experts} that see {odd[0].mlp.layer.input_dims}",
            remedy="run with --prerouter off",
        )
    file = open_heads(folder / spec.heads_file, spec, hidden=hidden, experts=experts)
    if spec.top_k is not None:
        override_top_k(model, streamed, slot, hidden=hidden, dtype=dtype, top_k=spec.top_k)
    bias = spec.router is not None and spec.router.expert_bias
    selection = Selection(
        model, [streamed[n] for n in consumers], slot, hidden=hidden, expert_bias=bias
    )
    if spec.router is not None:
        selection.check(spec.router)
    stored = mx.float16 if backend.compute_dtype is None else backend.compute_dtype
    budget.reserve("prerouter heads", Heads.planned_nbytes(file, len(owners), stored))
    return OpenPrerouter(
        spec, Heads.load(file, spec.active_owners, stored), selection, owners, consumers
    )


def _places(
    spec: PrerouterSpec, streamed: Sequence[StreamedExperts], folder: Path
) -> dict[int, int]:
    """Layer number in the model -> index of the expert layer."""
    place: dict[int, int] = {}
    twice: set[int] = set()
    for experts in streamed:
        numbers = _LAYER.findall(experts.mlp.layer.name)
        if len(numbers) == 1:
            twice.update({int(numbers[0])} & place.keys())
            place[int(numbers[0])] = experts.mlp.layer.index
    for number in (*spec.active_owners, *spec.consumers):
        if number not in place or number in twice:
            raise PrerouterError(
                "the Prerouter's spec names a layer that is no expert layer of this model",
                file=folder,
                expected=f"one of {sorted(place.keys() - twice)[:64]}",
                actual=number,
                remedy="use the spec that belongs to this model, or run with --prerouter off",
            )
    return place
