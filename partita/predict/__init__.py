"""Predictions of the time, memory and traffic of a step, before it runs.

In reading order, for a simulation: `machine` (a rank's processor and links, and the times of
collectives), `strategy` (models by name, and how one is distributed), `transformers_model` (a model
of transformers by its configuration), `simulate` (a graph simulated on streams, kernel by kernel).
`calibrate` measures a machine. `autoplan` searches for the fastest training configuration. For code
that is only planned: `rehearsal` (a call, and the memory of an eager step), `explain`. `show` draws
layouts.
"""

from .autoplan import ModelPlan, PlannedWay, autoplan
from .explain import ConsideredRow, ExplainedMove, ExplainedOp, Explanation, explain
from .machine import Link, Machine, MachineError, load_machine, shipped_machines
from .rehearsal import eager_memory
from .show import Shown, show
from .simulate import Simulation, simulate
from .strategy import MODELS, ModelShape, Strategy, StrategyError
from .transformers_model import shape_of_config

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
    "shape_of_config",
    "shipped_machines",
    "show",
    "simulate",
]
