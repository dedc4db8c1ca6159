"""What does a rank hold while a move is under way?"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Done", "Summed", "UnderWay", "ordered_sum"]


class UnderWay(Protocol):
    """Something that the ranks have begun and that this rank has yet to wait for."""

    def wait(self) -> object:
        """Return when its result may be read (on a GPU: by work queued from now on)."""


class Done:
    """What was over when it returned."""

    def wait(self) -> None:
        pass


class Summed:
    """Shares that are being exchanged, and are summed when they have come.

    Each rank gets its piece of every rank's share and adds them in rank order, in the dtype of
    `out` but at least 32 bits: the sum is the same bits whichever collective brought the shares.
    """

    def __init__(self, exchange: UnderWay, shares: torch.Tensor, out: torch.Tensor):
        self._exchange, self._shares, self._out = exchange, shares, out

    def wait(self) -> None:
        self._exchange.wait()
        with torch.no_grad():
            ordered_sum(self._shares, self._out)


def ordered_sum(shares: torch.Tensor, out: torch.Tensor) -> None:
    """Sum `shares` (n, numel) over its rows, in their order, into `out` (numel)."""
    narrow = out.element_size() < 4 and out.is_floating_point()
    total = shares[0].float() if narrow else out.copy_(shares[0])
    for share in shares[1:]:
        total += share
    if narrow:
        out.copy_(total)
