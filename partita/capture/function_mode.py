"""The function mode of a captured step: `StepFunctionMode` intercepts functions called on tensors.

- `x.data = y` replaces the node of x: later reads of x use y. At the step's end the value of y is
  copied into the memory of x. Other views of that memory keep their values until then, as in eager.
- `.item()`, `bool(x)`: return numbers that are known when the graph runs (`fakes`).
- Metadata of inputs, such as `is_leaf`: conditions of the program (`graph_inputs.TensorFacts`).
- Checks of values that torch makes in eager, but omits when it traces, become nodes of the graph.
- Attention masks that are not needed are removed (`known_masks`).
- Calls that run no code of the user are not profiled (`LibraryCalls`).
- What a graph cannot express raises an error: immediately, or after the run (`tracer`).
"""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partita.comm import user_line
from partita.graph.errors import CaptureError, not_an_input, not_captured
from partita.graph.graph_nodes import note_of
from partita.graph.shared_memory import shown_operand
from partita.layout import Fix
from partita.tensor.dtensor import as_dtensor, move_local
from partita.tensor.op_facts import STATE_OF_LEAVES, facts_of, facts_of_function
from partita.tensor.tensor_state import HERE

from .capture_context import dispatch_listeners, function_modes, profiled_again, unprofiled
from .code_origin import is_recorded_file
from .equal_calls import node_of
from .fakes import FakeDTensor, SymbolicInt, as_number, has_memory, read_unknown
from .functional_calls import takes_number
from .graph_inputs import GraphInputs, TensorFacts, is_fact
from .known_masks import ATTENTION

_aten = torch.ops.aten
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_OF_LEAVES = {inspect.getattr_static(torch.Tensor, name) for name in STATE_OF_LEAVES}
"""Attributes that must not be read from a real tensor in place of its fake, which may have
others.
"""
_READING, _ASKING = ("item", "tolist"), ("__bool__", "is_nonzero")


class StepFunctionMode(TorchFunctionMode):
    """A torch-function mode that intercepts the functions that a traced step calls.

    Args:
        inputs: the inputs of the graph.
        facts: handles reads of the metadata of inputs.
        reads_values: True if `.item()` returns a Python number where the capture can compute it;
            otherwise it returns a symbolic number.

    Attributes:
        called_last: the name of the function that was called last.
        meets_unknown_tensors: True if a function was called on a tensor that is neither an input
            nor made by the step.
    """

    def __init__(self, inputs: GraphInputs, facts: TensorFacts, reads_values: bool = False):
        super().__init__()
        self._inputs, self._facts, self._reads_values = inputs, facts, reads_values
        self.called_last = ""
        self.meets_unknown_tensors = False
        self._written: dict[int, tuple[Any, torch.Tensor]] = {}
        # By memory that an input had before `x.data = y`, or got by it: the input's former memory.
        self._left: dict[int, torch.Tensor] = {}
        self._taken: dict[int, torch.Tensor] = {}
        self.calls = LibraryCalls()
        with local_ops():
            self._memory = [(x, x.untyped_storage()._cdata) for x in inputs.fakes]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return unprofiled(self._follow_call, func, args, kwargs or {}, sys._getframe(1))

    def _follow_call(self, func: Any, args: Any, kwargs: Any, caller: types.FrameType) -> Any:
        if args and has_memory(args[0]):
            self.meets_unknown_tensors = True
            if getattr(func, "__self__", func) in _OF_LEAVES:
                raise not_an_input(user_line())
        if func == _set_data:
            return self._set_data(*args)
        self.called_last = name = getattr(func, "__name__", "")
        if _has_symbolic_int((args, kwargs)) and not takes_number(name):
            # A graph is for one value of a shape, an index or a count.
            args, kwargs = _with_ints((args, kwargs))
        if func is ATTENTION:
            args, kwargs = HERE.trace.masks.leave_out(args, kwargs, node_of)
        if type(func) in _C_FUNCTION_TYPES and not _is_followed(func):
            return self.calls.call(func, args, kwargs)
        if name in _READING:
            numbers = pytree.tree_map(_read_number, func(*args, **kwargs))
            return pytree.tree_map(read_unknown, numbers) if self._reads_values else numbers
        if name in _ASKING:  # torch's own would read a number first
            return bool(_read_number(torch.Tensor.item(*args, **kwargs)))
        if facts_of_function(name).changes_shape:
            if id(args[0]) in self._inputs.identities:
                raise _shape_is_changed(name)
            with local_ops():
                has_history = args[0].requires_grad
            if has_history and (views := _list_views(node_of(args[0]))):
                change = HERE.trace.newest_node(), views, _shape_below_views_is_changed(name)
                HERE.trace.changed_bases.append(change)
        _check_function(func)
        _check_values(func, args, kwargs)
        answer = self._facts.answer(func, args, caller)
        return answer[0] if answer else self.calls.call(func, args, kwargs)

    def _set_data(self, x: Any, value: Any) -> None:
        """Handles `x.data = value`."""
        with local_ops(), torch.no_grad():
            before = x.detach()
        with torch.no_grad():
            value = _laid_out_like(x, value.detach())
        if id(x) in self._inputs.identities:
            self._written.setdefault(id(x), (x, before))
        HERE.trace.assign_data(x, value)

    def check_data(self) -> None:
        """Raises CaptureError if a graph cannot repeat what the step has assigned to `x.data`."""
        with local_ops(), torch.no_grad():
            for x, memory in self._memory:
                known = id(x) in self._written or id(x) in self._inputs.renewed
                if not known and x.untyped_storage()._cdata != memory:
                    raise not_captured(
                        "x.set_(y), or x.data = y within a backward pass",
                        "the memory that x gets then is not tracked",
                        Fix("x.data.copy_(y)", "keeps the memory of x"),
                    )
            self._refuse_shared_memory()
            for x, before in self._written.values():
                self._left[before.untyped_storage()._cdata] = before
                self._taken[x.untyped_storage()._cdata] = before

    def copy_back(self) -> None:
        """Writes the values assigned to `x.data` into inputs. Called at the end of the trace."""
        with local_ops(), torch.no_grad():
            copies = []
            for x, before in self._written.values():
                value = x.detach()
                if value.untyped_storage()._cdata in self._left:
                    value = value.clone()  # otherwise it would be overwritten before it is read
                copies.append((before, value))
            for before, value in copies:
                before.copy_(value)

    def is_given_memory(self, fake: torch.Tensor) -> bool:
        """True if the step has changed the memory of the input `fake` by assigning to `.data`."""
        return id(fake) in self._written

    def separate_data(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the tensor that the graph must return for `value`, an output of the step.

        It may be another tensor if the step has assigned `x.data = y`. In eager code x then shares
        the memory of y. In the graph y is copied into x. So an output with the memory of y becomes
        an alias of x. An output with the former memory of x becomes a copy.

        Raises:
            CaptureError: the output is another view of that memory, or has a history.
        """
        with local_ops(), torch.no_grad():
            if not self._written or id(value) in self._inputs.identities:
                return value
            memory = value.untyped_storage()._cdata
            before = self._taken.get(memory) if memory in self._taken else self._left.get(memory)
            if before is None:
                return value
            one, other = ((t.shape, t.stride(), t.storage_offset()) for t in (value, before))
            if one == other and not value.requires_grad:
                return before.detach() if memory in self._taken else value.clone()
        raise not_captured(
            "an output of the step shares the memory that x had before x.data = y, or has since",
            "a graph copies y into x, so a later write to one would not change the other",
            Fix("return y.clone()", "if it is to keep its values"),
            Fix("x.data.copy_(y)", "keeps the memory of x"),
        )

    def _refuse_shared_memory(self) -> None:
        """Raises CaptureError if two inputs share memory after `x.data = y`.

        A graph would copy y into each, and writes of one would not change the other.
        """
        ends = [x.untyped_storage()._cdata for x, _ in self._memory]
        shared = {end for end, count in Counter(ends).items() if count > 1}
        for (x, _), end in zip(self._memory, ends, strict=True):
            if id(x) in self._written and end in shared:
                raise not_captured(
                    "x.data = y, where y is an input of the step or the new data of two tensors",
                    "in eager both share memory afterwards; in a graph x would get a copy",
                    Fix("x.data.copy_(y)", "if each is to have values of its own"),
                )


def _has_symbolic_int(value: Any) -> bool:
    kind = type(value)
    if kind is tuple or kind is list:
        return any(map(_has_symbolic_int, value))
    if kind is slice:
        return any(map(_has_symbolic_int, (value.start, value.stop, value.step)))
    return kind is SymbolicInt or (kind is dict and _has_symbolic_int([*value.values()]))


def _with_ints(value: Any) -> Any:
    """Returns `value` with ints for the symbolic ints in it, which are read."""
    if isinstance(value, slice):
        return slice(*map(_with_ints, (value.start, value.stop, value.step)))
    if type(value) is dict:
        return {k: _with_ints(v) for k, v in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_with_ints, value))
    return int(value) if type(value) is SymbolicInt else value


def _read_number(value: Any) -> Any:
    """Returns the result of `.item()`; for a bool True or False itself, for code like `is True`."""
    return bool(value) if isinstance(value, torch.SymBool) else as_number(value)


@lru_cache(maxsize=8192)
def _is_followed(func: Any) -> bool:
    """True if the mode may have to handle calls of a function in C."""
    name = getattr(func, "__name__", "")
    return (
        name in (*_READING, *_ASKING)
        or facts_of_function(name).changes_shape
        or func in _CHECKS
        or is_fact(func)
    )


def _shape_is_changed(name: str) -> CaptureError:
    return not_captured(
        f"the step changes the shape or the memory of an input ({name})",
        "a graph writes values into the memory of its inputs, but does not change shapes or memory",
        Fix("do it outside the step", "before or after the call"),
        place=user_line(),
    )


def _shape_below_views_is_changed(name: str) -> CaptureError:
    way = name.removesuffix("_")
    return not_captured(
        f"{name} changes the shape of a tensor in place, and the step has views of it",
        "over fake tensors torch then computes other gradients of the views",
        Fix(f"y = x.{way}(...)", "is a view of its own"),
        place=user_line(),
    )


def _list_views(node: fx.Node | None) -> list[fx.Node]:
    """Returns the views with a history of a node's value; none if the value is a view itself."""
    while node is not None and (source := shown_operand(node)[0]) is not None:
        if not facts_of(node.target).changes_metadata:
            return []
        node = source
    found: list[fx.Node] = []
    waiting = [] if node is None else [node]
    while waiting:
        shown = waiting.pop()
        views = [user for user in shown.users if shown_operand(user)[0] is shown]
        views = [view for view in views if view.target is not _aten.detach.default]
        found += [view for view in views if not facts_of(view.target).changes_metadata]
        waiting += views
    return found


def check_changed_bases(changed: Iterable[tuple[fx.Node, list[fx.Node], CaptureError]]) -> None:
    """Raises an error if forward reads a view of a tensor whose shape was changed in place.

    Args:
        changed: (last node before the change, views of the tensor, the error) for each change. The
            error of the first change that matters is raised.
    """
    for last, views, error in changed:
        readers = {user for view in views for user in view.users}
        while (last := last.next).op != "root":
            if last in readers and note_of(last).phase == "forward":
                raise error


def _check_function(func: Any) -> None:
    """Raises CaptureError if the user has replaced a torch function by one that calls it.

    Torch dispatches its own function under the replacement's name, so the replacement would run
    twice.
    """
    if isinstance(func, types.FunctionType) and is_recorded_file(func.__code__.co_filename):
        raise not_captured(
            f"the step replaces a torch function by {func.__qualname__}, which calls the original",
            "capture intercepts the original too, so that the replacement would run twice",
            Fix("your own module or function", "that calls torch's, instead of a replacement"),
        )


def _laid_out_like(x: Any, value: Any) -> Any:
    """Returns `value`, redistributed to the layout of x, which x keeps.

    Raises:
        CaptureError: x cannot hold it: another shape, dtype or device, or plain next to a DTensor.
    """
    one, other = (getattr(t, "_spec", None) for t in (x, value))
    if one is not None and other is not None and one.shape == other.shape:
        value = move_local(value, other, one, "data", "implicit")
    with local_ops():
        alike = (x.shape, x.dtype, x.device) == (value.shape, value.dtype, value.device)
    if (one is None) != (other is None) or not alike:
        raise not_captured(
            "x.data = y with a y of another shape or dtype",
            "the memory of x cannot hold it (module.double() and module.to(dtype) do this)",
            Fix("x.data.copy_(y)", "keeps the shape and the dtype of x"),
            Fix("dtype=", "makes the module in its dtype, as in nn.Linear(2, 2, dtype=...)"),
            Fix("module.double()", "or another conversion, before the step"),
        )
    return value if one is None else as_dtensor(value, one)


# -- checks of values ------------------------------------------------------------------------------


_Checks = Iterator[tuple[torch.Tensor, str]]
"""(condition tensor, torch's message if it is false) of each check."""


def _check_values(func: Any, args: Any, kwargs: Any) -> None:
    """Adds to the graph the checks that `func` makes in eager, on this rank's local values."""
    if func not in _CHECKS:
        return
    with local_ops(), torch.no_grad():
        for holds, text in _CHECKS[func](*args, **(kwargs or {})):
            torch._assert_async(holds.all(), text)


def _check_classes(tensor: torch.Tensor, num_classes: int = -1) -> _Checks:
    yield tensor >= 0, "Class values must be non-negative."
    if num_classes >= 0:
        yield tensor < num_classes, "Class values must be smaller than num_classes."


def _check_quantiles(input: Any, q: Any, *_: Any, **__: Any) -> _Checks:
    if isinstance(q, torch.Tensor):
        yield (q >= 0) & (q <= 1), "quantile() q values must be in the range [0, 1]"


_CHECKS: dict[Any, Callable[..., _Checks]] = {F.one_hot: _check_classes} | {
    getattr(home, name): _check_quantiles
    for home in (torch, torch.Tensor)
    for name in ("quantile", "nanquantile")
}
"""Maps a function to the checks of its operands that it makes in eager."""


# -- library calls ---------------------------------------------------------------------------------

_C_FUNCTION_TYPES = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
"""Types of functions and methods of C."""

_CALLING_BACK = frozenset(("apply_", "map_", "map2_"))
_PLAIN = frozenset(
    (
        bool,
        int,
        float,
        complex,
        str,
        types.NoneType,
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
    )
    + (torch.memory_format, torch.Size, torch.Tensor, torch.nn.Parameter, FakeTensor, FakeDTensor)
)
"""Types of operands that have no methods of the user."""


class LibraryCalls:
    """Calls torch functions in a capture, without profiling calls that cannot run user code.

    The profile function watches the user's calls, and is slow. User code can run inside a torch
    function only if a mode or a hook of the user intercepts it. So a call is profiled in two cases:
    a function mode of the user is active, or dispatch modes or saved-tensor hooks were added.
    """

    def __init__(self) -> None:
        self._is_heard = bool(function_modes())
        self._listeners = dispatch_listeners()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns `func(*args, **kwargs)`, profiled only if user code may run in it.

        Must be called within `unprofiled`.
        """
        if self._calls_nothing_of_users(func, args, kwargs):
            return func(*args, **kwargs)
        return profiled_again(func, *args, **kwargs)

    def call_own(self, func: Callable[..., Any], *args: Any) -> Any:
        """Returns `func(*args)`, for a function of partita.

        The call is not profiled, unless a user's mode intercepts the torch functions that it calls.
        """
        if function_modes() or dispatch_listeners() != self._listeners:
            return func(*args)
        return unprofiled(func, *args)

    def _calls_nothing_of_users(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        return (
            not self._is_heard
            and _calls_nothing_back(func)
            and all(map(_is_plain, args))
            and all(map(_is_plain, kwargs.values()))
            and dispatch_listeners() == self._listeners
        )


def _calls_nothing_back(func: Any) -> bool:
    """True for a function of torch that calls at most its operands' methods."""
    if type(func) in _C_FUNCTION_TYPES:
        return func.__name__ not in _CALLING_BACK
    return type(func) is types.FunctionType and _is_functional(func)


def _is_functional(func: types.FunctionType) -> bool:
    """True for a Python function of torch.nn.functional itself."""
    return vars(F).get(func.__name__) is func and func.__module__ == F.__name__


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind in (tuple, list) and all(map(_is_plain, value)))
