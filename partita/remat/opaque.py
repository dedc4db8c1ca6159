"""Opaque calls: what does autograd save in an opaque call, which is kept, or could be?

A region cannot see what such a call is made of: a compiled region, an `autograd.Function`, a
function of the user's. Of what autograd saves in it, views of its inputs are found again there;
the rest is kept with the call, or would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.parallel.nested_tensors import tensors_in

from .call_key import local_of
from .saved_results import start_of

__all__ = ["Inside", "SavedWithin"]


class SavedWithin:
    """A tensor that autograd saved within a kept call: as a region around, if any, packs it."""

    __slots__ = ("hooks", "packed")

    def __init__(self, t: torch.Tensor, hooks: tuple[Any, Any] | None):
        self.hooks = hooks
        self.packed = local_of(t) if hooks is None else hooks[0](local_of(t))

    def take(self) -> torch.Tensor:
        return self.packed if self.hooks is None else self.hooks[1](self.packed)


class Inside:
    """What autograd saves in an opaque call that is kept, or could be."""

    def __init__(self, inputs: list[torch.Tensor], keeps: bool):
        self.own: list[torch.Tensor] = []
        self._sizes: dict[int, int] = {}
        self._keeps = keeps
        self._starts = {(start_of(t), t.dtype): i for i, t in enumerate(inputs)}

    def place_of(self, t: torch.Tensor) -> tuple[Any, ...] | None:
        """Of a view of an input: (which, size, stride, offset). The second run has the input."""
        i = self._starts.get((start_of(t), t.dtype))
        return None if i is None else (i, t.size(), t.stride(), t.storage_offset())

    def holds(self, t: torch.Tensor) -> bool:
        """Is `t`, which is no view of an input, held as it is?"""
        if self._keeps:
            self.own.append(local_of(t))
        self._sizes[start_of(t)] = t.untyped_storage().nbytes()
        return self._keeps

    def fresh(self, out: Any) -> list[torch.Tensor]:
        """The tensors in `out` that are no views of inputs."""
        return [t for t in tensors_in(out) if (start_of(t), t.dtype) not in self._starts]

    def nbytes(self, out: Any) -> int:
        """What keeping the call would have cost."""
        with Local():
            sizes = {start_of(t): t.untyped_storage().nbytes() for t in tensors_in(out)}
        return sum((self._sizes | sizes).values())
