"""Reads of a region: has what a region reads of the world around it been written since its forward?

The second run reads it anew: a parameter that was stepped in between would give other values. So
each call notes the version of what came neither in as an input nor from another call. (Inputs are
looked after by autograd, and what the region itself writes is as it was for the second run.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Fix
from partita.tensor.tensor_state import state_of

from .ambient_state import Surroundings
from .call_key import Origins
from .calls import Event, Read
from .errors import RematError

__all__ = ["check_unwritten", "reads"]


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
