"""Training of Prerouter heads and of the Recovery LoRA; PyTorch, extra ``train``."""
