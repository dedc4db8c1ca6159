"""Rematerialization: a *region* (a function or module) saves less for backward, and runs its
forward again in backward.

In reading order: `region` (`remat`; budgets; regions in a captured step), `watched_calls` (how a
region intercepts calls, the key of each, and which results a policy keeps), `runs` (the first run
of a region, which is recorded, and the second), `saved_state` (what is kept for the second run:
inputs, ambient state, results), `kept_results` (which results fit a budget), `counters` (live
bytes, and recomputed operations).
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
