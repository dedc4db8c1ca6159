"""Programs whose step is called in other ways than by its name."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F

import partita as pt

from .containers import Plain
from .state import Change, change, having, setting


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
