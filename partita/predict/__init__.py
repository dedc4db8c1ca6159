"""Predictions of a step: what will it cost, before it runs?

In reading order: machine, collective_time, kernel_time, timeline, simulation, strategy, simulate;
explain and show stand beside them.
"""

from .explain import explain
from .explanation import ConsideredRow, ExplainedMove, ExplainedOp, Explanation
from .machine import Link, Machine, MachineError, load_machine, shipped_machines
from .show import Shown, show
from .simulate import simulate
from .simulation import Simulation
from .strategy import MODELS, Strategy, StrategyError

__all__ = [
    "MODELS",
    "ConsideredRow",
    "ExplainedMove",
    "ExplainedOp",
    "Explanation",
    "Link",
    "Machine",
    "MachineError",
    "Shown",
    "Simulation",
    "Strategy",
    "StrategyError",
    "explain",
    "load_machine",
    "shipped_machines",
    "show",
    "simulate",
]
