"""Calls of a region's first run: the record of one, the slots that stand for what autograd saved in
it, and the tensors from outside of the region that it read.

The second run reads those tensors anew: a parameter that was stepped in between would give other
values. So each call notes their versions. (Inputs are checked by autograd, and what the region
itself writes is restored for the second run.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Fix
from partita.tensor.tensor_state import state_of

from .ambient_state import AmbientState, RandomStates
from .call_key import Key, TensorOrigins, describe_call, make_local_alias
from .errors import RematError
from .saved_results import KeptCall, KeptKernels

__all__ = ["Read", "RecordedCall", "SavedSlot", "check_unwritten", "find_reads"]

Read = tuple[int, "weakref.ref[torch.Tensor]", int]
"""(index among the call's tensors, the tensor that holds the values at rest, its version)."""


class RecordedCall:
    """One call of the first run.

    Attributes:
        key, ordinal: its identity; the ordinal is among the calls of this key.
        number: among all calls of the run.
        slots: of the tensors that autograd saved in it, which the second run has to fill.
        draws: the states of random generators, where it draws.
        kept: its kept result, or None.
        reads: its tensors from outside of the region.
        borrowed: of a kept opaque call: saved tensors that are views of its inputs, as (input,
            size, stride, offset).
    """

    __slots__ = ("borrowed", "draws", "kept", "key", "number", "ordinal", "reads", "slots")

    def __init__(self, key: Key, ordinal: int, number: int):
        self.key, self.ordinal, self.number = key, ordinal, number
        self.slots: list[weakref.ref[SavedSlot]] = []
        self.draws: RandomStates | None = None
        self.kept: KeptKernels | KeptCall | None = None
        self.reads: tuple[Read, ...] = ()
        self.borrowed: list[tuple[Any, ...]] = []

    def __str__(self) -> str:
        return describe_call(self.key)


class SavedSlot:
    """Stands for a tensor that autograd saved. Only autograd holds it.

    Attributes:
        recompute: called with the slot, runs the region again to fill it.
        inside: the tensor was made within an opaque call, unseen.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "event",
        "inside",
        "recompute",
        "shape",
        "value",
        "version",
    )

    def __init__(
        self,
        recompute: Callable[[SavedSlot], None],
        event: RecordedCall,
        shape: torch.Size,
        dtype: torch.dtype,
    ):
        self.recompute, self.event, self.shape, self.dtype = recompute, event, shape, dtype
        self.value: torch.Tensor | None = None
        self.version = 0
        self.inside = False

    def fill(self, t: torch.Tensor) -> None:
        self.value = make_local_alias(t)
        self.version = self.value._version

    def take(self) -> torch.Tensor:
        """The tensor, recomputed if it is not here; the slot is empty afterwards."""
        if self.value is None:
            self.recompute(self)
        value, self.value = self.value, None
        assert value is not None
        if value._version != self.version:  # with hooks, autograd does not look
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {tuple(self.shape)}, saved by {self.event}"
            )
        return value


# -- tensors from outside of a region ---------------------------------------------------


def find_reads(tensors: list[torch.Tensor], origins: TensorOrigins) -> tuple[Read, ...]:
    """The `tensors` of a call that are from outside of its region, with their versions."""
    found: tuple[Read, ...] = ()
    for i, t in enumerate(tensors):
        if origins.of(t) is None:
            held, version = _find_source(t)
            found += ((i, weakref.ref(held), version),)
    return found


class _Named(Protocol):
    """What an error needs of a region: see `wrapped.Wrapped`."""

    @property
    def title(self) -> str: ...

    @property
    def module(self) -> nn.Module | None: ...


def check_unwritten(
    event: RecordedCall, tensors: list[torch.Tensor], region: _Named, ambient: AmbientState
) -> None:
    """Raise unless the second run's call that is `event` reads what the first one read.

    Args:
        region: that is run again, in these surroundings.

    Raises:
        RematError: a tensor was written in place in between. Names it, the call and both versions.
    """
    for i, ref, before in event.reads:
        if i >= len(tensors):
            continue
        held, now = _find_source(tensors[i])
        if now == before or ref() is not held or ambient.writes.has(held):
            continue
        name = _name_of(tensors[i], region.module)
        raise RematError(
            f"the recompute of {region.title} reads a tensor that was written in place "
            "since its forward read it",
            operands=(
                f"{name or f'tensor {i}'} of {event}",
                f"forward    read version {before}",
                f"recompute  reads version {now}",
            ),
            reason="gradients would be of values that forward did not have; without remat autograd "
            "says as much",
            fixes=(Fix("go backward first, and write it then", "an optimizer's step, say"),),
        )


def _find_source(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor that holds the values of `t` at rest, and the version that was read.

    A gathered parameter is a new tensor each time: its shard and the version of that, then.
    """
    rest = state_of(t).gathered_from
    if rest is not None:
        return rest
    with Local():
        return t, 0 if t.is_inference() else t._version


def _name_of(t: torch.Tensor, module: nn.Module | None) -> str | None:
    if module is None:
        return None
    named: Iterable[tuple[str, torch.Tensor]]
    for named in (module.named_parameters(), module.named_buffers()):
        for name, one in named:
            if one is t:
                return name
    return None
