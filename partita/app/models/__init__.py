"""Models to train, in ordinary PyTorch: `decoder` (what they have in common), `gpt`, `llama`."""

from .gpt import GPT
from .llama import Llama

__all__ = ["GPT", "Llama"]
