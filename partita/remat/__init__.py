"""Keeping less for backward: recompute a region, but for the results that a policy keeps.

In reading order: `region` (the call), `policy` and `names` (what is kept), `mode` and `calls` (what
a region hears of), `record` (its forward), `recompute` (the second run) with `call_key`,
`saved_results`, `inputs`, `ambient_state` and `reads`, `opaque` (calls that are not entered),
`budget` and `report`, `live_memory` with `kernel_mode`, `in_graph` (in a captured step); `errors`,
and small parts: `tree` (nested values), `wrapped` (objects that stand for functions).
"""

from .errors import RematError
from .policy import Call, keep_collectives, one_call
from .recompute import is_recomputing
from .region import checkpoint_name, remat
from .report import Report, remat_report

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
