"""Programs in which two places come to hold one object, or one that held it holds another."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime
import fractions
import pathlib
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from .containers import Plain
from .state import CHANGES, REFUSED, Change, change, refused

# -- two places that hold one object ---------------------------------------------------------------

KINDS: dict[str, Callable[[], Any]] = {
    "floats": lambda: float("1.5"),
    "ints": lambda: int("1000"),
    "texts": lambda: "".join(["a", "b"]),
    "bytes": lambda: bytes([1, 2]),
    "tuples": lambda: (*[1, 2],),
    "frozen_sets": lambda: frozenset([1, 2]),
    "lists": lambda: [1],
    "dicts": lambda: {"a": 1},
    "byte_arrays": lambda: bytearray(b"a"),
    "arrays": lambda: np.ones(2),
    "fractions": lambda: fractions.Fraction(1, 3),
    "dates": lambda: datetime.date(2020, 1, 1),
    "paths": lambda: pathlib.Path("a"),
    "objects": lambda: Plain(a=1),
    "tensors": lambda: torch.ones(3),
    "complex_numbers": lambda: complex("1+2j"),
    "slices": lambda: slice(1, 2),
}


def compared(kind: str, becomes_one: bool) -> None:
    """Two items of a list, or two attributes, that are compared by `is`."""
    make = KINDS[kind]

    def in_a_list() -> Change:
        one = make()
        held = [one, make() if becomes_one else one]
        new = one if becomes_one else make()
        step = lambda x: x * (2 if held[0] is held[1] else 3)  # noqa: E731
        return Change(step, lambda: held.__setitem__(1, new))

    def in_attributes() -> Change:
        one = make()
        held = Plain(a=one, b=make() if becomes_one else one)
        new = one if becomes_one else make()
        step = lambda x: x * (2 if held.a is held.b else 3)  # noqa: E731
        return Change(step, lambda: setattr(held, "b", new))

    how = "become_one" if becomes_one else "become_two"
    CHANGES[f"{kind}_in_a_list_that_{how}"] = in_a_list
    CHANGES[f"{kind}_in_attributes_that_{how}"] = in_attributes


for kind in KINDS:
    compared(kind, True)
    compared(kind, False)


# -- an argument that is another argument, or is in a place ----------------------------------------


class OfClass(dict):
    """A dictionary that pytree does not know."""


def compared_arguments(kind: str) -> None:
    """Two arguments, or an argument and an attribute, that are compared by `is`."""
    make = KINDS[kind]
    one, other = make(), make()
    others = [other, one, other, one]

    def two_arguments() -> Change:
        step = lambda x, a, b: x * (2 if a is b else 3)  # noqa: E731
        return Change(step, lambda: None, arguments=lambda i: (one, others[i]))

    def within_an_argument() -> Change:
        step = lambda x, pair: x * (2 if pair[0] is pair[1] else 3)  # noqa: E731
        return Change(step, lambda: None, arguments=lambda i: ([one, others[i]],))

    def with_an_attribute() -> Change:
        held = Plain(a=one)
        step = lambda x, a: x * (2 if a is held.a else 3)  # noqa: E731
        return Change(step, lambda: None, arguments=lambda i: (others[i],))

    def within_an_object() -> Change:
        step = lambda x, held: x * held.t * (2 if held.a is held.b else 3)  # noqa: E731
        made = [Plain(t=torch.ones(3), a=one, b=another) for another in others]
        return Change(step, lambda: None, arguments=lambda i: (made[i],))

    def within_a_dict_of_a_class() -> Change:
        step = lambda x, held: x * held["t"] * (2 if held["a"] is held["b"] else 3)  # noqa: E731
        made = [OfClass(t=torch.ones(3), a=one, b=another) for another in others]
        return Change(step, lambda: None, arguments=lambda i: (made[i],))

    if kind not in ("frozen_sets", "objects"):  # beside which an object may not hold tensors
        CHANGES[f"{kind}_within_an_argument_object"] = within_an_object
        CHANGES[f"{kind}_within_a_dict_of_a_class"] = within_a_dict_of_a_class
    CHANGES[f"{kind}_in_two_arguments"] = two_arguments
    CHANGES[f"{kind}_within_an_argument"] = within_an_argument
    if kind not in ("tuples", "lists", "dicts"):  # which arrive as copies, and are refused
        CHANGES[f"{kind}_in_an_argument_and_an_attribute"] = with_an_attribute


for kind in ("tuples", "frozen_sets", "lists", "dicts", "objects"):  # numbers and text are not
    compared_arguments(kind)


@change
def a_list_that_is_given_twice_with_floats():
    one = [2.0]
    return Change(
        lambda x, a, b: x * a[0] - b[0],
        lambda: None,
        arguments=lambda i: (one, one if i < 2 else [3.0 + i]),
    )


@change
def a_list_that_is_written_and_later_given_twice():
    one = [2.0]

    def step(x, a, b):
        held = a.pop()
        scale = len(b)
        a.append(held)
        return x * scale

    return Change(step, lambda: None, arguments=lambda i: (one, [2.0] if i < 2 else one))


# -- classes with other bases ----------------------------------------------------------------------


class First:
    pass


class Second:
    pass


@change
def the_bases_of_a_class():
    class Child(First):
        pass

    child = Child()
    return Change(
        lambda x: x * (2 if isinstance(child, First) else 3),
        lambda: setattr(Child, "__bases__", (Second,)),
    )


@change
def the_bases_of_a_base():
    class Parent(First):
        pass

    class Child(Parent):
        pass

    return Change(
        lambda x: x * (2 if issubclass(Child, First) else 3),
        lambda: setattr(Parent, "__bases__", (Second,)),
    )


# -- a name that a step binds to another name's tensor ---------------------------------------------


def bound(
    name: str, make: Callable[[Any], Any], bind: Callable[[Any], None], detached: bool = False
) -> None:
    """Tensors `a` and `b` of an object that the step binds anew, and that others hold, too."""

    def build() -> Change:
        held = make([torch.ones(3), torch.ones(3) * 2])
        before = [held.a, held.b]

        def step(x):
            bind(held)
            y = x * held.a + held.b
            return y.detach() if detached else y

        def change():
            with torch.no_grad():
                before[0].add_(3)

        def seen():
            pairs = [(now is was, type(now)) for now in (held.a, held.b) for was in before]
            return [held.a.detach(), held.b.detach(), *pairs]

        return Change(step, change, seen)

    CHANGES[name] = build


def parameters(tensors: Any) -> nn.Module:
    module = nn.Module()
    module.a, module.b = map(nn.Parameter, tensors)
    return module


def buffers(tensors: Any) -> nn.Module:
    module = nn.Module()
    for name, tensor in zip("ab", tensors, strict=True):
        module.register_buffer(name, tensor)
    return module


def exchange(held: Any) -> None:
    held.a, held.b = held.b, held.a


def make_one(held: Any) -> None:
    held.a = held.b


def make_new(held: Any) -> None:
    held.a = nn.Parameter(held.b.detach() * 2)


def attributes(tensors: Any) -> Plain:
    return Plain(a=tensors[0], b=tensors[1])


bound("attributes_that_a_step_exchanges", attributes, exchange)
bound("buffers_that_a_step_exchanges", buffers, exchange)
bound("parameters_that_a_step_exchanges", parameters, exchange)
bound("attributes_that_a_step_makes_one", attributes, make_one)
bound("parameters_that_a_step_makes_one", parameters, make_one)
bound("a_parameter_that_a_step_makes_and_reads", parameters, make_new, detached=True)
# A backward of the caller would not reach the new parameter in later calls.
bound("a_parameter_that_a_step_makes", parameters, make_new)
REFUSED.add("a_parameter_that_a_step_makes")


# -- tensors and settings in objects of libraries --------------------------------------------------


def of_library(
    name: str, make: Callable[[], Any], read: Callable[..., Any], write: Callable[[Any], Any]
) -> None:
    """An object of torch's or Python's library that a step reads, or whose methods it calls."""

    def build() -> Change:
        held = make()
        return Change(lambda x: read(held, x), lambda: write(held))

    CHANGES[name] = build


def rows() -> TensorDataset:
    return TensorDataset(torch.arange(12.0).reshape(4, 3))


def normal() -> Any:
    return torch.distributions.Normal(torch.zeros(3), torch.ones(3))


def setting(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held, name, value)


ONES = (torch.ones(4, 3),)
of_library("the_rows_of_a_dataset", rows, lambda d, x: x * d[1][0], setting("tensors", ONES))
of_library("a_row_written_in_place", rows, lambda d, x: x * d[1][0], lambda d: d.tensors[0].mul_(7))
of_library(
    "the_indices_of_a_subset",
    lambda: Subset(rows(), [1, 2]),
    lambda d, x: x * d[0][0],
    setting("indices", [3]),
)
of_library(
    "a_dataset_among_others",
    lambda: ConcatDataset([rows()]),
    lambda d, x: x * d[1][0],
    lambda d: d.datasets.__setitem__(0, TensorDataset(torch.ones(4, 3))),
)
of_library("a_mean", normal, lambda d, x: d.log_prob(x), setting("loc", torch.ones(3)))
of_library("a_mean_written", normal, lambda d, x: d.log_prob(x), lambda d: d.loc.add_(1))
of_library(
    "a_distribution_within",
    lambda: torch.distributions.Independent(normal(), 1),
    lambda d, x: x * d.log_prob(x)[:, None],
    lambda d: setattr(d.base_dist, "loc", torch.ones(3)),
)
of_library(
    "a_float_of_a_transform",
    lambda: torch.distributions.AffineTransform(0.0, 2.0),
    lambda t, x: t(x),
    setting("scale", 3.0),
)
of_library("what_is_returned", normal, lambda d, x: d.loc, setting("loc", torch.ones(3)))


def entered(context: Any, x: Any) -> Any:
    with context as scale:
        return x * scale


of_library(
    "what_a_context_gives",
    lambda: contextlib.nullcontext(2.0),
    entered,
    setting("enter_result", 3.0),
)
of_library(
    "a_scale_that_a_context_gives",
    lambda: contextlib.nullcontext(torch.ones(3)),
    entered,
    setting("enter_result", torch.ones(3) * 3),
)


# -- what is read past the attributes --------------------------------------------------------------


@change
def an_object_within_a_copied_one():
    inner = Plain(scale=2)
    outer = Plain(inner=inner)
    return Change(lambda x: x * copy.copy(outer).inner.scale, lambda: setattr(inner, "scale", 5))


@change
def an_attribute_of_a_copied_object():
    outer = Plain(inner=Plain(scale=2))
    new = Plain(scale=5)
    return Change(
        lambda x: x * copy.deepcopy(outer).inner.scale, lambda: setattr(outer, "inner", new)
    )


@change
def an_attribute_of_a_subclass():
    class Base:
        pass

    class Child(Base):
        held = Plain(scale=2)

    return Change(
        lambda x: x * Base.__subclasses__()[-1].held.scale,
        lambda: setattr(Child.held, "scale", 5),
    )


@change
def an_object_in_annotations():
    class Noted:
        pass

    Noted.__annotations__ = {"a": Plain(scale=2)}
    return Change(
        lambda x: x * Noted.__annotations__["a"].scale,
        lambda: setattr(Noted.__annotations__["a"], "scale", 5),
    )


# -- what a step leaves ----------------------------------------------------------------------------


@change
def a_list_that_was_there_before_and_is_remembered():
    source, memo = [[torch.ones(3)]], {}

    def step(x):
        if "k" not in memo:
            memo["k"] = source[0]
        return x * memo["k"][0]

    def renew():
        source[0] = [torch.ones(3) * 5]
        memo.clear()

    return Change(step, renew, lambda: memo["k"] is source[0])


@refused
def the_order_of_a_dictionary():
    held = collections.OrderedDict(a=2.0, b=3.0)

    def step(x):
        held.move_to_end("a")
        return x * 2

    return Change(step, lambda: None, lambda: [*held])


@refused
def a_key_that_is_put_at_the_end():
    held = {"a": 2.0, "b": 3.0}

    def step(x):
        held["a"] = held.pop("a")
        return x * 2

    return Change(step, lambda: None, lambda: [*held])


# -- tensors without a variable of their own -------------------------------------------------------


def beside(name: str, make: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    """A tensor in a step that compares two other objects."""

    def build() -> Change:
        one, held = Plain(), make(torch.ones(3))
        pair = [one, Plain()]
        step = lambda x: x * read(held) * (2 if pair[0] is pair[1] else 3)  # noqa: E731
        return Change(step, lambda: (pair.__setitem__(1, one), read(held).mul_(2)))

    CHANGES[f"a_tensor_in_{name}_beside_a_comparison"] = build


def module_with(kept: Any) -> nn.Module:
    module = nn.Linear(3, 3)
    module.kept = kept
    return module


beside("an_exception", ValueError, lambda held: held.args[0])
beside("a_view", lambda t: types.MappingProxyType({"t": t}), lambda held: held["t"])
beside("a_nested_tuple", lambda t: (1, (t,)), lambda held: held[1][0])
beside("a_dataset", TensorDataset, lambda held: held.tensors[0])
beside("a_modules_tuple", lambda t: module_with((t, 1)), lambda held: held.kept[0])
beside("a_modules_dict", lambda t: module_with({"a": ([t],)}), lambda held: held.kept["a"][0][0])


# -- optimizers ------------------------------------------------------------------------------------


def optimizer(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(3, 3).parameters(), **{"lr": 0.125, **options})


@change
def a_group_under_another_name():
    group = optimizer().param_groups[0]
    return Change(lambda x: x * group["lr"], lambda: group.update(lr=0.5))


@change
def the_settings_of_an_optimizer():
    one = optimizer()

    def step(x):
        group = one.param_groups[0]
        return x * sum(v is group[k] for k, v in one.defaults.items())

    return Change(step, lambda: one.param_groups[0].update(lr=float("0.125")))


@change
def a_setting_that_capture_exchanges():
    one = optimizer()
    return Change(
        lambda x: x * (2 if one.param_groups[0]["foreach"] is None else 3),
        lambda: one.param_groups[0].update(foreach=False),
    )


@change
def an_optimizer_with_fewer_groups():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    one = torch.optim.SGD([{"params": part.parameters(), "lr": 0.1} for part in model], 0.1)

    def step(x):
        one.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        one.step()
        return loss.detach()

    def drop():
        one.param_groups = one.param_groups[:1]

    return Change(step, drop)


@change
def a_rate_that_a_scheduler_gives():
    one = optimizer(lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(one, 0.5)
    rate = [torch.tensor(0.05)]
    return Change(
        lambda x: x * schedule.get_last_lr()[0], lambda: setattr(schedule, "_last_lr", rate)
    )


@change
def an_optimizer_that_only_a_hook_of_a_tensor_knows():
    model = nn.Linear(3, 3)
    one = torch.optim.SGD(model.parameters(), 0.125)

    def update(p):
        one.step()
        one.zero_grad()

    model.weight.register_post_accumulate_grad_hook(update)

    def step(x):
        model(x).square().mean().backward()
        return x * 2

    return Change(step, lambda: None, lambda: model.weight.detach())
