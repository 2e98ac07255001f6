"""Tiny configs of the mlx-lm MoE families: what the streamed runtime must reproduce exactly.

All have 8 experts, a hidden size of 128 and widths that every quantization mode divides. Run them
in float32: on a CPU 16-bit gathers are slower and less exact.
"""

from __future__ import annotations

from tests.support import family_attention, family_hybrid, family_mla, family_windowed
from tests.support.family_base import ALL_MODES, EXPERTS, HIDDEN, VOCAB, FamilyCase

__all__ = ["ALL_MODES", "EXPERTS", "FAMILIES", "HIDDEN", "VOCAB", "FamilyCase", "with_tag"]

GROUPS = (family_attention, family_windowed, family_mla, family_hybrid)
FAMILIES: dict[str, FamilyCase] = {c.name: c for group in GROUPS for c in group.CASES}


def with_tag(*tags: str) -> list[str]:
    """Names of the families that carry all of `tags`."""
    return [name for name, family in FAMILIES.items() if family.tags >= set(tags)]
