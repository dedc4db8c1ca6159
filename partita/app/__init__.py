"""The trainer of `partita train`, and the start of its ranks.

In reading order: `options`, `launch` with `start_rank` and `failures`, `trainer`, `data`,
`models/`, `progress`, `logs`, `step_timeline`, `checkpoint_schedule`; `cache_table` (`partita
cache`).
"""

from .launch import count_cores, is_rank, joined, launch
from .logs import make_logs, make_progress
from .options import Mesh, Options, flag, options_in, read_positive, shown_mesh
from .trainer import train, verify

__all__ = [
    "Mesh",
    "Options",
    "count_cores",
    "flag",
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
