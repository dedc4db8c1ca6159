"""Programs that exchange what a step reads: a value, in a container, in a holder, at a moment.

`program_of` builds one anew for each run. A step reads the value through `read`; at its moment
`write` puts another container, with another value, where the step finds it. What the program can
see is what each call returns, and `seen`: all tensors of the values that it ever had.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

# -- containers ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Fields:
    v: Any = None


@dataclasses.dataclass(frozen=True)
class FrozenFields:
    v: Any = None


class Plain:
    def __init__(self, v: Any) -> None:
        self.v = v


class Slotted:
    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v


class Dotted(dict):
    def __init__(self, v: Any) -> None:
        super().__init__(k=1)
        self.v = v


class OwnDict(dict):
    pass


class OwnList(list):
    pass


Pair = collections.namedtuple("Pair", "v w")


def by_default(v: Any) -> Any:
    found: Any = collections.defaultdict(int)
    found["v"] = v
    return found


# By name: what makes one around a value, and what reads the value there.
CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "nothing": (lambda v: v, lambda c: c),
    "list": (lambda v: [1, v], lambda c: c[1]),
    "tuple": (lambda v: (1, v), lambda c: c[1]),
    "dict": (lambda v: {"v": v, "w": 1}, lambda c: c["v"]),
    "ordered dict": (lambda v: collections.OrderedDict(v=v), lambda c: c["v"]),
    "default dict": (by_default, lambda c: c["v"]),
    "deque": (lambda v: collections.deque([v, 1]), lambda c: c[0]),
    "namespace": (lambda v: types.SimpleNamespace(v=v), lambda c: c.v),
    "dataclass": (Fields, lambda c: c.v),
    "frozen dataclass": (FrozenFields, lambda c: c.v),
    "object": (Plain, lambda c: c.v),
    "slots": (Slotted, lambda c: c.v),
    "named tuple": (lambda v: Pair(v, 1), lambda c: c.v),
    "dict of a class": (lambda v: OwnDict(v=v), lambda c: c["v"]),
    "list of a class": (lambda v: OwnList([v]), lambda c: c[0]),
    "attribute of a dict": (Dotted, lambda c: c.v),
    "user dict": (lambda v: collections.UserDict(v=v), lambda c: c["v"]),
    "partial": (lambda v: functools.partial(min, v), lambda c: c.args[0]),
    "mapping proxy": (lambda v: types.MappingProxyType({"v": v}), lambda c: c["v"]),
    "list in dict": (lambda v: {"a": [v]}, lambda c: c["a"][0]),
    "dict in list": (lambda v: [{"v": v}], lambda c: c[0]["v"]),
    "namespace in dict": (lambda v: {"a": types.SimpleNamespace(v=v)}, lambda c: c["a"].v),
    "dict in namespace": (lambda v: types.SimpleNamespace(a={"v": v}), lambda c: c.a["v"]),
    "object in list": (lambda v: [Plain(v)], lambda c: c[0].v),
    "list in object": (lambda v: Plain([v]), lambda c: c.v[0]),
    "tuple in dict": (lambda v: {"a": (v, v)}, lambda c: c["a"][1]),
    "deque in tuple": (lambda v: (collections.deque([v]),), lambda c: c[0][0]),
    "dict in dataclass": (lambda v: Fields({"v": v}), lambda c: c.v["v"]),
    "dict in dict in dict": (lambda v: {"a": {"b": {"v": v}}}, lambda c: c["a"]["b"]["v"]),
    "chain map": (lambda v: collections.ChainMap({}, {"v": v}), lambda c: c["v"]),
    "closure": (lambda v: lambda: v, lambda c: c()),
    "iterated list": (lambda v: [v], lambda c: next(each for each in c)),
    "values of a dict": (lambda v: {1: v}, lambda c: next(iter(c.values()))),
}

# -- holders ---------------------------------------------------------------------------------------

Found = tuple[Callable[..., Any], Callable[[Any], Any], Any]
"""What reads what is held (given the step's argument), what exchanges it, and what holds it."""


def in_global(first: Any) -> Found:
    space: dict[str, Any] = {"__name__": __name__, "__builtins__": __builtins__, "held": first}
    exec(compile("def read(_): return held", __file__, "exec"), space)
    return space["read"], lambda c: space.__setitem__("held", c), space


def in_closure(first: Any) -> Found:
    held = first

    def write(c: Any) -> None:
        nonlocal held
        held = c

    return lambda _: held, write, write


def in_attribute(first: Any) -> Found:
    owner = Plain(first)
    return lambda _: owner.v, lambda c: setattr(owner, "v", c), owner


def in_slot(first: Any) -> Found:
    owner = Slotted(first)
    return lambda _: owner.v, lambda c: setattr(owner, "v", c), owner


def in_whole_dict(first: Any) -> Found:
    owner = Plain(first)
    return lambda _: owner.v, lambda c: setattr(owner, "__dict__", {"v": c}), owner


def in_class(first: Any) -> Found:
    kind = type("Kind", (), {"held": first})
    return lambda _: kind.held, lambda c: setattr(kind, "held", c), kind


def in_base_class(first: Any) -> Found:
    base = type("Base", (), {"held": first})
    one = type("Kind", (base,), {})()
    return lambda _: one.held, lambda c: setattr(base, "held", c), one


def in_function(first: Any) -> Found:
    def function() -> None:
        pass

    function.held = first
    return lambda _: function.held, lambda c: setattr(function, "held", c), function


def in_dict_of_function(first: Any) -> Found:
    def function() -> None:
        pass

    function.held = first
    return lambda _: function.held, lambda c: setattr(function, "__dict__", {"held": c}), function


def in_default(first: Any) -> Found:
    def function(held: Any = first) -> Any:
        return held

    return lambda _: function(), lambda c: setattr(function, "__defaults__", (c,)), function


def in_keyword_default(first: Any) -> Found:
    def function(*, held: Any = first) -> Any:
        return held

    def write(c: Any) -> None:
        function.__kwdefaults__ = {"held": c}

    return lambda _: function(), write, function


def in_python_module(first: Any) -> Found:
    module = types.ModuleType("of_the_users")
    module.held = first
    return lambda _: module.held, lambda c: setattr(module, "held", c), module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


def in_module(first: Any) -> Found:
    net = Net()
    net.held = first
    return lambda _: net.held, lambda c: setattr(net, "held", c), net


def in_dict_of_dicts(first: Any) -> Found:
    held = {"a": {"b": first}}
    return lambda _: held["a"]["b"], lambda c: held["a"].__setitem__("b", c), held


def in_list(first: Any) -> Found:
    held = [first]
    return lambda _: held[0], lambda c: held.__setitem__(0, c), held


def in_outer_list(first: Any) -> Found:
    outer = types.SimpleNamespace(held=[first])
    return lambda _: outer.held[0], lambda c: setattr(outer, "held", [c]), outer


def in_partial(first: Any) -> Found:
    outer = [functools.partial(lambda c: c, first)]
    return (
        lambda _: outer[0](),
        lambda c: outer.__setitem__(0, functools.partial(outer[0].func, c)),
        outer,
    )


def in_method(first: Any) -> Found:
    class Owner:
        def __init__(self) -> None:
            self.held = first

        def get(self) -> Any:
            return self.held

    owner = Owner()
    method = owner.get
    return lambda _: method(), lambda c: setattr(owner, "held", c), owner


def in_property(first: Any) -> Found:
    class Owner:
        _held = first

        @property
        def held(self) -> Any:
            return self._held

    owner = Owner()
    return lambda _: owner.held, lambda c: setattr(owner, "_held", c), owner


def in_argument(first: Any) -> Found:
    given = [first]
    return lambda c: c, lambda c: given.__setitem__(0, c), given


HOLDERS: dict[str, Callable[[Any], Found]] = {
    name.removeprefix("in_").replace("_", " "): make
    for name, make in list(globals().items())
    if name.startswith("in_")
}

# -- values ----------------------------------------------------------------------------------------


def rate(at: int) -> float:
    return (0.5, 0.125, 0.75, 0.25, 1.5)[at % 5]


@dataclasses.dataclass
class Value:
    """A kind of value: what makes the one with a number, and what a step does with it."""

    make: Callable[[int, nn.Module], Any]
    use: Callable[[Any, torch.Tensor, nn.Module], torch.Tensor]


def use_parameter(p: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
    loss = (net(x) * p).square().mean()
    loss.backward()
    with torch.no_grad():
        p.sub_(0.25 * p.grad)
    p.grad = None
    net.zero_grad()
    return loss


def use_module(m: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
    loss = m(net(x)).square().mean()
    loss.backward()
    with torch.no_grad():
        for p in m.parameters():
            p.sub_(0.25 * p.grad)
    m.zero_grad()
    net.zero_grad()
    return loss


def use_optimizer(optimizer: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def write_buffer(t: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
    t.mul_(0.5).add_(x.mean())
    return (x * t).sum()


def linear(at: int, _: Any) -> nn.Module:
    torch.manual_seed(at)
    return nn.Linear(3, 2).double()


VALUES: dict[str, Value] = {
    "tensor": Value(
        lambda at, _: torch.full((3,), rate(at)).double(), lambda t, x, _: (x * t).sum()
    ),
    "written tensor": Value(lambda at, _: torch.full((3,), rate(at)).double(), write_buffer),
    "parameter": Value(
        lambda at, _: nn.Parameter(torch.full((3,), rate(at)).double()), use_parameter
    ),
    "module": Value(linear, use_module),
    "optimizer": Value(
        lambda at, net: torch.optim.SGD(net.parameters(), lr=rate(at), momentum=0.5), use_optimizer
    ),
    "adam": Value(
        lambda at, net: torch.optim.Adam(net.parameters(), lr=rate(at) / 8), use_optimizer
    ),
    "float": Value(lambda at, _: rate(at), lambda v, x, _: (x * v).sum()),
    "int": Value(lambda at, _: (2, 5, 3, 7, 2)[at % 5], lambda v, x, _: (x * v).sum()),
    "flag": Value(lambda at, _: at % 2 == 0, lambda v, x, _: (x * 2 if v else x - 1).sum()),
    "function": Value(lambda at, _: (torch.sin, torch.cos)[at % 2], lambda f, x, _: f(x).sum()),
}

# -- moments ---------------------------------------------------------------------------------------

CALLS = 5
# Before which calls another container is put there; of `back` the first one is put back.
BETWEEN = {
    "once": {1: 1},
    "late": {2: 1},
    "each": {1: 1, 2: 2, 3: 3, 4: 4},
    "back": {1: 1, 2: 0, 3: 1},
    "equal": {1: 0, 2: 1},  # another container of the same value, then another value
}
WITHIN = ("in the step", "in a hook", "in a forward hook")
MOMENTS = (*BETWEEN, *WITHIN)


@dataclasses.dataclass
class Program:
    step: Callable[..., Any]
    before: Callable[[int], Any]
    seen: Callable[[], Any]
    arguments: Callable[[], tuple[Any, ...]]
    roots: list[Any]


def program_of(container: str, holder: str, value: str, moment: str) -> Program:
    torch.manual_seed(0)
    make, read_value = CONTAINERS[container]
    kind = VALUES[value]
    net = nn.Linear(3, 3).double()
    values: dict[int, Any] = {}
    same: dict[int, Any] = {}

    def value_at(at: int) -> Any:
        if at not in values:
            values[at] = kind.make(at, net)
        return values[at]

    def container_at(at: int) -> Any:
        if moment == "equal":  # the value stays, the container is another
            return make(value_at(at))
        if at not in same:
            same[at] = make(value_at(at))
        return same[at]

    read, write, owner = HOLDERS[holder](container_at(0))
    by_argument = holder == "argument"
    if moment in WITHIN:
        container_at(1)

    def exchange(*_: Any) -> None:
        write(container_at(1))

    def step(x: torch.Tensor, given: Any = None) -> torch.Tensor:
        handle: Any = None
        if moment == "in a hook":
            x = x * 1
            x.requires_grad_()
            x.register_hook(exchange)
        found = kind.use(read_value(read(given)), x, net)
        if moment == "in a hook" and found.requires_grad and value in ("tensor", "float", "int"):
            found.backward()
        if moment == "in the step":
            exchange()
        del handle
        return found.detach()

    if moment == "in a forward hook":
        net.register_forward_hook(exchange)
        inner = step

        def step(x: torch.Tensor, given: Any = None) -> torch.Tensor:
            return inner(net(x).detach(), given)

    def before(call: int) -> None:
        at = BETWEEN.get(moment, {}).get(call)
        if at is not None:
            write(container_at(at))

    def seen() -> Any:
        return [p.detach().clone() for p in tensors_within([*values.values(), net])]

    def arguments() -> tuple[Any, ...]:
        return (owner[0],) if by_argument else ()

    return Program(step, before, seen, arguments, [owner, same, values, net])


def tensors_within(values: list[Any]) -> Iterator[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            yield v
        elif isinstance(v, nn.Module):
            yield from v.parameters()
        elif isinstance(v, torch.optim.Optimizer):
            for state in v.state.values():
                yield from (t for t in state.values() if isinstance(t, torch.Tensor))


def all_programs() -> list[tuple[str, str, str, str]]:
    """All combinations, in an order in which each slice has something of everything."""
    found = [*itertools.product(CONTAINERS, HOLDERS, VALUES, MOMENTS)]
    return sorted(found, key=lambda names: hash_of(" ".join(names)))


def hash_of(text: str) -> int:
    """A hash of text that is the same in every process."""
    found = 0
    for c in text:
        found = (found * 1_000_003 + ord(c)) % (1 << 61)
    return found * 2_654_435_761 % (1 << 32)


# -- runs ------------------------------------------------------------------------------------------


def run(program: Program, wrap: Callable[[Any], Any]) -> list[Any]:
    step, found = wrap(program.step), []
    for call in range(CALLS):
        program.before(call)
        x = torch.linspace(-1, 2, 6, dtype=torch.float64).reshape(2, 3) * (call + 1)
        result = step(x, *program.arguments())
        found.append((result.clone(), program.seen()))
    return found


_STOPS = (type, types.ModuleType, types.CodeType, types.FrameType, weakref.ref, str, int, float)


def find_fakes(roots: list[Any]) -> list[Any]:
    """The fake tensors that can be reached from objects, not by way of partita or of globals."""
    seen, waiting, found = {}, list(roots), []
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, FakeTensor):
            found.append(value)
        elif (
            isinstance(value, dict) and "__builtins__" in value and value is not roots[0]
        ) or type(value).__module__.startswith("partita.compile"):
            continue
        elif isinstance(value, type) and value.__module__ == __name__:
            waiting += vars(value).values()
        elif isinstance(value, types.FunctionType):
            waiting += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
            waiting.append(value.__dict__)
        elif isinstance(value, types.ModuleType) and value.__name__ == "of_the_users":
            waiting += vars(value).values()
        elif not isinstance(value, _STOPS):
            waiting += gc.get_referents(value)
    return found


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-9, atol=1e-9))
    return len(a) == len(b) and all(map(same, a, b))
