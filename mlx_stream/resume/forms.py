"""Checks the forms in a checkpoint's manifest before anything is made of them. Pure.

They are what `prefill.layer_outputs.pack` and `prefill.stand_ins.seen` write. A form that passes
can be taken apart without an IndexError or a TypeError; whether its numbers are true is what the
checksums say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_DEPTH = 32
_SCALARS = (bool, int, float, str)
_KINDS = ("value", "array", "list", "tuple", "dict", "object")


def output_form(form: Any, arrays: int, depth: int = 0) -> bool:
    """Whether this is a form of a layer's output with `arrays` arrays."""
    if depth > MOST_DEPTH or not isinstance(form, dict):
        return False
    kind = next((k for k in _KINDS if k in form), None)
    inner = form.get(kind) if kind is not None else None
    if kind == "value":
        return inner is None or isinstance(inner, _SCALARS)
    if kind == "array":
        return type(inner) is int and 0 <= inner < arrays
    if kind in ("list", "tuple"):
        return isinstance(inner, list) and all(output_form(f, arrays, depth + 1) for f in inner)
    if kind == "dict":
        return isinstance(inner, list) and all(
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], _SCALARS)
            and output_form(pair[1], arrays, depth + 1)
            for pair in inner
        )
    state = form.get("state")
    return (
        isinstance(inner, str)
        and isinstance(state, dict)
        and all(output_form(f, arrays, depth + 1) for f in state.values())
    )


def changed_forms(forms: Any, arrays: int) -> bool:
    """Whether these are forms of dicts that a layer changed: ``[position, form]``."""
    return isinstance(forms, list) and all(
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) is int
        and 0 <= pair[0] < 1000
        and isinstance(pair[1], dict)
        and "dict" in pair[1]
        and output_form(pair[1], arrays)
        for pair in forms
    )


def seen_forms(seen: Any, dtypes: Sequence[str]) -> bool:
    """Whether this is what one chunk saw: for each cache entry a list of its leaves' states."""
    return isinstance(seen, list) and all(
        isinstance(entry, list)
        and all(
            isinstance(leaf, dict) and all(_seen_form(f, dtypes) for f in leaf.values())
            for leaf in entry
        )
        for entry in seen
    )


def _seen_form(form: Any, dtypes: Sequence[str], depth: int = 0) -> bool:
    if depth > MOST_DEPTH or not isinstance(form, dict):
        return False
    if "value" in form:
        return form["value"] is None or isinstance(form["value"], _SCALARS)
    if "shape" in form:
        shape = form["shape"]
        sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**31 for n in shape)
        return sizes and len(shape) <= 8 and form.get("dtype") in dtypes
    inner = form.get("list", form.get("tuple"))
    return isinstance(inner, list) and all(_seen_form(f, dtypes, depth + 1) for f in inner)
