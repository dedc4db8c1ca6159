"""Rematerialization (activation checkpointing): a function or module saves less for backward.

Its forward then runs again in backward. Such a function or module is a *region*. In reading order:
`region` (`remat`; budgets), `watched_calls` (intercepts the calls in a region; which results are
kept), `runs` (the first run of a region, which is recorded, and the second, in backward),
`saved_state` (what is kept for the second run: inputs, random states, results), `kept_results`
(which results fit a budget), `counters` (live bytes, and recomputed operations).
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
