"""How one projection's expert weights are packed: read from the config, proved from the shapes.

Follows mlx-lm: an entry of the quantization map for the module's path is authoritative and must
agree with the tensors; without one, the packing is inferred from the shapes, because the
top-level default is often wrong for single modules. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mlx_stream.errors import MissingTensorError, TensorFormatError, UnsupportedQuantizationError

if TYPE_CHECKING:
    from mlx_stream.storage.expert_index import ExpertTensor

FLOAT_DTYPES = {"BF16": 16, "F16": 16, "F32": 32}
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# Every other mode has uint8 scales and allows exactly one (bits, group_size).
FIXED_MODES = {(4, 32): "mxfp4", (8, 32): "mxfp8", (4, 16): "nvfp4"}
MODES = ("affine", *FIXED_MODES.values())
# Foreign quantization methods whose weights mlx-lm maps onto one of MODES by shape.
SHAPE_METHODS = ("mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt")
CONVERT = "convert the model again with mlx_lm.convert -q"


@dataclass(frozen=True)
class QuantSpec:
    """Packing of one projection. mode 'none': bits is the float width, group_size 0."""

    mode: str  # 'affine' | 'mxfp4' | 'mxfp8' | 'nvfp4' | 'none'
    bits: int
    group_size: int

    @property
    def name(self) -> str:
        """Such as ``affine 4-bit g64``."""
        if self.mode == "none":
            return f"{self.bits}-bit floats"
        return f"{self.mode} {self.bits}-bit g{self.group_size}"


@dataclass(frozen=True)
class QuantConfig:
    """The quantization part of config.json: is there any, and which paths it names."""

    declared: bool
    entries: Mapping[str, Any]

    @classmethod
    def of(cls, config: Mapping[str, Any], file: Path) -> QuantConfig:
        """Raises UnsupportedQuantizationError for a method or mode that is not known."""
        text = config.get("text_config")
        sources = [config, text if isinstance(text, Mapping) else {}]
        for source in sources:
            found = source.get("quantization") or source.get("quantization_config")
            if isinstance(found, Mapping):
                _check_declaration(found, file)
                return cls(True, found)
        return cls(False, {})

    def entry(self, paths: tuple[str, ...]) -> dict[str, Any] | bool | None:
        """The entry of the first of `paths` that has one; None if none has."""
        for path in paths:
            for spelled in _spellings(path):
                found = self.entries.get(spelled)
                if isinstance(found, dict | bool):
                    return found
        return None


def _spellings(path: str) -> tuple[str, ...]:
    # A text model taken out of a multimodal one may keep the outer names in its config.
    inner = path.removeprefix("language_model.")
    return (path, inner) if inner != path else (path, f"language_model.{path}")


def _check_declaration(found: Mapping[str, Any], file: Path) -> None:
    method = found.get("quant_method")
    mode = found.get("mode", "affine")
    if mode not in MODES:
        _unsupported(file, None, "quantization mode", " ".join(MODES), mode)
    if not ("bits" in found and "group_size" in found) and method not in SHAPE_METHODS:
        _unsupported(file, None, "quantization method", " ".join(SHAPE_METHODS), method)


def resolve_spec(
    parts: Mapping[str, ExpertTensor],
    in_dims: int,
    paths: tuple[str, ...],
    quant: QuantConfig,
    file: Path,
) -> QuantSpec:
    """The packing of one projection, checked against every one of its tensors.

    Args:
        parts: part name ('weight', 'scales', ...) -> tensor with per-expert shape.
        in_dims: input features of the projection.
        paths: module paths under which the config may name it.
        file: named in errors only.

    Raises:
        MissingTensorError: a part the packing needs is not there.
        TensorFormatError: config and tensors, or two tensors, disagree.
        UnsupportedQuantizationError: a packing this release does not know.
    """
    entry = quant.entry(paths)
    if "scales" not in parts:
        spec = _plain_spec(parts, in_dims, entry, file)
    else:
        if entry is False or not quant.declared:
            _bad(file, parts["scales"].name, "no scales: the config says unquantized", "scales")
        spec = _infer(parts, in_dims, file)
        if isinstance(entry, dict):
            _check_entry(entry, spec, parts["weight"].name, file)
        _check_scales(parts, spec, file)
    _check_extras(parts, spec, file)
    return spec


def _plain_spec(
    parts: Mapping[str, ExpertTensor], in_dims: int, entry: dict | bool | None, file: Path
) -> QuantSpec:
    weight = parts["weight"]
    if entry or weight.dtype in ("U32", "U8"):
        raise MissingTensorError(
            "A quantized expert weight has no scales.",
            file=file,
            tensor=weight.name.removesuffix("weight") + "scales",
            expected="scales next to the packed weight",
            actual="not in the checkpoint",
            remedy="download the checkpoint again, or convert it again with mlx_lm.convert",
        )
    if weight.dtype not in FLOAT_DTYPES:
        _unsupported(file, weight.name, "weight dtype", " ".join(FLOAT_DTYPES), weight.dtype)
    if len(weight.shape) != 2 or weight.shape[1] != in_dims:
        _bad(file, weight.name, f"[out, {in_dims}] per expert", list(weight.shape))
    return QuantSpec("none", FLOAT_DTYPES[weight.dtype], 0)


def _infer(parts: Mapping[str, ExpertTensor], in_dims: int, file: Path) -> QuantSpec:
    weight, scales = parts["weight"], parts["scales"]
    if weight.dtype != "U32" or len(weight.shape) != 2:
        _bad(file, weight.name, "U32 [out, words]", f"{weight.dtype} {list(weight.shape)}")
    if len(scales.shape) != 2 or scales.shape[0] != weight.shape[0]:
        _bad(file, scales.name, f"[{weight.shape[0]}, groups] per expert", list(scales.shape))
    words, groups = weight.shape[1], scales.shape[1]
    if not words or words * 32 % in_dims:
        _bad(file, weight.name, f"whole bits for each of {in_dims} inputs", f"{words} words a row")
    if not groups or in_dims % groups:
        _bad(file, scales.name, f"whole groups over {in_dims} inputs", f"{groups} scales a row")
    bits, group_size = words * 32 // in_dims, in_dims // groups
    if scales.dtype == "U8":
        mode = FIXED_MODES.get((bits, group_size))
    elif scales.dtype in FLOAT_DTYPES:
        mode = "affine" if bits in AFFINE_BITS and group_size in AFFINE_GROUPS else None
    else:
        _bad(file, scales.name, "U8 or " + " ".join(FLOAT_DTYPES), scales.dtype)
    if mode is None:
        found = f"{bits} bits, group {group_size}, {scales.dtype} scales"
        known = f"affine {AFFINE_BITS} x {AFFINE_GROUPS}, or U8 scales with {FIXED_MODES}"
        _unsupported(file, weight.name, "packing", known, found)
    return QuantSpec(mode, bits, group_size)


def _check_entry(entry: dict[str, Any], spec: QuantSpec, name: str, file: Path) -> None:
    mode = entry.get("mode", "affine")
    if mode not in MODES:
        _unsupported(file, name, "quantization mode", " ".join(MODES), mode)
    # Absent fields mean what QuantizedSwitchLinear's defaults mean.
    said = QuantSpec(mode, entry.get("bits", 4), entry.get("group_size", 64))
    if said != spec:
        _bad(file, name, f"{said} from the config", f"{spec} from the tensor shapes")


def _check_scales(parts: Mapping[str, ExpertTensor], spec: QuantSpec, file: Path) -> None:
    scales, biases = parts["scales"], parts.get("biases")
    if spec.mode != "affine":
        if biases is not None:
            _bad(file, biases.name, f"no biases in mode {spec.mode}", list(biases.shape))
        return
    if biases is None:
        raise MissingTensorError(
            "An affine-quantized expert weight has no biases.",
            file=file,
            tensor=scales.name.removesuffix("scales") + "biases",
            expected=f"{scales.dtype} {list(scales.shape)} per expert",
            actual="not in the checkpoint",
            remedy="download the checkpoint again, or convert it again with mlx_lm.convert",
        )
    if (biases.dtype, biases.shape) != (scales.dtype, scales.shape):
        _bad(file, biases.name, f"{scales.dtype} {scales.shape}", f"{biases.dtype} {biases.shape}")


def _check_extras(parts: Mapping[str, ExpertTensor], spec: QuantSpec, file: Path) -> None:
    rows = parts["weight"].shape[0]
    bias, scale = parts.get("bias"), parts.get("global_scale")
    if bias is not None and (bias.dtype not in FLOAT_DTYPES or bias.shape != (rows,)):
        _bad(file, bias.name, f"float [{rows}] per expert", f"{bias.dtype} {list(bias.shape)}")
    if spec.mode == "none" and "biases" in parts:
        _bad(file, parts["biases"].name, "no biases without scales", "biases")
    if scale is None:
        return
    if spec.mode != "nvfp4":
        _bad(file, scale.name, "global_scale only in mode nvfp4", spec.mode)
    if scale.dtype != "F32" or scale.shape != ():
        _bad(file, scale.name, "one F32 per expert", f"{scale.dtype} {list(scale.shape)}")


def _bad(file: Path, tensor: str, expected: object, actual: object) -> NoReturn:
    raise TensorFormatError(
        "An expert tensor has not the format its projection needs.",
        file=file,
        tensor=tensor,
        expected=expected,
        actual=actual,
        remedy=f"check config.json against the weights, or {CONVERT}",
    )


def _unsupported(
    file: Path, tensor: str | None, what: str, expected: object, actual: object
) -> NoReturn:
    raise UnsupportedQuantizationError(
        f"Unsupported {what}.",
        file=file,
        tensor=tensor,
        expected=expected,
        actual=actual,
        remedy=CONVERT,
    )
