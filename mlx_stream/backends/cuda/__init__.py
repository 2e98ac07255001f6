"""The CUDA backend: pinned host slots, a copy stream of its own, grouped-expert kernels."""
