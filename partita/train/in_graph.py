"""What is a block of ZeRO-3 while a step is captured? Placements, and nothing else.

Its parameters are gathered by a move, whose transpose reduces and scatters their gradients. When
they are gathered again for backward, and how long what was gathered lives, is for the passes of the
compiler, which see all uses: no hooks on saved tensors, no storage that is released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from partita.tensor.autograd import moved
from partita.tensor.dtensor import tagged

if TYPE_CHECKING:
    from .unit import Unit

__all__ = ["InGraph"]


class InGraph:
    """Shows the modules of one block their gathered parameters, while it runs."""

    def __init__(self, unit: Unit):
        self.unit = unit
        self.depth = 0
        self._shards: list[Any] = []

    def begin(self) -> None:
        """A forward of one of the block's modules begins."""
        self.depth += 1
        if self.depth > 1:  # a tied weight's other module, or the same module again, within
            return
        unit = self.unit
        self._shards = list(unit.shards())
        for places, p in zip(unit.slots, self._shards, strict=True):
            dtype = unit.zero.precision.param_dtype
            x = p if dtype is None else p.to(dtype)
            after = unit.zero.whole(x._spec)
            whole = tagged(moved(x, x._spec, after, unit.name, "gather"), after)
            for slot in places:
                slot.owner._parameters[slot.attr] = whole  # type: ignore[assignment]

    def end(self) -> None:
        """It has ended, or broken off."""
        self.depth -= 1
        if self.depth:
            return
        for places, p in zip(self.unit.slots, self._shards, strict=True):
            for slot in places:
                slot.owner._parameters[slot.attr] = p
        self._shards = []
