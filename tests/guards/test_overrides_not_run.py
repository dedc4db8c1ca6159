"""A capture walks containers and objects without running what a user's class overrides."""

from __future__ import annotations

import collections
import queue
import sys
import threading
import time
import types
import weakref

import pytest
import torch

import partita as pt


def overriding(base):
    """A class of containers none of whose own ways of listing its items may be called."""

    def refuse(self, *args):
        raise AssertionError("the user's code runs")

    names = "__iter__ __len__ __bool__ __contains__ items keys values copy clear update extend"
    return type("Lazy", (base,), {name: refuse for name in names.split() if hasattr(base, name)})


def fill(base, value):
    kind = overriding(base)
    if issubclass(base, dict):
        made = kind()
        base.__setitem__(made, "a", value)
    elif base is collections.deque:
        made = kind()
        base.append(made, value)
    else:
        made = kind([value])
    return made


def put(base, made, value):
    if base in (set, frozenset):
        base.clear(made)
        base.add(made, value)
    else:
        base.__setitem__(made, "a" if issubclass(base, dict) else 0, value)


DICTS = [dict, collections.OrderedDict, collections.defaultdict]


@pytest.mark.parametrize("base", [*DICTS, list, collections.deque])
@pytest.mark.parametrize("values", [(2, 5), (torch.ones(3), torch.arange(3.0))])
@pytest.mark.parametrize("place", ["closure", "object", "module", "class"])
def test_containers_are_read_by_their_builtin_class(base, values, place):
    held = fill(base, values[0])
    key = "a" if issubclass(base, dict) else 0
    if place == "closure":
        get = lambda: held  # noqa: E731
    else:
        owner = {"object": types.SimpleNamespace, "module": torch.nn.Module}.get(place)
        owner = type("Owner", (), {}) if owner is None else owner()
        owner.held = held
        get = lambda: owner.held  # noqa: E731

    def step(x):
        return x * base.__getitem__(get(), key)

    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for value in (values[0], values[1], values[1], values[0]):
        put(base, held, value)
        torch.testing.assert_close(compiled(x), step(x))


def test_sets_are_read_by_their_builtin_class():
    held = fill(set, 2)
    step = lambda x: x * sum(set.__iter__(held))  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for value in (2, 5, 5, 2):
        put(set, held, value)
        torch.testing.assert_close(compiled(x), step(x))


class Shy:
    """Nobody but the step may ask it for anything."""

    def __init__(self):
        object.__setattr__(self, "scale", 2)

    def __getattribute__(self, name):
        if name != "scale":
            raise RuntimeError(f"{name} is read")
        return object.__getattribute__(self, name)


def test_an_object_is_not_asked_for_its_class():
    shy = Shy()
    step = lambda x: x * shy.scale  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for scale in (2, 4, 4):
        shy.scale = scale
        torch.testing.assert_close(compiled(x), step(x))


def test_a_mapping_proxy_of_a_mapping_of_the_users_is_not_listed():
    class Mapping(collections.UserDict):
        def __iter__(self):
            raise AssertionError("the user's code runs")

    under = Mapping()
    under.data["a"] = 2
    proxy = types.MappingProxyType(under)
    step = lambda x: x * proxy["a"]  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for value in (2, 4, 4):
        under.data["a"] = value
        torch.testing.assert_close(compiled(x), step(x))


def test_a_default_is_not_made_by_a_search():
    held = collections.defaultdict(lambda: torch.zeros(3), a=torch.ones(3))
    step = lambda x: x * dict.get(held, "a", x)  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.full((3,), 3.0)
    torch.testing.assert_close(compiled(x), step(x))
    del held["a"]
    torch.testing.assert_close(compiled(x), x * x)
    assert "a" not in held


def test_items_of_an_ordered_dictionary_stand_under_their_keys():
    held = collections.OrderedDict(a=torch.ones(3), b=2)
    held.move_to_end("a")
    step = lambda x: x * held["a"] * held["b"]  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for a, b in ((1, 2), (3, 2), (3, 5)):
        held.update(a=torch.full((3,), a), b=b)
        torch.testing.assert_close(compiled(x), step(x))


def test_names_of_a_module_that_are_not_read_refuse_nothing(monkeypatch):
    """Code that reads past a class may read any name of a module; a weak set there is no read."""
    module = types.ModuleType("module_with_a_weak_set")
    module.known, module.scale = weakref.WeakSet(), 2
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Past:
        scale = 3

        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

    past = Past()

    def step(x):
        import module_with_a_weak_set

        return x * past.scale * module_with_a_weak_set.scale

    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for scale in (2, 5, 5):
        module.scale = scale
        torch.testing.assert_close(compiled(x), step(x))
    with pytest.raises(pt.CaptureError, match="holds weak"):
        pt.compile(lambda x: x * len(module.known), backend="graph")(x)


class Monitor(threading.Thread):
    """A thread that changes what it holds at any time."""

    def __init__(self):
        super().__init__(daemon=True)
        self.turns, self.lines, self.ended = 0, queue.Queue(), threading.Event()

    def run(self):
        while not self.ended.wait(1e-4):
            self.turns += 1
            self.lines.put(self.turns)


@pytest.mark.slow
def test_threads_that_are_not_read_are_no_state(monkeypatch):
    """Names of a module are read ahead: a progress bar's monitor is none of the step's state."""
    monitor, module = Monitor(), types.ModuleType("module_with_a_thread")
    module.monitor, module.held, module.scale = monitor, {"lines": monitor.lines}, 2
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class Past:
        scale = 3

        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

    past = Past()

    def step(x):
        import module_with_a_thread

        return x * past.scale * module_with_a_thread.scale

    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    monitor.start()
    try:
        for scale in (2, 5, 5):
            module.scale = scale
            torch.testing.assert_close(compiled(x), step(x))
            before = monitor.turns
            while monitor.turns == before:
                time.sleep(1e-3)
    finally:
        monitor.ended.set()
    assert len(compiled.programs) == 2


class Slotted:
    __slots__ = ("scale",)


def by_class(held):
    return type(held).scale.__get__(held)


def by_descriptor(held, read=Slotted.scale):
    return read.__get__(held, Slotted)


def by_object(held):
    return object.__getattribute__(held, "scale")


def by_name(held):
    return getattr(Slotted.scale, "__get__")(held)  # noqa: B009


@pytest.mark.parametrize("read", [by_class, by_descriptor, by_object, by_name])
def test_slots_read_past_their_class_are_guarded(read):
    held = Slotted()
    held.scale = 2
    step = lambda x: x * read(held)  # noqa: E731
    compiled, x = pt.compile(step, backend="graph"), torch.ones(3)
    for scale in (2, 4, 4):
        held.scale = scale
        torch.testing.assert_close(compiled(x), step(x))
