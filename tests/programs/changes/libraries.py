"""Programs that read what Python's library, numpy or torch hold: one entry for each place."""

from __future__ import annotations

import array
import dataclasses
import enum
import functools
import inspect
import io
import logging
import operator
import pathlib
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from .state import CHANGES, REFUSED, Change, change, having, item, refused
from .world import afterwards, named, outside

__all__: list[str] = []

# -- numbers and texts of one's own classes, and what is read of objects in C ----------------------


class OfUsers:
    """Objects of it have attributes, whatever else they are."""

    k = 2


class Kind(OfUsers, enum.IntEnum):
    A = 3


for base, given in ((int, 3), (float, 3.0), (complex, 3.0), (str, "a"), (bytes, b"a")):
    item(
        f"an_attribute_of_a_kind_of_{base.__name__}",
        functools.partial(type("Own", (OfUsers, base), {}), given),
        lambda c: c.k,
        having("k", 5),
    )
item("what_an_error_was_given", lambda: ValueError(2), lambda c: c.args[0], having("args", (5,)))


@change
def an_attribute_of_a_member_that_is_an_int():
    Kind.A.__dict__.pop("k", None)
    return Change(lambda x: x * Kind.A * Kind.A.k, lambda: setattr(Kind.A, "k", 5))


@change
def an_attribute_of_a_class_that_a_getter_asks_for():
    class Holder:
        k = 2

    get = operator.attrgetter("k")
    return Change(lambda x: x * get(Holder), lambda: setattr(Holder, "k", 5))


@change
def a_method_of_a_class_that_a_caller_asks_for():
    class Holder:
        @staticmethod
        def k():
            return 2

    get = operator.methodcaller("k")
    return Change(lambda x: x * get(Holder), lambda: setattr(Holder, "k", staticmethod(lambda: 5)))


# -- buffers whose size a step changes -------------------------------------------------------------


def growing(name: str, make: Callable[[], Any], grow: Callable[[Any], Any]) -> None:
    """A step that writes what nothing can write each time: it stays as it was."""

    def build() -> Change:
        held = make()
        return Change(lambda x: x * (grow(held) is None), lambda: None)

    REFUSED.add(name)
    CHANGES[name] = build


growing("an_array_that_grows", lambda: array.array("d", [1]), lambda a: a.append(2))
growing("numpys_array_that_grows", lambda: np.ones(2), lambda a: a.resize((3,), refcheck=False))
growing("a_bytearray_that_grows", lambda: bytearray(b"a"), lambda a: a.append(2))
growing("a_text_that_is_closed", lambda: io.StringIO("a"), lambda a: a.close())
closed = io.StringIO("a")
closed.close()
item("whether_a_text_is_closed", lambda: closed, lambda c: 5 if c.closed else 2, lambda c: None)


# -- what classes and functions say of themselves --------------------------------------------------


@change
def what_a_class_says_of_patterns():
    class Point:
        __match_args__ = ("a", "b")
        a, b = 2, 5

    point = Point()

    def step(x):
        match point:
            case Point(k):
                return x * k

    return Change(step, lambda: setattr(Point, "__match_args__", ("b", "a")))


@change
def how_many_arguments_a_function_takes():
    def one(a, b):
        pass

    def other(a, b, c, d, e):
        pass

    return Change(
        lambda x: x * one.__code__.co_argcount, lambda: setattr(one, "__code__", other.__code__)
    )


@change
def a_signature_that_a_function_is_given():
    def function(a, b):
        pass

    return Change(
        lambda x: x * (1 + len(inspect.signature(function).parameters)),
        lambda: setattr(function, "__signature__", inspect.Signature([])),
    )


def with_fields() -> Any:
    @dataclasses.dataclass
    class Fields:
        k: int = 2

    return Fields


@change
def a_field_that_a_dataclass_is_given():
    kind = with_fields()
    fields = kind.__dataclass_fields__
    return Change(
        lambda x: x * len(dataclasses.fields(kind)), lambda: fields.update(other=fields["k"])
    )


@change
def a_default_of_a_field():
    held = with_fields()()
    return Change(
        lambda x: x * dataclasses.fields(held)[0].default,
        lambda: setattr(dataclasses.fields(held)[0], "default", 5),
    )


def module_with(k: int) -> Any:
    found: Any = types.ModuleType("another_of_users")
    found.k = k
    return found


def imported() -> int:
    import another_of_users

    return another_of_users.k


def imported_from() -> int:
    from another_of_users import k

    return k


for read in (imported, imported_from):
    named(
        f"another_module_that_is_{read.__name__}",
        read,
        lambda: sys.modules.__setitem__("another_of_users", module_with(5)),
        lambda: sys.modules.__setitem__("another_of_users", module_with(2)),
    )


# -- what the process has once ---------------------------------------------------------------------

LOGGER = "tests.programs.library"
for how, read in (
    ("level", lambda: 5 + logging.getLogger(LOGGER).level),
    ("telling", lambda: 5 if logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG) else 2),
):
    named(
        f"the_{how}_of_a_logger_that_is_asked_for",
        read,
        lambda: logging.getLogger(LOGGER).setLevel(logging.DEBUG),
        lambda: logging.getLogger(LOGGER).setLevel(logging.WARNING),
    )

NAME = threading.current_thread().name
named(
    "the_name_of_the_thread",
    lambda: len(threading.current_thread().name),
    lambda: setattr(threading.current_thread(), "name", "another"),
    lambda: setattr(threading.current_thread(), "name", NAME),
)
named(
    "the_seed",
    lambda: torch.initial_seed() % 100,
    lambda: torch.manual_seed(5),
    lambda: torch.manual_seed(2),
)


@change
def a_class_that_pytree_comes_to_know():
    class Holder:
        pass

    held = Holder()
    afterwards(lambda: pytree.SUPPORTED_NODES.pop(Holder, None))
    return Change(
        lambda x: x * (1 + len(pytree.tree_leaves([1, held]))),
        lambda: pytree.register_pytree_node(Holder, lambda o: ([1, 2, 3], None), lambda v, c: held),
    )


# -- functions of torch's that a layer calls -------------------------------------------------------


def replaced(name: str, by: Any) -> None:
    own = getattr(F, name)
    setattr(F, name, by)
    afterwards(lambda: setattr(F, name, own))


@change
def a_function_that_a_layer_calls():
    layer = torch.nn.ReLU()
    return Change(
        lambda x: layer(x), lambda: replaced("relu", lambda x, inplace=False: x.clamp(0) * 5)
    )


@refused
def a_function_of_torchs_that_is_called_by_what_stands_in_its_place():
    own, layer = F.relu, torch.nn.ReLU()
    replaced("relu", lambda x, inplace=False: own(x) * 5)
    return Change(lambda x: layer(x), lambda: None)


# -- what no guard can hold ------------------------------------------------------------------------

FOLDER = pathlib.Path(tempfile.mkdtemp())
np.save(FOLDER / "one.npy", np.array([2.0]))
(FOLDER / "one.txt").write_text("2.0")
outside("an_array_in_a_file", lambda: float(np.load(FOLDER / "one.npy")[0]))
outside("an_array_in_a_text", lambda: float(np.loadtxt(FOLDER / "one.txt")))
outside("numbers_in_a_file", lambda: float(np.fromfile(FOLDER / "one.npy")[-1]))
outside("a_tensor_in_a_file", lambda: torch.from_file(str(FOLDER / "one.npy"), size=2).sum())


@refused
def what_a_socket_receives():
    one, other = socket.socketpair()
    afterwards(lambda: (one.close(), other.close()))
    one.send(b"12345678")
    return Change(lambda x: x * int(other.recv(1)), lambda: None)


def anomalies(of_step: bool) -> Change:
    before = torch.is_anomaly_enabled()
    afterwards(lambda: torch.autograd.set_detect_anomaly(before))

    def step(x):
        w = torch.ones(3, requires_grad=True)
        if not of_step:
            (x * w).sum().backward()
            return w.grad
        with torch.autograd.set_detect_anomaly(True):
            (x * w).sum().backward()
            return w.grad

    return Change(step, lambda: torch.autograd.set_detect_anomaly(True))


for of_step in (True, False):
    CHANGES[f"anomalies_looked_for_by_{'the_step' if of_step else 'all'}"] = functools.partial(
        anomalies, of_step
    )
REFUSED.update(("anomalies_looked_for_by_the_step", "anomalies_looked_for_by_all"))


@refused
def anomalies_looked_for_in_a_later_backward():
    before = torch.is_anomaly_enabled()
    afterwards(lambda: torch.autograd.set_detect_anomaly(before))
    layer = torch.nn.Linear(3, 3)
    return Change(lambda x: layer(x), lambda: torch.autograd.set_detect_anomaly(True))
