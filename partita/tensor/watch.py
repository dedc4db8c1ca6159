"""The watchers of a thread: who is told of what runs in it, where torch has no hook for that.

A `TorchFunctionMode` is called for torch's own functions. It is not called where an
`autograd.Function` is applied (a region that torch compiled is one), where a region that partita
compiled is called, or for what a redistribution carries. Rematerialisation runs a part of the
program again and must find each call of the first run in the second, so it is told of those here.
`HERE` has what watches this thread: rematerialisation, a capture, `explain`.
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
    """What is told of a call, and decides whether it is made."""

    def run_function(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """`function.apply(*args, **kwargs)`, or the call of a compiled region; `run()` does it."""

    def announce_write(self, t: torch.Tensor) -> None:
        """Take note that the autograd.Function that is applied now is about to write `t` in
        place."""

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The redistribution `what` (a plan of moves) of the local tensor `x`; `run()` carries it
        out."""


class Label(str):
    """The name of a call in reports. Calls that differ in nothing else are the same call."""


class _Here(threading.local):
    """What watches this thread, which runs a rank.

    Attributes:
        watcher: the `Watcher` that is told of calls.
        capturing: is a step being captured (see `compile.capture`)? Its tensors have no memory.
        recorder: notes where the nodes of a captured step come from, while it is captured.
        block: follows the block of a captured step that runs now, if one does.
        explainer: is told how each call is planned; while there is one, all are planned anew.
        step_in_blocks: while a step of a model with blocks is captured, makes the update of an
            elementwise optimizer, given it, what runs its step, and of which parameter each tensor
            that it updates is a part (itself where it is none).
        call_own: while a step is captured, makes a call of which the capture need not hear.
    """

    watcher: Any = None
    capturing: bool = False
    recorder: Any = None
    block: Any = None
    explainer: Any = None
    step_in_blocks: Any = None
    call_own: Any = None

    def unheard(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, a function of partita's during which no code of the user's runs."""
        return function(*args) if self.call_own is None else self.call_own(function, *args)

    @cached_property
    def unfinished(self) -> list[Callable[[], None]]:
        """For what has begun here and not ended (a block's forward), innermost last, the function
        that ends it."""
        return []

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """End what begins inside when it is left, in whichever way: torch does not call a module's
        forward hooks where its forward raises what is no `Exception`."""
        n = len(self.unfinished)
        try:
            yield
        finally:
            while len(self.unfinished) > n:
                self.unfinished.pop()()

    def outside_block(self) -> AbstractContextManager[None]:
        """A context in which calls are not taken for a part of the block that is followed."""
        return nullcontext() if self.block is None else self.block.suspended()


HERE = _Here()
