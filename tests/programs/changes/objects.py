"""Programs in which objects change as a whole: one entry for each kind of object and of change.

Special attributes, classes and `__dict__`s are exchanged, two objects become one, caches are
cleared, hooks come and go, and steps leave what they make in places of all kinds.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.programs.exchanged_state import CONTAINERS, HOLDERS

from .state import CHANGES, HOOKS, REFUSED, Change, change, refused

__all__: list[str] = []


def nothing() -> None:
    pass


# -- special attributes ----------------------------------------------------------------------------

# By name: on what it stands, how it is read as a number, and what becomes of it.
SPECIAL: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "__name__": ("both", lambda f: len(f.__name__), "a_longer_name"),
    "__qualname__": ("both", lambda f: len(f.__qualname__), "a_longer_name"),
    "__module__": ("both", lambda f: len(f.__module__), "another.module"),
    "__doc__": ("both", lambda f: len(f.__doc__ or ""), "Another text."),
    "__defaults__": ("function", lambda f: len(f.__defaults__ or ()), (1, 2, 3)),
    "__kwdefaults__": ("function", lambda f: len(f.__kwdefaults__ or ()), {"a": 1, "b": 2}),
    "__annotations__": ("both", lambda f: len(f.__annotations__), {"a": int, "b": int}),
    "__wrapped__": ("function", lambda f: len(f.__wrapped__()), lambda: "abcde"),
    "__bases__": ("class", lambda k: len(k.__mro__), None),
    "__subclasses__": ("class", lambda k: 2 + len(k.__subclasses__()), None),
}


def reached_by(how: str, value: Any) -> Callable[[], Any]:
    held, owner, table = [value], types.SimpleNamespace(a=value), {"k": value}
    return {
        "its name": lambda: value,
        "a list": lambda: held[0],
        "an attribute": lambda: owner.a,
        "a dictionary": lambda: table["k"],
        "its type": lambda: type(one) if (one := make_one(value)) is not None else value,
    }[how]


@functools.lru_cache
def make_one(kind: Any) -> Any:
    return kind() if isinstance(kind, type) else None


def special(name: str, on: str, how: str) -> Callable[[], Change]:
    _, read, put = SPECIAL[name]

    def build() -> Change:
        def function(a=1, *, b=2):
            """A text."""

        function.__wrapped__ = lambda: "ab"
        function.__annotations__ = {}
        base = type("Base", (), {})
        other = type("Other", (base,), {})
        kind = type("Kind", (base,), {"__doc__": "A text.", "__annotations__": {}})
        value = function if on == "function" else kind
        kept: list[Any] = []

        def exchange() -> None:
            if name == "__bases__":
                kind.__bases__ = (other,)
            elif name == "__subclasses__":
                kept.append(type("New", (kind,), {}))
            else:
                setattr(value, name, put)

        found = reached_by(how, value)
        return Change(lambda x: x * (1 + read(found())), exchange)

    return build


for _name, (_where, _, _) in SPECIAL.items():
    for _on in ("function", "class"):
        for _how in ("its name", "a list", "an attribute", "a dictionary", "its type"):
            if _where in (_on, "both") and (_on == "class" or _how != "its type"):
                _title = f"{_name.strip('_')}_of_a_{_on}_by_{_how.replace(' ', '_')}"
                CHANGES[_title] = special(_name, _on, _how)


# -- containers of tensors in holders --------------------------------------------------------------


def exchanged(container: str, holder: str) -> Callable[[], Change]:
    def build() -> Change:
        make, read_value = CONTAINERS[container]
        read, write, _ = HOLDERS[holder](make(torch.full((3,), 2.0)))
        return Change(
            lambda x: x * read_value(read(None)), lambda: write(make(torch.full((3,), 5.0)))
        )

    return build


for _container, _holder in itertools.product(
    ("list", "dict", "ordered dict", "deque", "namespace", "dataclass", "named tuple", "partial"),
    ("global", "closure", "attribute", "class", "function", "keyword default", "default", "slot"),
):
    _title = f"a_{_container}_of_tensors_in_a_{_holder}".replace(" ", "_")
    CHANGES[_title] = exchanged(_container, _holder)


# -- two objects that become one -------------------------------------------------------------------


def joined(make: Callable[[], Any], where: str, how: str) -> Callable[[], Change]:
    def build() -> Change:
        one, other = make(), make()
        if where == "a list":
            held: Any = [one, other]
            read = lambda: held  # noqa: E731
            join = lambda: held.__setitem__(1, held[0])  # noqa: E731
        elif where == "a dictionary":
            held = {"a": one, "b": other}
            read = lambda: [held["a"], held["b"]]  # noqa: E731
            join = lambda: held.__setitem__("b", held["a"])  # noqa: E731
        else:
            held = types.SimpleNamespace(a=one, b=other)
            read = lambda: [held.a, held.b]  # noqa: E731
            join = lambda: setattr(held, "b", held.a)  # noqa: E731

        def asks(x: torch.Tensor) -> torch.Tensor:
            a, b = read()
            return x * (2 if a is b else 3)

        def writes(x: torch.Tensor) -> torch.Tensor:
            a, b = read()
            a[0] = 4
            return x * b[0]

        return Change(asks if how == "asks" else writes, join)

    return build


for _name, _make in {
    "lists": lambda: [1],
    "dictionaries": lambda: {0: 1},
    "deques": lambda: collections.deque([1]),
    "sets": lambda: {1},
    "byte_arrays": lambda: bytearray(b"a"),
}.items():
    for _where in ("a list", "a dictionary", "a namespace"):
        for _how in ("asks", "writes"):
            if _how == "asks" or _name not in ("sets", "byte_arrays"):
                _title = f"two_{_name}_in_{_where}_become_one_and_it_{_how}".replace(" ", "_")
                CHANGES[_title] = joined(_make, _where, _how)


# -- whole objects ---------------------------------------------------------------------------------


class Held:
    def __init__(self, k: Any) -> None:
        self.k = k


class OtherHeld(Held):
    def __getattribute__(self, name: str) -> Any:
        return 5.0 if name == "k" else super().__getattribute__(name)


def whole(make: Callable[[], Any], kind: str) -> Callable[[], Change]:
    def build() -> Change:
        owner = Held(make())

        def exchange() -> None:
            if kind == "dict":
                owner.__dict__ = {"k": make() * 2}
            elif kind == "class":
                owner.__class__ = OtherHeld
            elif kind == "deleted":
                del owner.k
                owner.k = make() * 3
            else:
                vars(owner).clear()
                vars(owner).update(k=make() * 4)

        return Change(lambda x: x * owner.k, exchange)

    return build


for _kind in ("dict", "class", "deleted", "cleared"):
    for _name, _make in {
        "a_float": lambda: 2.5,
        "an_int": lambda: 2,
        "a_tensor": lambda: torch.full((3,), 2.0),
        "a_parameter": lambda: nn.Parameter(torch.full((3,), 2.0)),
    }.items():
        CHANGES[f"an_object_with_{_name}_whose_{_kind}_is_another"] = whole(_make, _kind)


def of_module(which: str) -> Callable[[], Change]:
    def build() -> Change:
        model = nn.Linear(3, 3)
        model.register_buffer("scale", torch.ones(3))
        model.part = nn.Linear(3, 3)

        def exchange() -> None:
            torch.manual_seed(5)
            held = vars(model)
            if which == "buffer for parameter":
                weight = model.weight.detach() * 2
                del model.weight
                model.register_buffer("weight", weight)
            elif which == "parameter for buffer":
                scale = nn.Parameter(model.scale * 3)
                del model.scale
                model.scale = scale
            elif which == "attribute for parameter":
                weight = model.weight.detach() * 2
                del model.weight
                object.__setattr__(model, "weight", weight)
            elif which == "_modules":
                held[which] = {"part": nn.Linear(3, 3)}
            elif which == "part":
                model.part = nn.Linear(3, 3)
            elif which == "none":
                model.bias = None
            elif which == "turned round":
                held["_parameters"] = dict(reversed(held["_parameters"].items()))
            elif which == "_buffers":
                held[which] = {k: v * 2 for k, v in held[which].items()}
            else:
                held[which] = {k: nn.Parameter(v * 2) for k, v in held[which].items()}

        return Change(lambda x: model.part(model(x)) * model.scale, exchange)

    return build


for _which in (
    *("buffer for parameter", "parameter for buffer", "attribute for parameter", "_modules"),
    *("part", "none", "turned round", "_parameters", "_buffers"),
):
    CHANGES[f"a_module_with_another_{_which.strip('_').replace(' ', '_')}"] = of_module(_which)


# -- caches ----------------------------------------------------------------------------------------


def cached(by: Callable[[Any], Any], forget: str) -> Callable[[], Change]:
    def build() -> Change:
        table = {"k": 2}

        @by
        def look(key: str = "k") -> Any:
            return table[key]

        def exchange() -> None:
            table["k"] = 5
            if forget != "kept":
                look.cache_clear()
            if forget == "filled":
                look()

        return Change(lambda x: x * look(), exchange)

    return build


for _forget in ("kept", "cleared", "filled"):
    for _name, _by in {
        "cache": functools.cache,
        "lru_cache": functools.lru_cache,
        "lru_cache_of_one": functools.lru_cache(maxsize=1),
        "typed_cache": functools.lru_cache(typed=True),
    }.items():
        CHANGES[f"a_{_name}_that_is_{_forget}"] = cached(_by, _forget)


# -- hooks of all optimizers -----------------------------------------------------------------------


def hooked(register: Callable[[Any], Any], at_first: bool) -> Callable[[], Change]:
    def build() -> Change:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def hook(one: Any, *_: Any) -> None:
            with torch.no_grad():
                for p in one.param_groups[0]["params"]:
                    p.mul_(0.5)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        if at_first:
            HOOKS.append(register(hook))
            return Change(step, lambda: HOOKS.pop().remove())
        return Change(step, lambda: HOOKS.append(register(hook)))

    return build


for _first in (False, True):
    _verb = "goes" if _first else "comes"
    CHANGES[f"a_hook_before_all_optimizers_{_verb}"] = hooked(
        register_optimizer_step_pre_hook, _first
    )
    CHANGES[f"a_hook_behind_all_optimizers_{_verb}"] = hooked(
        register_optimizer_step_post_hook, _first
    )


# -- what a step leaves ----------------------------------------------------------------------------


def places() -> dict[str, Any]:
    def function() -> None:
        pass

    kind = type("Kind", (), {})
    return {
        "class": kind,
        "base_class": type("Derived", (kind,), {}),
        "function": function,
        "module": types.ModuleType("a_module_of_the_users"),
        "exception": ValueError("a"),
        "partial": functools.partial(nothing),
        "object": Held(1),
    }


def leaving(where: str, what: str, there: bool) -> Callable[[], Change]:
    def build() -> Change:
        place = places()[where]
        if there:
            place.last = torch.zeros(()) if what == "tensor" else None

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = x.square().sum()
            made = {"tensor": loss, "list": [loss], "function": lambda: loss, "flag": True}
            place.last = made[what]
            return loss

        def seen() -> Any:
            last = vars(place).get("last")
            return last.detach().clone() if isinstance(last, torch.Tensor) else last

        return Change(step, lambda: setattr(place, "last", None), seen)

    return build


for _where, _what, _there in itertools.product(
    places(), ("tensor", "list", "function", "flag"), (False, True)
):
    _title = f"a_{_what}_left_in_{'an old' if _there else 'a new'} attribute of a {_where}"
    CHANGES[_title.replace(" ", "_")] = leaving(_where, _what, _there)
    if _what in ("list", "function"):
        REFUSED.add(_title.replace(" ", "_"))


def lazily(make: Callable[[nn.Module], Any], use: Callable[..., Any]) -> Callable[[], Change]:
    def build() -> Change:
        model, owner = nn.Linear(3, 3), Held(None)

        def step(x: torch.Tensor) -> torch.Tensor:
            if owner.k is None:
                owner.k = make(model)
            return use(owner.k, model, x)

        return Change(step, nothing)

    return build


def trains(optimizer: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


for _name, _make, _use in (
    ("sgd", lambda m: torch.optim.SGD(m.parameters(), lr=0.1), trains),
    ("adam", lambda m: torch.optim.Adam(m.parameters(), lr=0.1), trains),
    ("linear", lambda m: nn.Linear(3, 3), lambda k, m, x: k(x).detach()),
    ("sequence", lambda m: nn.Sequential(m, nn.ReLU()), lambda k, m, x: k(x).detach()),
    ("tuple", lambda m: (m.weight,), lambda k, m, x: x @ k[0].detach()),
    ("closure", lambda m: (lambda w: lambda x: x @ w)(m.weight), lambda k, m, x: k(x).detach()),
    ("namespace", lambda m: types.SimpleNamespace(w=m.weight), lambda k, m, x: x * k.w.sum()),
    ("partial", lambda m: functools.partial(torch.mul, m.bias), lambda k, m, x: k(x).detach()),
):
    CHANGES[f"a_{_name}_that_the_step_makes"] = lazily(_make, _use)
    if _name != "sequence":  # it holds only what was there before
        REFUSED.add(f"a_{_name}_that_the_step_makes")


# -- requires_grad ---------------------------------------------------------------------------------


def frozen(kind: str) -> Callable[[], Change]:
    def build() -> Change:
        model, flag = nn.Linear(3, 3), Held(True)

        def step(x: torch.Tensor) -> torch.Tensor:
            if kind == "before":
                model.weight.requires_grad_(flag.k)
            if kind == "around":
                model.requires_grad_(False)
                y = model(x).detach()
                model.requires_grad_(True)
                x = x + y
            if kind == "thaws":
                model.requires_grad_(True)
            loss = model(x).square().mean()
            loss.backward()
            if kind in ("behind", "thaws"):
                model.requires_grad_(False)
            if kind == "behind":
                model.bias.requires_grad_(True)
            return loss.detach()

        def seen() -> Any:
            return [(p.requires_grad, p.grad is None or p.grad.clone()) for p in model.parameters()]

        return Change(step, lambda: setattr(flag, "k", False), seen)

    return build


for _kind in ("before", "around", "behind", "thaws"):
    CHANGES[f"requires_grad_set_{_kind}"] = frozen(_kind)


@refused
def a_hook_that_the_step_registers():
    w = nn.Parameter(torch.ones(3))

    def step(x):
        w.register_hook(lambda g: g * 2)
        loss = (x * w).sum()
        loss.backward()
        return loss.detach()

    return Change(step, nothing)


@change
def a_frozen_parameter_with_a_gradient():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    model.weight.requires_grad_(False)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Change(step, lambda: model.weight.requires_grad_(True), lambda: model.weight.detach())


# -- what a capture sets ---------------------------------------------------------------------------


@refused
def whether_garbage_is_collected():
    HOOKS.append(types.SimpleNamespace(remove=gc.enable))
    return Change(lambda x: x * (2 if gc.isenabled() else 3), gc.disable)


@refused
def the_profile_function():
    return Change(lambda x: x * (2 if sys.getprofile() is None else 3), nothing)


class Plus(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + 1


def parametrized(enter: bool) -> Callable[[], Change]:
    def build() -> Change:
        model = nn.Linear(3, 3)
        parametrize = nn.utils.parametrize
        parametrize.register_parametrization(model, "weight", Plus())
        stack = contextlib.ExitStack()
        HOOKS.append(types.SimpleNamespace(remove=stack.close))

        def step(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        def within(x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                return model(x) + model(x)

        def write() -> None:
            if enter:
                stack.enter_context(parametrize.cached())
            with torch.no_grad():
                model.parametrizations.weight.original.add_(1)

        return Change(step if enter else within, write)

    return build


CHANGES["parametrizations_cached_within_the_step"] = parametrized(False)
CHANGES["parametrizations_cached_around_a_call"] = parametrized(True)
REFUSED.add("parametrizations_cached_around_a_call")
