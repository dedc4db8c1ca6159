"""May a captured step read and leave tensors in slots, variables, enum members and the like?"""

from __future__ import annotations

import contextvars
import dataclasses
import enum
import gc
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt

Place = tuple[Callable[[], Any], Callable[[Any], object]]
"""How a place is read, and written."""


class Slotted:
    __slots__ = ("last",)


class InheritsSlots(Slotted):
    __slots__ = ("more",)


@dataclasses.dataclass(slots=True)
class Record:
    last: Any = None


def attribute_of(owner: Any, name: str = "last") -> Place:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def slot() -> Place:
    return attribute_of(Slotted())


def inherited_slot() -> Place:
    return attribute_of(InheritsSlots())


def slot_of_a_dataclass() -> Place:
    return attribute_of(Record())


def enum_member() -> Place:
    return attribute_of(enum.Enum("Kind", "A B").A)


def flag() -> Place:
    return attribute_of(enum.IntFlag("Flag", "A B").A)


def enum_class() -> Place:
    return attribute_of(enum.Enum("Kind", "A B"))


def variable() -> Place:
    last = None

    def put(value: Any) -> None:
        nonlocal last
        last = value

    return lambda: last, put


def global_variable() -> Place:
    def read() -> Any:
        return LAST

    def put(value: Any) -> None:
        global LAST
        LAST = value

    return read, put


def context_variable() -> Place:
    last: contextvars.ContextVar[Any] = contextvars.ContextVar("last")
    return last.get, last.set


def thread_local() -> Place:
    return attribute_of(threading.local())


def attribute() -> Place:
    return attribute_of(type("Holder", (), {})())


def function() -> Place:
    return attribute_of(lambda: None)


LAST: Any = None
PLACES = {
    make.__name__: make
    for make in (
        slot,
        inherited_slot,
        slot_of_a_dataclass,
        enum_member,
        flag,
        enum_class,
        variable,
        global_variable,
        context_variable,
        thread_local,
        attribute,
        function,
    )
}


def leaves(place: Place) -> Callable[[Any], Any]:
    _, put = place

    def step(x: Any) -> Any:
        put(x * 2)
        return x + 1

    return step


def adds(place: Place) -> Callable[[Any], Any]:
    read, put = place
    put(torch.ones(2))

    def step(x: Any) -> Any:
        put(read() + x)
        return read() * x

    return step


def reads(place: Place) -> Callable[[Any], Any]:
    read, put = place
    put(torch.ones(2))
    return lambda x: x * read()


def reads_a_list(place: Place) -> Callable[[Any], Any]:
    read, put = place
    put([torch.ones(2)])
    return lambda x: x * read()[0]


def reads_a_module(place: Place) -> Callable[[Any], Any]:
    read, put = place
    torch.manual_seed(0)
    put(torch.nn.Linear(2, 2))
    return lambda x: read()(x)


USES = {f.__name__: f for f in (leaves, adds, reads, reads_a_list, reads_a_module)}
MOST_CAPTURES = {"leaves": 2}


def run(place: str, use: str, compiled: bool) -> tuple[list[Any], int]:
    read, put = PLACES[place]()
    step = USES[use]((read, put))
    fast = pt.compile(step, backend="graph") if compiled else step
    found = []
    for i in range(4):
        found.append(fast(torch.tensor([1.0, 2.0]) * (i + 1)))
        if isinstance(held := read(), torch.Tensor):
            found.append(held.clone())
        if use == "reads":
            put(torch.full((2,), i + 2.0))  # another tensor, before the next call
        elif use == "reads_a_list":
            put([torch.full((2,), i + 2.0)])
    return found, len(getattr(fast, "reasons", ()))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_is_read_and_left_as_in_eager(place: str, use: str) -> None:
    want, _ = contextvars.copy_context().run(run, place, use, False)
    found, captures = contextvars.copy_context().run(run, place, use, True)
    torch.testing.assert_close(found, want)
    assert captures <= MOST_CAPTURES.get(use, 1)


def call_functions_of_two_modules(line: str, compiled: bool) -> list[Any]:
    """Returns results and values of steps with a global `cv` and a variable "cv" in two modules.

    Reading NumPy's memory makes capture search the step's state a second time.
    """
    modules = [types.ModuleType(name) for name in ("one", "other")]
    for i, module in enumerate(modules):
        vars(module).update(torch=torch, array=np.ones(2), cv=contextvars.ContextVar("cv"))
        exec(f"def read(x):\n    {line}\n    return y * torch.from_numpy(array)", vars(module))
        module.cv.set(torch.full((2,), i + 2.0))
    one, other = modules
    found = []
    for step in (one.read, lambda x: one.read(x) - 3 * other.read(x)):
        step = pt.compile(step, backend="graph") if compiled else step
        for i in range(3):
            found.append(step(torch.tensor([1.0, 2.0]) * (i + 1)))
            found += [module.cv.get().clone() for module in modules]
    return found


@pytest.mark.parametrize("line", ["y = x; cv.set(x * 2)", "y = x * cv.get()"])
def test_places_of_one_name_are_not_taken_for_each_other(line: str) -> None:
    want = contextvars.copy_context().run(call_functions_of_two_modules, line, False)
    found = contextvars.copy_context().run(call_functions_of_two_modules, line, True)
    torch.testing.assert_close(found, want)


def test_a_tensor_that_a_step_deletes_is_one_clear_error() -> None:
    holder, record, held = type("Holder", (), {})(), Slotted(), {"t": torch.ones(2)}
    holder.t = record.last = cell = torch.ones(2)

    def drop(x: Any) -> Any:
        nonlocal cell
        del cell
        return x

    for step in (
        lambda x: (delattr(holder, "t"), x + 1)[1],
        lambda x: (delattr(record, "last"), x + 1)[1],
        lambda x: (held.pop("t"), x + 1)[1],
        drop,
    ):
        with pytest.raises(pt.CaptureError, match="deleted or replaced the tensor"):
            pt.compile(step, backend="graph")(torch.ones(2))
    assert all(torch.equal(t, torch.ones(2)) for t in (holder.t, record.last, held["t"], cell))


def test_nothing_is_left_where_a_step_is_refused() -> None:
    cell, record, items = None, Slotted(), []

    def step(x: Any) -> Any:
        nonlocal cell
        cell = record.last = x * 2
        items.append(x)  # would be there once
        return x

    with pytest.raises(pt.CaptureError, match=r"leaves a tensor|changes"):
        pt.compile(step, backend="graph")(torch.ones(2))
    assert cell is None and not hasattr(record, "last") and items == []
    assert not any(isinstance(v, FakeTensor) for v in gc.get_referents(record))
