"""Calls of a region: what is noted of one, and what stands for a tensor that autograd saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Fix
from partita.tensor.tensor_state import state_of

from .ambient_state import Draws, Surroundings
from .call_key import Key, Origins, describe, local_of
from .errors import RematError
from .saved_results import KeptCall, KeptKernels

__all__ = ["Event", "Read", "SavedSlot", "check_unwritten", "reads"]

Read = tuple[int, "weakref.ref[torch.Tensor]", int]
"""Of a tensor of a call: its place among them, what holds its values at rest, and its version."""


class Event:
    """One call of the first run.

    Attributes:
        key, ordinal: its identity; ordinal among the calls of this key.
        number: among all calls of the run.
        slots: the tensors that autograd saved in it, which the second run has to bring.
        draws: the states of random generators, where it draws.
        kept: what was kept of it.
        reads: the tensors of the world around that go in.
        borrowed: of a kept opaque call, which slots lie in which of its inputs, and where.
    """

    __slots__ = ("borrowed", "draws", "kept", "key", "number", "ordinal", "reads", "slots")

    def __init__(self, key: Key, ordinal: int, number: int):
        self.key, self.ordinal, self.number = key, ordinal, number
        self.slots: list[weakref.ref[SavedSlot]] = []
        self.draws: Draws | None = None
        self.kept: KeptKernels | KeptCall | None = None
        self.reads: tuple[Read, ...] = ()
        self.borrowed: list[tuple[Any, ...]] = []

    def __str__(self) -> str:
        return describe(self.key)


class SavedSlot:
    """Stands for a tensor that autograd saved. Autograd alone holds it.

    Attributes:
        recompute: called with the slot, has its tensor made again.
        inside: it was made within an opaque call, unseen.
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
        event: Event,
        shape: torch.Size,
        dtype: torch.dtype,
    ):
        self.recompute, self.event, self.shape, self.dtype = recompute, event, shape, dtype
        self.value: torch.Tensor | None = None
        self.version = 0
        self.inside = False

    def fill(self, t: torch.Tensor) -> None:
        self.value = local_of(t)
        self.version = self.value._version

    def take(self) -> torch.Tensor:
        """The tensor, recomputed if it is not here. It is let go again."""
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


# -- what a region reads of the world around it ---------------------------------------------------


def reads(tensors: list[torch.Tensor], origins: Origins) -> tuple[Read, ...]:
    """Which of a call's `tensors` were there before its region, and in which version."""
    found: tuple[Read, ...] = ()
    for i, t in enumerate(tensors):
        if origins.of(t) is None:
            held, version = _at_rest(t)
            found += ((i, weakref.ref(held), version),)
    return found


class _Named(Protocol):
    """What an error says of a region: see `wrapped.Wrapped`."""

    @property
    def title(self) -> str: ...

    @property
    def module(self) -> nn.Module | None: ...


def check_unwritten(
    event: Event, tensors: list[torch.Tensor], region: _Named, surroundings: Surroundings
) -> None:
    """Of the second run's call that is `event`: does it read what the first one read?

    Args:
        region: that is run again, in these surroundings.

    Raises:
        RematError: a tensor was written in place in between. Names it, the call and both versions.
    """
    for i, ref, before in event.reads:
        if i >= len(tensors):
            continue
        held, now = _at_rest(tensors[i])
        if now == before or ref() is not held or surroundings.writes.has(held):
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


def _at_rest(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What holds the values of `t` when no region runs, and in which version they were read.

    A gathered parameter is new each time: its shards say of which version it was gathered.
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
