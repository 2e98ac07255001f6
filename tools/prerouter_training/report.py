"""What the LoRA's phases report: perplexity on the excerpt, in float32, arm by arm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from mlx_stream.prerouter.spec import PrerouterSpec
from tools.prerouter_training.files import HEADS_NAME, LORA_NAME
from tools.prerouter_training.heads import Heads
from tools.prerouter_training.lora import Lora
from tools.prerouter_training.model import Student
from tools.prerouter_training.scores import perplexity
from tools.prerouter_training.weights import assemble
from tools.train_demo_model import fake_quantize, quantized_bits

CHECK_TOKENS = 160


@torch.no_grad()
def results(
    plain: Student, before: Path, after: Path, spec: PrerouterSpec, tokens: torch.Tensor
) -> dict[str, float]:
    """Perplexities of what a phase wrote, of its base, and of mixtures of them.

    ``merged`` has the LoRA added to the weights and these rounded as the checkpoint's are.
    ``check`` is of the first CHECK_TOKENS tokens as a decoding runtime sees them: it begins with
    one token of prompt, its first step routes itself, and from the third token on all is scored.

    Args:
        plain: the base in float32, with K and consumers.
        before, after: folders of the phase before and of this one, read again from their files.
        spec: of this one.
    """
    lora = load_lora(after, spec)
    heads = Heads.load(after / HEADS_NAME)
    student = replace(plain, heads=heads, lora=lora)
    earlier = Heads.load(before / HEADS_NAME).of(spec.owners)
    own_k = plain.base.shape.num_experts_per_tok
    check = {"predict_from": 2, "first": 2}
    arms = {
        "base, its own K": replace(plain, top_k=own_k),
        "base": plain,
        "base with LoRA, own routing": replace(student, heads=None),
        "predicted, heads before": replace(plain, heads=earlier),
        "predicted": replace(student, lora=None),
        "predicted with LoRA": student,
        "predicted, merged and rounded": merged(student),
    }
    found = {name: round(perplexity(arm, tokens), 4) for name, arm in arms.items()}
    part = tokens[:CHECK_TOKENS]
    found |= {
        f"check, {name}": round(perplexity(arms[name], part, **check), 4)
        for name in ("base, its own K", "predicted", "predicted with LoRA")
    }
    return found


def load_lora(folder: Path, spec: PrerouterSpec) -> Lora:
    """The LoRA that a phase left in its folder."""
    assert spec.lora is not None, "a phase with a LoRA has it in its spec"
    return Lora.load(folder / LORA_NAME, spec.lora.alpha, spec.lora.rank)


def merged(student: Student) -> Student:
    """The same without a LoRA: its product is in the weights, which are quantized again."""
    lora, weights = student.lora, dict(student.base.weights)
    assert isinstance(lora, Lora), "only a student with a LoRA can be merged"
    for layer in range(student.base.shape.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name, weight in lora.effective(prefix, student.base.layer(layer)).items():
            if f"{prefix}{name}".removesuffix(".weight") + ".lora_A" in lora.parameters:
                bits = quantized_bits(name)
                rounded = weight if bits is None else fake_quantize(weight, bits)
                weights[f"{prefix}{name}"] = rounded
    base = assemble(student.base.shape, weights, student.base.dtype)
    return replace(student, base=base, lora=None)
