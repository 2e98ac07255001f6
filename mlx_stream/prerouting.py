"""Fits a loaded model to its checkpoint's Prerouter, if it has one that is to be used."""

from __future__ import annotations

from dataclasses import replace

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.config import ConfigError
from mlx_stream.decode.decoder import Prerouting
from mlx_stream.decode.options import DecodeOptions
from mlx_stream.loader import LoadedModel
from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.prerouter.opening import choose_prerouter, open_prerouter


def prepare_prerouter(
    loaded: LoadedModel, options: DecodeOptions, backend: Backend, budget: MemoryBudget
) -> tuple[LoadedModel, Prerouting]:
    """The model as it is to run, and what routes it.

    With a Prerouter the model's number of experts a token may be another, and its resident bytes
    are more by the heads.

    Raises:
        ConfigError: the Prerouter was asked for together with options that exclude it.
        PrerouterError, CapabilityError, CheckpointError, BudgetError: see open_prerouter.
    """
    choice = choose_prerouter(
        loaded.index.checkpoint.path, options.prerouter, options.prerouter_spec
    )
    if choice.spec is None:
        return loaded, Prerouting(None, choice.reason, cache_offset)
    conflict = _conflict(options)
    if conflict is not None:
        if options.prerouter == "auto":
            return loaded, Prerouting(None, f"off: {conflict}", cache_offset)
        raise ConfigError(
            "these options exclude the Prerouter",
            expected="--decode-path auto or exact, and --predict auto or off",
            actual=conflict,
            remedy="leave them out, or run with --prerouter off",
        )
    opened = open_prerouter(
        choice.spec,
        choice.folder,
        loaded.model,
        loaded.streamed,
        loaded.slot,
        backend=backend,
        budget=budget,
        hidden=loaded.shape.hidden,
        dtype=loaded.dtype,
    )
    shape = replace(loaded.shape, top_k=choice.spec.top_k or loaded.shape.top_k)
    resident = loaded.resident_nbytes + opened.nbytes
    fitted = replace(loaded, shape=shape, resident_nbytes=resident)
    return fitted, Prerouting(opened, choice.reason, cache_offset)


def _conflict(options: DecodeOptions) -> str | None:
    if options.path not in ("auto", "exact"):
        return f"--decode-path {options.path}"
    if options.predict not in ("auto", "off"):
        return f"--predict {options.predict}"
    return None
