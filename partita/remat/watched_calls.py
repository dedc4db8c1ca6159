"""Watched calls: how a region sees the calls of its program, and the key under which it finds one.

`CallMode` stands above autograd and passes each function of torch to the watcher of this thread,
the region's first or second run. `KernelMode` stands below autograd and below layouts: it sees each
ATen call, in backward too, with the rank's own pieces as plain tensors. A call's key is its
function, the user's frames between the region and the call, and its arguments: of a tensor its
shape, layout and dtype, and which call of the run made it. Two runs of one program make equal
calls, though the second may leave some out; where it takes another way, its first call is not
found.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.comm import first_instruction
from partita.compile.capture.capture_context import attribute_set
from partita.layout import LayoutError
from partita.parallel.batch import tensors_in
from partita.tensor.dispatch import op_of
from partita.tensor.dtensor import DTensor, short_dtype
from partita.tensor.op_facts import (
    OVERRIDES,
    VIEW_ATTRIBUTES,
    enter_function,
    facts_of,
    facts_of_function,
    runs_as_torch_has_it,
)
from partita.tensor.tensor_state import HERE


class RematError(LayoutError):
    """A recompute cannot bring back what its forward made. Names the calls that differ."""


# -- functions of torch ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionKind:
    """A function of torch, as a region treats it.

    Attributes:
        op: its op's name.
        func: the function.
        is_call: False where it computes nothing.
        body: a Python function to run instead, so that the calls inside are seen.
        writes: the places and names of the arguments that it writes, but for `out`.
    """

    op: str
    func: Callable[..., Any]
    is_call: bool = True
    body: Callable[..., Any] | None = None
    writes: tuple[tuple[int, str], ...] = ()


def _make_function_kind(func: Callable[..., Any]) -> FunctionKind:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return FunctionKind(
            attribute, func, is_call=name == "__get__" and attribute in VIEW_ATTRIBUTES
        )
    if facts_of_function(name).computes_nothing or (
        runs_as_torch_has_it(func) and func not in OVERRIDES
    ):
        return FunctionKind(name, func, is_call=False)
    form = op_of(func).form
    body = None
    if (
        isinstance(func, types.FunctionType)
        and func.__module__ in ("torch.nn.functional", "torch.functional")
        and form.rule is None
        and func not in OVERRIDES
    ):
        body = enter_function(func)  # as DTensors enter it too
    writes = tuple((one.place, one.name) for one in form.writes)
    if form.inplace or name == "__setitem__":
        writes = ((0, "input"),)
    elif isinstance(func, torch._ops.OpOverload):  # an op of the user's says so in its schema
        writes = tuple((one.place, one.name) for one in facts_of(func).writes)
    return FunctionKind(form.name, func, body=body, writes=writes)


_KINDS: dict[Callable[..., Any], FunctionKind] = {}


def current_watcher() -> Any:
    """The watcher of this thread; None while torch.compile traces, which is no business of ours."""
    if torch.compiler.is_compiling() and not HERE.capturing:
        return None
    return HERE.watcher


def watching(watcher: Any) -> AbstractContextManager[None]:
    """Within, `watcher` is told of this thread's calls; where it is None, nobody."""
    return attribute_set(HERE, "watcher", watcher)


class CallMode(TorchFunctionMode):
    """Passes each function of torch that the program calls to this thread's watcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        run = current_watcher()
        if run is None:
            return func(*args, **kwargs)
        kind = _KINDS.get(func)
        if kind is None:
            kind = _KINDS[func] = _make_function_kind(func)
        if not kind.is_call:
            return func(*args, **kwargs)
        if kind.body is not None and kind.op not in run.policy.ops:
            with self:  # which torch has taken off for this call
                return kind.body(*args, **kwargs)
        return run.run_call(kind, args, kwargs)


def is_internal(function: Any) -> bool:
    """Is it an `autograd.Function` of partita's own, within a call of the program's?"""
    return isinstance(function, type) and function.__module__.startswith("partita.")


def make_call_mode() -> AbstractContextManager[Any]:
    """A `CallMode` to enter, or nothing where one is on: compiled regions guard on their number.

    Private torch: there is no public way to ask which modes are on.
    """
    count = torch._C._len_torch_function_stack()
    on = map(torch._C._get_function_stack_at, range(count))
    return nullcontext() if any(isinstance(mode, CallMode) for mode in on) else CallMode()


# -- kernels --------------------------------------------------------------------------------------


class KernelMode(TorchDispatchMode):
    """Calls `kernel` in place of each kernel that runs while it is entered.

    Regions of torch.compile run compiled: otherwise torch.compile would stand aside, and another
    program be seen. What such a region computes in kernels of its own is not seen.
    """

    supports_higher_order_operators = True  # a compiled region may be one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Local():
            return self.kernel(func, args, kwargs or {})

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, or something in its place, and return the result."""
        raise NotImplementedError


# -- keys of calls ---------------------------------------------------------------------------------

Key = tuple[Any, tuple[int, ...], Any]
"""(function, call site, key of the arguments), such as

    ("matmul", (code, instruction, ...), ((("input", 0), Size([8, 16]), float32), ...))
"""

Origin = tuple[str, int, int] | tuple[str, int]
"""What made a tensor of a run: ("call", number, output), or ("input", number)."""


# -- call sites ------------------------------------------------------------------------------------


def run_from_here(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)`; call sites within it end at this frame."""
    return fn(*args, **kwargs)


_BOUNDARY = run_from_here.__code__
_ROOMS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLUMBING = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(
        os.path.join(_ROOMS, room) + os.sep
        for room in ("compile", "tensor", "comm", "rules", "remat")
    ),
)

_codes: dict[int, tuple[CodeType, bool]] = {}
"""By the id of code: the code, which is held so that its id stays its own, and whether it is the
user's."""


def _classify_code(code: CodeType) -> tuple[CodeType, bool]:
    entry = _codes[id(code)] = (code, not code.co_filename.startswith(_PLUMBING))
    return entry


def find_call_site() -> tuple[int, ...]:
    """The user's frames between the region and here: `(code, instruction, code, ...)`."""
    frame = sys._getframe(2)
    found: list[int] = []
    while frame is not None:
        code = frame.f_code
        if code is _BOUNDARY:
            break
        i = id(code)
        if (_codes.get(i) or _classify_code(code))[1]:
            found.append(i)
            found.append(first_instruction(code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def line_of_site(where: tuple[int, ...]) -> str:
    """`"model.py:12"` of a call site, relative to the working directory; "" without a frame."""
    if not where:
        return ""
    code, at = _codes[where[0]][0], where[1]
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    name, here = code.co_filename, os.getcwd() + os.sep
    return f"{name.removeprefix(here)}:{line}"


# -- arguments ----------------------------------------------------------------------------------


class TensorOrigins:
    """Which call of a run made which tensor.

    Args:
        first: those of the first run, in the second. They are asked for results that the program
            has kept itself, and so does not compute again.
    """

    def __init__(self, first: TensorOrigins | None = None):
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        self._first = first

    def learn(self, t: torch.Tensor, origin: Origin) -> None:
        self._known[id(t)] = (weakref.ref(t), origin)

    def learn_outputs(self, out: Any, number: int, inputs: list[torch.Tensor]) -> None:
        """Note that call `number` made the tensors in `out`, except those that are its inputs."""
        outputs = (out,) if isinstance(out, torch.Tensor) else tensors_in(out)
        for k, one in enumerate(outputs):
            if not any(t is one for t in inputs):
                self.learn(one, ("call", number, k))

    def of(self, t: torch.Tensor) -> Origin | None:
        found = self._known.get(id(t))
        if found is not None and found[0]() is t:
            return found[1]
        return None if self._first is None else self._first.of(t)

    def forget_the_dead(self) -> None:
        """After the run: drop tensors that are freed, which cannot be met again."""
        self._known = {i: entry for i, entry in self._known.items() if entry[0]() is not None}


_PLAIN = frozenset(
    (int, float, bool, str, type(None), complex, bytes, type(Ellipsis))
    + (torch.dtype, torch.device, torch.memory_format, torch.layout)
)


def _make_argument_key(value: Any, origins: TensorOrigins, tensors: list[torch.Tensor]) -> Any:
    """The key of an argument: hashable, and equal for equal calls. Appends its tensors to
    `tensors`."""
    kind = type(value)
    if kind in _PLAIN:
        return value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        origin: Any = origins.of(value)
        with Local():
            if origin is None and value.requires_grad and value.is_leaf:
                origin = ("leaf", id(value))  # a parameter is itself
            shape = value._spec if isinstance(value, DTensor) else value.shape
            return (origin, shape, value.dtype)
    if kind is tuple or kind is list or isinstance(value, (tuple, list)):
        return tuple([_make_argument_key(v, origins, tensors) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _make_argument_key(v, origins, tensors)) for k, v in value.items()])
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return ("slice", *[_make_argument_key(v, origins, tensors) for v in parts])
    return kind


def make_inputs_key(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    origins: TensorOrigins,
    tensors: list[torch.Tensor],
) -> Any:
    """The keys of a call's positional and keyword arguments. Appends its tensors to `tensors`."""
    return _make_argument_key(args, origins, tensors), _make_argument_key(kwargs, origins, tensors)


def key_of_shape(
    what: Any, shape: Any, dtype: torch.dtype, site: tuple[int, ...] | None = None
) -> Key:
    """The key of a call that has one tensor, of which the shape alone counts."""
    inputs = (((None, torch.Size(shape), dtype),), ())
    return what, find_call_site() if site is None else site, inputs


# -- text ------------------------------------------------------------------------------------------


def describe_call(key: Key) -> str:
    """`matmul(f32[8, 16], f32[16, 16]) at model.py:12`."""
    what, where, (args, kwargs) = key
    each = [_format_key_part(a) for a in args] + [f"{k}={_format_key_part(v)}" for k, v in kwargs]
    name = what if isinstance(what, str) else _name_of_function(what)
    line = line_of_site(where)
    return f"{name}({', '.join(each)})" + (f" at {line}" if line else "")


def _name_of_function(what: Any) -> str:
    """The name of an `autograd.Function`, or of a wrapped function of the user's."""
    name: Any = getattr(what, "title", None) or getattr(what, "__qualname__", str(what))
    # The class by which torch applies what it has compiled.
    return "a compiled region" if name.endswith("CompiledFunction") else name


def _format_key_part(part: Any) -> str:
    if isinstance(part, tuple):
        if len(part) == 3 and isinstance(part[2], torch.dtype):
            _, what, dtype = part
            dims = what.layout.brief() if not isinstance(what, torch.Size) else list(what)
            text = str(dims) if isinstance(dims, list) else f"[{dims}]"
            return f"{short_dtype(dtype)}{text}"
        return f"({', '.join(map(_format_key_part, part))})"
    return part.__name__ if isinstance(part, type) else repr(part)


def make_local_alias(t: torch.Tensor) -> torch.Tensor:
    """A plain alias, without history, of `t`'s memory on this rank."""
    with Local():
        return t.detach()
