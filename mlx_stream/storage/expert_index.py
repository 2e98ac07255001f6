"""(layer, expert, tensor) -> byte range, found by structure and not by model family.

Owns the recognition of stacked expert tensors `[E, ...]` and every consistency check between
them and the config. Pure: works on a Checkpoint's headers. It refuses dense models and layouts
whose experts are not stacked, because there a range of experts is not a range of bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NoReturn

from mlx_stream.errors import (
    DenseModelError,
    MissingTensorError,
    TensorFormatError,
    UnstackedExpertsError,
)
from mlx_stream.storage.checkpoint import Checkpoint, TensorInfo
from mlx_stream.storage.expert_count import check_config_count, common_count
from mlx_stream.storage.quant_spec import CONVERT, QuantConfig, QuantSpec, resolve_spec
from mlx_stream.storage.record_layout import RecordLayout

__all__ = ["ExpertIndex", "ExpertLayer", "ExpertTensor", "QuantSpec", "build_expert_index"]

Key = tuple[str, str]  # (projection, part), e.g. ('gate_proj', 'weight')

GLU = ("gate_proj", "up_proj", "down_proj")
MLP = ("fc1", "fc2")
FUSED = "gate_up_proj"  # rows: all of gate, then all of up
PARTS = ("weight", "scales", "biases", "bias", "global_scale")
_EXPERT_NAME = re.compile(
    rf"(?P<prefix>.+)\.(?P<proj>{'|'.join((*GLU, FUSED, *MLP))})\.(?P<part>{'|'.join(PARTS)})"
)
# One tensor per expert, or stacked in a family's own orientation: mlx-lm rewrites both.
_HF_NAME = re.compile(
    r"(^|\.)experts\.(\d+\.|(gate_up_proj|down_proj)(_blocks|_scales|_bias)?$)"
    r"|(^|\.)block_sparse_moe\.input_linear\."
)


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor kind of one layer. Expert e's bytes: [offset + p*stride, ... + nbytes).

    p is e, but for packed layers in another order: ExpertLayer.position.
    """

    key: Key
    name: str  # tensor name in the file; both halves of a fused tensor have the same
    file: int
    dtype: str
    shape: tuple[int, ...]  # of one expert
    offset: int  # absolute, of position 0
    stride: int  # bytes from one expert to the next, >= nbytes
    nbytes: int  # of one expert


@dataclass(frozen=True)
class ExpertLayer:
    """All expert tensors of one routed layer."""

    index: int  # execution order among expert layers
    name: str  # prefix in the checkpoint
    kind: Literal["glu", "mlp"]
    num_experts: int
    tensors: tuple[ExpertTensor, ...]
    quant: tuple[tuple[str, QuantSpec], ...]
    record: RecordLayout | None = None  # of a packed layer

    def position(self, expert: int) -> int:
        """Which expert of the file it is, counted from the start."""
        return expert if self.record is None else self.record.position(expert)

    def experts_at(self, positions: range) -> Sequence[int]:
        """The experts at these places of the file, ascending."""
        if self.record is None or self.record.order is None:
            return positions
        return sorted(self.record.order[positions.start : positions.stop])

    @cached_property
    def expert_nbytes(self) -> int:
        """Bytes of one expert over all tensors."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_nbytes

    @property
    def input_dims(self) -> int:
        """D: rows of the last projection."""
        return self.tensor((self.quant[-1][0], "weight")).shape[0]

    @property
    def hidden_dims(self) -> int:
        """F: rows of the first projection."""
        return self.tensor((self.quant[0][0], "weight")).shape[0]

    def tensor(self, key: Key) -> ExpertTensor:
        """Raises KeyError if this layer has no such tensor."""
        return self._by_key[key]

    def spec(self, projection: str) -> QuantSpec:
        """Raises KeyError if this layer has no such projection."""
        return dict(self.quant)[projection]

    @cached_property
    def _by_key(self) -> dict[Key, ExpertTensor]:
        return {t.key: t for t in self.tensors}


@dataclass(frozen=True)
class ExpertIndex:
    """The expert layers of a checkpoint, in execution order."""

    checkpoint: Checkpoint
    layers: tuple[ExpertLayer, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @cached_property
    def tensor_names(self) -> frozenset[str]:
        return frozenset(t.name for layer in self.layers for t in layer.tensors)

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes of every tensor that is not an expert tensor."""
        tensors = self.checkpoint.tensors
        return self.checkpoint.tensor_bytes - sum(tensors[n].nbytes for n in self.tensor_names)


def build_expert_index(checkpoint: Checkpoint) -> ExpertIndex:
    """Find and validate all expert layers.

    Raises:
        DenseModelError: no stacked expert tensors and no sign of experts.
        UnstackedExpertsError: experts in the Hugging Face layout.
        ExpertCountError: E differs between tensors or from the config.
        MissingTensorError, TensorFormatError, UnsupportedQuantizationError: a broken layer.
    """
    groups = _expert_groups(checkpoint.tensors.values())
    if not groups:
        _fail_no_experts(checkpoint)
    _check_records(checkpoint, groups)
    quant = QuantConfig.of(checkpoint.config, checkpoint.path / "config.json")
    layers = [
        _build_layer(checkpoint, number, prefix, groups[prefix], quant)
        for number, prefix in enumerate(sorted(groups, key=_natural))
    ]
    return ExpertIndex(checkpoint, tuple(layers))


def _natural(name: str) -> list[str | int]:
    return [int(s) if s.isdigit() else s for s in re.split(r"([0-9]+)", name)]


def _expert_groups(tensors: Iterable[TensorInfo]) -> dict[str, dict[Key, TensorInfo]]:
    """Prefix -> its projection tensors, for prefixes with a stacked (3-D) weight."""
    groups: dict[str, dict[Key, TensorInfo]] = {}
    stacked: set[str] = set()
    for t in tensors:
        if m := _EXPERT_NAME.fullmatch(t.name):
            groups.setdefault(m["prefix"], {})[m["proj"], m["part"]] = t
            if m["part"] == "weight" and len(t.shape) == 3:
                stacked.add(m["prefix"])
    return {prefix: group for prefix, group in groups.items() if prefix in stacked}


def _fail_no_experts(checkpoint: Checkpoint) -> NoReturn:
    t = next((t for t in checkpoint.tensors.values() if _HF_NAME.search(t.name)), None)
    if t is not None:
        raise UnstackedExpertsError(
            "The experts are in the Hugging Face layout, not stacked as MLX needs them.",
            file=checkpoint.files[t.file].path,
            tensor=t.name,
            expected="tensors [E, ...] such as '...switch_mlp.gate_proj.weight'",
            actual="one tensor per expert, or unconverted blocks",
            remedy="mlx_stream pack FOLDER -o DIR rewrites it (--bits 4: and quantizes it)",
        )
    raise DenseModelError(
        "The model has no routed experts, so there is nothing to stream.",
        file=checkpoint.path,
        expected="stacked expert tensors such as '...switch_mlp.gate_proj.weight'",
        actual=f"model_type {checkpoint.config.get('model_type')!r}, none found",
        remedy="run dense models with mlx_lm.generate",
    )


def _build_layer(
    checkpoint: Checkpoint,
    index: int,
    prefix: str,
    group: Mapping[Key, TensorInfo],
    quant: QuantConfig,
) -> ExpertLayer:
    kind = "mlp" if any(proj in MLP for proj, _ in group) else "glu"
    projections = MLP if kind == "mlp" else GLU
    _check_weights(checkpoint, group, projections)
    # A weight first: it is what an error compares the others with.
    tensors = sorted(group.values(), key=lambda t: not t.name.endswith(".weight"))
    num_experts = common_count(checkpoint, tensors)
    check_config_count(checkpoint, prefix, num_experts)
    parts = _projection_parts(checkpoint, prefix, group, num_experts)
    rows = {proj: parts[proj]["weight"].shape[0] for proj in projections}
    _check_rows(checkpoint, parts)
    specs = []
    for proj in projections:
        last = proj == projections[-1]
        in_dims = rows[projections[0]] if last else rows[projections[-1]]
        paths = (f"{prefix}.{proj}", *(() if last else (f"{prefix}.{FUSED}",)))
        file = checkpoint.files[parts[proj]["weight"].file].path
        specs.append((proj, resolve_spec(parts[proj], in_dims, paths, quant, file)))
    ordered = (parts[proj][p] for proj in projections for p in PARTS if p in parts[proj])
    record = checkpoint.records.get(prefix)
    return ExpertLayer(index, prefix, kind, num_experts, tuple(ordered), tuple(specs), record)


def _check_records(checkpoint: Checkpoint, groups: Mapping[str, Mapping[Key, TensorInfo]]) -> None:
    """Every packed layer is an expert layer, and all its tensors lie in its records."""
    for prefix in checkpoint.records.keys() - groups.keys():
        name = checkpoint.records[prefix].tensors[0].name
        _fail_format(checkpoint, checkpoint.tensors[name], "expert tensors in records", name)
    for prefix, group in groups.items():
        record = checkpoint.records.get(prefix)
        names = set() if record is None else {t.name for t in record.tensors}
        wrong = [t for t in group.values() if (t.name in names) != (record is not None)]
        if wrong or len(names) not in (0, len(group)):
            t = next(iter(wrong or group.values()))
            _fail_format(checkpoint, t, "all of a layer's tensors in its records", t.name)


def _projection_parts(
    checkpoint: Checkpoint, prefix: str, group: Mapping[Key, TensorInfo], num_experts: int
) -> dict[str, dict[str, ExpertTensor]]:
    parts: dict[str, dict[str, ExpertTensor]] = {}
    for (proj, part), t in group.items():
        if proj != FUSED:
            halves = ((proj, 0, 1),)
        elif part == "global_scale":  # one scalar per expert, used by both halves
            halves = (("gate_proj", 0, 1), ("up_proj", 0, 1))
        else:
            halves = (("gate_proj", 0, 2), ("up_proj", 1, 2))
        for name, half, count in halves:
            view = _expert_tensor(checkpoint, (name, part), t, num_experts, half, count)
            parts.setdefault(name, {})[part] = view
    return parts


def _expert_tensor(
    checkpoint: Checkpoint, key: Key, t: TensorInfo, num_experts: int, half: int, count: int
) -> ExpertTensor:
    """View of `t`: for each expert, block `half` of `count` equal blocks of its rows."""
    shape = t.shape[1:]
    if count > 1:
        if not shape or shape[0] % count:
            _fail_format(checkpoint, t, f"[E, {count}*F, ...]", list(t.shape))
        shape = (shape[0] // count, *shape[1:])
    each = t.nbytes // num_experts
    stride = each if t.stride is None else t.stride
    nbytes = each // count
    offset = t.offset + half * nbytes
    return ExpertTensor(key, t.name, t.file, t.dtype, shape, offset, stride, nbytes)


def _check_weights(
    checkpoint: Checkpoint, group: Mapping[Key, TensorInfo], projections: Sequence[str]
) -> None:
    """The layer has a stacked weight for each projection, and no tensor of any other."""
    if (FUSED, "weight") in group and projections == GLU:
        projections = (FUSED, GLU[2])
    for proj in projections:
        if (proj, "weight") not in group:
            _fail_missing(checkpoint, next(iter(group.values())), f".{proj}.weight")
    for (proj, part), t in group.items():
        if proj not in projections:
            _fail_format(checkpoint, t, f"only {', '.join(projections)} in this layer", proj)
        if part == "weight" and (len(t.shape) != 3 or 0 in t.shape):
            _fail_format(checkpoint, t, "a stacked weight [E, out, in]", list(t.shape))


def _check_rows(checkpoint: Checkpoint, parts: Mapping[str, Mapping[str, ExpertTensor]]) -> None:
    if "gate_proj" not in parts:
        return
    gate, up = parts["gate_proj"]["weight"], parts["up_proj"]["weight"]
    if gate.shape[0] != up.shape[0]:
        _fail_format(checkpoint, up, f"{gate.shape[0]} rows, as gate_proj", up.shape[0])


def _fail_missing(checkpoint: Checkpoint, sibling: TensorInfo, ending: str) -> NoReturn:
    prefix = _EXPERT_NAME.fullmatch(sibling.name)["prefix"]
    raise MissingTensorError(
        "An expert layer is incomplete.",
        file=checkpoint.files[sibling.file].path,
        tensor=prefix + ending,
        expected=f"next to {sibling.name}",
        actual="in no file of the checkpoint",
        remedy="finish the download: a shard is missing or from another version",
    )


def _fail_format(
    checkpoint: Checkpoint, t: TensorInfo | ExpertTensor, expected: object, actual: object
) -> NoReturn:
    path: Path = checkpoint.files[t.file].path
    raise TensorFormatError(
        "An expert tensor has not the shape its layer needs.",
        file=path,
        tensor=t.name,
        expected=expected,
        actual=actual,
        remedy=f"download this checkpoint again, or {CONVERT}",
    )
