"""torch.utils.checkpoint of functions that take DTensors, eager and in a captured step.

Eager, torch runs a region again in backward, on its inputs, which it saves as autograd saves
tensors. Where saved tensors are packed by hooks (an offload, a sharded block) autograd hands them
back as plain tensors, so their layouts are kept beside them. And torch compares the metadata of
what both runs saved: it is shown this rank's pieces, whichever way they are saved. Releases that do
not have `save_inputs` and `get_inputs` save the inputs by an autograd.Function, which is typed
anyway.

In a captured step a region is one as `pt.remat` makes it. Torch runs it again from random numbers
that it has put aside: a graph draws when it runs, and the second mask would be another. So capture
runs the region once and marks it; what is made again in backward is then chosen in the graph, which
keeps what was drawn.

Private torch: there is no public way to either. `checkpoint` makes a `_CheckpointFrame`, and calls
the two functions that are replaced below by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torchs
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils.checkpoint import _CheckpointFrame

from partita.versions import frames_hold_inputs, name_of_checkpoint_generator

from .dtensor import DTensor, tagged
from .watch import HERE

__all__ = ["BEGINS"]


_Frame: Any = _CheckpointFrame


def _compare_pieces() -> None:
    begin = _Frame.__init__

    def __init__(frame: Any, *args: Any, **kwargs: Any) -> None:
        begin(frame, *args, **kwargs)
        if frame.metadata_fn is not None:
            frame.metadata_fn = partial(_describe_piece, frame.metadata_fn)

    _Frame.__init__ = __init__


def _keep_layouts() -> None:
    save, get = _Frame.save_inputs, _Frame.get_inputs

    def save_inputs(frame: Any, *args: Any) -> None:
        save(frame, *args)
        frame._layouts = [a._spec if isinstance(a, DTensor) else None for a in args]

    def get_inputs(frame: Any) -> list[Any]:
        with torch.enable_grad():  # as the region itself is run again: an alias has its history
            return [
                tagged(a.view_as(a), spec) if spec is not None and type(a) is torch.Tensor else a
                for a, spec in zip(get(frame), frame._layouts, strict=True)
            ]

    _Frame.save_inputs, _Frame.get_inputs = save_inputs, get_inputs


def _describe_piece(describe: Any, x: torch.Tensor) -> Any:
    with Local():
        return describe(x)


_compare_pieces()
if frames_hold_inputs(_Frame):
    _keep_layouts()


# -- in a captured step ----------------------------------------------------------------------------

BEGINS = name_of_checkpoint_generator(torchs)
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
