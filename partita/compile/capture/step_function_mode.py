"""The torch-function mode of a captured step: it follows what the step calls of tensors by name.

- `x.data = y` exchanges what node makes x. Reads of x from then on are reads of y; at the step's
  end y's value is copied into the memory of x. Other views of that keep their values until then, as
  in eager.
- `.item()`, `bool(x)`: numbers that are known when the graph runs (`fakes`).
- Metadata of inputs, as `is_leaf`: conditions of the program (`inputs.TensorFacts`).
- Checks of values that torch makes in eager and leaves out when it traces: nodes of the graph.
- Attention's masks, where they need not be there (`known_masks`).
- Calls during which no code of the user's runs are not profiled (`LibraryCalls`).
- What a graph cannot answer is refused: at once, or when the step has run (`check_truth`).
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from partita.comm import user_line
from partita.layout import Fix
from partita.tensor.autograd import moved
from partita.tensor.dtensor import tagged
from partita.tensor.op_facts import (
    STATE_OF_LEAVES,
    facts_of,
    facts_of_function,
    find_unknown_effect,
)
from partita.tensor.tensor_state import HERE

from ..arguments import is_taken_apart
from ..errors import CaptureError, not_an_input, not_captured
from ..graph_nodes import note_of
from ..guards.codes import asks_whether_true, asks_which_object, is_recorded
from ..guards.guards import function_modes
from ..guards.places import Place
from ..verify import SPACES
from .capture_context import dispatch_listeners, profiled_again, unprofiled
from .equal_calls import node_of
from .fakes import FakeDTensor, as_number, has_memory
from .inputs import GraphInputs, TensorFacts, is_fact
from .known_masks import ATTENTION

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
        if func is ATTENTION and HERE.block is None:  # a block leaves it out by itself
            args, kwargs = HERE.recorder.masks.leave_out(args, kwargs, _find_node)
        if type(func) in _C_FUNCTION_TYPES and not _is_followed(func):
            return self.calls.call(func, args, kwargs)
        if name in _READING:
            self.reads_number = self.reads_number or user_line()
            return pytree.tree_map(as_number, func(*args, **kwargs))
        if name in _ASKING:  # torch would ask for a number first
            return bool(as_number(torch.Tensor.item(*args, **kwargs)))
        if facts_of_function(name).changes_shape and id(args[0]) in self._inputs.identities:
            raise _shape_is_changed(name)
        _check_function(func)
        _check_values(func, args, kwargs)
        answer = self._facts.answer(func, args, caller)
        return answer[0] if answer else self.calls.call(func, args, kwargs)

    def _set_data(self, x: Any, value: Any) -> None:
        """`x.data = value`."""
        with Local(), torch.no_grad():
            before = x.detach()
        with torch.no_grad():
            value = _laid_out_like(x, value.detach())
        if id(x) in self._inputs.identities:
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


def _find_node(mask: torch.Tensor) -> tuple[fx.Node, dict[fx.Node, fx.Node]] | None:
    node = node_of(mask)
    return None if node is None else (node, {})


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


_Checks = Iterator[tuple[torch.Tensor, str]]
"""What must be true, and torch's message where it is not."""


def _check_values(func: Any, args: Any, kwargs: Any) -> None:
    """Have the graph check what `func` checks in eager, of this rank's local values."""
    if func not in _CHECKS:
        return
    with Local(), torch.no_grad():
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
"""By function, the checks that it makes of its operands in eager."""


# -- library calls ---------------------------------------------------------------------------------

_C_FUNCTION_TYPES = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
"""Types of functions and methods of C."""

_CALLING_BACK = frozenset(("apply_", "map_", "map2_"))
_PLAIN = frozenset(
    (bool, int, float, complex, str, NoneType, type(...), torch.dtype, torch.device, torch.layout)
    + (torch.memory_format, torch.Size, torch.Tensor, torch.nn.Parameter, FakeTensor, FakeDTensor)
)
"""Types of operands that have no method of the user's."""


class LibraryCalls:
    """Calls functions of torch, unprofiled where that calls nothing of the user's.

    What the user may have put between a function and its kernels is compared with what is there
    when this is made: torch-function modes must not be the user's, dispatch modes and hooks on
    saved tensors not have become more.
    """

    def __init__(self) -> None:
        self._is_heard = bool(function_modes())
        self._listeners = dispatch_listeners()

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`func(*args, **kwargs)`. Called within `unprofiled`."""
        if self._calls_nothing_of_users(func, args, kwargs):
            return func(*args, **kwargs)
        return profiled_again(func, *args, **kwargs)

    def call_own(self, func: Callable[..., Any], *args: Any) -> Any:
        """`func(*args)`, a function of partita's, unprofiled unless a mode of the user's hears what
        it calls of torch."""
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
    """Is it a function of torch that calls at most its operands' methods?"""
    if type(func) in _C_FUNCTION_TYPES:
        return func.__name__ not in _CALLING_BACK
    return type(func) is FunctionType and _is_functional(func)


@lru_cache(maxsize=1024)
def _is_functional(func: FunctionType) -> bool:
    """Is it a Python function of torch.nn.functional itself?"""
    return vars(F).get(func.__name__) is func and func.__module__ == F.__name__


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind in (tuple, list) and all(map(_is_plain, value)))


# -- checks of a run -------------------------------------------------------------------------------


def check_constants(graph: fx.Graph) -> None:
    """Raise CaptureError if a tensor that is no input is a constant of the graph.

    Tensors that a step makes of numbers are copied first (`lift_fresh_copy`). Fake modes refuse any
    other tensor, but a proxy mode handles some calls of one-element tensors itself.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user.op == "call_function" and not facts_of(user.target).lifts:
                raise not_an_input(note_of(user).source)


def check_operators(graph: fx.Graph) -> None:
    """Raise CaptureError if the step calls an operator that is not torch's own, and of which it is
    not known that it only makes tensors of its arguments."""
    for node in graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if node.op != "call_function" or space in (*SPACES, "profiler"):
            continue
        if effect := find_unknown_effect(node.target):
            raise not_captured(
                f"the step calls {node.target}, an operator of a library of its own",
                effect,
                Fix(
                    "torch.library.custom_op(..., mutates_args=())",
                    "for what only gives new tensors",
                ),
                Fix("call it outside the step", "before or after, or between compiled regions"),
                place=note_of(node).source,
            )


def check_truth(codes: Iterable[CodeType], line: str) -> None:
    """Raise CaptureError if a function asks `is True` in a step that calls `.item()` at `line`."""
    for asking in filter(asks_whether_true, codes if line else ()):
        raise not_captured(
            f"{asking.co_name} asks whether something `is True`, in a step that reads a value",
            "what .item() gives has no value while a step is captured, and is not True itself",
            Fix("return x.item()", "and ask outside of the step"),
            place=line,
        )


def check_arguments(call: Any, places: Iterable[Place], codes: Iterable[CodeType]) -> None:
    """Raise CaptureError if the step may ask whether an argument is an object known by name.

    Containers and objects of tensors are made anew for the step, which would find two.

    Args:
        call: the arguments and keyword arguments.
        places: what the step reads.
        codes: of the functions that ran.
    """
    asking = next(filter(asks_which_object, codes), None)
    if asking is None:
        return
    made_anew = _made_anew(call)
    for place in places if made_anew else ():
        if any(place.value is v or type(place.value) is _own_class(v) for v in made_anew):
            raise not_captured(
                f"{asking.co_name} asks whether something is another object, an argument is a "
                f"{type(place.value).__name__}, and so is {place.name}",
                "a step is given its arguments made anew: `is` would find two objects for one",
                Fix("pass it, or read it by its name", "not both"),
                place=f"{asking.co_filename}:{asking.co_firstlineno}",
            )


def _own_class(value: Any) -> type | None:
    """The class of an object of the user's; None of a list or dictionary."""
    return None if type(value).__module__ == "builtins" else type(value)


def _made_anew(call: Any) -> list[Any]:
    """The containers and objects among the arguments that `flatten_call` takes apart."""
    found: list[Any] = []

    def look(value: Any) -> bool:
        apart = not pytree.tree_is_leaf(value) or is_taken_apart(value)
        if apart and not isinstance(value, tuple):
            found.append(value)
        return False

    pytree.tree_leaves(call, is_leaf=look)
    return found
