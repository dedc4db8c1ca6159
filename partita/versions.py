"""Versions: partita's own version, the tested versions of torch, and how torch versions differ.

Code checks torch for a feature, not for its version number, because a build between two releases
may have either form. Three differences need no check, because the same code works for all versions:

- torch 2.11 frees the tensors that an autograd node has saved when its result is freed
  (`remat/saved_state.py`)
- from 2.14 on a group norm raises for an input without channels (`rules/table/norms_and_losses.py`)
- from 2.14 on `Function.apply` is in C (`tensor/dtensor_gradients.py`)
"""

from __future__ import annotations

import re
from types import ModuleType

import torch

__version__ = "0.2.0"

_OLDEST, _NEWEST = (2, 11), (2, 14)
"""The oldest and newest release of torch that were tested; `pip install` accepts those."""

INPUT_CHECK = re.compile(
    r"^ +assert_size_stride\((?:\w+, .*, 'input'|arg\d+_\d+, [^'\n]*)\)\n", re.MULTILINE
)
"""Matches a line of Inductor's code that checks an input. Up to torch 2.12, only the tensor's name
distinguishes it from the check of a result."""


def describe_torch() -> str:
    """Returns the version of torch as text, with a remark if it is not a tested one."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if _OLDEST <= release <= _NEWEST:
        return torch.__version__
    tested = " to ".join(f"{major}.{minor}" for major, minor in (_OLDEST, _NEWEST))
    return f"{torch.__version__}, which was not tested: {tested} were"


def name_of_checkpoint_generator(checkpoints: ModuleType) -> str:
    """Returns the name of the generator in `checkpoints` that wraps a function.

    `checkpoints` is the module `torch.utils.checkpoint`. torch 2.14 renamed the generator.
    """
    name = "_checkpoint_without_reentrant_generator"
    return f"{name}_impl" if hasattr(checkpoints, f"{name}_impl") else name


def frames_hold_inputs(frame: type) -> bool:
    """True if `frame`, a class of `torch.utils.checkpoint`, has methods that save inputs.

    Torch 2.11 saves them by an `autograd.Function`.
    """
    return hasattr(frame, "save_inputs") and hasattr(frame, "get_inputs")


def base_of_scheduler_passes(passes: ModuleType) -> type:
    """Returns the base class for a custom Inductor pass over fused kernels.

    `passes` is torch's module with the class. Torch 2.11 has no class for it, and accepts any pass
    over graphs.
    """
    found: type = getattr(passes, "CustomSchedulerPass", passes.CustomGraphPass)
    return found
