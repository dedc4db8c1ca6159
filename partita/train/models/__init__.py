"""Models to train: ordinary PyTorch, one file each."""

from .gpt import GPT

__all__ = ["GPT"]
