"""Programs that ask a tensor for more than its values: one entry for each fact that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .state import CHANGES, REFUSED, Change

__all__: list[str] = []

BASE = torch.arange(12.0)


def fact(name: str, asks: Callable[[Any], Any], *tensors: Callable[[], Any]) -> None:
    """Two tensors, the second in place of the first: as an argument, and as a global one."""

    def argument() -> Change:
        made = [make() for make in tensors]
        return Change(
            lambda x, t: x * (2 if asks(t) else 5),
            lambda: None,
            arguments=lambda i: (made[i // 2],),
        )

    def reached() -> Change:
        first, second = [make() for make in tensors]
        held = [first]
        return Change(
            lambda x: x * (2 if asks(held[0]) else 5), lambda: held.__setitem__(0, second)
        )

    CHANGES[f"{name}_of_an_argument"] = argument
    CHANGES[f"{name}_of_a_tensor_that_is_reached"] = reached


def with_gradient() -> torch.Tensor:
    t = torch.ones(3, requires_grad=True)
    t.grad = torch.ones(3)
    return t


def with_hook() -> torch.Tensor:
    t = torch.ones(3, requires_grad=True)
    t.register_hook(lambda g: g * 2)
    return t


def named(**values: Any) -> torch.Tensor:
    t = torch.ones(3)
    t.__dict__.update(values)
    return t


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


fact("the_offset", lambda t: t.storage_offset() == 0, lambda: BASE[:3], lambda: BASE[3:6])
fact(
    "the_offset_of_a_view",
    lambda t: t.view(3).storage_offset() == 0,
    lambda: BASE[:3],
    lambda: BASE[3:6],
)
REFUSED.update(
    f"the_offset_of_a_view_of_{what}" for what in ("an_argument", "a_tensor_that_is_reached")
)
fact("whether_there_is_a_gradient", lambda t: t.grad is None, leaf, with_gradient)
fact("whether_there_is_a_base", lambda t: t._base is None, lambda: torch.ones(3), lambda: BASE[:3])
fact("whether_it_was_inferred", lambda t: t.is_inference(), inferred, lambda: torch.ones(3))
fact(
    "a_class", lambda t: type(t) is torch.Tensor, lambda: torch.ones(3), lambda: nn.Parameter(BASE)
)
fact("an_attribute_that_comes", lambda t: getattr(t, "k", 2) == 2, named, lambda: named(k=5))
fact("an_attribute", lambda t: t.k == 2, lambda: named(k=2), lambda: named(k=5))
fact("whether_it_is_shared", lambda t: t.is_shared(), leaf, lambda: torch.ones(3).share_memory_())


def argued(name: str, step: Callable[..., Any], *tensors: Callable[[], Any]) -> None:
    def build() -> Change:
        made = [make() for make in tensors]
        return Change(step, lambda: None, arguments=lambda i: (made[i // 2],))

    CHANGES[name] = build


argued(
    "whether_an_argument_is_a_leaf",
    lambda x, t: x * (2 if t.is_leaf else 5),
    leaf,
    lambda: leaf() * 1,
)
argued(
    "whether_an_argument_has_a_history",
    lambda x, t: x * (2 if t.grad_fn is None else 5),
    leaf,
    lambda: leaf() * 1,
)
argued(
    "whether_an_argument_is_conjugated",
    lambda x, t: x * (2 if t.is_conj() else 5),
    lambda: torch.ones(3).cfloat(),
    lambda: torch.ones(3).cfloat().conj(),
)
argued(
    "a_hook_of_an_argument", lambda x, t: torch.autograd.grad((x * t).sum(), t)[0], leaf, with_hook
)


class Own(torch.Tensor):
    """A tensor of a class of the user's."""


argued(
    "an_argument_of_a_class_of_its_own",
    lambda x, t: x * t,
    lambda: torch.ones(3),
    lambda: BASE[:3].as_subclass(Own),
)
argued("an_address", lambda x, t: x * (t.data_ptr() % 2), leaf, leaf)
argued("a_counter_of_writes", lambda x, t: x * t._version, leaf, leaf)
REFUSED.update(("an_argument_of_a_class_of_its_own", "an_address", "a_counter_of_writes"))


def scaled(k: int) -> Callable[[Any], Any]:
    return lambda self: self * k


def a_method_that_all_tensors_are_given() -> Change:
    torch.Tensor.scaled = scaled(2)
    return Change(lambda x: x.scaled(), lambda: setattr(torch.Tensor, "scaled", scaled(5)))


CHANGES["a_method_that_all_tensors_are_given"] = a_method_that_all_tensors_are_given


def found_by_tensor(name: str, make: Callable[[torch.Tensor], Any]) -> None:
    """A container that finds a tensor, for which another stands while the step is captured."""

    def build() -> Change:
        held = torch.ones(3)
        within = make(held)
        return Change(lambda x: x * held * (2 if held in within else 5), lambda: None)

    REFUSED.add(name)
    CHANGES[name] = build


found_by_tensor("a_set_of_tensors", lambda t: {t})
found_by_tensor("a_dictionary_by_tensors", lambda t: {t: 1})
