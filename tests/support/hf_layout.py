"""Checkpoints in the layouts in which models are published: one tensor per expert, fused blocks.

Made from the mlx-lm form of a generated checkpoint. What mlx-lm makes of them again is the
reference of the tests, so a layout here need only be one that mlx-lm accepts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

_EXPERTS = re.compile(
    r"(?P<base>.+?)\.(?P<owner>switch_mlp|switch_glu|experts)\."
    r"(?P<proj>gate_proj|up_proj|down_proj|fc1|fc2)\.(?P<part>weight|bias)"
)
Weights = dict[str, mx.array]
Style = Callable[[Weights], Weights]


def _each(names: dict[str, str]) -> Style:
    """One tensor per expert; projections that `names` has not keep theirs."""

    def style(weights: Weights) -> Weights:
        made: Weights = {}
        for name, value in weights.items():
            m = _EXPERTS.fullmatch(name)
            if m is None:
                made[name] = value
                continue
            proj = names.get(m["proj"], m["proj"])
            for e in range(value.shape[0]):
                made[f"{m['base']}.experts.{e}.{proj}.{m['part']}"] = mx.contiguous(value[e])
        return made

    return style


def _fused(gate_up: str, down: str, *, swap: bool) -> Style:
    """Gate and up in one tensor of all experts; `swap`: rows are inputs."""

    def turn(a: mx.array) -> mx.array:
        return mx.contiguous(mx.swapaxes(a, 1, 2) if swap else a)

    def style(weights: Weights) -> Weights:
        made: Weights = {}
        for name, value in weights.items():
            m = _EXPERTS.fullmatch(name)
            if m is None:
                made[name] = value
            elif m["proj"] == "down_proj":
                made[f"{m['base']}.{down}"] = turn(value)
            elif m["proj"] == "gate_proj":
                up = weights[name.replace("gate_proj", "up_proj")]
                made[f"{m['base']}.{gate_up}"] = turn(mx.concatenate([value, up], axis=1))
        return made

    return style


STYLES: dict[str, Style] = {
    "each": _each({}),
    "w123": _each({"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}),
    "up_down": _each({"fc1": "up_proj", "fc2": "down_proj"}),
    "fused": _fused("experts.gate_up_proj", "experts.down_proj", swap=False),
    "fused_inner": _fused("gate_up_proj", "down_proj", swap=False),
    "fused_swapped": _fused("experts.gate_up_proj", "experts.down_proj", swap=True),
    "linear": _fused("input_linear.weight", "output_linear.weight", swap=False),
}


def mxfp4_blocks(weights: Weights) -> Weights:
    """gpt_oss: 4-bit blocks of 32 values, gate and up rows taking turns."""
    made: Weights = {}
    for name, value in weights.items():
        m = re.fullmatch(
            r"(.+\.experts)\.(gate_proj|up_proj|down_proj)\.(weight|scales|bias)", name
        )
        if m is None:
            made[name] = value
            continue
        base, proj, part = m.groups()
        suffix = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[part]
        if proj == "up_proj":
            continue
        if proj == "gate_proj":
            up = weights[name.replace("gate_proj", "up_proj")]
            value = mx.stack([value, up], axis=2).reshape(value.shape[0], -1, *value.shape[2:])
            proj = "gate_up_proj"
        if part == "weight":
            value = value.view(mx.uint8).reshape(*value.shape[:2], -1, 16)
        made[f"{base}.{proj}{suffix}"] = mx.contiguous(value)
    return made


def fp8_blocks(weights: Weights) -> Weights:
    """deepseek_v3: 8-bit floats with a scale for each 128 x 128 block, one tensor per expert."""
    made: Weights = {}
    for name, value in STYLES["each"](weights).items():
        if ".experts." not in name or not name.endswith(".weight"):
            made[name] = value
            continue
        rows, columns = (-(-n // 128) for n in value.shape)
        scale = mx.random.uniform(0.5, 2.0, (rows, columns), key=mx.random.key(len(made)))
        made[name] = mx.to_fp8(value.astype(mx.float32))
        made[f"{name}_scale_inv"] = scale
    return made


def publish(mlx_folder: Path, out: Path, style: Style, shards: int = 2) -> Path:
    """Write the checkpoint at `mlx_folder` in another layout at `out`."""
    weights: Weights = {}
    for file in sorted(mlx_folder.glob("model*.safetensors")):
        weights.update(mx.load(str(file)))
    made = style(weights)
    out.mkdir(parents=True)
    names = list(made)
    for n in range(shards):
        part = {name: made[name] for name in names[n::shards]}
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(out / file), part, {"format": "pt"})
    for file in mlx_folder.iterdir():
        if file.suffix != ".safetensors" and not file.name.endswith("index.json"):
            shutil.copy(file, out)
    return out


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
