"""What `zero` keeps beside a model: the one place where tests look for it."""

from __future__ import annotations

from torch import nn

from partita.parallel.fsdp_group import ZeroState
from partita.parallel.zero import GradReducer


def zero_state(model: nn.Module) -> ZeroState | GradReducer | None:
    """The state of a model to which `zero` was applied; None of any other."""
    return model.__dict__.get("_zero")
