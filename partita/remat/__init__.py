"""Rematerialization: a region keeps less for backward, and is run again when backward needs the
rest.

In reading order: `region` (`remat`, the call; budgets; regions in a captured step), `watched_calls`
(how a region sees calls, the key of each, and which results a policy keeps), `runs` (the first run,
which is recorded, and the second), `saved_state` (what is kept for the second: inputs, ambient
state, results), `kept_results` (which of them a budget has room for), `counters` (live bytes, and
operations that are made again).
"""

from .counters import Report, remat_report
from .region import checkpoint_name, remat
from .runs import is_recomputing
from .watched_calls import Call, RematError, keep_collectives, one_call

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
