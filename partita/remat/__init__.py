"""Keeping less for backward: recompute a region, but for the results that a policy keeps."""

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
