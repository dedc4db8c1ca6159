"""Calls of a region: what is noted of one, and what stands for a tensor that autograd saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .ambient_state import Draws
from .call_key import Key, describe, local_of
from .saved_results import KeptCall, KeptKernels

__all__ = ["Event", "Read", "SavedSlot"]

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
