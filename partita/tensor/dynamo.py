"""Dynamo: what `torch.compile` does where it meets a DTensor, and where it meets partita itself.

Dynamo knows of a tensor only what its class lets it see: of a DTensor the piece's sizes beside the
global ones. It must not trace one. Before anything else it reads an attribute of its own from a
tensor (is its address static?); of a DTensor that raises, after which the frame, with all that it
calls, runs as it would without `torch.compile`, with one warning. Where a whole graph was asked
for, that is the error. Of partita's own code Dynamo enters only what `_ENTERED` names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import after_import

from . import memory_view  # noqa: F401  what users hear comes first
from .dtensor import DTensor
from .tensor_overrides import OVERRIDES

__all__ = ["TOLD", "only_entered"]

F = TypeVar("F", bound=Callable[..., Any])

_SAID = (
    "torch.compile met a DTensor, which it cannot compile: what takes one runs as it is written "
    "(with fullgraph=True that is an error). pt.compile(step) compiles a step over DTensors"
)


_ENTERED = (
    *(
        f"tensor/{name}.py"
        for name in ("torch_patches torch_checkpoint constructors flex module_hooks").split()
    ),
    "parallel/optimizer.py",
    "remat/",
)
"""What Dynamo may enter: functions that stand in torch's own places, where plain programs are
compiled, too, and regions, which know what they are in a program that is compiled."""


def only_entered(function: F) -> F:
    """Have Dynamo run frames of `function` as they stand, though it enters it from others.

    One that asks `is_dynamo_compiling()` and is compiled by itself has that folded: what Dynamo
    should do would be what runs. Private: `torch.compiler` keeps Dynamo out of a function callers
    and all, not of its own frame alone.
    """
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def _skip_files(rules: Any) -> None:
    """Have Dynamo skip the frames of this package; `rules` is its module of what it skips."""
    package = Path(__file__).parents[1]
    rules.FORCE_SKIP_FILES.update(
        str(file)
        for file in package.rglob("*.py")
        if not file.relative_to(package).as_posix().startswith(_ENTERED)
    )


TOLD: list[str] = []
"""The warning, once this process has given it."""


def _refuse_dynamo(x: DTensor) -> Any:
    """The attribute that Dynamo reads first: it raises what makes Dynamo skip the frame."""
    if torch._guards.TracingContext.try_get() is None:  # somebody else asks
        raise AttributeError("_dynamo_static_input_type")
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    if not TOLD:
        TOLD.append(_SAID)
        warnings.warn(_SAID, stacklevel=2)
    refusal = Unsupported(_SAID, "a DTensor of partita", skip_frame=True)
    refusal.frame_exec_strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    raise refusal


def _ignore_static_address(x: DTensor, kind: str) -> None:
    """`mark_static_address` of a DTensor: whatever is compiled does not take it."""


DTensor._dynamo_static_input_type = property(_refuse_dynamo, _ignore_static_address)  # type: ignore[attr-defined]


def _answer_dynamo(function: Any) -> None:
    """Let Dynamo ask of a piece what users must not: it looks at what a plain tensor is a view of,
    and `x.to_local()` is a view of a DTensor."""
    refused = OVERRIDES[function]

    def answer_or_refuse(x: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch._guards.TracingContext.try_get() is None:
            return refused(x, *args, **kwargs)
        with Local():
            return function(x, *args, **kwargs)

    OVERRIDES[function] = answer_or_refuse


_answer_dynamo(torch.Tensor.untyped_storage)
_answer_dynamo(torch.Tensor.storage_offset)
after_import("torch._dynamo.trace_rules", _skip_files)  # which takes seconds
