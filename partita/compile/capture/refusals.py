"""Refusals: errors of torch during capture, explained as what the step does and at which line."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from partita.comm import Uneven, user_line
from partita.layout import Fix, LayoutError

from ..errors import CaptureError, not_captured, of_data

__all__ = ["explain_error", "not_an_input", "user_line_of"]

_NUMBERS = [f"{stem}{kind}" for stem in ("Sym", "Symbolic") for kind in ("Float", "Int", "Bool")]

_TORCH, _PARTITA = Path(torch.__file__).parent, Path(__file__).parents[2]

# Parts of torch's messages where a fake tensor is asked for its memory.
_OF_MEMORY = (
    "torch.storage.UntypedStorage",
    "elem.device.type must be",
    ".numpy() is not supported",
)


def explain_error(error: Exception, line: str, function: str = "") -> Exception:
    """A CaptureError that says what the step did; the error itself where it is the step's own.

    Args:
        error: raised while a step was captured.
        line: the user's line that raised it.
        function: of torch, that the step called last by name.
    """
    if isinstance(error, Uneven):
        return not_captured(error.fact, error.reason, place=error.place)
    if isinstance(error, LayoutError):
        return error
    if isinstance(error, DynamicOutputShapeException):
        return of_data(error.func._schema.name, place=line)
    text = str(error).strip().split("\n")[0]
    if any(asks in text for asks in _OF_MEMORY):
        return not_captured(
            "the step asks for a tensor's memory (copy.copy, copy.deepcopy, .numpy())",
            "while it is captured tensors have none",
            Fix("x.detach().clone()", "a copy that is part of the graph"),
            place=line,
        )
    if (
        isinstance(error, DataDependentOutputException)
        or "_local_scalar_dense" in str(error)
        or "data-dependent" in str(error).lower()
        or "data is not allocated yet" in text  # a kernel that reads what has no memory
        or any(f"passed to {name}." in text for name in _NUMBERS)
    ):
        asking = _code_of_torch(error)
        if not asking and hasattr(torch, function):  # not where a tensor's own method asks
            asking = f"torch.{function}"
        return not_captured(
            f"the step reads a value{asking and f', in {asking}'}",
            "while it is captured there are no values: float(x), a branch on x and text that x is "
            "put into ask for one; what .item() gives may be reckoned with, and be returned",
            _WITHOUT_READING.get(asking, Fix("return the tensor", "and read it outside")),
            place=line,
        )
    op, _, rest = text.partition(": ")
    if rest.startswith("attempted to run this operator with Meta tensors"):
        return not_captured(
            f"the step calls {op.removeprefix('aten::')}, which needs memory",
            "nothing says which shape it gives, and while it is captured tensors have no values",
            Fix(f'torch.library.register_fake("{op}")', "for an op of your own"),
            Fix("call it before the step", "and give its result as an argument"),
            place=line,
        )
    if "a leaf Variable that requires grad is being used in an in-place" in text:
        return not_captured(
            "the step writes in place what has a history",
            "an argument's history would be another after the call, or a parameter would have one",
            Fix("x = x.clone()", "first"),
            Fix("with torch.no_grad()", "around an update"),
            place=line,
        )
    if _has_functorch_frame(traceback.walk_tb(error.__traceback__)):
        return _functorch_error(line)
    if "Fake" in type(error).__name__ or ("FakeTensor" in text and type(error) is not ValueError):
        return not_an_input(line, f" ({text})")
    return error


_WITHOUT_READING = {
    "torch/nn/modules/batchnorm.py": Fix(
        "BatchNorm(momentum=0.1)", "a number: for None it reads how many batches there were"
    ),
}
"""By file of torch that reads a value, what avoids it."""

_MACHINERY = (
    *("_ops.py", "_tensor.py", "_compile.py", "overrides.py", "__init__.py"),
    "_dynamo",
    "_subclasses",
    "fx",
    "utils",
)
"""Files of torch that only pass a question on."""


def _code_of_torch(error: BaseException) -> str:
    """The file of torch whose code asked for the value; "" where the user's code did."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_TORCH):
            file = path.relative_to(_TORCH)
            if file.parts[0] not in _MACHINERY:
                return f"torch/{file.as_posix()}"
        elif not path.is_relative_to(_PARTITA):
            return ""
    return ""


def _has_functorch_frame(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Is one of the frames in torch.func's gradients?"""
    path = str(_TORCH / "_functorch" / "eager_transforms.py")
    return any(frame.f_code.co_filename == path for frame, _ in frames)


def _functorch_error(place: str) -> CaptureError:
    return not_captured(
        "the step takes gradients by torch.func (grad, vjp, jacrev, hessian)",
        "what it makes of tensors for that is not what a graph is made of",
        Fix("torch.autograd.grad(...)", "of tensors with requires_grad_()"),
        place=place,
    )


def not_an_input(place: str, more: str = "") -> CaptureError:
    """The error to raise where a step uses a tensor that it does not reach by name."""
    if _has_functorch_frame(traceback.walk_stack(None)):
        return _functorch_error(place)
    return not_captured(
        "the step uses a tensor that is not among its inputs",
        f"it is not an argument, nor found by name where the step is defined{more}",
        Fix("pt.compile(step, state=[holder])", "names the object that holds it"),
        place=place,
    )


def user_line_of(error: BaseException) -> str:
    """The user's innermost line in the traceback of an error."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, number in reversed(frames):
        line = user_line(frame)
        if line and frame.f_code.co_filename.endswith(line.rsplit(":", 1)[0].lstrip("./")):
            return f"{line.rsplit(':', 1)[0]}:{number}"
    return ""
