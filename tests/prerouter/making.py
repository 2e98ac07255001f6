"""Heads and specs for tests: random, or made to say what a test wants them to say."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from math import erf
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_stream.prerouter.spec import EDGE0_8B, EDGE0_35B, PrerouterSpec
from mlx_stream.prerouter.spec_file import SPEC_NAME, write_spec

PLAIN = "layers.{}.{}.weight"
NESTED = "layers.{}.mlp.prerouter.{}.weight"
HEADS = "prerouter.safetensors"

Arrays = dict[tuple[int, str], np.ndarray]


def form(
    which: str, owners: Sequence[int], consumers: Sequence[int], **changes: object
) -> PrerouterSpec:
    """A spec of one of the published forms, of other layers; the router is the model's own."""
    base = {"35b": EDGE0_35B, "8b": EDGE0_8B}[which]
    fixed = {"top_k": None, "router": None, "lora": None}
    fixed |= {"heads_file": HEADS, "name": f"test {which}"}
    both = fixed | {"owners": tuple(owners), "consumers": tuple(consumers)} | changes
    return replace(base, **both)  # type: ignore[arg-type]


def random_heads(
    spec: PrerouterSpec,
    hidden: int,
    experts: int,
    *,
    width: int = 16,
    seed: int = 0,
    dtype: type = np.float16,
    linear: bool = True,
) -> Arrays:
    """Noise of a size that gives logits of about 1."""
    rng, inputs = np.random.default_rng(seed), hidden + 2 * experts
    shapes = {"fc1": (width, inputs), "fc2": (experts, width), "linear_init": (experts, inputs)}
    found: Arrays = {}
    for owner in spec.owners:
        for part, shape in shapes.items():
            if part != "linear_init" or linear:
                values = rng.standard_normal(shape, np.float32) / shape[1] ** 0.5
                found[owner, part] = values.astype(dtype)
    return found


def save_heads(path: Path, arrays: Arrays, names: str = PLAIN) -> None:
    """As a safetensors file."""
    mx.save_safetensors(
        str(path), {names.format(owner, part): mx.array(a) for (owner, part), a in arrays.items()}
    )


def with_heads(
    checkpoint: Path, out: Path, spec: PrerouterSpec, arrays: Arrays, names: str = PLAIN
) -> Path:
    """A copy of a checkpoint with a Prerouter."""
    shutil.copytree(checkpoint, out)
    write_spec(out / SPEC_NAME, spec)
    save_heads(out / spec.heads_file, arrays, names)
    return out


def numpy_logits(
    arrays: Arrays, owner: int, x: np.ndarray, current: Sequence[int], previous: Sequence[int]
) -> np.ndarray:
    """A head in float64, written out: the independent reference."""
    fc1, fc2 = (arrays[owner, p].astype(np.float64) for p in ("fc1", "fc2"))
    experts = len(fc2)
    linear = arrays.get((owner, "linear_init"), np.zeros((experts, fc1.shape[1])))
    hot = np.zeros((2, experts))
    for row, ids in zip(hot, (current, previous), strict=True):
        row[list(ids)] = 1
    v = np.concatenate([x.astype(np.float64), *hot])
    h = fc1 @ v
    h = h * 0.5 * (1 + np.array([erf(a / 2**0.5) for a in h]))
    return linear.astype(np.float64) @ v + fc2 @ h
