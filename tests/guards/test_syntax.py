"""A captured step sees what it reads and writes by any syntax: compilers of Python differ."""

from __future__ import annotations

import linecache
import sys
import types
from typing import Any

import pytest
import torch

import partita as pt

# Each is the body of a function of `x`. It reads `mod.n`, `Kind.n`, `box.n` or `n`: 2 at first.
READS = {
    "a list comprehension": "return x * sum([mod.n for _ in range(1)])",
    "a comprehension within one": "return x * sum([v for u in [[mod.n]] for v in [w for w in u]])",
    "a set comprehension": "return x * sum({mod.n for _ in '1'})",
    "a dictionary comprehension": "return x * max({mod.n: 1 for _ in '1'})",
    "a comprehension with a closure": "return x * [lambda: k * mod.n for k in (1,)][0]()",
    "a comprehension that hides a name": "k = 3\ny = [k for k in (mod.n,)]\nreturn x * y[0] * k",
    "a generator": "return x * next(v for v in (mod.n,))",
    "a class body": "class K:\n    n = mod.n\nreturn x * K.n",
    "a comprehension in a class": "class K:\n    n = sum(mod.n for _ in '1')\nreturn x * K.n",
    "a base class by super()": "return x * Derived().plain()",
    "a method by super()": "return x * Derived().method()",
    "an attribute by super(type, object)": "return x * Derived().two()",
    "an attribute by super() in a comprehension": "return x * Derived().listed()",
    "a class method by super()": "return x * Derived.of_class()",
    "a property": "return x * Derived().shown",
    "an attribute of an attribute": "return x * Derived().kind.n",
    "a pattern of a class": "match box:\n    case types.SimpleNamespace(n=k): return x * k",
    "a pattern of a mapping": "match vars(box):\n    case {'n': k}: return x * k",
    "a named value": "return x * k if (k := mod.n) else x",
    "text": "return x * len(f'{\"a\" * mod.n!s:>1}')",
    "a slice": "return x[: mod.n] * n",
    "a chain of comparisons": "return x * 3 if 1 < mod.n < 3 else x",
    "a conditional": "return x * (mod.n if mod.n else 1)",
    "a default": "return with_default(x)",
    "a keyword": "return scaled(x, by=mod.n)",
    "a starred call": "return scaled(*[x], **{'by': mod.n})",
    "a closure": "def inner():\n    return k\nk = mod.n\nreturn x * inner()",
    "a nested function": "def f():\n    def g(): return mod.n\n    return g()\nreturn x * f()",
    "try": "try:\n    k = mod.n\nexcept TypeError: pass\nfinally:\n    x = x * n\nreturn x * k",
    "try of a group": "try:\n    k = mod.n\nexcept* AttributeError:\n    k = 1\nreturn x * k",
    "with": "with held(mod) as m:\n    return x * m.n",
    "exec": "space = {'mod': mod}\nexec('k = mod.n', space)\nreturn x * space['k']",
    "a global": "return x * n",
    "a global in a comprehension": "return x * sum([n for _ in '1'])",
    "a global by globals()": "return x * globals()['n']",
    "an import": "from states import n as k\nreturn x * k",
    "a computed name": "k = 'n'\nreturn x * getattr(mod, k + '')",
    "a computed name in a comprehension": "return x * sum([getattr(Kind, k) for k in 'n'])",
    "a name in a comprehension": "return x * sum([getattr(u, 'n') for u in (Kind, mod)])",
    "attributes by map": "return x * sum(map(operator.attrgetter('n'), (mod, Kind)))",
}
NEW_READS = {
    "a function with a type parameter": "def f[T](y: T) -> T:\n    return y * mod.n\nreturn f(x)",
    "a class of a type parameter": "class K[T]:\n    def n(self): return mod.n\nreturn x * K().n()",
    "a type alias": "type A = mod.n\nreturn x * A.__value__",
    "text within text": "return x * len(f'{f'{'a' * mod.n}'}')",
}  # fmt: skip
STATE = """
import contextlib
import operator
import types
import mod
n = 2
class Kind:
    n = 2
    def method(self): return self.n * type(self).n
    @classmethod
    def of_class(cls): return cls.n
    @property
    def shown(self): return self.kind.n
class Derived(Kind):
    kind = Kind
    def plain(self): return super().n
    def method(self): return super().method()
    def two(self): return super(Derived, self).n
    def listed(self): return sum([super(Derived, self).n for _ in '1'])
    @classmethod
    def of_class(cls): return super().of_class()
box = types.SimpleNamespace(n=2)
def scaled(x, by): return x * by
def with_default(x, k=box): return x * k.n
@contextlib.contextmanager
def held(m):
    yield m
"""


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The globals of a user's module."""
    mod, states = types.ModuleType("mod"), types.ModuleType("states")
    mod.n = 2
    monkeypatch.setitem(sys.modules, "mod", mod)
    monkeypatch.setitem(sys.modules, "states", states)
    run(STATE, vars(states), "states.py")
    return vars(states)


def run(text: str, space: dict[str, Any], file: str) -> None:
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    exec(compile(text, file, "exec", dont_inherit=True), space)


def function_of(body: str, space: dict[str, Any]) -> Any:
    run("\n    ".join(["def step(x):", *body.splitlines()]), space, "step.py")
    return space["step"]


def change(space: dict[str, Any]) -> None:
    for home in (space["mod"], space["Kind"], space["box"]):
        home.n = 3
    space["n"] = 3


def check_read(body: str, space: dict[str, Any]) -> None:
    step = function_of(body, space)
    x = torch.arange(1.0, 5.0)
    compiled = pt.compile(step, backend="graph")
    for _ in range(2):
        assert torch.equal(compiled(x), step(x))
    before = step(x)
    change(space)
    assert torch.equal(compiled(x), step(x)) and not torch.equal(before[:2], step(x)[:2])


@pytest.mark.parametrize("what", READS)
def test_what_a_step_reads_by_any_syntax_is_read_again(what: str, space: dict[str, Any]):
    check_read(READS[what], space)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is new in Python 3.12")
@pytest.mark.parametrize("what", NEW_READS)
def test_what_a_step_reads_by_newer_syntax_is_read_again(what: str, space: dict[str, Any]):
    check_read(NEW_READS[what], space)


# The line before the last of each writes what outlives the step, and another value in each call.
WRITES = {
    "an added number": "y = x * 2\nbox.n += 1\nreturn y",
    "an attribute of a class": "y = x * 2\nKind.n += 1\nreturn y",
    "a global": "global n\ny = x * 2\nn = n + 1\nreturn y",
    "an item": "y = x * 2\nitems[0] += 1\nreturn y",
    "a slice": "y = x * 2\nitems[0:1] = [1, 2]\nreturn y",
    "a slice with a step": "y = x * 2\nitems[0:4:2] = items[0] + 1, 7\nreturn y",
    "a deleted item": "y = x * 2\ndel items[0]\nreturn y",
    "a deleted slice": "y = x * 2\ndel items[:1]\nreturn y",
    "an append": "y = x * 2\nitems.append(1)\nreturn y",
    "an append in a comprehension": "y = x * 2\n[items.append(i) for i in (1, 2)]\nreturn y",
    "an unpacked value": "y = x * 2\nbox.n, k = box.n + 7, 8\nreturn y",
    "a loop": "y = x * 2\nfor box.n in (box.n + 8, box.n + 9): pass\nreturn y",
    "with": "y = x * 2\nwith held(box.n + 5) as box.n: pass\nreturn y",
}


@pytest.mark.parametrize("what", WRITES)
def test_what_a_step_changes_by_any_syntax_is_refused_with_its_line(
    what: str, space: dict[str, Any]
):
    space["items"] = [1, 2, 3, 4]
    step = pt.compile(function_of(WRITES[what], space), backend="graph")
    line = WRITES[what].count("\n") + 1  # the first is `def step(x)`
    with pytest.raises(pt.CaptureError, match=rf"step\.py:{line}\)"):
        step(torch.arange(1.0, 5.0))
    assert space["items"] == [1, 2, 3, 4] and space["n"] == space["Kind"].n == space["box"].n == 2
