"""Errors of capture: what a step does that a graph cannot express, and when capture is tried again.

`explain_error` turns torch's error during capture into a `CaptureError` that says what the step
does, and at which line. `RefusedCall` decides when capture is tried again.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses import fake_tensor

from partita.comm import Uneven, user_line
from partita.layout import Fix, LayoutError
from partita.layout.text import human

_EAGER = Fix('pt.compile(step, fallback="eager")', "runs the step eagerly if it cannot be captured")


class CaptureError(LayoutError):
    """Raised if a step does something that a graph cannot express.

    Examples are a branch on data, and a tensor that is neither an argument nor found in the state.

    Attributes:
        guards: a `guards.Guards` with the Python state that the step had read before the error;
            None if that is unknown.
    """

    guards: Any = None


class RefusedCall:
    """Remembers that a step could not be captured, to decide when capture is tried again.

    Capture is tried again when a Python value that the step had read has changed. Changes by the
    step's own eager run do not count: the next call is compared with the state after that run.

    Args:
        guards: a `guards.Guards`; None if unknown. Capture is then never tried again.
        tries: the number of failed captures; after `_MOST_TRIES` capture is not tried again.
        why: the reason, as text.
    """

    def __init__(self, guards: Any, tries: int, why: str):
        self._guards = guards if tries < _MOST_TRIES else None
        self.tries, self.why = tries, why

    def holds(self) -> bool:
        """True if capture need not be tried again.

        This is so if no value that the step read has changed, or if those values are unknown.
        """
        return self._guards is None or bool(self._guards.hold())

    def note_run(self) -> None:
        """Stores the Python values after an eager run, to compare the next call with them."""
        if self._guards is not None and not self._guards.hold():
            self._guards = self._guards.as_of_now()


_MOST_TRIES = 16  # captures of calls with one signature, for changed Python values


def not_captured(fact: str, reason: str, *fixes: Fix, place: str | None = None) -> CaptureError:
    """Returns the error for a step that cannot be captured.

    Args:
        fact: what the step does.
        reason: why a graph cannot express it.
        fixes: the fixes that the error proposes.
        place: a "file:line". None: the user's current line.
    """
    return CaptureError(
        f"capture: {fact}",
        place=user_line() if place is None else place,
        reason=reason,
        fixes=(*fixes, _EAGER),
    )


def make_data_dependent_shape_error(op: str, *, place: str | None = None) -> CaptureError:
    """Returns the error to raise if the output shape of `op` ("aten::nonzero") depends on data.

    Args:
        place: a "file:line". None: the user's current line.
    """
    return not_captured(
        f"the shape of {op.removeprefix('aten::')} depends on data",
        "all shapes in a graph must be known before it runs",
        place=place,
    )


def make_lazy_parameter_error() -> CaptureError:
    """Returns the error to raise if a step reaches a parameter that has no shape yet."""
    return not_captured(
        "the step reaches a parameter that has no shape yet, such as LazyLinear's",
        "a lazy module creates its parameters in its first forward, and a graph needs known shapes",
        Fix("model(x)", "once before the first step, under torch.no_grad()"),
    )


def make_anomaly_mode_error() -> CaptureError:
    """Returns the error to raise if a backward pass runs in anomaly mode."""
    return not_captured(
        "the step has a backward pass in torch's anomaly mode",
        "the graph's backward does not run through autograd, so anomaly mode could not check it "
        "for NaN",
        Fix("torch.autograd.set_detect_anomaly(False)", "before the step"),
    )


def make_dispatch_mode_error(mode: Any) -> CaptureError:
    """Returns the error for a compiled step that is called within a user's TorchDispatchMode."""
    return not_captured(
        f"the step is called within {type(mode).__name__}, a TorchDispatchMode",
        "compiled code makes none of the calls that the mode intercepts",
        Fix("with mode: ...", "within the step, so that it becomes a part of the graph"),
        Fix('pt.compile(step, backend="graph")', "makes the graph's calls one by one"),
    )


def make_recording_error(error: Exception) -> CaptureError:
    """Returns the error to raise if recording a CUDA graph of a step has raised `error`."""
    return not_captured(
        "a step's kernels cannot be recorded as a CUDA graph",
        f"{type(error).__name__}: {error}",
        Fix("cuda_graphs=False", "launches them one by one"),
    )


def make_budget_too_small_error(budget: int, least: int) -> CaptureError:
    """Returns the error for a memory budget that is less than a step needs, `least` bytes."""
    return CaptureError(
        f"compile: a budget of {budget} bytes ({human(budget)}) cannot be kept: the step needs "
        f"{least} ({human(least)}) above what it holds between calls",
        reason="recomputation needs inputs, and gradients and gathered weights always stay",
        fixes=(Fix(f"budget={least}", "the smallest that suffices"),),
    )


# -- errors of torch, explained --------------------------------------------------------------------

_NUMBERS = [f"passed to Sym{kind}." for kind in ("Float", "Int", "Bool")]
_NUMBERS += [
    "SymbolicFloat",
    "SymbolicInt",
    "required argument is not a",
    "is not JSON serializable",
]
"""Parts of messages of C code that got a symbolic number in place of a Python number."""


def is_of_number(error: BaseException | None) -> bool:
    """True if C code raised `error` because it got a symbolic number instead of a Python number."""
    return any(part in str(error).strip().split("\n")[0] for part in _NUMBERS)


_TORCH, _PARTITA = Path(torch.__file__).parent, Path(__file__).parents[1]

# Parts of torch's messages for reads of a fake tensor's memory.
_OF_MEMORY = "torch.storage.UntypedStorage", "elem.device.type must be", ".numpy() is not supported"


def explain_error(error: Exception, line: str, function: str = "") -> Exception:
    """Returns a CaptureError that says what the step did.

    Returns `error` itself if it is a LayoutError, or an error that the user's code raised.

    Args:
        error: the error that was raised while a step was captured.
        line: the user's line that raised it.
        function: the name of the torch function that the step called last.
    """
    if isinstance(error, Uneven):
        return not_captured(error.fact, error.reason, place=error.place)
    if isinstance(error, LayoutError):
        return error
    if isinstance(error.__cause__, CaptureError):  # torch has wrapped it
        return error.__cause__
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return make_data_dependent_shape_error(error.func._schema.name, place=line)
    text = str(error).strip().split("\n")[0]
    if any(asks in text for asks in _OF_MEMORY):
        return not_captured(
            "the step reads a tensor's memory (copy.copy, copy.deepcopy, .numpy())",
            "during capture tensors have none",
            Fix("x.detach().clone()", "a copy that is part of the graph"),
            place=line,
        )
    if (
        isinstance(error, fake_tensor.DataDependentOutputException)
        or "_local_scalar_dense" in str(error)
        or "data-dependent" in str(error).lower()
        or "data is not allocated yet" in text  # a kernel that reads a tensor without memory
        or is_of_number(error)
    ):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        asking = file_of_torch(reversed(frames), _MACHINERY)
        if not asking and hasattr(torch, function):  # methods of Tensor are not named
            asking = f"torch.{function}"
        return not_captured(
            f"the step reads a value{asking and f', in {asking}'}",
            "during capture tensors have no values. float(x), a branch on x and text with x need "
            "one; the result of .item() may be used in arithmetic, and be returned",
            _WITHOUT_READING.get(
                asking, Fix("return the tensor", "and read it outside of the step")
            ),
            place=line,
        )
    named = re.search(r"([\w:.]+)(: attempted to run this operator|\)>. This is necessary)", text)
    op = named[1] if named else ""
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        op = error.func._schema.name
    if op:
        return not_captured(
            f"the step calls {op.removeprefix('aten::')}, which needs memory",
            "the shape of its result is unknown, and during capture tensors have no values",
            Fix(f'torch.library.register_fake("{op}")', "if it is your own op"),
            Fix("call it before the step", "and pass its result as an argument"),
            place=line,
        )
    if "a leaf Variable that requires grad is being used in an in-place" in text:
        return not_captured(
            "the step writes in place into a tensor with a history",
            "the call would change the autograd history of an argument, or give one to a parameter",
            Fix("x = x.clone()", "first"),
            Fix("with torch.no_grad()", "around an update"),
            place=line,
        )
    if _has_functorch_frame(traceback.walk_tb(error.__traceback__)):
        return _functorch_error(line)
    # Python's own errors name the class of an operand, as in "'FakeTensor' and 'NoneType'".
    is_own = type(error) in (ValueError, TypeError, AttributeError)
    if "Fake" in type(error).__name__ or ("FakeTensor" in text and not is_own):
        return not_an_input(line, f" ({text})")
    return error


_WITHOUT_READING = {
    "torch/nn/modules/batchnorm.py": Fix(
        "BatchNorm(momentum=0.1)", "a number: with None it reads the number of batches so far"
    )
}
"""Maps a file of torch that reads a value to a fix that avoids the read."""

_MACHINERY = (
    *("_ops.py", "_tensor.py", "_compile.py", "overrides.py", "__init__.py"),
    "_dynamo",
    "_subclasses",
    "fx",
    "utils",
)
"""Files and folders of torch that only forward a call, so that they are not named in errors."""


def file_of_torch(frames: Iterable[FrameType], machinery: Collection[str]) -> str:
    """Returns the file of torch that reads a tensor's value, such as "torch/nn/functional.py".

    Returns "" if the user's code reads it.

    Args:
        frames: the stack frames, innermost first.
        machinery: files and folders of torch to skip, because they only forward a call.
    """
    for frame in frames:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_TORCH):
            file = path.relative_to(_TORCH)
            if file.parts[0] not in machinery:
                return f"torch/{file.as_posix()}"
        elif not path.is_relative_to(_PARTITA):
            return ""
    return ""


def _has_functorch_frame(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """True if one of the frames is in torch.func's gradients."""
    path = str(_TORCH / "_functorch" / "eager_transforms.py")
    return any(frame.f_code.co_filename == path for frame, _ in frames)


def _functorch_error(place: str) -> CaptureError:
    return not_captured(
        "the step takes gradients by torch.func (grad, vjp, jacrev, hessian)",
        "it wraps tensors in a way that a graph does not support",
        Fix("torch.autograd.grad(...)", "for tensors with requires_grad_()"),
        place=place,
    )


def not_an_input(place: str, more: str = "") -> CaptureError:
    """Returns the error for a step that uses a tensor which is not one of its inputs.

    Args:
        place: the user's line, a "file:line".
        more: a text to append to the reason.
    """
    if _has_functorch_frame(traceback.walk_stack(None)):
        return _functorch_error(place)
    return not_captured(
        "the step uses a tensor that is not among its inputs",
        f"it is not an argument, and is not found by name where the step is defined{more}",
        Fix("pt.compile(step, state=[holder])", "names the object that holds it"),
        place=place,
    )


def user_line_of(error: BaseException) -> str:
    """Returns the user's innermost line in an error's traceback, as "file:line"; "" if none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for frame, number in reversed(frames):
        line = user_line(frame)
        if line and frame.f_code.co_filename.endswith(line.rsplit(":", 1)[0].lstrip("./")):
            return f"{line.rsplit(':', 1)[0]}:{number}"
    return ""


class UnsureOfWrites(Exception):
    """Raised if capture cannot decide which values an in-place write changes.

    The graph is then traced again, under torch's functionalization.
    """
