"""Conversion on the way into the packed layout: Hugging Face names, fused tensors, other widths."""
