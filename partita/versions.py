"""Versions: partita's own, those of torch that were tested, and what these have in other forms.

Torch itself is asked, and not its number: a build between two releases has one form or the other.
Three differences need no question, since what suits all versions is no longer than what suits one:
torch 2.11 lets go of what an autograd node has saved when its result goes
(`remat/saved_state.py`); from 2.14 on a group norm takes no piece without channels
(`rules/table/norms_and_losses.py`), and `Function.apply` is in C (`tensor/dtensor_gradients.py`).
"""

from __future__ import annotations

import re
from types import ModuleType

import torch

__version__ = "0.2.0"

_OLDEST, _NEWEST = (2, 11), (2, 14)
"""The releases of torch of which tests have run: those that `pip install` accepts."""

INPUT_CHECK = re.compile(
    r"^ +assert_size_stride\((?:\w+, .*, 'input'|arg\d+_\d+, [^'\n]*)\)\n", re.MULTILINE
)
"""A line of Inductor's code that checks an input. Up to torch 2.12 only the tensor's name tells it
from the check of a result."""


def describe_torch() -> str:
    """The version of torch, with a word where it is none of those that were tested."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if _OLDEST <= release <= _NEWEST:
        return torch.__version__
    tested = " to ".join(f"{major}.{minor}" for major, minor in (_OLDEST, _NEWEST))
    return f"{torch.__version__}, which was not tested: {tested} were"


def name_of_checkpoint_generator(checkpoints: ModuleType) -> str:
    """The name of what `torch.utils.checkpoint` runs before and after a function that it will run
    again: another one from torch 2.14 on."""
    name = "_checkpoint_without_reentrant_generator"
    return f"{name}_impl" if hasattr(checkpoints, f"{name}_impl") else name


def frames_hold_inputs(frame: type) -> bool:
    """Does a frame of `torch.utils.checkpoint` save its inputs by methods of its own? Torch 2.11
    saves them by an `autograd.Function`."""
    return hasattr(frame, "save_inputs") and hasattr(frame, "get_inputs")


def base_of_scheduler_passes(passes: ModuleType) -> type:
    """The class of Inductor's passes over fused kernels. Torch 2.11 has none, and takes any pass
    over graphs."""
    found: type = getattr(passes, "CustomSchedulerPass", passes.CustomGraphPass)
    return found
