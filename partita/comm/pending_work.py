"""Pending work: what a rank holds while a collective is under way, and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["CompletedWork", "PendingList", "PendingSum", "PendingWork", "sum_in_rank_order"]


class PendingWork(Protocol):
    """A collective that the ranks have begun and that this rank has yet to wait for."""

    def wait(self) -> object:
        """Return when its result may be read (on a GPU: by work queued from now on)."""


class CompletedWork:
    """Work that was complete when it was returned."""

    def wait(self) -> None:
        pass


class PendingList:
    """Several pieces of work under way, waited for in order."""

    def __init__(self, parts: Sequence[PendingWork]):
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


class PendingSum:
    """An exchange of shares that are summed when they have arrived.

    Each rank gets its piece of every rank's share and adds them in rank order, in the dtype of
    `out` but at least 32 bits: the sum is the same bits whichever collective brought the shares.
    """

    def __init__(self, exchange: PendingWork, shares: Sequence[torch.Tensor], out: torch.Tensor):
        self._exchange, self._shares, self._out = exchange, shares, out

    def wait(self) -> None:
        self._exchange.wait()
        with torch.no_grad():
            sum_in_rank_order(self._shares, self._out)


def sum_in_rank_order(shares: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Sum `shares`, in their order, into `out`, which may be one of them."""
    narrow = out.element_size() < 4 and out.is_floating_point()
    first, *rest = shares
    if narrow:
        total = first.float()
    else:
        total = out if out.dtype == first.dtype and rest else first.to(out.dtype)
        if total is out:
            torch.add(first, rest.pop(0), out=out)
    for share in rest:
        total = total.add_(share) if total is not first else total + share
    if total is not out:
        out.copy_(total)
