"""Watchers: who is told of calls that torch announces to nobody?

A `TorchFunctionMode` hears of torch's own functions. It does not hear of an `autograd.Function`
being applied (a region that torch compiled is one), nor of a region that partita
compiled, nor of what a redistribution carries. Whoever runs a part
of the program again, and must find each call of the first run in the second, is told of those here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch

__all__ = ["HERE", "Label", "Watcher"]


class Watcher(Protocol):
    """What is told, and decides whether the call is made."""

    def run_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """`function.apply(*args, **kwargs)`, or the call of a compiled region; `run()` does it."""

    def announce_write(self, t: torch.Tensor) -> None:
        """What is applied now is going to write `t` in place, which torch announces to nobody."""

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The redistribution `what` of the local tensor `x`, which `run()` carries."""


class Label(str):
    """What a call is called in reports; it decides nothing of what the call does."""


class _Here(threading.local):
    """Who watches this thread: a rank, or a part of one that runs alone.

    Attributes:
        watcher: who is told.
        capturing: is a step being captured (see `compile.capture`)? Its tensors have no memory.
        recorder: what notes where the nodes of a captured step come from, while it is captured.
        block: who follows the block of a captured step that runs now, if one does.
        explainer: who is told how each call is planned, and has it planned anew.
    """

    watcher: Any = None
    capturing: bool = False
    recorder: Any = None
    block: Any = None
    explainer: Any = None

    @cached_property
    def unfinished(self) -> list[Callable[[], None]]:
        """What has begun here and not ended, innermost last: how each is broken off."""
        return []

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """What begins inside ends with it, in whichever way it is left.

        A module's hooks are not called where its forward is left by what is no `Exception`.
        """
        n = len(self.unfinished)
        try:
            yield
        finally:
            while len(self.unfinished) > n:
                self.unfinished.pop()()

    def outside_block(self) -> AbstractContextManager[None]:
        """Within, what is called is no part of the block that is followed, if one is."""
        return nullcontext() if self.block is None else self.block.suspended()


HERE = _Here()
