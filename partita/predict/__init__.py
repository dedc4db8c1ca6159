"""Predictions of the time, memory and traffic of a step, before it runs.

In reading order:

- simulation: `machine` (speed of processor and links, times of collectives), `strategy` (models by
  name, and how one is distributed), `transformers_model` (a model of transformers), `simulate` (a
  graph simulated kernel by kernel), `calibrate` (measures a machine of CPUs), `calibrate_gpu`
  (measures a GPU), `autoplan` (searches for the fastest training configuration)
- planning without a simulation: `rehearsal` (runs a call on tensors without memory; memory of an
  eager step), `explain` (how each call is planned)
- `show`: draws layouts
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
