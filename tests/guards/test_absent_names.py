"""A step that finds no attribute, or another one, on any kind of object is captured again.

Each case is a holder of the attribute, a way to ask for it, and a moment at which it is set or
deleted. Plain Python is the truth.
"""

from __future__ import annotations

import builtins
import collections
import functools
import inspect
import io
import math
import os
import random
import types
from typing import Protocol, runtime_checkable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import partita as pt

X = torch.ones(3)


class Plain:
    def method(self):
        pass

    @staticmethod
    def static():
        pass

    @classmethod
    def of_class(cls):
        pass

    @property
    def asked(self):
        return None


class Array(np.ndarray):
    pass


class Text(io.StringIO):
    pass


class Failure(Exception):
    pass


class Module(nn.Module):
    def forward(self, x):
        return x


@runtime_checkable
class Scaled(Protocol):
    scale: float


def make_function():
    def inner():
        pass

    return inner


def make_generator_function():
    def inner():
        yield

    return inner


HOLDERS = {
    "function": make_function,
    "lambda": lambda: lambda: 0,
    "wrapped function": lambda: functools.wraps(make_function())(lambda: 0),
    "generator function": make_generator_function,
    "method's function": lambda: Plain.method,
    "function of a method": lambda: Plain().method.__func__,
    "static method": lambda: Plain.static,
    "function of a class method": lambda: Plain.of_class.__func__,
    "function of a property": lambda: vars(Plain)["asked"].fget,
    "function of a partial": lambda: functools.partial(make_function()).func,
    "forward of a layer": lambda: nn.Linear.forward,
    "exception": ValueError,
    "exception of the user's": Failure,
    "cached function": lambda: functools.lru_cache(lambda: 0),
    "single dispatch": lambda: functools.singledispatch(lambda value: 0),
    "partial": lambda: functools.partial(make_function()),
    "array": lambda: np.zeros(1).view(Array),
    "file in memory": Text,
    "file of Python's in memory": io.StringIO,
    "module of Python code": lambda: types.ModuleType("a_module"),
    "module of torch": lambda: torch,
    "function of torch": lambda: F.relu,
    "module of numpy": lambda: np,
    "module of C": lambda: math,
    "builtins": lambda: builtins,
    "distribution": lambda: torch.distributions.Normal(0.0, 1.0),
    "layer": Module,
    "class": lambda: type("Made", (), {}),
    "object": Plain,
    "namespace": types.SimpleNamespace,
    "dictionary of the user's": type("Table", (dict,), {}),
    "counter": lambda: type("Count", (collections.Counter,), {})(),
}


def by_getattr(k):
    return getattr(k, "scale", None)


def by_hasattr(k):
    return k.scale if hasattr(k, "scale") else None


def by_try(k):
    try:
        return k.scale
    except AttributeError:
        return None


def by_vars(k):
    return vars(k).get("scale")


def by_dict(k):
    held = k.__dict__
    return held["scale"] if "scale" in held else None  # noqa: SIM401


def by_dir(k):
    return getattr(k, "scale") if "scale" in dir(k) else None  # noqa: B009


def by_computed_name(k):
    return getattr(k, "".join(("sc", "ale")), None)


def by_object(k):
    try:
        return object.__getattribute__(k, "scale")
    except AttributeError:
        return None


def by_getattr_static(k):
    return inspect.getattr_static(k, "scale", None)


def by_members(k):
    return dict(inspect.getmembers(k)).get("scale")


def by_protocol(k):
    return 4.0 if isinstance(k, Scaled) else None


WAYS = [by_getattr, by_hasattr, by_try, by_vars, by_dict, by_dir, by_computed_name, by_object]
WAYS += [by_getattr_static, by_members, by_protocol]
VALUES = {"number": (2.0, 4.0), "integer": (2, 4), "flag": (False, True), "list": ([2], [4])}


def scaled(found):
    if found is None:
        return X.sum()
    return (X * (found[0] if isinstance(found, list) else 1 + found)).sum()


# `getmembers` reads the transpose of an array, which has none. Of a module of a library that is
# passed on, the step records the names that stand in its code.
LIBRARIES = ("module of torch", "module of numpy", "module of C", "builtins")
LEFT_OUT = {("array", by_members), *((holder, by_computed_name) for holder in LIBRARIES)}


def make_cases():
    for holder in HOLDERS:
        for way in WAYS:
            for value in VALUES:
                if (holder, way) not in LEFT_OUT:
                    yield holder, way, value


CASES = [*make_cases()]
EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "40"))
CHOSEN = random.Random(0).sample(CASES, min(EXAMPLES, len(CASES)))


def compare_moments(holder, way, values):
    """The results of the step, and of plain Python, as the attribute comes, changes and goes."""
    k = HOLDERS[holder]()
    step = pt.compile(lambda: scaled(way(k)), backend="graph")
    compiled, plain = [], []
    try:
        for value in (None, values[0], values[1], None, values[1]):
            if value is not None:
                k.scale = value
            elif "scale" in vars(k):
                del k.scale
            plain.append(scaled(way(k)).item())
            compiled.append(step().item())
    finally:
        if "scale" in vars(k):
            del k.scale
    return compiled, plain


@pytest.mark.parametrize(
    ("holder", "way", "value"), CHOSEN, ids=[f"{h}-{w.__name__}-{v}" for h, w, v in CHOSEN]
)
def test_an_attribute_comes_changes_and_goes(holder, way, value):
    compiled, plain = compare_moments(holder, way, VALUES[value])
    assert compiled == plain


def test_attributes_of_exceptions_in_no_dictionary_are_read():
    error = ValueError("a")
    step = pt.compile(lambda: X.sum() * (1 if error.__cause__ is None else 2), backend="graph")
    assert step().item() == 3
    error.__cause__ = ValueError("b")
    assert step().item() == 6
    notes = pt.compile(lambda: X.sum() * len(getattr(error, "__notes__", ())), backend="graph")
    assert notes().item() == 0
    error.add_note("c")
    assert notes().item() == 3


def test_a_module_that_answers_for_names_is_captured_again():
    module = types.ModuleType("a_module")
    step = pt.compile(lambda: X.sum() * getattr(module, "scale", 1), backend="graph")
    assert step().item() == 3
    module.__getattr__ = lambda name: 2
    assert step().item() == 6


def test_a_name_that_replaces_another_is_seen():
    holder = make_function()
    holder.other = 1
    step = pt.compile(lambda: X.sum() * getattr(holder, "scale", 1), backend="graph")
    assert step().item() == 3
    del holder.other
    holder.scale = 2
    assert step().item() == 6


def test_counts_of_a_cache_are_refused():
    cached = functools.lru_cache(lambda: 1)
    with pytest.raises(pt.CaptureError, match="reads the statistics of a cache"):
        pt.compile(lambda: X.sum() * cached.cache_info().hits, backend="graph")()


TOTALS = {key: HOLDERS[key] for key in ("function", "method's function", "exception", "array")}


@pytest.mark.parametrize("holder", [*TOTALS, "cached function"])
def test_a_total_of_tensors_is_kept_on_any_object(holder):
    k = HOLDERS[holder]()

    def step(x):
        k.scale = getattr(k, "scale", 0) + x.sum()
        return k.scale * 1

    compiled = pt.compile(step, backend="graph")
    try:
        assert [compiled(X).item() for _ in range(3)] == [3, 6, 9]
        assert type(k.scale) is torch.Tensor
    finally:
        del k.scale
