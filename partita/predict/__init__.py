"""Predictions of a step: what will it cost, before it runs?

In reading order: machine, collective_time, kernel_time, timeline, simulate, calibrate, plan_space,
autoplan; explain and show stand beside them.
"""

from .explain import explain
from .explanation import ConsideredRow, ExplainedMove, ExplainedOp, Explanation
from .show import Shown, show

__all__ = [
    "ConsideredRow",
    "ExplainedMove",
    "ExplainedOp",
    "Explanation",
    "Shown",
    "explain",
    "show",
]
