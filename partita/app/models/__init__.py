"""Models to train, in ordinary PyTorch: `decoder` (their common parts), `gpt`, `llama`."""

from .gpt import GPT
from .llama import Llama

__all__ = ["GPT", "Llama"]
