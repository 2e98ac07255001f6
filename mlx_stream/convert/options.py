"""What a conversion does to the weights: pure data, kept in the packed folder's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlx_stream.errors import PackError
from mlx_stream.storage.quant_spec import AFFINE_BITS, AFFINE_GROUPS, FIXED_MODES, QuantSpec

FIXED = {mode: QuantSpec(mode, bits, group) for (bits, group), mode in FIXED_MODES.items()}
DEFAULT_GROUP = 64
REFINED_BITS = 3  # at 4 bits refining was measured to gain nothing: docs/mixed_widths.md


@dataclass(frozen=True)
class Conversion:
    """How the weights of a source become those of a packed folder.

    Attributes:
        experts: quantization of the routed experts; None leaves them as they are.
        rest: of all other linear and embedding layers; None leaves them as they are.
        refine: whether scales and biases of affine groups are refined (see quantize.py), where
            there are at most REFINED_BITS bits.
    """

    experts: QuantSpec | None = None
    rest: QuantSpec | None = None
    refine: bool = False

    def __post_init__(self) -> None:
        for spec in (self.experts, self.rest):
            if spec is not None:
                _check(spec)
        if self.refine and not any(refinable(s) for s in self.specs):
            raise PackError(
                "there is nothing to refine",
                expected=f"an affine quantization to {REFINED_BITS} bits or fewer",
                actual=", ".join(s.name for s in self.specs) or "no quantization",
                remedy="leave --refine out, or ask for fewer bits",
            )

    @property
    def specs(self) -> tuple[QuantSpec, ...]:
        """Those that are asked for."""
        return tuple(s for s in (self.rest, self.experts) if s is not None)

    def as_json(self) -> dict[str, Any]:
        """For the manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Conversion:
        """From a manifest. Raises PackError for what no release wrote."""
        try:
            experts, rest = (_spec(found[key]) for key in ("experts", "rest"))
            refine = found["refine"]
            if type(refine) is bool:
                return cls(experts, rest, refine)
        except (KeyError, TypeError, AttributeError) as error:
            raise _malformed(found) from error
        raise _malformed(found)


def refinable(spec: QuantSpec) -> bool:
    """Whether refining helps: groups with a scale and a zero, and few codes."""
    return spec.mode == "affine" and spec.bits <= REFINED_BITS


def _malformed(found: Mapping[str, Any]) -> PackError:
    return PackError(
        "packed.json does not say how the weights were converted",
        expected="experts, rest and refine",
        actual=str(found)[:200],
        remedy="pack the checkpoint again",
    )


def _spec(found: Mapping[str, Any] | None) -> QuantSpec | None:
    return None if found is None else QuantSpec(found["mode"], found["bits"], found["group_size"])


def make_spec(mode: str, bits: int | None, group_size: int | None) -> QuantSpec:
    """A quantization with what is not given filled in: affine has groups of 64.

    Raises:
        PackError: a combination that MLX has not.
    """
    fixed = FIXED.get(mode)
    if fixed is not None:
        return QuantSpec(mode, _given(bits, fixed.bits), _given(group_size, fixed.group_size))
    if bits is None:
        raise PackError(
            "the affine mode needs a number of bits",
            expected=f"one of {AFFINE_BITS}",
            actual="none",
            remedy="add --bits",
        )
    return QuantSpec(mode, bits, _given(group_size, DEFAULT_GROUP))


def _given(value: int | None, default: int) -> int:
    """0 counts as given: MLX has no such quantization, and it must not pass for the default."""
    return default if value is None else value


def conversion_of(
    mode: str | None,
    bits: int | None,
    expert_bits: int | None,
    rest_bits: int | None,
    group_size: int | None,
    refine: bool,
) -> Conversion:
    """What the flags of ``mlx_stream pack`` ask for.

    A mode alone, or `bits`, is for everything; `expert_bits` and `rest_bits` are for one part.

    Raises:
        PackError: a combination that MLX has not, or that asks for nothing.
    """
    if bits is None and expert_bits is None and rest_bits is None and mode in (None, "affine"):
        if group_size is not None or mode is not None:
            raise PackError(
                "a quantization needs a number of bits",
                expected="--bits, --expert-bits or --rest-bits",
                actual=f"mode {mode}, group size {group_size}",
                remedy="add --bits",
            )
        return Conversion(refine=refine)
    everything = bits is not None or (expert_bits is None and rest_bits is None)

    def part(own: int | None) -> QuantSpec | None:
        if own is None and not everything:
            return None
        return make_spec(mode or "affine", own if own is not None else bits, group_size)

    return Conversion(part(expert_bits), part(rest_bits), refine)


def _check(spec: QuantSpec) -> None:
    if spec.mode in FIXED:
        good = spec == FIXED[spec.mode]
        expected = FIXED[spec.mode].name
    else:
        good = (
            spec.mode == "affine" and spec.bits in AFFINE_BITS and spec.group_size in AFFINE_GROUPS
        )
        expected = f"affine with {AFFINE_BITS} bits and groups of {AFFINE_GROUPS}, " + ", ".join(
            FIXED
        )
    if not good:
        raise PackError(
            "MLX has no such quantization",
            expected=expected,
            actual=f"{spec.mode}, {spec.bits} bits, groups of {spec.group_size}",
            remedy="choose another --mode, --bits or --group-size",
        )
