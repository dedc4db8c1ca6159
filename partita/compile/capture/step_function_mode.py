"""The torch-function mode of a captured step: it follows what the step calls of tensors by name.

- `x.data = y` exchanges what node makes x. Reads of x from then on are reads of y; at the step's
  end y's value is copied into the memory of x. Other views of the old memory keep their values
  until then, as in eager.
- `.item()`, `bool(x)`: numbers that are known when the graph runs (`symbolic`).
- Metadata of inputs, as `is_leaf`: conditions of the program (`tensor_facts`).
- Checks of values that torch makes in eager and leaves out when it traces: nodes of the graph.
- Changes of an input's shape, and calls through replaced functions of torch: refused.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass as Local
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partita.comm import user_line
from partita.layout import Fix
from partita.tensor.autograd import moved
from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import STATE_OF_LEAVES, facts_of_function
from partita.tensor.tensor_state import HERE

from ..errors import CaptureError, not_captured
from ..guards.codes import is_recorded
from .capture_context import unprofiled
from .fakes import has_memory
from .inputs import GraphInputs
from .library_calls import C_FUNCTION_TYPES, LibraryCalls
from .refusals import not_an_input
from .symbolic import as_number
from .tensor_facts import TensorFacts, is_fact

__all__ = ["StepFunctionMode", "check_values"]


_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OF_LEAVES = {inspect.getattr_static(torch.Tensor, name) for name in STATE_OF_LEAVES}
"""What a real tensor must not be asked in place of its fake: it would answer wrongly."""
_READING, _ASKING = ("item", "tolist"), ("__bool__", "is_nonzero")


class StepFunctionMode(TorchFunctionMode):
    """Follows the torch functions that a step calls while it is traced.

    Args:
        inputs: of the graph.
        facts: answers what is asked of their metadata.

    Attributes:
        called_last: the name of the function that was called last.
        reads_number: the user's line that first calls `.item()`; "" where none does.
        meets_unknown_tensors: was a function called of a tensor that is no input and is not made by
            the step?
    """

    def __init__(self, inputs: GraphInputs, facts: TensorFacts):
        super().__init__()
        self._inputs, self._facts = inputs, facts
        self.called_last = ""
        self.reads_number = ""
        self.meets_unknown_tensors = False
        self._written: dict[int, tuple[Any, torch.Tensor]] = {}
        self.calls = LibraryCalls()
        with Local():
            self._memory = [(x, x.untyped_storage()._cdata) for x in inputs.fakes]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return unprofiled(self._follow_call, func, args, kwargs or {}, sys._getframe(1))

    def _follow_call(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        if args and has_memory(args[0]):
            self.meets_unknown_tensors = True
            if getattr(func, "__self__", func) in _OF_LEAVES:
                raise not_an_input(user_line())
        if func == _set_data:
            return self._set_data(*args)
        self.called_last = name = getattr(func, "__name__", "")
        if type(func) in C_FUNCTION_TYPES and not _is_followed(func):
            return self.calls.call(func, args, kwargs)
        if name in _READING:
            self.reads_number = self.reads_number or user_line()
            return pytree.tree_map(as_number, func(*args, **kwargs))
        if name in _ASKING:  # torch would ask for a number first
            return bool(as_number(torch.Tensor.item(*args, **kwargs)))
        if facts_of_function(name).changes_shape and args[0] in self._inputs.identities:
            raise _shape_is_changed(name)
        _check_function(func)
        check_values(func, args, kwargs)
        answer = self._facts.answer(func, args, caller)
        return answer[0] if answer else self.calls.call(func, args, kwargs)

    def _set_data(self, x: Any, value: Any) -> None:
        """`x.data = value`."""
        with Local(), torch.no_grad():
            before = x.detach()
        with torch.no_grad():
            value = _laid_out_like(x, value.detach())
        if x in self._inputs.identities:
            self._written.setdefault(id(x), (x, before))
        HERE.recorder.exchange(x, value)

    def copy_back(self) -> None:
        """Write what the step has left in the `.data` of its inputs into their memory."""
        with Local(), torch.no_grad():
            for x, memory in self._memory:
                if id(x) not in self._written and x.untyped_storage()._cdata != memory:
                    raise not_captured(
                        "x.set_(y), or x.data = y within a backward pass",
                        "what memory x is given then is not followed",
                        Fix("x.data.copy_(y)", "keeps the memory of x"),
                    )
            self._refuse_shared_memory()
            held = {before.untyped_storage()._cdata for _, before in self._written.values()}
            copies = []
            for x, before in self._written.values():
                value = x.detach()
                if value.untyped_storage()._cdata in held:
                    value = value.clone()  # or it would be overwritten before it is read
                copies.append((before, value))
            for before, value in copies:
                before.copy_(value)

    def _refuse_shared_memory(self) -> None:
        """Raise CaptureError where two inputs lie in one memory after `x.data = y`: each would get
        a copy, and keep it when the other is written later."""
        ends = [x.untyped_storage()._cdata for x, _ in self._memory]
        shared = {end for end, count in Counter(ends).items() if count > 1}
        for (x, _), end in zip(self._memory, ends, strict=True):
            if id(x) in self._written and end in shared:
                raise not_captured(
                    "x.data = y, where y is another tensor that the step is given, or that it "
                    "gives to two",
                    "both would lie in one memory afterwards, and a graph copies",
                    Fix("x.data.copy_(y)", "if each is to have values of its own"),
                )


@lru_cache(maxsize=8192)
def _is_followed(func: Any) -> bool:
    """May the mode have to do with calls of a function of C?"""
    name = getattr(func, "__name__", "")
    return (
        name in (*_READING, *_ASKING)
        or facts_of_function(name).changes_shape
        or func in _CHECKS
        or is_fact(func)
    )


def _shape_is_changed(name: str) -> CaptureError:
    return not_captured(
        f"the step changes the shape or the memory of a tensor that it is given ({name})",
        "a graph writes what is in the memory of its inputs, and leaves that as it is",
        Fix("do it outside the step", "before or after the call"),
        place=user_line(),
    )


def _check_function(func: Any) -> None:
    """Raise CaptureError where the program has replaced a function of torch by one that calls it.

    Torch announces the call of its own function under the replacement's name, so that the
    replacement would run twice.
    """
    if isinstance(func, FunctionType) and is_recorded(func.__code__.co_filename):
        raise not_captured(
            f"the step calls a function of torch's through {func.__qualname__}, which stands in "
            "its place",
            "who hears what torch calls is told that it is the latter, which would run twice",
            Fix("a module or function of your own", "that calls torch's, rather than in its place"),
        )


def _laid_out_like(x: Any, value: Any) -> Any:
    """`value`, redistributed to the layout of x, which x keeps.

    Raises:
        CaptureError: it is another kind of tensor than x.
    """
    one, other = (getattr(t, "_spec", None) for t in (x, value))
    if one is not None and other is not None and one.shape == other.shape:
        value = moved(value, other, one, "data", "implicit")
    with Local():
        alike = (x.shape, x.dtype, x.device) == (value.shape, value.dtype, value.device)
    if (one is None) != (other is None) or not alike:
        raise not_captured(
            "x.data = y with a y of another shape or dtype",
            "the memory of x, which stays, cannot hold it",
            Fix("x.data.copy_(y)", "keeps what x is"),
        )
    return value if one is None else tagged(value, one)


# -- checks of values ------------------------------------------------------------------------------


Checks = Iterator[tuple[torch.Tensor, str]]
"""What must be true, and torch's message where it is not."""


_CHECKS: dict[Any, Callable[..., Checks]] = {}
_QUANTILES = ("quantile", "nanquantile")


def _checks(*functions: Any) -> Callable[[Callable[..., Checks]], Callable[..., Checks]]:
    """Register the checks that `functions` make of their operands."""

    def register_checks(f: Callable[..., Checks]) -> Callable[..., Checks]:
        _CHECKS.update(dict.fromkeys(functions, f))
        return f

    return register_checks


def check_values(func: Any, args: Any, kwargs: Any) -> None:
    """Have the graph check what `func` checks in eager, of this rank's local values."""
    if func not in _CHECKS:
        return
    with Local(), torch.no_grad():
        for holds, text in _CHECKS[func](*args, **(kwargs or {})):
            torch._assert_async(holds.all(), text)


@_checks(F.one_hot)
def _check_classes(tensor: torch.Tensor, num_classes: int = -1) -> Checks:
    yield tensor >= 0, "Class values must be non-negative."
    if num_classes >= 0:
        yield tensor < num_classes, "Class values must be smaller than num_classes."


@_checks(*(getattr(home, name) for home in (torch, torch.Tensor) for name in _QUANTILES))
def _check_quantiles(input: Any, q: Any, *_: Any, **__: Any) -> Checks:
    if isinstance(q, torch.Tensor):
        yield (q >= 0) & (q <= 1), "quantile() q values must be in the range [0, 1]"
