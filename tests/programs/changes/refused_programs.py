"""Programs that read what no guard can hold, or write what no graph can write."""

from __future__ import annotations

import collections
import itertools
import random
import time

import numpy as np
import torch
from torch import nn

from .containers import Plain, Slots
from .modules import Holder
from .state import Change, refused


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
