"""Models to train: ordinary PyTorch, one file each."""

from .gpt import GPT
from .llama import Llama

__all__ = ["GPT", "Llama"]
