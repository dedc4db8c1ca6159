"""Ambient state: what the second run of a region must find as the first run found it.

Random generators, autocast, context variables and the default device; and buffers that the first
run wrote, such as the running statistics of a batch norm: within the second run they have the
values from before the first, afterwards those that they had before the second.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import read_autocast_state, use_autocast_state
from partita.comm.device import generators_in_use
from partita.tensor.op_facts import facts_of_function

__all__ = ["AmbientState", "BufferWrites", "RandomStates", "is_random"]

States = list[tuple[torch.Generator, torch.Tensor]]


# -- random numbers --------------------------------------------------------------------------------


def is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Does a call of this op draw random numbers?"""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
    return facts_of_function(name).draws or "generator" in kwargs


class RandomStates:
    """The states of the generators that a call draws from, before it and after."""

    def __init__(self, tensors: Iterable[torch.Tensor], kwargs: dict[str, Any] | None = None):
        generators = generators_in_use(t.device for t in tensors)
        own = (kwargs or {}).get("generator")
        if own is not None:
            generators.append(own)
        self.before: States = [(g, g.get_state()) for g in generators]
        self.after: States = []

    def over(self) -> bool:
        """Note the states after the call; True if it drew."""
        now = [(g, g.get_state()) for g, _ in self.before]
        self.after = [
            (g, state)
            for (g, state), (_, first) in zip(now, self.before, strict=True)
            if not torch.equal(state, first)
        ]
        return bool(self.after)


# -- buffers that a run writes ---------------------------------------------------------------------


class BufferWrites:
    """The buffers from outside of a region that it writes, with their values from before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def note(self, t: torch.Tensor) -> None:
        """`t` is going to be written."""
        if not self.has(t):
            with Local(), torch.no_grad():
                self._before[id(t)] = (weakref.ref(t), t.detach().clone())

    def has(self, t: torch.Tensor) -> bool:
        """Is `t` written by the run?"""
        known = self._before.get(id(t))
        return known is not None and known[0]() is t

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Within, the buffers have the values from before the first run; afterwards those of
        now."""
        now: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            with Local(), torch.no_grad():
                for ref, before in self._before.values():
                    t = ref()
                    if t is not None:
                        now.append((t, t.detach().clone()))
                        _set_value(t, before)
            yield
        finally:
            with Local(), torch.no_grad():
                for t, value in now:
                    _set_value(t, value)


def _set_value(t: torch.Tensor, value: torch.Tensor) -> None:
    # `.data`: autograd must not count this as a write, since in the end nothing has changed.
    torch._C.TensorBase.data.__get__(t).copy_(value)  # type: ignore[attr-defined]


# -- all of the state ------------------------------------------------------------------------------


class AmbientState:
    """The ambient state of a region's first run."""

    def __init__(self, devices: Iterable[torch.device]):
        devices = set(devices)
        self._states: States = [(g, g.get_state()) for g in generators_in_use(devices)]
        self._casting = read_autocast_state()
        self._cached = torch.is_autocast_cache_enabled()
        self._device = torch.empty(0).device
        self._context = contextvars.copy_context()
        self.writes = BufferWrites()
        self._touched: dict[torch.Generator, torch.Tensor] = {}

    @contextmanager
    def restored(self) -> Iterator[contextvars.Context]:
        """Within, the state of the first run; afterwards the state of now. Yields the context to
        run in."""
        self._touched = {}
        with ExitStack() as modes:
            modes.enter_context(use_autocast_state(self._casting, cache=self._cached))
            if torch.empty(0).device != self._device:
                modes.enter_context(self._device)
            modes.enter_context(self.writes.undone())
            modes.callback(self._put_back)
            self.draw_as(self._states)
            modes.enter_context(torch.enable_grad())
            yield self._context.copy()

    def draw_as(self, states: States) -> None:
        """Put generators into these states, until the run is over."""
        for generator, state in states:
            if generator not in self._touched:
                self._touched[generator] = generator.get_state()
            generator.set_state(state)

    def _put_back(self) -> None:
        for generator, state in self._touched.items():
            generator.set_state(state)
        self._touched = {}
