"""Models on a mesh: the trainer and how its ranks start."""

from .launch import cores, is_rank, joined, launch
from .options import Mesh, Options, flag, options_in, read_positive, shown_mesh
from .progress import make_progress
from .trainer import train, verify

__all__ = [
    "Mesh",
    "Options",
    "cores",
    "flag",
    "is_rank",
    "joined",
    "launch",
    "make_progress",
    "options_in",
    "read_positive",
    "shown_mesh",
    "train",
    "verify",
]
