"""PyTorch, or one line that says how to get it, instead of a traceback."""

from __future__ import annotations

import sys

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("these tools need the extra 'train': pip install -e '.[train]'")

__all__ = ["torch"]
