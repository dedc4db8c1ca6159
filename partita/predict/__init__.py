"""Predictions of what a step costs, before it runs.

In reading order, of a simulation: `machine` (what a rank's processor and links do, and the times of
collectives), `timeline` (a graph played on streams, kernel by kernel), `strategy` (models by name,
and the ways to spread one), `simulate`; `eager_memory` (the memory of a step that is not compiled);
`calibrate` measures a machine. Of a plan: `plan_bounds`
(what a way takes at least), `autoplan` (the search). Of an explanation: `rehearsal` (a call is
planned and not run), `explain`. `show` draws layouts.
"""

from .autoplan import ModelPlan, PlannedWay, autoplan
from .eager_memory import eager_memory
from .explain import ConsideredRow, ExplainedMove, ExplainedOp, Explanation, explain
from .machine import Link, Machine, MachineError, load_machine, shipped_machines
from .show import Shown, show
from .simulate import Simulation, simulate
from .strategy import MODELS, ModelShape, Strategy, StrategyError

__all__ = [
    "MODELS",
    "ConsideredRow",
    "ExplainedMove",
    "ExplainedOp",
    "Explanation",
    "Link",
    "Machine",
    "MachineError",
    "ModelPlan",
    "ModelShape",
    "PlannedWay",
    "Shown",
    "Simulation",
    "Strategy",
    "StrategyError",
    "autoplan",
    "eager_memory",
    "explain",
    "load_machine",
    "shipped_machines",
    "show",
    "simulate",
]
