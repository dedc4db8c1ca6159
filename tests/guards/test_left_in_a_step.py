"""What a step makes and leaves anywhere is refused, and nothing fake stays there."""

from __future__ import annotations

import builtins
import functools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import partita as pt

KEPT = None


class Box:
    def __init__(self, made):
        self.made = made


class Lazy:
    """Makes what it lacks, as a lazy configuration does."""

    def __init__(self, make):
        self.make = make

    def __getattr__(self, name):
        assert name == "made"  # partita asks for nothing that the step does not ask for
        self.__dict__[name] = self.make()
        return self.__dict__[name]


def by_cache(make):
    return functools.lru_cache(make)


def by_bounded_cache(make):
    return functools.lru_cache(maxsize=4)(make)


def by_unbounded_cache(make):
    return functools.cache(make)


def by_builtins(make):
    builtins.kept_ = None

    def get():
        if builtins.kept_ is None:
            builtins.kept_ = make()
        return builtins.kept_

    return get


def by_module_of_torch(make):
    torch.kept_ = None

    def get():
        if torch.kept_ is None:
            torch.kept_ = make()
        return torch.kept_

    return get


def by_class_statement(make):
    global KEPT
    KEPT = None

    def get():
        global KEPT
        if KEPT is None:

            class KEPT:
                made = make()

        return KEPT.made

    return get


def by_globals(make):
    globals()["KEPT"] = None

    def get():
        if globals()["KEPT"] is None:
            globals()["KEPT"] = Box(make())
        return globals()["KEPT"].made

    return get


def by_new_global(make):
    globals().pop("NEW", None)

    def get():
        if "NEW" not in globals():
            globals()["NEW"] = Box(make())
        return globals()["NEW"].made

    return get


def by_dispatch(make):
    @functools.singledispatch
    def find(value):
        return None

    def get():
        if find(1) is None:
            made = make()
            find.register(int)(lambda value: made)
        return find(1)

    return get


def by_attribute_of_a_function(make):
    def get():
        if not hasattr(get, "made"):
            get.made = Box(make())
        return get.made.made

    return get


def by_getattr(make):
    lazy = Lazy(make)
    return lambda: lazy.made


WAYS = [by_cache, by_bounded_cache, by_unbounded_cache, by_builtins, by_module_of_torch]
WAYS += [by_class_statement, by_globals, by_new_global, by_dispatch]
WAYS += [by_attribute_of_a_function, by_getattr]


def make_optimizer(weight):
    return torch.optim.SGD([weight], lr=0.1, momentum=0.9)


def make_averages(weight):
    return [weight.detach().clone()]


def train(made, weight):
    loss = weight.square().sum()
    if isinstance(made, list):
        with torch.no_grad():
            made[0].add_(weight)
        return made[0].sum()
    made.zero_grad()
    loss.backward()
    made.step()
    return loss.detach()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [make_optimizer, make_averages])
def test_what_a_step_makes_is_refused_each_time_and_not_left(way, make):
    weight = torch.nn.Parameter(torch.ones(3))
    get = way(lambda: make(weight))

    compiled = pt.compile(lambda: train(get(), weight), backend="graph")
    for _ in range(2):
        with pytest.raises(pt.CaptureError, match="leaves"):
            compiled()
    torch.testing.assert_close(weight.detach(), torch.ones(3))
    made = get()  # outside of a capture: what is there now is real
    tensors = made if isinstance(made, list) else made.param_groups[0]["params"]
    assert not any(isinstance(t, FakeTensor) for t in tensors)
    other = torch.nn.Parameter(torch.ones(3))
    plain = make(other)
    for _ in range(3):
        torch.testing.assert_close(compiled(), train(plain, other))


def test_a_lazy_object_is_asked_for_what_the_step_asks():
    lazy = Lazy(lambda: 1)
    assert pt.compile(lambda: torch.ones(3).sum() * lazy.made, backend="graph")().item() == 3
