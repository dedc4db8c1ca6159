"""Python outputs of a step: what it assigns to attributes and containers, and objects in its
result.

A program must repeat the assignments in each call. An assignment that it cannot repeat raises an
error at capture: tensors stored in lists or variables, attributes of tensors, writes that differ in
each call.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from partita.capture.code_origin import is_user_module
from partita.capture.fakes import is_symbolic, is_text_of_unknown
from partita.capture.graph_inputs import user_attributes_of
from partita.capture.graph_outputs import attributes_given_to
from partita.capture.left_attributes import (
    attributes_restored,
    find_keys_with_fakes,
    is_list_of_parameters,
)
from partita.graph.errors import CaptureError, not_captured
from partita.graph.program import Input
from partita.graph.slots import Slot
from partita.layout import Fix
from partita.tensor.dtensor_gradients import user_hooks_of

from . import ReadRecord, Write
from .bytecode import line_of_write
from .inputs import State
from .values import (
    MISSING,
    Place,
    brief,
    has_type,
    items_of,
    read_field,
)

# -- what a step leaves in attributes --------------------------------------------------------------

_SHARED = (torch.Tensor, types.ModuleType, types.CodeType, types.FrameType)
_MOST_OBJECTS = 10_000  # the most objects that one search visits


class ModuleAttributes:
    """The attributes of modules before the step, to find out which of them the step sets.

    Parameters and buffers are not included.
    """

    def __init__(self, state: State):
        self._homes = [
            (f"{name}.{prefix}" if prefix else name, vars(part))
            for name, module in state.modules.items()
            for prefix, part in module.named_modules()
        ]
        self._before: list[dict[str, Any]] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Removes fake tensors from module attributes at the end of the `with` block."""
        homes = [home for _, home in self._homes]
        with attributes_restored(homes, contains_fake) as self._before:
            yield

    def is_of_module(self, home: Any) -> bool:
        """True if the dictionary `home` is the `__dict__` of one of the modules."""
        return any(home is known for _, known in self._homes)

    def make_left_error(self, place: Place, value: Any) -> Exception:
        """Returns the error for a step that stores `value` in a place where a program cannot."""
        for _, attributes in self._homes:
            if place.home is attributes.get("_buffers"):
                return not_captured(
                    f"the step registers {place.name}, a buffer that its module did not have",
                    "a module's buffers must be known before a step is captured",
                    Fix("self.register_buffer(...) in __init__", "the step may register it again"),
                    Fix(
                        "module(x)",
                        "once before the step, if its forward registers missing buffers",
                    ),
                )
        return make_left_error(place.name, value)

    def list_left_tensors(self, known: Collection[tuple[int, Any]]) -> list[Slot]:
        """Returns a slot for each module attribute in which the step has stored a tensor.

        Call it inside `restored`, before the attributes are restored.

        Args:
            known: the identities of the slots that are inputs.

        Raises:
            CaptureError: the step stores a tensor in a list, dictionary or variable that held no
                tensor.
        """
        found = []
        for (name, home), held in zip(self._homes, self._before, strict=True):
            for key in find_keys_with_fakes(home, contains_fake):
                if (id(home), key) in known or has_only_known_fakes(home[key], known):
                    continue
                if isinstance(home[key], torch.Tensor) or is_symbolic(home[key]):
                    found.append(Slot(f"{name}.{key}", "value", home, key))
                elif not is_list_of_parameters(home[key], held.get(key)):
                    raise make_left_error(f"{name}.{key}")
        return found


# -- attributes of tensors -------------------------------------------------------------------------


class InputAttributes:
    """Copies the attributes that a user has set on input tensors to their fakes during capture.

    Args:
        record: the record of what the step reads from Python objects. The attributes are added to
            it.
    """

    def __init__(self, record: ReadRecord):
        self._record = record
        self._before: list[tuple[Input, torch.Tensor, dict[str, Any], Any]] = []

    def copy(self, given: Input, fake: torch.Tensor, stand_in: Callable[[Any], Any]) -> None:
        """Copies the user's attributes of an input tensor to the fake that replaces it.

        Args:
            stand_in: a function from a tensor in an attribute to its fake.
        """
        held = given.tensor.__dict__
        for name in user_attributes_of(given.tensor):
            self._record.read_place(Place(f"{given.name}.{name}", held, name), held[name])
            fake.__dict__[name] = stand_in(held[name])
        before = {name: fake.__dict__[name] for name in attributes_given_to(fake)}
        self._before.append((given, fake, before, user_hooks_of(fake)))

    def check_unchanged(self) -> None:
        """Raises CaptureError if the step has set an attribute or a hook of an input tensor."""
        for given, fake, before, hooks in self._before:
            if user_hooks_of(fake) != hooks:
                raise not_captured(
                    f"the step changes the hooks of {given.name}",
                    "a hook is not part of a graph: only the capture would register it",
                    Fix("x.register_hook(hook)", "before the step"),
                    Fix("handle.remove()", "within the step, if the hook is for this call only"),
                )
            for name in {*before, *attributes_given_to(fake)}:
                if fake.__dict__.get(name, MISSING) is not before.get(name, MISSING):
                    raise not_captured(
                        f"the step sets {given.name}.{name}",
                        "an attribute of a tensor is not part of a graph: only the capture would "
                        "set it",
                        Fix("do it outside the step", "before or after the call"),
                    )


# -- objects that hold a tensor that the step made -------------------------------------------------


def check_result(value: Any, known: Container[int]) -> None:
    """Raises CaptureError if a leaf of the result contains a fake tensor, or text made from one.

    Args:
        value: the leaf.
        known: the ids of objects that existed before the step. Fakes in them do not count, unless
            the leaf is a fake, or a container with one.
    """
    if is_text_of_unknown(value):
        raise not_captured(
            "the step returns a string that was formatted from a tensor, or from a value of "
            ".item()",
            "the values are known only after the graph has run, and each call would return the "
            "string of capture",
            Fix("return the tensor", "and format it outside"),
        )
    if contains_fake(value) or contains_new_fake(value, known):
        kind = type(value).__name__
        raise not_captured(
            f"the step returns a {kind} that holds tensors",
            "only tensors are computed in each call; the object would be the one of capture",
            Fix("return a tuple or a dictionary"),
            Fix(f"torch.utils._pytree.register_dataclass({kind})"),
        )


def has_only_known_fakes(value: Any, known: Collection[tuple[int, Any]]) -> bool:
    """True if `value` is a container whose fake tensors are all in places that are graph inputs.

    The program already writes these places. `known` has their identities.
    """
    if not has_type(value, (list, dict, tuple, collections.deque)):
        return False
    ahead, seen = [value], {id(value)}
    while ahead:
        held = ahead.pop()
        keys, values = items_of(held)
        for key, v in enumerate(values) if keys is None else zip(keys, values, strict=True):
            if (id(held), key) in known or not contains_fake(v):
                continue
            if not has_type(v, (list, dict, tuple, collections.deque)):
                return False
            if id(v) not in seen:
                seen.add(id(v))
                ahead.append(v)
    return True


_HOLDING_NOTHING = frozenset((bool, int, float, complex, str, bytes, type(None), type))
_EMPTIABLE = frozenset((dict, list, tuple, set, collections.OrderedDict))


def contains_fake(value: Any) -> bool:
    """True if `value` is a fake tensor or symbolic number, or a container with one."""
    kind = type(value)
    if kind in _HOLDING_NOTHING or (kind in _EMPTIABLE and not value):
        return False  # true of nearly all attributes of modules
    return any(map(_stands_in, walk_reachable(value)))


def contains_new_fake(value: Any, known: Container[int]) -> bool:
    """True if an object that the step created contains a fake tensor, or a string printed from one.

    Args:
        value: the object at which the search begins.
        known: the ids of objects that existed before the step, which are not searched. They hold
            fakes during capture.
    """

    def list_held(held: Any) -> Iterable[Any]:
        return () if id(held) in known else _in_object(held)

    found = walk_reachable(value, list_held)
    return any(_stands_in(v) or is_text_of_unknown(v) for v in found if id(v) not in known)


def _in_container(value: Any) -> Iterable[Any]:
    kind: type = type(value)
    if issubclass(kind, (dict, list, tuple, set, frozenset, collections.deque)):
        keys, values = items_of(value)
        return [*(keys or ()), *values]
    if dataclasses.is_dataclass(kind):
        return [read_field(value, f.name) for f in dataclasses.fields(kind)]
    return ()


def walk_reachable(
    value: Any, contents_of: Callable[[Any], Iterable[Any]] = _in_container
) -> Iterator[Any]:
    """Yields `value` and everything that it contains, each object once, up to `_MOST_OBJECTS`.

    Args:
        contents_of: a function from a value to the values inside it; by default a container's
            items.
    """
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay theirs
    waiting = [value]
    while waiting and len(seen) < _MOST_OBJECTS:
        found = waiting.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            yield found
            waiting += contents_of(found)


def _in_object(value: Any) -> Iterable[Any]:
    """Returns the objects to which an object refers, except by its code."""
    kind = type(value)
    if has_type(value, type):
        return [*vars(value).values()] if is_user_module(value.__module__) else ()
    if kind in _HOLDING_NOTHING or has_type(value, _SHARED):
        return ()
    if has_type(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if kind.__module__.startswith("partita."):
        return ()
    return gc.get_referents(value)


def _stands_in(value: Any) -> bool:
    if has_type(value, weakref.ref):
        value = value()
    return has_type(value, FakeTensor) or is_symbolic(value)


def make_left_error(name: str, value: Any = None) -> Exception:
    """Returns the error for a step that stores `value` in `name`, for example a global list.

    It is a tensor, a number that is a graph input, or an object with tensors.
    """
    what = "a number that is an input" if is_symbolic(value) else "a tensor"
    if value is not None and not _stands_in(value) and not contains_fake(value):
        kind = type(value).__name__
        return not_captured(
            f"the step makes a {kind} that holds tensors, and leaves it in {name}",
            "during capture fakes replace its tensors, and the object would keep them",
            Fix(f"make the {kind} before the step", "for example in __init__"),
        )
    return not_captured(
        f"the step leaves {what} in {name}",
        "only the capture would store it there, not each call",
        Fix("return it"),
        Fix("self.name = x", "in a module, where x is one tensor and no nn.Parameter"),
        Fix(
            "call it outside the step", "what stores it there, such as scheduler.step() or a cache"
        ),
    )


# -- other writes ----------------------------------------------------------------------------------


def unrepeated_write_error(write: Write, codes: list[CodeType], step: Any) -> CaptureError:
    """Returns the error for a change of a Python object that a program cannot repeat.

    Args:
        write: the change.
        codes: the code of the functions that ran.
        step: the step. Its line is used if the line of the write is unknown.
    """
    was, now = brief(write.before), brief(write.after)
    changed = f" ({was} became {now})" if was != now else ""
    return not_captured(
        f"the step changes {write.place.name}{changed}",
        "a graph contains only tensors: only the capture would make this change, not each call",
        Fix("do it outside the step", "before or after the call"),
        place=line_of_write(codes, write.place.key) or _line_of(step),
    )


def _line_of(step: Any) -> str:
    """Returns the line at which a step is defined; "" if there is none."""
    f = inspect.unwrap(step) if inspect.isfunction(step) else getattr(step, "__func__", step)
    code = getattr(f, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
