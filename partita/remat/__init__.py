"""Rematerialization: a region keeps less for backward, and is run again when backward needs the
rest.

In reading order: `region` (`remat`, the call), `policy` and `names` (which results are kept),
`modes` (how a region sees the functions and kernels that run), `record` (the first run) with
`calls` and `inputs`, `recompute` (the second run) with `call_key` (which call is which),
`saved_results` and `ambient_state` (random generators, autocast, buffers), `budget`, `report`,
`live_memory` (counting bytes), `in_graph` (regions in a captured step); `errors`, and `wrapped`
(objects that stand for functions).
"""

from .counters import Report, remat_report
from .policy import Call, keep_collectives, one_call
from .recompute import is_recomputing
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
