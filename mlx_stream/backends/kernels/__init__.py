"""Grouped-expert kernels: their sources, their launch parameters, and who runs them."""
