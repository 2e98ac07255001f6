"""Which modules of a model get which quantization, and what config.json then says. Pure.

The rules are mlx-lm's (`quantize_model`): a family's own `quant_predicate` decides what stays in
floats or gets more bits, and rows that are no multiple of a group stay in floats.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_stream.convert.options import Conversion
from mlx_stream.errors import PackError, UnsupportedModelError
from mlx_stream.storage.quant_spec import QuantSpec

EXPERTS, REST = "the routed experts", "what is no routed expert"
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass(frozen=True)
class ModuleWidth:
    """One module with a weight: how it is, and how it is to be. None: floats.

    misfit: whether it stays as it is because its rows are no multiple of the group asked for.
    """

    path: str
    now: QuantSpec | None
    then: QuantSpec | None
    misfit: bool = False

    @property
    def changes(self) -> bool:
        """Whether its weight is computed anew."""
        return self.then is not None and self.then != self.now


def module_widths(
    model: nn.Module, conversion: Conversion, expert_prefixes: frozenset[str]
) -> dict[str, ModuleWidth]:
    """Every module with a weight of its own, by path.

    Args:
        model: as mlx-lm loads the source, lazily.
        expert_prefixes: paths of the modules that hold a layer's routed experts.

    Raises:
        PackError: no module can have what is asked for.
        UnsupportedModelError: a quantized module that cannot be made anew.
    """
    found: dict[str, ModuleWidth] = {}
    parts: dict[str, list[ModuleWidth]] = {EXPERTS: [], REST: []}
    for path, module in model.named_modules():
        if "weight" not in module:
            continue
        expert = path.rpartition(".")[0] in expert_prefixes
        wanted = conversion.experts if expert else conversion.rest
        now = current_spec(module)
        then = now if wanted is None else _target(model, path, module, now, wanted)
        if then != now and "global_scale" in module:
            _fail_global_scale(path)
        if then != now and now is None and not mx.issubdtype(module.weight.dtype, mx.floating):
            _fail_no_floats(path, module.weight.dtype)
        quantizable = now is not None or hasattr(module, "to_quantized")
        misfit = wanted is not None and quantizable and not _fits(module, now, wanted)
        found[path] = ModuleWidth(path, now, then, misfit)
        if quantizable:
            parts[EXPERTS if expert else REST].append(found[path])
    for part, wanted in ((EXPERTS, conversion.experts), (REST, conversion.rest)):
        if wanted is not None and all(w.misfit for w in parts[part]):
            raise PackError(
                f"no weight of {part} can be quantized so",
                expected=f"rows that are multiples of {wanted.group_size}",
                actual=f"{wanted.name}, and all rows have other lengths",
                remedy="choose a smaller --group-size",
            )
    return found


def current_spec(module: nn.Module) -> QuantSpec | None:
    """The quantization of a module; None for floats."""
    if "scales" not in module:
        return None
    return QuantSpec(module.mode, module.bits, module.group_size)


def _target(
    model: nn.Module, path: str, module: nn.Module, now: QuantSpec | None, wanted: QuantSpec
) -> QuantSpec | None:
    if now is None and not hasattr(module, "to_quantized"):
        return None
    if not _fits(module, now, wanted):
        return now
    predicate = getattr(model, "quant_predicate", None)
    said = True if predicate is None else predicate(path, module)
    if isinstance(said, dict):
        wanted = QuantSpec(
            said.get("mode", "affine"), said.get("bits", 4), said.get("group_size", 64)
        )
        return wanted if _fits(module, now, wanted) else now
    return wanted if said else now


def _fits(module: nn.Module, now: QuantSpec | None, wanted: QuantSpec) -> bool:
    """Whether a row is a whole number of groups."""
    inputs = module.weight.shape[-1]
    inputs = inputs if now is None else inputs * 32 // now.bits
    return inputs % wanted.group_size == 0


def _fail_global_scale(path: str) -> NoReturn:
    raise UnsupportedModelError(
        "a weight has a scale for the whole tensor, which cannot be quantized again",
        tensor=path,
        expected="floats, or a quantization without global_scale",
        actual="nvfp4 with global_scale",
        remedy="pack it as it is: leave --bits and --mode out",
    )


def _fail_no_floats(path: str, dtype: mx.Dtype) -> NoReturn:
    raise UnsupportedModelError(
        "a weight to be quantized has neither floats nor scales",
        tensor=f"{path}.weight",
        expected="floats, or an MLX quantization",
        actual=f"{dtype}",
        remedy="convert the checkpoint to bfloat16 first",
    )


def converted_config(
    config: Mapping[str, Any], widths: Mapping[str, ModuleWidth], conversion: Conversion
) -> dict[str, Any]:
    """config.json of what is written.

    Args:
        config: as mlx-lm's ``load_model`` returns it.
    """
    made = copy.deepcopy(dict(config))
    made.pop("_name_or_path", None)
    used = {w.path: w.then for w in widths.values() if w.then is not None}
    text = made.get("text_config")
    for owner in (made, *([text] if isinstance(text, dict) else [])):
        owner.pop("quantization_config", None)
        if owner is not made:
            owner.pop("quantization", None)
    if not used:
        made.pop("quantization", None)
        return made
    default = conversion.rest or conversion.experts or _declared(made) or next(iter(used.values()))
    entries: dict[str, Any] = _entry(default)
    entries |= {path: _entry(spec) for path, spec in used.items() if spec != default}
    made["quantization"] = made["quantization_config"] = entries
    return made


def _declared(config: Mapping[str, Any]) -> QuantSpec | None:
    found = config.get("quantization")
    if not isinstance(found, dict) or not {"bits", "group_size"} <= found.keys():
        return None
    return QuantSpec(found.get("mode", "affine"), found["bits"], found["group_size"])


def _entry(spec: QuantSpec) -> dict[str, Any]:
    return {"group_size": spec.group_size, "bits": spec.bits, "mode": spec.mode}


def cast_dtype(config: Mapping[str, Any]) -> mx.Dtype | None:
    """The dtype that mlx_lm.convert gives to floats: the config's; None leaves them."""
    text = config.get("text_config")
    said = config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    return DTYPES.get(said) if isinstance(said, str) else None


def casts(model: nn.Module, dtype: mx.Dtype | None) -> Iterator[str]:
    """Names of the parameters that are cast to `dtype`."""
    if dtype is None:
        return
    predicate = getattr(model, "cast_predicate", lambda _: True)
    for name, array in tree_flatten(model.parameters()):
        if predicate(name) and mx.issubdtype(array.dtype, mx.floating) and array.dtype != dtype:
            yield name
