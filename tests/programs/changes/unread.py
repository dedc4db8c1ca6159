"""Programs in which something changes that the step does not read."""

from __future__ import annotations

import functools
import logging

import torch
from torch import nn

from .containers import Plain
from .modules import Holder
from .state import Change, change, having


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
