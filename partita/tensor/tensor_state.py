"""Tensor state: what partita remembers of one tensor, beside its layout.

All of it is one `TensorState` in one attribute of the tensor, so that it is clear what a copy does
not take over, and what a tensor that takes another's place must be given. The spec alone, which
every op reads, is an attribute of its own (`_spec`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction as Unheard  # by modes, too

if TYPE_CHECKING:
    from .spec import Spec

__all__ = [
    "OURS",
    "MovedValue",
    "ReopenHook",
    "Rest",
    "TensorState",
    "count_writes",
    "count_writes_of",
    "own_state",
    "state_of",
    "was_written_since",
]

_STATE = "_partita"
OURS = frozenset(("_spec", _STATE))
"""Attributes of a DTensor that belong to us and are not copied as the user's own are."""


@dataclass(frozen=True)
class Rest:
    """The specs of a parameter's gradient and update, where ZeRO has them in another layout than
    it.

    Attributes:
        gradient: the spec of the gradient, once it is reduced.
        update: the spec of the optimizer's state, and of the part of the value that it updates.
        owner: what reduces the gradient early and gathers what was updated.
        name: of the block, whose gradients travel together.
    """

    gradient: Spec
    update: Spec
    owner: Any
    name: str = ""


@dataclass(frozen=True)
class MovedValue:
    """A tensor's value in the layout of `spec`, which is good as long as neither is written.

    Attributes:
        version: of the tensor that was moved, and whether gradients were recorded then.
        value_version: of `value`.
    """

    spec: Spec
    version: tuple[int, bool]
    value: torch.Tensor
    value_version: int


@dataclass(frozen=True)
class ReopenHook:
    """A tensor's hook that is taken off and registered again in every step.

    Private torch: it is put into the dictionary `_backward_hooks` itself. To register a hook costs
    3 microseconds for each parameter and step, a hook that is called for nothing 6.
    """

    id: int
    hook: Any


@dataclass(slots=True)
class TensorState:
    """What is known of one tensor; of most tensors nothing.

    Attributes:
        rest: the layouts in which ZeRO keeps its gradient and its update.
        gradient_of: the tensor whose `.grad` this object is, or was.
        origin: of a view copy, what it was copied from (an `Origin`).
        moved: its value in the last other layout that an op needed.
        reopens: the hook that makes a reduced gradient partial again, before backward adds to it.
        written_unseen: may it have been written through `.data`, which torch does not count?
        gathered_from: the parameter at rest that this is the gathered value of, and its version.
        was_plain: was it a plain parameter when an optimizer may have made its state for it?
        given_up: its name in the model that now holds another in its place, and what replaced it.
    """

    rest: Rest | None = None
    gradient_of: weakref.ref[Any] | None = None
    origin: Any = None
    moved: MovedValue | None = None
    reopens: ReopenHook | None = None
    written_unseen: bool = False
    gathered_from: tuple[torch.Tensor, int] | None = None
    was_plain: bool = False
    given_up: tuple[str, str] | None = None


_NOTHING = TensorState()


def state_of(x: torch.Tensor) -> TensorState:
    """What is known of `x`, to be read only: tensors of which nothing is known share one state."""
    state: TensorState = x.__dict__.get(_STATE, _NOTHING)
    return state


def own_state(x: torch.Tensor) -> TensorState:
    """The state of `x` alone, to be written."""
    state: TensorState | None = x.__dict__.get(_STATE)
    if state is None:
        state = x.__dict__[_STATE] = TensorState()
    return state


def count_writes(x: torch.Tensor) -> int:
    """How many writes of `x` torch has counted (its version); in inference it counts none."""
    with Unheard():
        return 0 if x.is_inference() else x._version


def count_writes_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`count_writes` of each."""
    with Unheard():
        return [0 if x.is_inference() else x._version for x in tensors]


def was_written_since(x: torch.Tensor, count: int) -> bool:
    """May `x` have other values than when `count` writes were counted?"""
    return count_writes(x) != count or state_of(x).written_unseen
