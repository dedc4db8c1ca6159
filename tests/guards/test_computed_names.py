"""A step that reads attributes by computed names, of any object, is captured again.

Each case is a way to read, a kind of object that another one holds, and a moment at which the
attribute or the name changes. Plain Python is the truth.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import operator
import os
import random
import sys
import types

import pytest
import torch
from torch import nn

import partita as pt

X = torch.ones(3)
NAME = "partita_a_module_of_a_test"
key, place = "one", NAME
keys = {"key": "one"}
get = getattr
root = types.SimpleNamespace()


class Thing:
    pass


def make_function():
    def inner():
        pass

    return inner


HOLDERS = {
    "module": lambda: types.ModuleType(NAME),
    "class": lambda: type("Made", (), {}),
    "function": make_function,
    "object": Thing,
    "layer": nn.Module,
    "namespace": types.SimpleNamespace,
}


def read_by(holder, name):
    return getattr(holder, name)


def read_in_loop():
    found = root
    for name in ("inner", *[key]):
        found = getattr(found, name)
    return found


def read_local():
    get_it = getattr
    return get_it(root.inner, key)


WAYS = {
    "getattr of getattr": lambda: getattr(getattr(root, "inner"), key),  # noqa: B009
    "getattr": lambda: getattr(root.inner, key),
    "an item": lambda: getattr(root.inner, keys["key"]),
    "f-string": lambda: getattr(root.inner, f"{key[:1]}{key[1:]}"),
    "loop": read_in_loop,
    "default": lambda: getattr(root.inner, key, 7),
    "hasattr": lambda: 5 if hasattr(root.inner, key) else 9,
    "attrgetter": lambda: operator.attrgetter("inner." + key)(root),
    "methodcaller": lambda: operator.methodcaller("__getattribute__", key)(root.inner),
    "reduce": lambda: functools.reduce(getattr, ["inner", key], root),
    "map": lambda: next(iter([*map(getattr, [root.inner], [key])])),
    "vars": lambda: vars(root.inner)[key],
    "__dict__": lambda: root.inner.__dict__[key],
    "getattr_static": lambda: inspect.getattr_static(root.inner, key),
    "object": lambda: type(root.inner).__getattribute__(root.inner, key),
    "another name": lambda: get(root.inner, key),
    "local name": read_local,
    "function": lambda: read_by(root.inner, key),
    "generator": lambda: sum(getattr(holder, key) for holder in (root.inner,)),
    "dir": lambda: dir(root.inner).count(key),
}
WAYS_TO_MODULES = {
    "sys.modules": lambda: sys.modules[place].one,
    "getattr of sys.modules": lambda: getattr(sys.modules[place], key),
    "vars of sys.modules": lambda: vars(sys.modules[place])[key],
    "import_module": lambda: importlib.import_module(place).one,
    "getattr of import_module": lambda: getattr(importlib.import_module(place), key),
}
MOMENTS = ["changed", "renamed", "renamed and changed", "deleted", "added", "replaced"]


def change(moment, kind):
    inner = root.inner
    if "renamed" in moment:
        globals()["key"] = keys["key"] = "other"
    if moment == "renamed and changed":
        inner.other = 13
    elif moment in ("changed", "added"):
        inner.one = 11
    elif moment == "deleted":
        del inner.one
    elif moment == "replaced":
        put_new(kind, one=21, other=22)


def put_new(kind, **values):
    root.inner = HOLDERS[kind]()
    for name, value in values.items():
        setattr(root.inner, name, value)
    if kind == "module":
        sys.modules[NAME] = root.inner


def outcome(step):
    try:
        return step().item()
    except (AttributeError, KeyError) as error:
        return type(error)


CASES = [
    *itertools.product(WAYS, HOLDERS, MOMENTS),
    *itertools.product(WAYS_TO_MODULES, ["module"], MOMENTS),
]
# The `__getattribute__` of a class reads its metaclass.
CASES = [c for c in CASES if c[1] != "class" or c[0] not in ("object", "methodcaller")]
EXAMPLES = int(os.environ.get("PARTITA_EXAMPLES", "80"))
CHOSEN = random.Random(0).sample(CASES, min(EXAMPLES, len(CASES)))


@pytest.mark.parametrize(("way", "kind", "moment"), CHOSEN)
def test_an_attribute_of_a_computed_name_is_read_again(way, kind, moment, monkeypatch):
    read = {**WAYS, **WAYS_TO_MODULES}[way]
    monkeypatch.setitem(globals(), "key", "one")
    monkeypatch.setitem(keys, "key", "one")
    monkeypatch.setitem(sys.modules, NAME, None)
    put_new(kind, **({} if moment == "added" else {"one": 2}), other=5)

    def plain():
        return X.sum() * read()

    step = pt.compile(plain, backend="graph")
    assert outcome(step) == outcome(plain)
    change(moment, kind)
    assert outcome(step) == outcome(plain)
    captures = len(step.reasons)
    assert outcome(step) == outcome(plain)
    assert isinstance(outcome(plain), type) or len(step.reasons) == captures
    assert type(sys.modules[NAME]) in (types.ModuleType, type(None))


def test_what_a_step_does_not_read_of_a_module_may_change():
    module = types.ModuleType(NAME)
    module.one, module.other = 2, 5
    step = pt.compile(lambda: X.sum() * read_by(module, "one"), backend="graph")
    assert step().item() == 6
    module.one = 3
    assert step().item() == 9
    assert type(module) is types.ModuleType
