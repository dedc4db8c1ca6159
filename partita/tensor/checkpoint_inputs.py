"""Inputs of a checkpoint: on what does torch's checkpoint run a region again?

On its inputs, which it saves as autograd saves tensors. Where saved tensors are packed by hooks (an
offload, a sharded block) autograd hands them back as plain tensors, so their layouts are kept
beside them. And it compares what both runs saved: this rank's pieces, whichever way they are saved.
There is no public way to either: `_CheckpointFrame` is torch's own. Releases that do not have
these two methods save the inputs by an autograd.Function, which is typed anyway.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils.checkpoint import _CheckpointFrame

from .dtensor import DTensor, tagged

__all__: list[str] = []


_Frame: Any = _CheckpointFrame  # of which torch 2.11 lacks the two methods


def _compare_pieces() -> None:
    begin = _Frame.__init__

    def __init__(frame: Any, *args: Any, **kwargs: Any) -> None:
        begin(frame, *args, **kwargs)
        if frame.metadata_fn is not None:
            frame.metadata_fn = partial(_of_piece, frame.metadata_fn)

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


def _of_piece(describe: Any, x: torch.Tensor) -> Any:
    with Local():
        return describe(x)


_compare_pieces()
if hasattr(_Frame, "save_inputs") and hasattr(_Frame, "get_inputs"):
    _keep_layouts()
