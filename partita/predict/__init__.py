"""Predictions of a step: what will it cost, before it runs?

In reading order: collective_time, machine with measured_curve, kernel_time with kernel_rates,
timeline, simulation, strategy, simulate, calibrate with calibrate_rank and kernel_deck, plan_space,
plan_bounds, way_search, plan_code, autoplan; explain and show stand beside them; `rehearsal`,
`explanation` and `call_text` belong to explain; `explain_command`, `simulate_command`,
`calibrate_command` and `plan_command` are on the command line.
"""

from .autoplan import ModelPlan, PlannedWay, autoplan
from .explain import explain
from .explanation import ConsideredRow, ExplainedMove, ExplainedOp, Explanation
from .machine import Link, Machine, MachineError, load_machine, shipped_machines
from .show import Shown, show
from .simulate import simulate
from .simulation import Simulation
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
