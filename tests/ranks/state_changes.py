"""Programs whose Python state changes between two calls of a step: one entry for each kind.

An entry is made of: what the step is, what changes between its second and its third call and,
where the step itself changes state, what is looked at after each call. It is built anew for each
run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import dataclasses
import enum
import fractions
import functools
import itertools
import logging
import math
import os
import queue
import random
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

__all__ = ["CHANGES", "REFUSED", "Change"]


@dataclasses.dataclass
class Change:
    """One program.

    Attributes:
        step: what is compiled.
        change: what happens between two calls.
        seen: what a user can look at afterwards.
        arguments: of each of the four calls, beside x.
    """

    step: Callable[..., Any]
    change: Callable[[], Any]
    seen: Callable[[], Any] = lambda: None
    arguments: Callable[[int], tuple[Any, ...]] = lambda i: ()


CHANGES: dict[str, Callable[[], Change]] = {}
REFUSED: set[str] = set()


def change(build: Callable[[], Change]) -> Callable[[], Change]:
    CHANGES[build.__name__] = build
    return build


def refused(build: Callable[[], Change]) -> Callable[[], Change]:
    """What no guard can hold, or no graph can write: an error, not a number."""
    REFUSED.add(build.__name__)
    return change(build)


def item(name: str, make: Callable[[], Any], read: Callable[..., Any], write: Callable[[Any], Any]):
    """A value that is read from something that the step's closure holds."""

    def build() -> Change:
        held = make()
        return Change(lambda x: x * read(held), lambda: write(held))

    CHANGES[name] = build


def setting(key: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, value)


def having(key: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, key, value)


# -- containers ------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    BLUE = 5


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 7


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    inner: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: int = 2


@dataclasses.dataclass(slots=True)
class Slotted:
    scale: int = 2


class Plain:
    factor = 3

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slots:
    __slots__ = ("inner", "scale")

    def __init__(self) -> None:
        self.scale = 2


class Dotted(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


item("a_value_in_a_dict", lambda: {"k": 1}, lambda c: c["k"], setting("k", 4))
item("a_value_in_a_dict_by_get", lambda: {"k": 1}, lambda c: c.get("k"), setting("k", 4))
item("a_key_that_comes", lambda: {}, lambda c: c.get("k", 2), setting("k", 4))
item("a_key_that_goes", lambda: {"k": 5}, lambda c: c.get("k", 2), lambda c: c.pop("k"))
item("a_key_asked_for_with_in", lambda: {}, lambda c: 5 if "k" in c else 2, setting("k", 1))
item("the_length_of_a_dict", lambda: {"a": 1}, len, setting("b", 1))
item("the_sum_of_a_dict", lambda: {"a": 1}, lambda c: sum(c.values()), setting("a", 9))
item(
    "the_order_of_a_dict",
    lambda: {"a": 1, "b": 2},
    lambda c: next(iter(c.values())),
    lambda c: c.update(a=c.pop("a")),
)
item(
    "a_value_in_a_nested_dict",
    lambda: {"a": {"b": 2}},
    lambda c: c["a"]["b"],
    lambda c: c["a"].update(b=7),
)
item(
    "a_dict_in_a_dict_replaced",
    lambda: {"a": {"b": 2}},
    lambda c: c["a"]["b"],
    setting("a", {"b": 7}),
)
item("a_dict_by_a_computed_key", lambda: {"k1": 1}, lambda c: c[f"k{1}"], setting("k1", 4))
item("a_list_item", lambda: [1, 2], lambda c: c[0], setting(0, 4))
item("a_list_that_grows", lambda: [1, 2], sum, lambda c: c.append(5))
item("a_list_that_shrinks", lambda: [1, 2], sum, lambda c: c.pop())
item("a_list_turned_round", lambda: [1, 2], lambda c: c[0], lambda c: c.reverse())
item(
    "a_list_of_lists",
    lambda: [[1], [2]],
    lambda c: c[1][0],
    lambda c: c[1].append(3) or c[1].pop(0),
)
item("a_list_in_a_tuple", lambda: ([1],), lambda c: c[0][0], lambda c: setting(0, 5)(c[0]))
item("a_tuple_in_a_dict", lambda: {"a": (1, 2)}, lambda c: c["a"][0], setting("a", (3, 2)))
item("a_set_that_grows", lambda: {1}, len, lambda c: c.add(2))
item("a_set_asked_for_a_member", lambda: {1}, lambda c: 5 if 3 in c else 2, lambda c: c.add(3))
item(
    "a_frozenset_in_a_list",
    lambda: [frozenset({1})],
    lambda c: len(c[0]),
    setting(0, frozenset({1, 2})),
)
item("a_deque_item", lambda: collections.deque([1, 2]), lambda c: c[0], lambda c: c.rotate(1))
item("a_counter", lambda: collections.Counter("aab"), lambda c: c["a"], lambda c: c.update("a"))
item("a_default_dict", lambda: collections.defaultdict(int, k=1), lambda c: c["k"], setting("k", 4))
item("an_ordered_dict", lambda: collections.OrderedDict(k=1), lambda c: c["k"], setting("k", 4))
item("a_chain_map", lambda: collections.ChainMap({"k": 1}), lambda c: c["k"], setting("k", 4))
item("a_dict_with_attributes", lambda: Dotted(k=1), lambda c: c.k, having("k", 4))
item(
    "a_mapping_proxy",
    lambda: (d := {"k": 1}, types.MappingProxyType(d)),
    lambda c: c[1]["k"],
    lambda c: c[0].update(k=4),
)
item("a_named_tuple_in_a_list", lambda: [Point(1, 2)], lambda c: c[0].x, setting(0, Point(4, 2)))
item("an_enum_member", lambda: [Color.RED], lambda c: c[0].value, setting(0, Color.BLUE))
item("an_int_enum_member", lambda: {"l": Level.LOW}, lambda c: c["l"], setting("l", Level.HIGH))
item("a_slice", lambda: [slice(0, 1)], lambda c: sum([1, 2, 3][c[0]]), setting(0, slice(0, 3)))
item("a_range", lambda: [range(2)], lambda c: len(c[0]), setting(0, range(5)))
item("a_complex_number", lambda: [1 + 0j], lambda c: c[0].real, setting(0, 4 + 0j))
item("a_string", lambda: ["a"], lambda c: len(c[0]), setting(0, "abc"))
item("bytes", lambda: [b"a"], lambda c: len(c[0]), setting(0, b"abc"))
item("a_bytearray", lambda: bytearray(b"a"), lambda c: c[0], setting(0, 3))
item("none_that_becomes_a_number", lambda: [None], lambda c: c[0] or 2, setting(0, 5))
item("one_that_becomes_true", lambda: [1], lambda c: 3 if c[0] is True else 2, setting(0, True))
item(
    "one_that_becomes_a_float",
    lambda: [1],
    lambda c: 3 if isinstance(c[0], float) else 2,
    setting(0, 1.0),
)
item("zero_that_becomes_minus_zero", lambda: [0.0], lambda c: c[0], setting(0, -0.0))
item("a_sign_of_zero_asked_for", lambda: [0.0], lambda c: math.copysign(2, c[0]), setting(0, -0.0))
item("a_number_that_becomes_nan", lambda: [1.0], lambda c: c[0], setting(0, math.nan))
item("nan_that_becomes_a_number", lambda: [math.nan], lambda c: c[0], setting(0, 3.0))
item("nan_that_stays", lambda: [math.nan, 2], lambda c: c[1], setting(0, float("nan")))
item("an_array_item", lambda: np.ones(3), lambda c: float(c[1]), setting(1, 4))
item("an_item_of_a_long_array", lambda: np.ones(5000), lambda c: float(c.sum()), setting(2500, 400))
item(
    "an_array_in_a_dict",
    lambda: {"a": np.ones(3)},
    lambda c: float(c["a"][1]),
    lambda c: c["a"].fill(7),
)
item("a_number_of_numpy", lambda: [np.float64(2)], lambda c: float(c[0]), setting(0, np.float64(3)))
item(
    "a_dtype",
    lambda: [torch.float32],
    lambda c: 2 if c[0] is torch.float32 else 3,
    setting(0, torch.float64),
)
item("a_dataclass_field", Settings, lambda c: c.scale, having("scale", 5.0))
item(
    "a_dataclass_in_a_dataclass",
    lambda: Settings(inner=Settings()),
    lambda c: c.inner.scale,
    lambda c: having("scale", 5.0)(c.inner),
)
item(
    "a_dict_in_a_dataclass",
    lambda: Settings(inner={"k": 2}),
    lambda c: c.inner["k"],
    lambda c: c.inner.update(k=6),
)
item("a_frozen_dataclass_replaced", lambda: [Frozen()], lambda c: c[0].scale, setting(0, Frozen(7)))
item("a_dataclass_with_slots", Slotted, lambda c: c.scale, having("scale", 5))
item("a_namespace", lambda: types.SimpleNamespace(k=2), lambda c: c.k, having("k", 5))
item(
    "a_namespace_in_a_namespace",
    lambda: types.SimpleNamespace(a=types.SimpleNamespace(k=2)),
    lambda c: c.a.k,
    lambda c: having("k", 5)(c.a),
)
item("an_objects_attribute", lambda: Plain(k=2), lambda c: c.k, having("k", 5))
item(
    "an_objects_attribute_by_getattr",
    lambda: Plain(k1=2),
    lambda c: getattr(c, f"k{1}"),
    having("k1", 5),
)
item("an_attribute_that_comes", lambda: Plain(), lambda c: getattr(c, "k", 2), having("k", 5))
item(
    "an_attribute_that_goes",
    lambda: Plain(k=7),
    lambda c: getattr(c, "k", 2),
    lambda c: delattr(c, "k"),
)
item(
    "an_attribute_that_hides_the_classes", lambda: Plain(), lambda c: c.factor, having("factor", 5)
)
item("an_attribute_by_vars", lambda: Plain(k=2), lambda c: vars(c)["k"], having("k", 5))
item(
    "a_dict_in_an_object",
    lambda: Plain(cfg={"k": 2}),
    lambda c: c.cfg["k"],
    lambda c: c.cfg.update(k=6),
)
item(
    "an_object_in_an_object",
    lambda: Plain(sub=Plain(k=2)),
    lambda c: c.sub.k,
    lambda c: having("k", 5)(c.sub),
)
item(
    "an_object_in_an_object_replaced",
    lambda: Plain(sub=Plain(k=2)),
    lambda c: c.sub.k,
    having("sub", Plain(k=5)),
)
item("an_object_in_a_list", lambda: [Plain(k=2)], lambda c: c[0].k, lambda c: having("k", 5)(c[0]))
item("a_slot", Slots, lambda c: c.scale, having("scale", 5))
item(
    "an_object_of_another_class",
    lambda: Plain(k=2),
    lambda c: c.factor,
    having("__class__", type("Other", (Plain,), {"factor": 9})),
)
item("a_float_in_a_dict", lambda: {"k": 0.5}, lambda c: c["k"], setting("k", 0.25))
item(
    "a_float_in_a_list_branched_on",
    lambda: [0.5],
    lambda c: 1 if c[0] > 0.3 else 2,
    setting(0, 0.25),
)


class Lazy:
    """Its attribute is what a property works out."""

    def __init__(self) -> None:
        self._k = 2

    @property
    def k(self) -> int:
        return self._k


class Asked:
    """Its attributes are in a dictionary of its own."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"k": 2}

    def __getattr__(self, name: str) -> Any:
        return self.held[name]


class Wrapped:
    """As configurations of transformers: a name may stand for another."""

    names = {"size": "hidden"}

    def __init__(self) -> None:
        self.hidden = 2

    def __getattribute__(self, name: str) -> Any:
        known = super().__getattribute__("names")
        return super().__getattribute__(known.get(name, name))


class Described:
    """A descriptor of the user's."""

    def __get__(self, owner: Any, kind: Any) -> Any:
        return owner.held[0]


class WithDescriptor:
    k = Described()

    def __init__(self) -> None:
        self.held = [2]


item("what_a_property_reads", Lazy, lambda c: c.k, having("_k", 5))
item("what_getattr_looks_up", Asked, lambda c: c.k, lambda c: c.held.update(k=5))
item("what_getattribute_looks_up", Wrapped, lambda c: c.size, having("hidden", 5))
item("what_a_descriptor_reads", WithDescriptor, lambda c: c.k, lambda c: setting(0, 5)(c.held))
item(
    "the_arguments_of_a_partial",
    lambda: [functools.partial(pow, 2)],
    lambda c: c[0](2),
    setting(0, functools.partial(pow, 3)),
)
item(
    "a_dict_in_a_partial",
    lambda: (d := {"k": 2}, functools.partial(lambda d: d["k"], d)),
    lambda c: c[1](),
    lambda c: c[0].update(k=5),
)
item(
    "a_bound_method_of_another_object",
    lambda: [Lazy().__getattribute__],
    lambda c: c[0]("_k"),
    lambda c: having("_k", 5)(c[0].__self__),
)


# -- large containers, and what is reached in other ways -------------------------------------------

MANY = 100_001


def read_by_bound(method: str, *arguments: Any) -> Callable[[], Change]:
    """A value that is read by a container's own method, which the closure holds."""

    def build() -> Change:
        held = {"k": 2} if method == "get" else [2, 5, 2]
        read = getattr(held, method)
        write = functools.partial(held.__setitem__, "k" if method == "get" else 0)
        return Change(lambda x: x * read(*arguments), lambda: write(7))

    return build


CHANGES["a_dicts_get_in_a_closure"] = read_by_bound("get", "k")
CHANGES["a_lists_count_in_a_closure"] = read_by_bound("count", 2)


class Setter:
    """A property that is written through."""

    def __init__(self) -> None:
        self._k = 2

    @property
    def k(self) -> int:
        return self._k

    @k.setter
    def k(self, value: int) -> None:
        self._k = value


def bare(**values: Any) -> Any:
    """An object of a class of its own."""
    return type("Bare", (Plain,), {})(**values)


class Meta(type):
    scale = 2


item(
    "an_attribute_that_comes_to_a_class",
    bare,
    lambda c: getattr(c, "scale", 2),
    lambda c: setattr(type(c), "scale", 5),
)
item(
    "an_attribute_that_hides_that_of_a_base",
    bare,
    lambda c: type(c).factor,
    lambda c: setattr(type(c), "factor", 5),
)
item("an_item_of_a_large_list", lambda: [2] * MANY, lambda c: c[-1], setting(-1, 4))
item("a_large_list_that_grows", lambda: [2] * MANY, len, lambda c: c.append(4))
item("a_large_dict", lambda: dict.fromkeys(range(MANY), 2), lambda c: c[5], setting(5, 4))
item(
    "a_key_of_a_large_dict",
    lambda: dict.fromkeys(range(MANY), 2),
    lambda c: 2 if 5 in c else 3,
    lambda c: c.__setitem__(-1, c.pop(5)),
)
item(
    "a_member_of_a_large_set",
    lambda: set(range(MANY)),
    lambda c: 2 if 5 in c else 3,
    lambda c: (c.discard(5), c.add(-1)),
)
item("a_large_tuple_in_a_list", lambda: [(2,) * MANY], lambda c: c[0][7], setting(0, (3,) * MANY))
item(
    "a_large_list_in_a_dict",
    lambda: {"k": [2] * MANY},
    lambda c: c["k"][7],
    lambda c: c["k"].sort(key=id) or c["k"].__setitem__(7, 3),
)
item("a_large_list_of_floats", lambda: [2.0] * MANY, lambda c: c[3], setting(3, 4.0))
item(
    "a_zero_in_a_large_list",
    lambda: [0.0] * MANY,
    lambda c: math.copysign(2, c[3]),
    setting(3, -0.0),
)
item("a_user_dict", lambda: collections.UserDict(k=2), lambda c: c["k"], setting("k", 4))
item("a_user_list", lambda: collections.UserList([2]), lambda c: c[0], setting(0, 4))
item("what_a_property_writes", Setter, lambda c: c.k, having("k", 4))
item(
    "a_fraction",
    lambda: [fractions.Fraction(1, 2)],
    lambda c: float(c[0]),
    setting(0, fractions.Fraction(3, 2)),
)
item(
    "a_default_factory",
    lambda: collections.defaultdict(lambda: 2),
    lambda c: c.copy()["k"],
    lambda c: setattr(c, "default_factory", lambda: 5),
)
item(
    "the_type_of_a_value",
    lambda: {"k": 2},
    lambda c: 3 if isinstance(c["k"], str) else 2,
    setting("k", "2"),
)
item(
    "a_key_of_another_type",
    lambda: {1: 2},
    lambda c: 3 if any(k is True for k in c) else 2,
    lambda c: (c.clear(), c.update({True: 2})),
)
item(
    "a_dict_in_another_order",
    lambda: {"a": 2, "b": 3},
    lambda c: next(iter(c.values())),
    lambda c: c.__setitem__("a", c.pop("a")),
)
item(
    "a_list_of_lists_of_lists",
    lambda: [[[2]]],
    lambda c: c[0][0][0],
    lambda c: c[0][0].__setitem__(0, 4),
)
item(
    "a_list_that_holds_itself",
    lambda: [c := [2], c.append(c)][0],
    lambda c: c[1][1][0],
    setting(0, 4),
)
item(
    "a_class_made_by_another",
    lambda: Meta("OfMeta", (), {}),
    lambda c: c.scale,
    lambda c: setattr(c, "scale", 5),
)


# -- closures, defaults, globals -------------------------------------------------------------------


@change
def a_number_in_a_closure():
    k = 2

    def change():
        nonlocal k
        k = 5

    return Change(lambda x: x * k, change)


@change
def a_number_in_a_closure_that_another_function_reads():
    k = 2

    def scaled(x):
        return x * k

    def change():
        nonlocal k
        k = 5

    return Change(lambda x: scaled(x), change)


@change
def a_function_in_a_closure_replaced():
    f = torch.sin

    def change():
        nonlocal f
        f = torch.cos

    return Change(lambda x: f(x), change)


@change
def a_function_of_the_users_in_a_closure_replaced():
    def f(x):
        return x * 2

    def change():
        nonlocal f
        f = lambda x: x * 3  # noqa: E731

    return Change(lambda x: f(x), change)


@change
def a_default_argument():
    def scaled(x, k=2):
        return x * k

    return Change(lambda x: scaled(x), lambda: having("__defaults__", (5,))(scaled))


@change
def a_dict_as_a_default():
    def scaled(x, cfg={"k": 2}):  # noqa: B006
        return x * cfg["k"]

    return Change(lambda x: scaled(x), lambda: scaled.__defaults__[0].update(k=5))


@change
def a_keyword_default():
    def scaled(x, *, k=2):
        return x * k

    return Change(lambda x: scaled(x), lambda: scaled.__kwdefaults__.update(k=5))


@change
def the_steps_own_default():
    def step(x, k=2):
        return x * k

    return Change(step, lambda: having("__defaults__", (5,))(step))


@change
def the_code_of_a_function():
    def scaled(x):
        return x * 2

    return Change(
        lambda x: scaled(x), lambda: having("__code__", (lambda x: x * 7).__code__)(scaled)
    )


@change
def an_attribute_of_a_function():
    def scaled(x):
        return x * scaled.k

    scaled.k = 2
    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def a_decorated_functions_closure():
    k = [2]

    def doubled(f):
        @functools.wraps(f)
        def run(x):
            return f(x) * 2

        return run

    @doubled
    def scaled(x):
        return x * k[0]

    return Change(lambda x: scaled(x), lambda: setting(0, 5)(k))


@change
def a_closure_under_no_grad():
    k = [2]

    @torch.no_grad()
    def scaled(x):
        return x * k[0]

    return Change(lambda x: scaled(x), lambda: setting(0, 5)(k))


@change
def a_partial_as_the_step():
    cfg = {"k": 2}
    return Change(functools.partial(lambda cfg, x: x * cfg["k"], cfg), lambda: cfg.update(k=5))


@change
def a_method_as_the_step():
    class Trainer:
        def __init__(self):
            self.cfg = {"k": 2}

        def step(self, x):
            return x * self.cfg["k"]

    trainer = Trainer()
    return Change(trainer.step, lambda: trainer.cfg.update(k=5))


@change
def a_callable_object_as_the_step():
    class Trainer:
        k = 2

        def __call__(self, x):
            return x * self.k

    trainer = Trainer()
    return Change(trainer, lambda: having("k", 5)(trainer))


@change
def a_class_attribute():
    class Config:
        k = 2

    return Change(lambda x: x * Config.k, lambda: having("k", 5)(Config))


@change
def a_class_attribute_by_an_instance():
    class Config:
        k = 2

    config = Config()
    return Change(lambda x: x * config.k, lambda: having("k", 5)(Config))


@change
def an_attribute_of_a_base_class():
    class Base:
        k = 2

    class Config(Base):
        pass

    return Change(lambda x: x * Config().k, lambda: having("k", 5)(Base))


@change
def a_dict_on_a_class():
    class Config:
        cfg = {"k": 2}

    return Change(lambda x: x * Config.cfg["k"], lambda: Config.cfg.update(k=5))


@change
def a_method_replaced_on_a_class():
    class Scale:
        def apply(self, x):
            return x * 2

    scale = Scale()
    return Change(lambda x: scale.apply(x), lambda: having("apply", lambda self, x: x * 5)(Scale))


@change
def a_method_replaced_on_an_object():
    class Scale:
        def apply(self, x):
            return x * 2

    scale = Scale()
    return Change(lambda x: scale.apply(x), lambda: having("apply", lambda x: x * 5)(scale))


@change
def a_static_method_replaced():
    class Scale:
        @staticmethod
        def apply(x):
            return x * 2

    return Change(
        lambda x: Scale.apply(x), lambda: having("apply", staticmethod(lambda x: x * 5))(Scale)
    )


@change
def a_class_method_that_reads_its_class():
    class Scale:
        k = 2

        @classmethod
        def apply(cls, x):
            return x * cls.k

    return Change(lambda x: Scale.apply(x), lambda: having("k", 5)(Scale))


@change
def a_class_replaced():
    class Scale:
        def __call__(self, x):
            return x * 2

    held = [Scale]
    other = type("Scale", (), {"__call__": lambda self, x: x * 5})
    return Change(lambda x: held[0]()(x), lambda: setting(0, other)(held))


NUMBER, CONFIG, FUNCTION = 2, {"k": 2}, torch.sin


@change
def a_global_number():
    globals()["NUMBER"] = 2
    return Change(lambda x: x * NUMBER, lambda: globals().update(NUMBER=5))


@change
def a_global_dict():
    CONFIG["k"] = 2
    return Change(lambda x: x * CONFIG["k"], lambda: CONFIG.update(k=5))


@change
def a_global_function_replaced():
    globals()["FUNCTION"] = torch.sin
    return Change(lambda x: FUNCTION(x), lambda: globals().update(FUNCTION=torch.cos))


@change
def a_global_that_comes():
    globals().pop("LATER", None)

    def step(x):
        try:
            return x * LATER
        except NameError:
            return x * 2

    return Change(step, lambda: globals().update(LATER=5))


def _module() -> Any:
    made = types.ModuleType("a_module_of_the_users")
    made.K, made.CFG, made.f = 2, {"k": 2}, torch.sin
    sys.modules[made.__name__] = made
    return made


@change
def a_variable_of_an_imported_module():
    made = _module()
    return Change(lambda x: x * made.K, lambda: having("K", 5)(made))


@change
def a_dict_of_an_imported_module():
    made = _module()
    return Change(lambda x: x * made.CFG["k"], lambda: made.CFG.update(k=5))


@change
def a_function_of_an_imported_module_replaced():
    made = _module()
    return Change(lambda x: made.f(x), lambda: having("f", torch.cos)(made))


@change
def a_module_imported_within_the_step():
    made = _module()

    def step(x):
        import a_module_of_the_users as there

        return x * there.K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_name_imported_within_the_step():
    made = _module()

    def step(x):
        from a_module_of_the_users import K

        return x * K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_variable_of_a_module_under_another_name():
    made = _module()

    def step(x):
        other = made
        return x * other.K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_context_variable():
    var = contextvars.ContextVar("k", default=2)
    return Change(lambda x: x * var.get(), lambda: var.set(5))


@change
def a_variable_of_the_environment():
    os.environ["PARTITA_TEST_K"] = "2"

    def change():
        os.environ["PARTITA_TEST_K"] = "5"

    return Change(lambda x: x * int(os.environ["PARTITA_TEST_K"]), change)


@change
def a_variable_of_the_environment_by_getenv():
    os.environ.pop("PARTITA_TEST_K", None)

    def change():
        os.environ["PARTITA_TEST_K"] = "5"

    return Change(lambda x: x * int(os.getenv("PARTITA_TEST_K", "2")), change)


@change
def a_flag_of_torch():
    torch.set_default_dtype(torch.float32)

    def change():
        torch.set_default_dtype(torch.float64)

    return Change(lambda x: (x * torch.ones(())).to(torch.get_default_dtype()), change)


# -- modules ---------------------------------------------------------------------------------------


def module(build: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> Callable[[], Any]:
    """A module that a step calls."""

    def whole() -> Change:
        torch.manual_seed(0)
        held, what = build()
        return Change(lambda x: held(x), what)

    CHANGES[build.__name__] = whole
    return build


def placed(held: Any, at: int, value: Any) -> None:
    held[at] = value


@module
def a_dropouts_p():
    m = nn.Dropout(0.0)
    return m, lambda: having("p", 1.0)(m)


@module
def a_layer_norms_eps():
    m = nn.LayerNorm(3)
    return m, lambda: having("eps", 10.0)(m)


@module
def a_batch_norms_momentum():
    m = nn.BatchNorm1d(3)
    return nn.Sequential(m, nn.ReLU()), lambda: having("momentum", 0.9)(m)


@module
def an_elus_alpha():
    m = nn.ELU()
    return m, lambda: having("alpha", 5.0)(m)


@module
def a_leaky_relus_slope():
    m = nn.LeakyReLU()
    return m, lambda: having("negative_slope", 5.0)(m)


@module
def a_gelus_approximation():
    m = nn.GELU()
    return m, lambda: having("approximate", "tanh")(m)


@module
def a_module_put_into_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return m, lambda: m.eval()


@module
def a_part_put_into_eval():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))
    return m, lambda: m[1].eval()


@module
def an_activation_replaced():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: placed(m, 1, nn.ReLU())


@module
def a_layer_replaced_by_one_alike():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return m, lambda: placed(m, 1, nn.Linear(3, 3))


@module
def a_layer_appended():
    m = nn.Sequential(nn.Linear(3, 3))
    return m, lambda: m.append(nn.Tanh())


@module
def a_layer_removed():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: m.pop(1)


@module
def layers_exchanged():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def swap():
        m[0], m[1] = m[1], m[0]

    return m, swap


@module
def a_forward_replaced():
    m = nn.Linear(3, 3)
    return m, lambda: having("forward", lambda x: x * 5)(m)


@module
def a_forward_replaced_on_a_part():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: having("forward", lambda x: x * 5)(m[1])


@module
def a_forward_replaced_on_the_class():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    return Scale(), lambda: having("forward", lambda self, x: x * 5)(Scale)


@module
def a_modules_class_changed():
    class Scale(nn.Module):
        def forward(self, x):
            return x * 2

    class More(Scale):
        def forward(self, x):
            return x * 5

    m = Scale()
    return m, lambda: having("__class__", More)(m)


@module
def a_forward_hook_added():
    m = nn.Linear(3, 3)
    return m, lambda: m.register_forward_hook(lambda m, i, out: out * 5)


@module
def a_forward_hook_removed():
    m = nn.Linear(3, 3)
    hook = m.register_forward_hook(lambda m, i, out: out * 5)
    return m, hook.remove


@module
def a_forward_pre_hook_added_to_a_part():
    m = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return m, lambda: m[1].register_forward_pre_hook(lambda m, i: (i[0] * 5,))


@module
def a_hook_for_all_modules():
    m = nn.Linear(3, 3)
    return m, lambda: HOOKS.append(
        nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 5)
    )


HOOKS: list[Any] = []  # of all modules: taken away after each run


@module
def what_a_hook_reads():
    m, k = nn.Linear(3, 3), [2]
    m.register_forward_hook(lambda m, i, out: out * k[0])
    return m, lambda: setting(0, 5)(k)


class Holder(nn.Module):
    """A module with whatever attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x):
        return x * self.k


@module
def a_number_in_a_module():
    m = Holder(k=2)
    return m, lambda: having("k", 5)(m)


@module
def a_number_in_a_module_in_a_module():
    m = nn.Sequential(nn.Linear(3, 3), Holder(k=2))
    return m, lambda: having("k", 5)(m[1])


@module
def a_number_that_becomes_a_parameter():
    m = Holder(k=2)

    def change():
        del m.k
        m.k = nn.Parameter(torch.full((), 5.0))

    return m, change


@module
def a_dict_in_a_module():
    class Scaled(Holder):
        def forward(self, x):
            return x * self.cfg["k"]

    m = Scaled(cfg={"k": 2})
    return m, lambda: m.cfg.update(k=5)


@module
def an_object_in_a_module():
    class Scaled(Holder):
        def forward(self, x):
            return x * self.cfg.k

    m = Scaled(cfg=Plain(k=2))
    return m, lambda: having("k", 5)(m.cfg)


@module
def a_module_list_that_grows():
    class All(Holder):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = All(layers=nn.ModuleList([nn.Linear(3, 3)]))
    return m, lambda: m.layers.append(nn.Linear(3, 3))


@module
def a_plain_list_of_modules_that_grows():
    class All(Holder):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    m = All(layers=[nn.Tanh()])
    return m, lambda: m.layers.append(nn.ELU(5.0))


@module
def a_module_dict_entry_replaced():
    class One(Holder):
        def forward(self, x):
            return self.layers["a"](x)

    m = One(layers=nn.ModuleDict({"a": nn.Linear(3, 3)}))
    return m, lambda: setting("a", nn.Tanh())(m.layers)


@module
def a_bias_that_goes():
    m = nn.Linear(3, 3)
    return m, lambda: having("bias", None)(m)


@module
def a_bias_that_comes():
    m = nn.Linear(3, 3, bias=False)
    return m, lambda: having("bias", nn.Parameter(torch.ones(3)))(m)


@module
def a_parameter_replaced():
    m = nn.Linear(3, 3)
    return m, lambda: having("weight", nn.Parameter(torch.ones(3, 3)))(m)


@module
def a_parameter_given_other_data():
    m = nn.Linear(3, 3)
    return m, lambda: having("data", torch.ones(3, 3))(m.weight)


@module
def a_parameter_written_in_place():
    m = nn.Linear(3, 3)
    return m, lambda: m.weight.data.fill_(2)


@module
def a_parameter_frozen():
    m = nn.Linear(3, 3)
    return m, lambda: m.weight.requires_grad_(False)


@module
def a_buffer_replaced():
    m = Holder()
    m.register_buffer("k", torch.full((3,), 2.0))
    return m, lambda: having("k", torch.full((3,), 5.0))(m)


@module
def a_parametrization():
    m = nn.Linear(3, 3)

    class Doubled(nn.Module):
        def forward(self, w):
            return w * 2

    return m, lambda: nn.utils.parametrize.register_parametrization(m, "weight", Doubled())


@module
def the_weights_that_are_tied():
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    return m, lambda: having("weight", m[0].weight)(m[1])


@module
def a_module_of_another_dtype():
    m = nn.Sequential(Holder(k=2.0), nn.Linear(3, 3))
    return m, lambda: m[1].load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})


@change
def a_module_without_parameters_in_a_closure_replaced():
    m = nn.Tanh()

    def change():
        nonlocal m
        m = nn.ReLU()

    return Change(lambda x: m(x), change)


@change
def a_model_in_a_closure_replaced():
    m = nn.Linear(3, 3)

    def change():
        nonlocal m
        m = nn.Linear(3, 3)
        nn.init.ones_(m.weight)

    def build(x):
        return m(x)

    nn.init.zeros_(m.weight)
    nn.init.zeros_(m.bias)
    m.bias.requires_grad_(False)
    return Change(
        lambda x: build(x) * 1 if m is not None else x, lambda: (change(), nn.init.ones_(m.bias))
    )


@change
def a_module_in_a_dict_replaced():
    held = {"f": nn.Tanh()}
    return Change(lambda x: held["f"](x), lambda: held.update(f=nn.ReLU()))


@change
def a_list_of_tensors_that_grows():
    held = [torch.ones(3)]
    return Change(lambda x: x * sum(held), lambda: held.append(torch.ones(3)))


@change
def a_dict_of_tensors_that_grows():
    held = {"a": torch.ones(3)}
    return Change(lambda x: x * sum(held.values()), lambda: held.update(b=torch.ones(3)))


@change
def a_tensor_in_a_dict_replaced():
    held = {"a": torch.ones(3)}
    return Change(lambda x: x * held["a"], lambda: held.update(a=torch.full((3,), 5.0)))


@change
def a_tensor_in_a_closure_replaced():
    k = torch.ones(3)

    def change():
        nonlocal k
        k = torch.full((3,), 5.0)

    return Change(lambda x: x * k, change)


@change
def a_compiled_module():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0))
    torch.manual_seed(0)
    m[0].reset_parameters()
    return Change(m, lambda: having("p", 1.0)(m[1]))


@change
def a_compiled_modules_hook():
    m = nn.Sequential(nn.Tanh(), nn.Tanh())
    return Change(m, lambda: m[1].register_forward_hook(lambda m, i, out: out * 5))


@change
def a_compiled_modules_layer_replaced():
    m = nn.Sequential(nn.Tanh(), nn.Tanh())
    return Change(m, lambda: placed(m, 1, nn.ReLU()))


# -- training --------------------------------------------------------------------------------------


def trained(
    build: Callable[[nn.Module], tuple[Any, Callable[[Any], Any]]],
) -> Callable[..., Any]:
    """A step of an optimizer, of which something changes."""

    def whole() -> Change:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer, what = build(model)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        def seen():
            return [p.detach().clone() for p in model.parameters()]

        return Change(step, lambda: what(optimizer), seen)

    CHANGES[build.__name__] = whole
    return build


def grouped(key: str, value: Any) -> Callable[[Any], None]:
    return lambda optimizer: optimizer.param_groups[0].__setitem__(key, value)


@trained
def a_learning_rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), grouped("lr", 0.5)


@trained
def a_weight_decay(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1), grouped("weight_decay", 0.5)


@trained
def a_weight_decay_that_leaves_zero(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), grouped("weight_decay", 0.5)


@trained
def a_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), grouped("momentum", 0.9)


@trained
def the_betas(model):
    return torch.optim.Adam(model.parameters(), lr=0.1), grouped("betas", (0.5, 0.6))


@trained
def an_epsilon(model):
    return torch.optim.Adam(model.parameters(), lr=0.1), grouped("eps", 0.1)


@trained
def maximising(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), grouped("maximize", True)


@trained
def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), grouped("nesterov", True)


@trained
def a_group_more(model):
    extra = nn.Parameter(torch.ones(2))
    return torch.optim.SGD([model.weight], lr=0.1), lambda o: o.add_param_group(
        {"params": [model.bias], "lr": 0.3, "x": extra}
    )


@trained
def a_parameter_out_of_a_group(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), lambda o: o.param_groups[0]["params"].pop()


@trained
def an_optimizers_state_cleared(model):
    return torch.optim.Adam(model.parameters(), lr=0.1), lambda o: o.state.clear()


@trained
def an_optimizers_state_loaded(model):
    return torch.optim.Adam(model.parameters(), lr=0.1), lambda o: o.load_state_dict(o.state_dict())


@trained
def a_step_post_hook_of_an_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1), lambda o: o.register_step_post_hook(
        lambda o, a, k: model.weight.data.mul_(0.5)
    )


@trained
def a_step_pre_hook_of_an_optimizer(model):
    def halve(optimizer, args, kwargs):  # None: what a hook returns stands for the arguments
        model.weight.grad.mul_(0.5)

    return (
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda o: o.register_step_pre_hook(halve),
    )


@trained
def a_scheduler_outside_the_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer, lambda o: scheduler.step()


@trained
def an_initial_rate_outside_the_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer, grouped("initial_lr", 0.7)


@change
def an_initial_rate_that_the_step_reads():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.param_groups[0]["initial_lr"] = 2.0
    return Change(
        lambda x: x * optimizer.param_groups[0]["initial_lr"],
        lambda: grouped("initial_lr", 5.0)(optimizer),
    )


@change
def a_setting_of_a_group_that_the_step_reads():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [p], "scale": 2.0}], lr=0.1)
    return Change(
        lambda x: x * optimizer.param_groups[0]["scale"], lambda: grouped("scale", 5.0)(optimizer)
    )


@change
def gradients_there_before_a_step():
    p = nn.Parameter(torch.ones(3))

    def step(x):
        (x * p).sum().backward()
        return x * 1

    def change():
        p.grad = None

    return Change(step, change, lambda: p.grad.clone())


@change
def accumulation_by_a_global():
    cfg = {"micro": 1}
    p = nn.Parameter(torch.ones(3))

    def step(x):
        p.grad = None
        for _ in range(cfg["micro"]):
            (x * p).sum().backward()
        return x * 1

    return Change(step, lambda: cfg.update(micro=4), lambda: p.grad.clone())


# -- arguments -------------------------------------------------------------------------------------


def argued(name: str, *values: Any, read: Callable[[Any], Any] = lambda v: v) -> None:
    """An argument beside the tensor: the first in two calls, the second in two."""
    CHANGES[name] = lambda: Change(
        lambda x, v: x * read(v), lambda: None, arguments=lambda i: (values[i // 2],)
    )


argued("an_argument", 2, 5)
argued("a_float_argument", 2.0, 5.0)
argued("an_argument_that_becomes_true", 1, True, read=lambda v: 3 if v is True else 2)
argued("an_argument_that_becomes_minus_zero", 0.0, -0.0)
argued("an_argument_that_becomes_nan", 1.0, math.nan)
argued("an_argument_in_a_dict", {"k": 2}, {"k": 5}, read=lambda v: v["k"])
argued("an_argument_dict_with_another_key", {"k": 2}, {"j": 5}, read=lambda v: v.get("k", 3))
argued("an_argument_list_that_is_longer", [1, 2], [1, 2, 3], read=sum)
argued("an_argument_of_a_dataclass", Settings(2.0), Settings(5.0), read=lambda v: v.scale)
argued("an_argument_of_a_frozen_dataclass", Frozen(2), Frozen(5), read=lambda v: v.scale)
argued("an_argument_object", Plain(k=2), Plain(k=5), read=lambda v: v.k)
argued("an_array_as_an_argument", np.ones(3), np.full(3, 5.0), read=lambda v: float(v[0]))
argued(
    "a_long_array_as_an_argument",
    np.ones(5000),
    np.concatenate([np.ones(2500), np.full(2500, 3.0)]),
    read=lambda v: float(v.sum()),
)
argued("an_argument_function", torch.sin, torch.cos, read=lambda v: v(torch.ones(())))
argued("an_argument_string", "a", "abc", read=len)
argued("an_argument_slice", slice(0, 1), slice(0, 3), read=lambda v: sum([1, 2, 3][v]))
argued("an_argument_enum", Color.RED, Color.BLUE, read=lambda v: v.value)
argued("an_argument_set", {1}, {1, 2}, read=len)


@change
def an_argument_object_that_is_changed():
    held = Plain(k=2)
    return Change(lambda x, v: x * v.k, lambda: having("k", 5)(held), arguments=lambda i: (held,))


@change
def an_array_argument_that_is_written():
    held = np.ones(3)
    return Change(
        lambda x, v: x * float(v[1]), lambda: setting(1, 5)(held), arguments=lambda i: (held,)
    )


@change
def a_module_as_an_argument():
    held = nn.Dropout(0.0)
    return Change(lambda x, m: m(x), lambda: having("p", 1.0)(held), arguments=lambda i: (held,))


@change
def another_module_as_an_argument():
    both = [nn.Tanh(), nn.ReLU()]
    return Change(lambda x, m: m(x), lambda: None, arguments=lambda i: (both[i // 2],))


# -- what comes and goes without mattering ---------------------------------------------------------


@change
def what_the_step_does_not_read():
    held = Plain(k=2, steps=0)
    return Change(lambda x: x * held.k, lambda: having("steps", 5)(held))


@change
def a_container_replaced_by_an_equal_one():
    held = {"cfg": {"k": [2, 3]}}
    return Change(lambda x: x * held["cfg"]["k"][0], lambda: held.update(cfg={"k": [2, 3]}))


@change
def what_is_changed_and_changed_back_within_the_step():
    held = Plain(k=2, scale=3)

    def step(x):
        before, held.scale = held.scale, 7
        try:
            return x * held.scale * held.k
        finally:
            held.scale = before

    return Change(step, lambda: having("k", 5)(held), lambda: vars(held).copy())


@change
def a_list_that_a_step_fills_and_empties():
    held = []

    def step(x):
        held.append(x * 2)
        return held.pop()

    return Change(step, lambda: None, lambda: list(held))


@change
def a_result_remembered_by_a_cache():
    @functools.lru_cache
    def mask(n):
        return tuple(range(n))

    return Change(lambda x: x * sum(mask(3)), lambda: None)


@change
def a_dict_used_as_a_cache():
    known = {}

    def step(x):
        if 3 not in known:
            known[3] = 5
        return x * known[3]

    return Change(step, lambda: known.clear(), lambda: dict(known))


@change
def an_attribute_made_when_first_used():
    held = Plain()

    def step(x):
        if not hasattr(held, "k"):
            held.k = 3
            return x * 2
        return x * held.k

    return Change(step, lambda: delattr(held, "k"), lambda: vars(held).copy())


@change
def an_attribute_that_is_only_written():
    held = Plain(size=0)

    def step(x):
        held.size = len(x)
        return x * 2

    return Change(step, lambda: having("size", 9)(held), lambda: held.size)


@change
def a_mode_that_is_set_in_the_step():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0))

    def step(x):
        model.eval()
        return model(x)

    torch.manual_seed(0)
    model[0].reset_parameters()
    return Change(step, lambda: model.train(), lambda: [m.training for m in model.modules()])


@change
def a_tensor_left_in_a_modules_attribute():
    model = Holder(k=2)

    def step(x):
        model.last = (x * model.k).sum()
        return x * 1

    return Change(step, lambda: having("k", 5)(model), lambda: model.last.clone())


@change
def a_tensor_left_in_an_objects_attribute():
    held = Plain(k=2)

    def step(x):
        held.last = (x * held.k).sum()
        return x * 1

    return Change(step, lambda: having("k", 5)(held), lambda: held.last.clone())


@change
def an_object_that_the_step_makes():
    cfg = {"k": 2}

    def step(x):
        held = Plain(x=x, n=0)
        for _ in range(cfg["k"]):
            held.x, held.n = held.x * 2, held.n + 1
        return held.x * held.n

    return Change(step, lambda: cfg.update(k=4))


@change
def a_line_that_is_printed():
    def step(x):
        print(end="")
        return x * 2

    return Change(step, lambda: None)


@change
def a_line_that_is_logged():
    def step(x):
        logging.getLogger("partita.test").debug("here")
        return x * 2

    return Change(step, lambda: None)


# -- what no guard can hold, or no graph can write -------------------------------------------------


@refused
def a_counter_in_a_closure():
    n = 0

    def step(x):
        nonlocal n
        n += 1
        return x * n

    return Change(step, lambda: None, lambda: n)


@refused
def a_counter_that_is_not_used():
    n = 0

    def step(x):
        nonlocal n
        n += 1
        return x * 2

    return Change(step, lambda: None, lambda: n)


COUNT = 0


@refused
def a_global_counter():
    globals()["COUNT"] = 0

    def step(x):
        global COUNT
        COUNT += 1
        return x * 2

    return Change(step, lambda: None, lambda: COUNT)


@refused
def a_counter_in_an_object():
    held = Plain(n=0)

    def step(x):
        held.n += 1
        return x * 2

    return Change(step, lambda: None, lambda: held.n)


@refused
def a_counter_in_a_dict():
    held = {"n": 0}

    def step(x):
        held["n"] += 1
        return x * 2

    return Change(step, lambda: None, lambda: dict(held))


@refused
def a_counter_in_a_module():
    model = Holder(k=2, n=0)

    def step(x):
        model.n += 1
        return model(x)

    return Change(step, lambda: None, lambda: model.n)


@refused
def a_counter_on_a_class():
    class Config:
        n = 0

    def step(x):
        Config.n += 1
        return x * 2

    return Change(step, lambda: None, lambda: Config.n)


@refused
def a_counter_in_a_slot():
    held = Slots()

    def step(x):
        held.scale += 1
        return x * 2

    return Change(step, lambda: None, lambda: held.scale)


@refused
def a_counter_on_a_function():
    def step(x):
        step.n += 1
        return x * 2

    step.n = 0
    return Change(step, lambda: None, lambda: step.n)


@refused
def a_counter_in_an_array():
    held = np.zeros(2)

    def step(x):
        held[0] += 1
        return x * 2

    return Change(step, lambda: None, lambda: held.tolist())


@refused
def a_list_that_the_step_appends_to():
    held = []

    def step(x):
        held.append(1)
        return x * 2

    return Change(step, lambda: None, lambda: list(held))


@refused
def a_list_that_the_step_appends_a_tensor_to():
    held = []

    def step(x):
        held.append(x.sum())
        return x * 2

    return Change(step, lambda: None, lambda: [t.clone() for t in held])


@refused
def a_list_by_its_bound_append():
    held = []
    push = held.append

    def step(x):
        push(1)
        return x * 2

    return Change(step, lambda: None, lambda: list(held))


@refused
def a_dict_that_the_step_fills():
    held = {}

    def step(x):
        held[len(held)] = 1
        return x * 2

    return Change(step, lambda: None, lambda: dict(held))


@refused
def a_deque_that_the_step_turns():
    held = collections.deque([1, 2, 3])

    def step(x):
        held.rotate(1)
        return x * held[0]

    return Change(step, lambda: None, lambda: list(held))


@refused
def a_list_in_an_object_that_the_step_appends_to():
    held = Plain(log=[])

    def step(x):
        held.log.append(x.shape)
        return x * 2

    return Change(step, lambda: None, lambda: list(held.log))


@refused
def an_argument_that_the_step_changes():
    def step(x, v):
        v["n"] = v.get("n", 0) + 1
        return x * 2

    held = {}
    return Change(step, lambda: None, lambda: dict(held), lambda i: (held,))


@refused
def a_list_argument_that_the_step_appends_to():
    def step(x, v):
        v.append(1)
        return x * 2

    held = []
    return Change(step, lambda: None, lambda: list(held), lambda i: (held,))


@refused
def a_scheduler_within_the_step():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(x):
        optimizer.zero_grad()
        (x * p).sum().backward()
        optimizer.step()
        scheduler.step()
        return x * 1

    return Change(step, lambda: None, lambda: (p.detach().clone(), scheduler.last_epoch))


@refused
def a_rate_set_within_the_step():
    p = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=0.1)

    def step(x):
        optimizer.zero_grad()
        (x * p).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        return x * 1

    return Change(step, lambda: None, lambda: (p.detach().clone(), optimizer.param_groups[0]["lr"]))


@refused
def a_seed_within_the_step():
    def step(x):
        torch.manual_seed(3)
        return x * 2

    return Change(step, lambda: None, lambda: torch.initial_seed())


@refused
def a_fork_of_the_generator():
    def step(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + torch.rand(3)

    return Change(step, lambda: None)


@refused
def a_state_of_the_generator_set():
    state = torch.get_rng_state()

    def step(x):
        torch.set_rng_state(state)
        return x + torch.rand(3)

    return Change(step, lambda: None)


@refused
def a_generator_of_torch():
    generator = torch.Generator().manual_seed(0)
    return Change(lambda x: x + torch.rand(3, generator=generator), lambda: None)


@refused
def a_random_number():
    random.seed(0)
    return Change(lambda x: x * random.random(), lambda: None)


@refused
def a_random_choice():
    random.seed(0)
    return Change(lambda x: x * random.randint(1, 1000), lambda: None)


@refused
def a_generator_of_random_numbers():
    generator = random.Random(0)
    return Change(lambda x: x * generator.random(), lambda: None)


@refused
def a_random_number_of_numpy():
    np.random.seed(0)
    return Change(lambda x: x * float(np.random.rand()), lambda: None)


@refused
def a_generator_of_numpy():
    generator = np.random.default_rng(0)
    return Change(lambda x: x * float(generator.random()), lambda: None)


@refused
def the_clock():
    return Change(lambda x: x * time.perf_counter(), lambda: None)


@refused
def the_clock_by_its_own_name():
    now = time.monotonic_ns
    return Change(lambda x: x * now(), lambda: None)


@refused
def an_iterator():
    numbers = iter([1, 2, 3, 4, 5, 6, 7, 8])
    return Change(lambda x: x * next(numbers), lambda: None)


@refused
def a_generator():
    numbers = (n * 2 for n in range(100))
    return Change(lambda x: x * next(numbers), lambda: None)


@refused
def a_count():
    numbers = itertools.count(1)
    return Change(lambda x: x * next(numbers), lambda: None)


@refused
def an_iterator_in_an_object():
    held = Plain(batches=iter(range(100)))
    return Change(lambda x: x * next(held.batches), lambda: None)


@refused
def a_generator_that_is_read_by_a_loop():
    numbers = (n for n in range(100))

    def step(x):
        for n in numbers:
            return x * n
        return x

    return Change(step, lambda: None)


# -- regions and other ways to be called -----------------------------------------------------------


@change
def a_step_that_holds_a_compiled_one():
    cfg = {"k": 2}
    inner = pt.compile(lambda x: x * cfg["k"], backend="graph")
    return Change(lambda x: inner(x) + 1, lambda: cfg.update(k=5))


@change
def what_a_lambda_in_a_table_reads():
    k = [2]
    table = {"f": lambda x: x * k[0]}
    return Change(lambda x: table["f"](x), lambda: setting(0, 5)(k))


@change
def what_an_inner_function_reads():
    k = [2]

    def step(x):
        def inner(y):
            return y * k[0]

        return inner(x)

    return Change(step, lambda: setting(0, 5)(k))


@change
def what_a_comprehension_reads():
    k = [1, 2]

    def step(x):
        return sum([x * v for v in k])

    return Change(step, lambda: k.append(3))


@change
def what_a_sort_key_reads():
    k = {"sign": 1}

    def step(x):
        return x * sorted([1, 2, 3], key=lambda v: v * k["sign"])[0]

    return Change(step, lambda: k.update(sign=-1))


@change
def what_a_functional_reads():
    cfg = Plain(p=0.0)
    return Change(lambda x: F.dropout(x, cfg.p, training=True), lambda: having("p", 1.0)(cfg))


@change
def what_an_autograd_function_reads():
    class Scale(torch.autograd.Function):
        k = 2

        @staticmethod
        def forward(ctx, x):
            return x * Scale.k

        @staticmethod
        def backward(ctx, g):
            return g * Scale.k

    return Change(lambda x: Scale.apply(x), lambda: having("k", 5)(Scale))


@change
def a_function_with_a_name_built_up():
    table = types.SimpleNamespace(f1=lambda x: x * 2)
    return Change(
        lambda x: getattr(table, "f" + "1")(x), lambda: having("f1", lambda x: x * 5)(table)
    )


# -- what a step meets beside its own names --------------------------------------------------------


class _Base:
    def scaled(self, x):
        return x * 2


class _Derived(_Base):
    def scaled(self, x):
        return super().scaled(x) + 1


@change
def a_method_of_a_base_that_super_calls():
    base = type("Base", (_Base,), {"scaled": lambda self, x: x * 2})
    made = type("Made", (_Derived, base), {})()

    def put():
        base.scaled = lambda self, x: x * 100

    return Change(made.scaled, put)


@change
def a_method_of_a_base_that_is_named():
    class Base:
        def scaled(self, x):
            return x * 2

    class Derived(Base):
        def scaled(self, x):
            return Base.scaled(self, x) + 1

    made = Derived()
    return Change(
        lambda x: made.scaled(x), lambda: setattr(Base, "scaled", lambda self, x: x * 100)
    )


@change
def an_attribute_that_its_class_comes_to_have():
    class Settings:
        pass

    held = Settings()
    return Change(lambda x: x * getattr(held, "k", 3), lambda: setattr(Settings, "k", 4))


@change
def a_global_before_a_builtin():
    variables: dict[str, Any] = {}
    exec("def step(x):\n    return x * abs(-3)", variables)
    return Change(variables["step"], lambda: variables.update(abs=lambda v: 10))


@change
def a_number_in_a_tensor_of_a_namespace():
    held = types.SimpleNamespace(total=torch.zeros(()))

    def step(x):
        held.total = held.total * 0.9 + x.sum()
        return x * held.total

    return Change(step, lambda: setattr(held, "total", torch.tensor(5.0)))


@refused
def a_number_in_a_tensor_that_nothing_finds():
    held = [types.MappingProxyType({"total": torch.zeros(())})]

    def step(x):
        return x * (held[0]["total"] * 0.9)

    return Change(
        step, lambda: held.__setitem__(0, types.MappingProxyType({"total": torch.ones(())}))
    )


@change
def a_tensor_in_a_user_dict():
    held = collections.UserDict(total=torch.zeros(()))

    def step(x):
        return x * (held["total"] * 0.9)

    return Change(step, lambda: held.update(total=torch.tensor(5.0)))


@change
def a_rate_that_becomes_a_tensor():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Change(step, lambda: optimizer.param_groups[0].update(lr=torch.tensor(0.3)))


@refused
def an_event_of_other_threads():
    event = threading.Event()
    return Change(lambda x: x * (2 if event.is_set() else 1), event.set)


@refused
def a_queue_of_other_threads():
    waiting: queue.Queue[int] = queue.Queue()

    def step(x):
        waiting.put(1)
        return x * 2

    return Change(step, lambda: None, waiting.qsize)


@refused
def a_file_that_is_read():
    def step(x):
        with open(__file__) as file:
            return x * len(file.read(1))

    return Change(step, lambda: None)


@refused
def work_that_another_thread_does():
    model = nn.Linear(3, 3)

    def step(x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(model, x).result()

    return Change(step, lambda: None)


# -- what comes to be there, and what is read past the program's own classes -----------------------

item(
    "an_attribute_that_a_class_comes_to_have",
    lambda: type("C", (), {}),
    lambda c: getattr(c, "k", 2),
    having("k", 5),
)
item(
    "an_attribute_that_a_module_comes_to_have",
    lambda: types.ModuleType("of_users"),
    lambda c: getattr(c, "k", 2),
    having("k", 5),
)
item(
    "an_attribute_asked_for_with_hasattr",
    lambda: types.ModuleType("of_users"),
    lambda c: 3 if hasattr(c, "k") else 2,
    having("k", 5),
)
item(
    "an_attribute_of_the_type_of_an_object",
    lambda: type("C", (), {})(),
    lambda c: type(c).scale if hasattr(type(c), "scale") else 2,
    lambda c: setattr(type(c), "scale", 5),
)
item("a_thread_local", threading.local, lambda c: getattr(c, "k", 2), having("k", 5))
item("a_list_in_a_thread_local", lambda: _local(k=[2]), lambda c: sum(c.k), lambda c: c.k.append(5))
item(
    "a_context_variables_default",
    lambda: _variable(),
    lambda c: c.get()[0],
    lambda c: c.get().__setitem__(0, 5),
)
item(
    "what_an_enums_member_has_been_given",
    lambda: _member(scale=2),
    lambda c: c.scale,
    having("scale", 5),
)
item(
    "what_an_enums_member_holds",
    lambda: enum.Enum("E", {"A": [2]}).A,
    lambda c: c.value[0],
    lambda c: c.value.append(c.value.insert(0, 5)),
)
item(
    "the_keywords_of_a_partial_set_anew",
    lambda: functools.partial(dict, k=2),
    lambda c: c()["k"],
    lambda c: c.__setstate__((dict, (), {"k": 5}, {})),
)
item("an_attribute_of_a_partial", lambda: _partial(k=2), lambda c: c.k, having("k", 5))
item(
    "the_length_by_another_len",
    lambda: type("C", (), {"__len__": lambda self: 2})(),
    len,
    lambda c: setattr(type(c), "__len__", lambda self: 5),
)
item(
    "an_item_by_another_getitem",
    lambda: type("C", (), {"__getitem__": lambda self, i: 2})(),
    lambda c: c[0],
    lambda c: setattr(type(c), "__getitem__", lambda self, i: 5),
)
item(
    "the_truth_by_another_bool",
    lambda: type("C", (), {"__bool__": lambda self: True})(),
    lambda c: 2 if c else 3,
    lambda c: setattr(type(c), "__bool__", lambda self: False),
)


def _variable() -> contextvars.ContextVar[list[int]]:
    held = [2]
    return contextvars.ContextVar("v", default=held)


def _local(**values: Any) -> threading.local:
    local = threading.local()
    local.__dict__.update(values)
    return local


def _member(**values: Any) -> Any:
    member = enum.Enum("E", "A B").A
    member.__dict__.update(values)
    return member


def _partial(**values: Any) -> Any:
    partial = functools.partial(int)
    partial.__dict__.update(values)
    return partial


@change
def an_attribute_that_a_function_comes_to_have():
    def scaled(x):
        return x * getattr(scaled, "k", 2)

    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def an_attribute_in_the_dict_of_a_function():
    def scaled(x):
        return x * vars(scaled).get("k", 2)

    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def a_global_asked_for_in_globals():
    globals().pop("LATE", None)
    return Change(lambda x: x * globals().get("LATE", 2), lambda: globals().update(LATE=5))


@change
def a_remembered_result_that_is_forgotten():
    held = {"k": 2}

    @functools.cache
    def k():
        return held["k"]

    k()  # before the step runs

    def change():
        held["k"] = 5
        k.cache_clear()

    return Change(lambda x: x * k(), change)


@change
def an_implementation_for_a_type_registered():
    @functools.singledispatch
    def scale(value):
        return 2

    return Change(lambda x: x * scale(1), lambda: scale.register(int, lambda value: 5))


@change
def a_variable_of_the_environment_by_a_computed_name():
    names = ["partita_k"]
    os.environ.pop(names[0], None)

    def change():
        os.environ[names[0]] = "5"

    return Change(lambda x: x * int(os.getenv(names[0], "2")), change)


@change
def whether_the_environment_has_a_variable():
    os.environ.pop("PARTITA_K", None)
    name = "PARTITA_K"

    def change():
        os.environ[name] = "5"

    return Change(lambda x: x * (3 if name in os.environ else 2), change)


@change
def a_function_of_torch_replaced():
    usual = F.softsign
    HOOKS.append(types.SimpleNamespace(remove=lambda: setattr(F, "softsign", usual)))
    return Change(lambda x: F.softsign(x), lambda: setattr(F, "softsign", lambda x: x * 3))


@change
def a_variable_of_pythons_own_module():
    sys.of_users = 2
    return Change(lambda x: x * sys.of_users, lambda: setattr(sys, "of_users", 5))


def setting_of_torch(name: str, asked: Callable[[], Any], put: Callable[[Any], Any], to: Any):
    def build() -> Change:
        before = asked()
        HOOKS.append(types.SimpleNamespace(remove=lambda: put(before)))
        return Change(lambda x: x * (2 if asked() == before else 3), lambda: put(to))

    CHANGES[name] = build


setting_of_torch(
    "deterministic_algorithms",
    torch.are_deterministic_algorithms_enabled,
    torch.use_deterministic_algorithms,
    True,
)
setting_of_torch(
    "the_precision_of_matmul",
    torch.get_float32_matmul_precision,
    torch.set_float32_matmul_precision,
    "medium",
)
setting_of_torch(
    "a_flag_of_a_backend",
    lambda: torch.backends.cudnn.benchmark,
    lambda v: torch.backends.cudnn.set_flags(_benchmark=v),  # where global flags are disabled, too
    True,
)
setting_of_torch(
    "which_attention_may_be_used",
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.enable_flash_sdp,
    False,
)
setting_of_torch(
    "whether_anomalies_are_looked_for",
    torch.is_anomaly_enabled,
    torch.autograd.set_detect_anomaly,
    True,
)


@change
def deterministic_algorithms_that_an_op_asks_for():
    HOOKS.append(types.SimpleNamespace(remove=lambda: torch.use_deterministic_algorithms(False)))
    return Change(
        lambda x: x + torch.empty(3).nan_to_num(0.0).mul(0.0),
        lambda: torch.use_deterministic_algorithms(True),
    )


item(
    "a_dictionary_that_holds_weakly",
    lambda: weakref.WeakKeyDictionary({Plain: 2}),
    lambda d: d[Plain],
    setting(Plain, 5),
)
item(
    "a_weak_reference",
    lambda: (held := Plain(k=2), weakref.ref(held)),
    lambda c: c[1]().k,
    lambda c: setattr(c[0], "k", 5),
)
REFUSED.update(("a_dictionary_that_holds_weakly", "a_weak_reference"))


def several(change_of: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Optimizers in a dictionary, of which something changes."""

    def build() -> Change:
        torch.manual_seed(0)
        models = [nn.Linear(3, 3), nn.Linear(3, 3)]
        held = {
            "models": models,
            "optimizers": [torch.optim.SGD(m.parameters(), lr=0.1) for m in models],
        }

        def step(x):
            loss = sum(m(x).square().mean() for m in models)
            for m in models:
                m.zero_grad()
            loss.backward()
            for optimizer in held["optimizers"]:
                optimizer.step()
            return loss

        def seen():
            return [p.detach().clone() for m in models for p in m.parameters()]

        return Change(step, lambda: change_of(held), seen)

    CHANGES[change_of.__name__] = build
    return build


@several
def an_optimizer_out_of_a_list(held):
    held["optimizers"].pop()


@several
def optimizers_exchanged(held):
    held["optimizers"][0].param_groups[0]["lr"] = 0.5
    held["optimizers"].reverse()


@several
def groups_of_an_optimizer_replaced(held):
    optimizer = held["optimizers"][0]
    optimizer.param_groups = [dict(optimizer.param_groups[0], lr=0.7)]


@several
def a_group_of_an_optimizer_replaced(held):
    groups = held["optimizers"][0].param_groups
    groups[0] = dict(groups[0], lr=0.7, params=groups[0]["params"][:1])


@change
def a_module_out_of_a_list():
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def step(x):
        for m in models:
            x = m(x)
        return x

    return Change(step, models.pop)
