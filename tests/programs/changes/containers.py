"""Programs whose lists, dicts and other containers change between two calls."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import functools
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .state import CHANGES, Change, having, item, setting


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


# -- large containers, and what is reached in other ways ------------------------------------------

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
