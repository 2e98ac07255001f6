"""mlx_stream: run Mixture-of-Experts models larger than memory by streaming their experts."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "load": "mlx_stream.runtime",
    "Runtime": "mlx_stream.runtime",
    "PrefillResult": "mlx_stream.runtime",
    "plan": "mlx_stream.planner.plan",
    "PrefillPlan": "mlx_stream.prefill.schedule",
    "StreamConfig": "mlx_stream.config",
    "Receipt": "mlx_stream.telemetry",
    "KvOptions": "mlx_stream.kv.options",
    "Conversation": "mlx_stream.conversation",
    "errors": "mlx_stream.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    """Import on first use: ``import mlx_stream`` stays fast and free of side effects."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_EXPORTS[name])
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
