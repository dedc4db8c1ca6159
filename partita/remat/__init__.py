"""Rematerialization: a region keeps less for backward, and is run again when backward needs the
rest.

In reading order: `region` (`remat`, the call; budgets; regions in a captured step), `policy` (which
results are kept), `watched_calls` (how a region sees calls, and the key of each), `record` (the
first run), `saved_state` (what is kept of it: inputs, ambient state, results), `recompute` (the
second run), `counters` (live bytes, and operations that are made again).
"""

from .counters import Report, remat_report
from .policy import Call, keep_collectives, one_call
from .record import is_recomputing
from .region import checkpoint_name, remat
from .watched_calls import RematError

__all__ = [
    "Call",
    "RematError",
    "Report",
    "checkpoint_name",
    "is_recomputing",
    "keep_collectives",
    "one_call",
    "remat",
    "remat_report",
]
