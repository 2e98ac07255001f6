"""What a decoder layer hands to the next one, taken apart into arrays and a JSON-ready form.

mlx-lm's layers return arrays, tuples (hyper-connection streams, shared keys), or change an object
or a dict that they were given. Whatever is of another kind is refused, never guessed.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlx_stream.errors import CapabilityError

_SCALARS = (bool, int, float, str)


def pack(value: Any, arrays: list[mx.array]) -> Any:
    """A JSON-ready form of `value`; its arrays are appended to `arrays`.

    Raises:
        CapabilityError: it holds something that cannot be stored.
    """
    if value is None or isinstance(value, _SCALARS):
        return {"value": value}
    if isinstance(value, mx.array):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if type(value) in (list, tuple):
        kind = type(value).__name__
        return {kind: [pack(v, arrays) for v in value]}
    if type(value) is dict and all(isinstance(k, _SCALARS) for k in value):
        return {"dict": [[k, pack(v, arrays)] for k, v in value.items()]}
    if hasattr(value, "__dict__") and not isinstance(value, dict):
        state = {k: pack(v, arrays) for k, v in vars(value).items()}
        return {"object": type(value).__name__, "state": state}
    raise CapabilityError(
        "a layer of this model hands on what cannot be stored",
        expected="arrays, numbers, lists, tuples or dicts of them",
        actual=type(value).__name__,
        remedy="run this model without --checkpoint-dir",
    )


def unpack(form: Any, arrays: list[mx.array], given: list[Any]) -> Any:
    """What :func:`pack` took apart.

    Args:
        given: what the layer was called with: an object comes back as the one of its class that
            is among them, with the packed state.
    """
    if "value" in form:
        return form["value"]
    if "array" in form:
        return arrays[form["array"]]
    if "list" in form:
        return [unpack(f, arrays, given) for f in form["list"]]
    if "tuple" in form:
        return tuple(unpack(f, arrays, given) for f in form["tuple"])
    if "dict" in form:
        return {k: unpack(f, arrays, given) for k, f in form["dict"]}
    for value in given:
        if type(value).__name__ == form["object"] and hasattr(value, "__dict__"):
            for key, state in form["state"].items():
                vars(value)[key] = unpack(state, arrays, given)
            return value
    raise CapabilityError(
        "a layer of this model hands on an object that it was not given",
        expected=f"a {form['object']} among its arguments",
        actual=", ".join(type(value).__name__ for value in given),
        remedy="run this model without --checkpoint-dir",
    )


def given_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call, in a fixed order."""
    return [*args, *(kwargs[name] for name in sorted(kwargs))]


def pack_changed(given: list[Any], arrays: list[mx.array]) -> list[Any]:
    """Dicts among a layer's arguments, which it may have changed, as ``[position, form]``."""
    return [[n, pack(v, arrays)] for n, v in enumerate(given) if type(v) is dict]


def put_changed(forms: list[Any], arrays: list[mx.array], given: list[Any]) -> None:
    """Put what :func:`pack_changed` took apart into the dicts of another call."""
    for position, form in forms:
        given[position].clear()
        given[position].update(unpack(form, arrays, given))
