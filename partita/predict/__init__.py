"""Predictions of what a step costs, before it runs.

In reading order, of a simulation: `collective_time` (formulas of collectives), `machine` (what a
rank's processor and links do), `kernel_rates` and `kernel_time` (times of kernels), `timeline` (a
graph played on streams), `simulation` (what was found), `strategy` (named models), `simulate`;
`calibrate` and `calibrate_rank` measure a machine. Of a plan: `way` (all ways to spread a model),
`plan_bounds`, `way_search`, `autoplan`. Of an explanation: `explanation` (its data), `rehearsal` (a
run without memory), `explain`, `call_text` (a call said as text). `show` draws layouts; `commands`
are on the command line.
"""

from .autoplan import ModelPlan, PlannedWay, autoplan
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
    "explain",
    "load_machine",
    "shipped_machines",
    "show",
    "simulate",
]
