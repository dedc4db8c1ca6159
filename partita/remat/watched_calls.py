"""Watched calls: how a remat region intercepts the calls in it, and recognizes each when it runs
again.

`CallMode` is above autograd. It passes each call of a torch function to the region's first or
second run. `KernelMode` is below autograd and below layouts. It intercepts each ATen call, also in
backward, with local tensors.

A call's key is its function, the user's frames between the region and the call, and its arguments.
A tensor argument is described by its shape, layout and dtype, and by the call that made it. If the
second run takes another path, its first new call is not found. A policy decides which results a
region keeps: it lists functions, modules and names.
"""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.capture.capture_context import attribute_set
from partita.comm import first_instruction
from partita.compile import CompiledStep
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
    form_of,
    needs_no_rule,
)
from partita.tensor.tensor_state import HERE


class RematError(LayoutError):
    """Raised if a recompute differs from its forward. The message names the calls that differ."""


# -- functions of torch ----------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionKind:
    """How remat regions treat calls of a torch function.

    Attributes:
        op: the name of its op.
        func: the function.
        is_call: False if it computes nothing.
        body: a Python function to run instead, so that the calls inside it are intercepted.
        writes: positions and names of the arguments that it writes, except `out`.
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
    if facts_of_function(name).computes_nothing or (needs_no_rule(func) and func not in OVERRIDES):
        return FunctionKind(name, func, is_call=False)
    form = op_of(func).form
    body = None
    if (
        isinstance(func, types.FunctionType)
        and func.__module__ in ("torch.nn.functional", "torch.functional")
        and form.rule is None
        and func not in OVERRIDES
    ):
        body = enter_function(func)  # dispatch of DTensors runs this body, too
    writes = tuple((one.place, one.name) for one in form.writes)
    if form.inplace or name == "__setitem__":
        writes = ((0, "input"),)
    elif isinstance(func, torch._ops.OpOverload):  # the schema of a user's op lists its writes
        writes = tuple((one.place, one.name) for one in facts_of(func).writes)
    return FunctionKind(form.name, func, body=body, writes=writes)


_KINDS: dict[Callable[..., Any], FunctionKind] = {}


def current_watcher() -> Any:
    """Returns the object that intercepts this thread's calls for a remat region, or None.

    It is None while Dynamo traces.
    """
    return None if HERE.trace.is_compiling() else HERE.watcher


def watching(watcher: Any) -> AbstractContextManager[None]:
    """Returns a context manager. Inside, `watcher` intercepts this thread's calls.

    Args:
        watcher: a run of a region; None: nothing intercepts calls.
    """
    return attribute_set(HERE, "watcher", watcher)


class CallMode(TorchFunctionMode):
    """A torch-function mode that passes each call to the remat region that runs in this thread."""

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
            with self:  # enter it again: torch disables a mode during its own call
                return kind.body(*args, **kwargs)
        return run.run_call(kind, args, kwargs)


def is_internal(function: Any) -> bool:
    """True if `function` is an `autograd.Function` of partita, which remat does not record."""
    return isinstance(function, type) and function.__module__.startswith("partita.")


def make_call_mode() -> AbstractContextManager[Any]:
    """Returns a `CallMode` to enter; if one is active, a context manager that does nothing.

    With several modes, compiled regions would be compiled again, because they have a guard on the
    number of modes. Private torch: no public function lists the active modes.
    """
    count = torch._C._len_torch_function_stack()
    on = map(torch._C._get_function_stack_at, range(count))
    return nullcontext() if any(isinstance(mode, CallMode) for mode in on) else CallMode()


# -- kernels --------------------------------------------------------------------------------------


class KernelMode(TorchDispatchMode):
    """The base of dispatch modes that call their method `kernel` in place of each ATen kernel.

    Regions of torch.compile run compiled, and kernels inside them are not intercepted. (Normally
    they run uncompiled under a dispatch mode, and the mode would intercept other kernels.)
    """

    supports_higher_order_operators = True  # a compiled region may run as one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with local_ops():
            return self.kernel(func, args, kwargs or {})

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the kernel `func`, or something in its place, and returns the result.

        Args:
            args, kwargs: the arguments of the kernel.
        """
        raise NotImplementedError


# -- keys of calls ---------------------------------------------------------------------------------

Key = tuple[Any, tuple[int, ...], Any]
"""(function, call site, key of the arguments), such as

    ("matmul", (code, instruction, ...), ((("input", 0), Size([8, 16]), float32), ...))
"""

Producer = tuple[Any, ...]
"""The origin of a tensor of a run: ("call", number, output), ("input", number), or the key of a
redistribution."""


# -- call sites ------------------------------------------------------------------------------------


def run_from_here(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `fn(*args, **kwargs)`. Call sites that remat records inside it begin at this frame."""
    return fn(*args, **kwargs)


_BOUNDARY = run_from_here.__code__
_ROOMS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PLUMBING = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(
        os.path.join(_ROOMS, room) + os.sep
        for room in ("compile", "guards", "capture", "graph", "tensor", "comm", "rules", "remat")
    ),
)

_codes: dict[int, tuple[CodeType, bool]] = {}
"""Maps the id of a code object to it (kept alive, so that its id stays its own), and to True if it
is the user's."""


def _classify_code(code: CodeType) -> tuple[CodeType, bool]:
    entry = _codes[id(code)] = (code, not code.co_filename.startswith(_PLUMBING))
    return entry


def find_call_site() -> tuple[int, ...]:
    """Returns the user's frames from the remat region to the current call, to identify the call.

    The tuple has a code id and an instruction offset for each frame, innermost first.
    """
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
    """Returns the file and line of a call site (`find_call_site`), such as "model.py:12".

    The path is relative to the working directory. Returns "" if the site has no frame.
    """
    if not where:
        return ""
    code, at = _codes[where[0]][0], where[1]
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    name, here = code.co_filename, os.getcwd() + os.sep
    return f"{name.removeprefix(here)}:{line}"


# -- arguments -------------------------------------------------------------------------------------


class TensorProducers:
    """Maps each tensor in a run of a region to its `Producer`, such as the call that made it.

    Args:
        first: in the second run, the map of the first run. It is needed for tensors that the
            program itself kept from the first run, and does not compute again.
    """

    def __init__(self, first: TensorProducers | None = None):
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Producer]] = {}
        self._first = first

    def note(self, t: torch.Tensor, producer: Producer) -> None:
        self._known[id(t)] = (weakref.ref(t), producer)

    def note_outputs(self, out: Any, number: int, inputs: list[torch.Tensor]) -> None:
        """Records that a call made the tensors in `out` that are not among its inputs.

        Args:
            number: the number of the call.
            inputs: the tensors that the call reads.
        """
        for k, one in enumerate((out,) if isinstance(out, torch.Tensor) else tensors_in(out)):
            for t in inputs:  # not by a generator, which takes longer
                if t is one:
                    break
            else:
                self._known[id(one)] = (weakref.ref(one), ("call", number, k))

    def find(self, t: torch.Tensor) -> Producer | None:
        found = self._known.get(id(t))
        if found is not None and found[0]() is t:
            return found[1]
        return None if self._first is None else self._first.find(t)

    def forget_freed(self) -> None:
        """Removes the entries of tensors that have been freed. Called after the run."""
        self._known = {i: entry for i, entry in self._known.items() if entry[0]() is not None}


_PLAIN = frozenset(
    (int, float, bool, str, type(None), complex, bytes, type(Ellipsis))
    + (torch.dtype, torch.device, torch.memory_format, torch.layout)
)


def _make_argument_key(value: Any, producers: TensorProducers, tensors: list[torch.Tensor]) -> Any:
    """Returns the hashable key of an argument, equal for equal calls. Extends `tensors`."""
    kind = type(value)
    if kind in _PLAIN:
        return value if value == value else "nan"
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        producer: Any = producers.find(value)
        with local_ops():
            if producer is None and value.requires_grad and value.is_leaf:
                producer = ("leaf", id(value))  # a parameter is the same object in both runs
            shape = value._spec if isinstance(value, DTensor) else value.shape
            return (producer, shape, value.dtype)
    if kind is tuple or kind is list or isinstance(value, (tuple, list)):
        return tuple([_make_argument_key(v, producers, tensors) for v in value])
    if isinstance(value, dict):
        return tuple([(k, _make_argument_key(v, producers, tensors)) for k, v in value.items()])
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return ("slice", *[_make_argument_key(v, producers, tensors) for v in parts])
    return kind


def make_inputs_key(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    producers: TensorProducers,
    tensors: list[torch.Tensor],
) -> Any:
    """Returns a hashable key of a call's arguments, by which the second run finds the call again.

    Args:
        args, kwargs: the arguments of the call.
        producers: maps a tensor to the call that made it.
        tensors: a list to which the tensors among the arguments are appended.
    """
    return _make_argument_key(args, producers, tensors), _make_argument_key(
        kwargs, producers, tensors
    )


def key_of_shape(
    what: Any, shape: Any, dtype: torch.dtype, site: tuple[int, ...] | None = None
) -> Key:
    """Returns the key of a call with one tensor, which is described by its shape and dtype only.

    Args:
        what: the name of the op.
        shape, dtype: the shape and the dtype of the tensor.
        site: the call site; None for the current one.
    """
    inputs = (((None, torch.Size(shape), dtype),), ())
    return what, find_call_site() if site is None else site, inputs


# -- text ------------------------------------------------------------------------------------------


def describe_call(key: Key) -> str:
    """Returns a text such as `matmul(f32[8, 16], f32[16, 16]) at model.py:12` for a call's key."""
    what, where, (args, kwargs) = key
    each = [_format_key_part(a) for a in args] + [f"{k}={_format_key_part(v)}" for k, v in kwargs]
    name = what if isinstance(what, str) else _name_of_function(what)
    line = line_of_site(where)
    return f"{name}({', '.join(each)})" + (f" at {line}" if line else "")


def _name_of_function(what: Any) -> str:
    """Returns the name of an `autograd.Function`, or of a wrapped function of the user's."""
    name: Any = getattr(what, "title", None) or getattr(what, "__qualname__", str(what))
    # The autograd.Function in which torch runs compiled code.
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
    """Returns a detached plain tensor with the local memory of `t`."""
    with local_ops():
        return t.detach()


# -- wrapped functions ----------------------------------------------------------------------------


class Wrapped:
    """A callable that wraps the function `fn`, or a module's forward.

    The forward is looked up in the module's class, so that a copy of the module calls the forward
    of the copy.
    """

    def __init__(self, fn: Callable[..., Any] | None, module: nn.Module | None = None):
        self._fn, self._module = fn, module

    @classmethod
    def in_place_of_forward(cls, module: nn.Module, *args: Any) -> Any:
        """Sets a module's attribute `forward` to a wrapper of it, and returns the wrapper.

        Args:
            args: further arguments of the wrapper's class.
        """
        made = cls(module.__dict__.get("forward"), module, *args)
        object.__setattr__(module, "forward", made)
        return made

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The original function; `inspect.signature` follows this name."""
        if self._fn is not None:
            return self._fn
        assert self._module is not None
        return types.MethodType(type(self._module).forward, self._module)

    @property
    def module(self) -> nn.Module | None:
        """The module whose forward is wrapped; None if a function is wrapped."""
        return self._module

    @property
    def __name__(self) -> str:
        if self._module is not None:
            return type(self._module).__name__
        return getattr(self._fn, "__name__", None) or type(self._fn).__name__

    @property
    def title(self) -> str:
        """The name of the wrapped function or module, for errors and reports."""
        if self._module is not None:
            return type(self._module).__name__
        return getattr(self._fn, "__qualname__", None) or self.__name__

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return getattr(self._fn, "__doc__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind it like a method, if the wrapped function is an attribute of a class."""
        return self if instance is None else partial(self, instance)


# -- names in a policy -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call inside a remat region, as the argument of a policy function.

    Attributes:
        op: the op's name: "matmul" for `torch.matmul`, `Tensor.matmul` and `@`. For a
            redistribution, the kinds of its moves: "all_gather".
        function: a function of torch, an `autograd.Function`, or what `pt.one_call` returned. For a
            redistribution, its `Plan`.
        inputs: shape and dtype of each input tensor; the global shape of a DTensor.
        is_collective: True for a redistribution that sends bytes.
        name: the name that the program gives its result by `checkpoint_name`, if known.
    """

    op: str
    function: Any
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    is_collective: bool = False
    name: str | None = None
    _site: tuple[int, ...] = ()

    @property
    def place(self) -> str:
        """The user's line of the call, such as "model.py:12"."""
        return line_of_site(self._site)


def keep_collectives(call: Call) -> bool:
    """Keeps the results of redistributions: a policy for `pt.remat`, alone or in a list.

    If they are kept, recomputing repeats no collective.

    Args:
        call: a call in the region. The result is True for a redistribution that sends bytes.
    """
    return call.is_collective


class OneCall(Wrapped):
    """A function marked by `one_call`. A remat region can keep its results, as for a single op."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = current_watcher()
        if run is None:
            return self.__wrapped__(*args, **kwargs)
        return run.run_one_call(self, args, kwargs)


def one_call(fn: Any) -> Any:
    """Marks a function of your own, so that a remat policy can name it and keep its results.

    `pt.remat(block, policy=[attention])` keeps the results of calls of a marked `attention`. Use
    this for functions of your own and for compiled functions, because torch does not intercept
    their calls. Modules in a policy need no mark. A kept call is not recomputed; the tensors that
    autograd saved inside it are kept, too. Outside of `pt.remat` the function behaves as before.

        @pt.one_call
        def attention(q, k, v): ...

    Args:
        fn: a function or a module.

    Returns:
        A function. For a module: the module itself, whose `forward` is marked.
    """
    if isinstance(fn, OneCall):
        return fn
    if not isinstance(fn, nn.Module):
        return OneCall(fn)
    if not isinstance(fn.__dict__.get("forward"), OneCall):
        OneCall.in_place_of_forward(fn)
    return fn


# -- policies --------------------------------------------------------------------------------------


_NAMEABLE = (str, nn.Module, OneCall, CompiledStep)


class Policy:
    """A policy of `pt.remat`, parsed: it decides which results are kept.

    Attributes:
        ops: names of ops whose results are kept.
        functions: `autograd.Function`s, `OneCall`s and compiled regions whose results are kept.
        names: names of tensors (`checkpoint_name`) that are kept.
        collectives: True keeps the results of redistributions.
        test: the user's function of a `Call`, or None.
        budget: bytes, or None.
    """

    def __init__(self, policy: Any):
        self.ops: set[str] = set()
        self.functions: set[Any] = set()
        self.names: set[str] = set()
        self.collectives = False
        self.test: Callable[[Call], Any] | None = None
        self.budget: int | None = None
        if policy is None:
            return
        if isinstance(policy, int) and not isinstance(policy, bool):
            if policy < 0:
                raise ValueError(f"policy={policy}: a budget is a number of bytes")
            self.budget = policy
        elif isinstance(policy, (list, tuple, set, frozenset)):
            for item in policy:
                self._take(item)
        elif isinstance(policy, (*_NAMEABLE, type)) or _is_announced(policy):
            self._take(policy)
        elif callable(policy):
            self.test = policy
        else:
            raise ValueError(
                f"policy={policy!r}: takes a list of functions, modules and names, a function of a "
                "Call, or a budget in bytes"
            )

    def _take(self, item: Any) -> None:
        if isinstance(item, str):
            self.names.add(item)
        elif item is keep_collectives:
            self.collectives = True
        elif isinstance(item, nn.Module):
            self.functions.add(one_call(item).__dict__["forward"])
        elif isinstance(item, _NAMEABLE) or (
            isinstance(item, type) and issubclass(item, torch.autograd.Function)
        ):
            self.functions.add(item)
        elif isinstance(item, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            raise ValueError(
                f"policy names {item}, a kernel; name the function that the program calls, as "
                "torch.matmul or F.scaled_dot_product_attention"
            )
        elif _is_announced(item):
            self.ops.add(form_of(item).name)
        else:
            name = getattr(item, "__qualname__", repr(item))
            raise ValueError(
                f"policy names {name}, whose calls cannot be intercepted; mark it first: "
                f"{getattr(item, '__name__', 'f')} = pt.one_call(...), and name that"
            )

    @property
    def wants_names(self) -> bool:
        return bool(self.names) or self.test is not None

    def keeps(self, op: str, function: Any, key: Key, name: str | None, moves: bool) -> bool:
        """True if the policy keeps the result of a call.

        Args:
            op: the name of the op.
            function: the function that is called; for a redistribution, its plan.
            key: the key of the call.
            name: the name of the result (`checkpoint_name`), if it is known.
            moves: True if it is a redistribution that sends bytes.
        """
        if self.test is not None:
            return bool(self.test(_make_call(op, function, key, name, moves)))
        if moves and self.collectives:
            return True
        return op in self.ops or function in self.functions or name in self.names

    def keeps_redistribution(self, plan: Any, x: torch.Tensor, site: tuple[int, ...]) -> bool:
        """True if the policy keeps the result of a redistribution of the local tensor `x`.

        A policy function gets the global shape, so it decides the same on every rank.

        Args:
            plan: the redistribution: a plan of moves.
            site: the call site.
        """
        moves = [move for move in plan.moves if move.sends]
        if not moves:
            return False
        kinds = " ".join(move.kind for move in moves)
        key = key_of_shape(kinds, moves[0].before.shape, x.dtype, site)
        return self.keeps(kinds, plan, key, None, True)


def _make_call(op: str, function: Any, key: Key, name: str | None, moves: bool) -> Call:
    found: list[tuple[tuple[int, ...], torch.dtype]] = []
    _collect_inputs(key[2], found)
    return Call(op, function, tuple(found), moves, name, key[1])


def _collect_inputs(part: Any, found: list[Any]) -> None:
    if isinstance(part, tuple):
        if len(part) == 3 and isinstance(part[2], torch.dtype):
            shape = part[1] if isinstance(part[1], torch.Size) else part[1].shape
            found.append((tuple(shape), part[2]))
        else:
            for p in part:
                _collect_inputs(p, found)


def _is_announced(item: Any) -> bool:
    """True if a `TorchFunctionMode` intercepts calls of this function."""
    if isinstance(item, type) or not callable(item):
        return False
    if isinstance(item, Hashable) and item in torch.overrides.get_testing_overrides():
        return True
    # Methods of Tensor have their operators' names; all builtins of torch can be intercepted.
    return type(item).__name__ in ("method_descriptor", "wrapper_descriptor") or (
        type(item).__name__ == "builtin_function_or_method"
        and (getattr(item, "__module__", None) or "torch").startswith("torch")
    )
