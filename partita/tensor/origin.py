"""The origin of a view copy: what it was copied from, and whether it is up to date.

A view copy is a tensor with memory of its own that would be a view on one device (see `aliasing`).
There a view shows what is written into its base afterwards. So a view copy is taken again when it
is read and its source was written since. Torch counts a tensor's writes, and every write of ours is
counted on all ranks alike, so that all take it again together. In inference mode nothing is
counted, and it is taken again at each read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

# Not public, but a copy may be asked for where torch-function is disabled, and nothing else turns
# it on again. Without it the view would be taken of the shard.
from torch._C import _EnableTorchFunction

from .tensor_state import state_of

__all__ = ["Origin", "count_writes_or_none", "current"]


@dataclass(slots=True)
class Origin:
    """What a view copy is of: `view(source, *args, **kwargs)`, of several results number `index`.

    Attributes:
        source: an alias of the tensor, whose shape stays as it was.
        source_writes: how often `source` was written before the copy was taken; None in inference.
        retaken: the copy that was taken last in its place, with what it was taken from:
            (source, its writes, with gradients?, copy).
        graded: was it taken where gradients are recorded? Else it has none, wherever it is read.
    """

    source: Any
    view: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    index: int | None
    source_writes: int | None
    retaken: tuple[Any, int, bool, Any] | None = None
    graded: bool = field(default_factory=torch.is_grad_enabled)

    def take_again(self, copy: Any) -> Any:
        """`copy` if it is up to date, else the same part of the source as it is now."""
        source = current(self.source)
        count, graded = count_writes_or_none(source), self.graded and torch.is_grad_enabled()
        if count is not None:
            if source is self.source and count == self.source_writes:
                return copy
            retaken = self.retaken
            if retaken is not None and retaken[0] is source and retaken[1:3] == (count, graded):
                return retaken[3]
        with _EnableTorchFunction(), torch.set_grad_enabled(graded):
            part = self.view(source, *self.args, **self.kwargs)
            if self.index is not None:
                part = part[self.index]
        if count is not None:
            self.retaken = (source, count, graded, part)
        return part


def current(x: Any) -> Any:
    """`x`; where it is a view copy that is out of date, the same part of its source as it is
    now."""
    origin = state_of(x).origin
    return x if origin is None else origin.take_again(x)


def count_writes_or_none(x: torch.Tensor) -> int | None:
    """How often the memory of `x` was written; None where torch does not count."""
    with Local():
        return None if x.is_inference() else x._version
