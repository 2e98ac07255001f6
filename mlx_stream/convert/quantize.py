"""Temporary."""

from mlx_stream.packed.quantize import Quantized, quantize

__all__ = ["Quantized", "quantize"]
