"""The trainer behind `partita train`, and the start of its ranks.

In reading order: `options`, `launch` (starts the ranks; messages if one fails) with `start_rank`,
`trainer` (the loop, its checkpoints, the timeline of a step), `data`, `models/`, `logs` (progress
on a terminal, and logs).
"""

from .launch import count_cores, is_launched, is_rank, joined, launch
from .logs import make_logs, make_progress
from .options import Mesh, Options, flag, options_in, read_positive, shown_mesh
from .trainer import train, verify

__all__ = [
    "Mesh",
    "Options",
    "count_cores",
    "flag",
    "is_launched",
    "is_rank",
    "joined",
    "launch",
    "make_logs",
    "make_progress",
    "options_in",
    "read_positive",
    "shown_mesh",
    "train",
    "verify",
]
