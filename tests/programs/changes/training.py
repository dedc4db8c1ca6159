"""Programs that train, and whose optimizers or parameters change between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .state import CHANGES, Change, change


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
