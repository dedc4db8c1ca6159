"""torch.utils.checkpoint in a captured step: a region, as `pt.remat` makes one.

Torch runs the region again in backward, from random numbers that it has put aside: a graph draws
when it runs, and the second mask would be another. So capture runs the region once and marks it;
what is made again in backward is then chosen in the graph, which keeps what was drawn.

Private torch: there is no public way to be asked. `checkpoint` calls these two, by these names, of
which one was another before torch 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torchs

from .watch import HERE

__all__ = ["BEGINS"]

_PLAIN = "_checkpoint_without_reentrant_generator"
BEGINS = f"{_PLAIN}_impl" if hasattr(torchs, f"{_PLAIN}_impl") else _PLAIN
"""The name of what `checkpoint` calls before and after a function that it will run again."""
_begin = getattr(torchs, BEGINS)


def _begin_or_mark(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    return _mark_remat_region() if HERE.capturing else _begin(function, *args, **kwargs)


def _mark_remat_region() -> Iterator[None]:
    with HERE.recorder.region():
        yield


def _apply_or_mark(cls: type[Any], function: Any, preserve: bool, *args: Any) -> Any:
    if not HERE.capturing:
        return super(torchs.CheckpointFunction, cls).apply(function, preserve, *args)
    # One that runs its forward without gradients has some where an argument has.
    trains = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with HERE.recorder.region(), torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return function(*args)


setattr(torchs, BEGINS, _begin_or_mark)
torchs.CheckpointFunction.apply = classmethod(_apply_or_mark)  # type: ignore[assignment]
