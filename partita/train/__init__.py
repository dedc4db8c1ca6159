"""Models on a mesh: the trainer and how its ranks start."""

from .launch import cores, is_rank, joined, launch
from .progress import make_progress
from .trainer import Options, train, verify

__all__ = [
    "Options",
    "cores",
    "is_rank",
    "joined",
    "launch",
    "make_progress",
    "train",
    "verify",
]
