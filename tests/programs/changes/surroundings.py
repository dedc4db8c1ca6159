"""Programs that depend on modes, hooks and settings around the step."""

from __future__ import annotations

import collections
import concurrent.futures
import contextvars
import enum
import functools
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .containers import Plain
from .state import CHANGES, HOOKS, REFUSED, Change, change, having, item, refused, setting


class _Base:
    def scaled(self, x):
        return x * 2


class _Derived(_Base):
    def scaled(self, x):
        return super().scaled(x) + 1


@change
def a_method_of_a_base_that_super_calls():
    base = type("Base", (_Base,), {"scaled": lambda self, x: x * 2})
    made = type("Made", (_Derived, base), {})()

    def put():
        base.scaled = lambda self, x: x * 100

    return Change(made.scaled, put)


@change
def a_method_of_a_base_that_is_named():
    class Base:
        def scaled(self, x):
            return x * 2

    class Derived(Base):
        def scaled(self, x):
            return Base.scaled(self, x) + 1

    made = Derived()
    return Change(
        lambda x: made.scaled(x), lambda: setattr(Base, "scaled", lambda self, x: x * 100)
    )


@change
def an_attribute_that_its_class_comes_to_have():
    class Settings:
        pass

    held = Settings()
    return Change(lambda x: x * getattr(held, "k", 3), lambda: setattr(Settings, "k", 4))


@change
def a_global_before_a_builtin():
    variables: dict[str, Any] = {}
    exec("def step(x):\n    return x * abs(-3)", variables)
    return Change(variables["step"], lambda: variables.update(abs=lambda v: 10))


@change
def a_number_in_a_tensor_of_a_namespace():
    held = types.SimpleNamespace(total=torch.zeros(()))

    def step(x):
        held.total = held.total * 0.9 + x.sum()
        return x * held.total

    return Change(step, lambda: setattr(held, "total", torch.tensor(5.0)))


@change
def a_number_in_a_view_of_a_dictionary():
    held = [types.MappingProxyType({"total": torch.zeros(())})]

    def step(x):
        return x * (held[0]["total"] * 0.9)

    return Change(
        step, lambda: held.__setitem__(0, types.MappingProxyType({"total": torch.ones(())}))
    )


@change
def a_tensor_in_a_user_dict():
    held = collections.UserDict(total=torch.zeros(()))

    def step(x):
        return x * (held["total"] * 0.9)

    return Change(step, lambda: held.update(total=torch.tensor(5.0)))


@change
def a_rate_that_becomes_a_tensor():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Change(step, lambda: optimizer.param_groups[0].update(lr=torch.tensor(0.3)))


@refused
def an_event_of_other_threads():
    event = threading.Event()
    return Change(lambda x: x * (2 if event.is_set() else 1), event.set)


@refused
def a_queue_of_other_threads():
    waiting: queue.Queue[int] = queue.Queue()

    def step(x):
        waiting.put(1)
        return x * 2

    return Change(step, lambda: None, waiting.qsize)


@refused
def a_file_that_is_read():
    def step(x):
        with open(__file__) as file:
            return x * len(file.read(1))

    return Change(step, lambda: None)


@refused
def work_that_another_thread_does():
    model = nn.Linear(3, 3)

    def step(x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(model, x).result()

    return Change(step, lambda: None)


# -- what comes to be there, and what is read past the program's own classes ----------------------

item(
    "an_attribute_that_a_class_comes_to_have",
    lambda: type("C", (), {}),
    lambda c: getattr(c, "k", 2),
    having("k", 5),
)
item(
    "an_attribute_that_a_module_comes_to_have",
    lambda: types.ModuleType("of_users"),
    lambda c: getattr(c, "k", 2),
    having("k", 5),
)
item(
    "an_attribute_asked_for_with_hasattr",
    lambda: types.ModuleType("of_users"),
    lambda c: 3 if hasattr(c, "k") else 2,
    having("k", 5),
)
item(
    "an_attribute_of_the_type_of_an_object",
    lambda: type("C", (), {})(),
    lambda c: type(c).scale if hasattr(type(c), "scale") else 2,
    lambda c: setattr(type(c), "scale", 5),
)
item("a_thread_local", threading.local, lambda c: getattr(c, "k", 2), having("k", 5))
item("a_list_in_a_thread_local", lambda: _local(k=[2]), lambda c: sum(c.k), lambda c: c.k.append(5))
item(
    "a_context_variables_default",
    lambda: _variable(),
    lambda c: c.get()[0],
    lambda c: c.get().__setitem__(0, 5),
)
item(
    "what_an_enums_member_has_been_given",
    lambda: _member(scale=2),
    lambda c: c.scale,
    having("scale", 5),
)
item(
    "what_an_enums_member_holds",
    lambda: enum.Enum("E", {"A": [2]}).A,
    lambda c: c.value[0],
    lambda c: c.value.append(c.value.insert(0, 5)),
)
item(
    "the_keywords_of_a_partial_set_anew",
    lambda: functools.partial(dict, k=2),
    lambda c: c()["k"],
    lambda c: c.__setstate__((dict, (), {"k": 5}, {})),
)
item("an_attribute_of_a_partial", lambda: _partial(k=2), lambda c: c.k, having("k", 5))
item(
    "the_length_by_another_len",
    lambda: type("C", (), {"__len__": lambda self: 2})(),
    len,
    lambda c: setattr(type(c), "__len__", lambda self: 5),
)
item(
    "an_item_by_another_getitem",
    lambda: type("C", (), {"__getitem__": lambda self, i: 2})(),
    lambda c: c[0],
    lambda c: setattr(type(c), "__getitem__", lambda self, i: 5),
)
item(
    "the_truth_by_another_bool",
    lambda: type("C", (), {"__bool__": lambda self: True})(),
    lambda c: 2 if c else 3,
    lambda c: setattr(type(c), "__bool__", lambda self: False),
)


def _variable() -> contextvars.ContextVar[list[int]]:
    held = [2]
    return contextvars.ContextVar("v", default=held)


def _local(**values: Any) -> threading.local:
    local = threading.local()
    local.__dict__.update(values)
    return local


def _member(**values: Any) -> Any:
    member = enum.Enum("E", "A B").A
    member.__dict__.update(values)
    return member


def _partial(**values: Any) -> Any:
    partial = functools.partial(int)
    partial.__dict__.update(values)
    return partial


@change
def an_attribute_that_a_function_comes_to_have():
    def scaled(x):
        return x * getattr(scaled, "k", 2)

    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def an_attribute_in_the_dict_of_a_function():
    def scaled(x):
        return x * vars(scaled).get("k", 2)

    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def a_global_asked_for_in_globals():
    globals().pop("LATE", None)
    return Change(lambda x: x * globals().get("LATE", 2), lambda: globals().update(LATE=5))


@change
def a_remembered_result_that_is_forgotten():
    held = {"k": 2}

    @functools.cache
    def k():
        return held["k"]

    k()  # before the step runs

    def change():
        held["k"] = 5
        k.cache_clear()

    return Change(lambda x: x * k(), change)


@change
def an_implementation_for_a_type_registered():
    @functools.singledispatch
    def scale(value):
        return 2

    return Change(lambda x: x * scale(1), lambda: scale.register(int, lambda value: 5))


@change
def a_variable_of_the_environment_by_a_computed_name():
    names = ["partita_k"]
    os.environ.pop(names[0], None)

    def change():
        os.environ[names[0]] = "5"

    return Change(lambda x: x * int(os.getenv(names[0], "2")), change)


@change
def whether_the_environment_has_a_variable():
    os.environ.pop("PARTITA_K", None)
    name = "PARTITA_K"

    def change():
        os.environ[name] = "5"

    return Change(lambda x: x * (3 if name in os.environ else 2), change)


@change
def a_function_of_torch_replaced():
    usual = F.softsign
    HOOKS.append(types.SimpleNamespace(remove=lambda: setattr(F, "softsign", usual)))
    return Change(lambda x: F.softsign(x), lambda: setattr(F, "softsign", lambda x: x * 3))


@change
def a_variable_of_pythons_own_module():
    sys.of_users = 2
    return Change(lambda x: x * sys.of_users, lambda: setattr(sys, "of_users", 5))


def setting_of_torch(name: str, asked: Callable[[], Any], put: Callable[[Any], Any], to: Any):
    def build() -> Change:
        before = asked()
        HOOKS.append(types.SimpleNamespace(remove=lambda: put(before)))
        return Change(lambda x: x * (2 if asked() == before else 3), lambda: put(to))

    CHANGES[name] = build


setting_of_torch(
    "deterministic_algorithms",
    torch.are_deterministic_algorithms_enabled,
    torch.use_deterministic_algorithms,
    True,
)
setting_of_torch(
    "the_precision_of_matmul",
    torch.get_float32_matmul_precision,
    torch.set_float32_matmul_precision,
    "medium",
)
setting_of_torch(
    "a_flag_of_a_backend",
    lambda: torch.backends.cudnn.benchmark,
    lambda v: torch.backends.cudnn.set_flags(_benchmark=v),  # where global flags are disabled, too
    True,
)
setting_of_torch(
    "which_attention_may_be_used",
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.enable_flash_sdp,
    False,
)
setting_of_torch(
    "whether_anomalies_are_looked_for",
    torch.is_anomaly_enabled,
    torch.autograd.set_detect_anomaly,
    True,
)


@change
def deterministic_algorithms_that_an_op_asks_for():
    HOOKS.append(types.SimpleNamespace(remove=lambda: torch.use_deterministic_algorithms(False)))
    return Change(
        lambda x: x + torch.empty(3).nan_to_num(0.0).mul(0.0),
        lambda: torch.use_deterministic_algorithms(True),
    )


item(
    "a_dictionary_that_holds_weakly",
    lambda: weakref.WeakKeyDictionary({Plain: 2}),
    lambda d: d[Plain],
    setting(Plain, 5),
)
item(
    "a_weak_reference",
    lambda: (held := Plain(k=2), weakref.ref(held)),
    lambda c: c[1]().k,
    lambda c: setattr(c[0], "k", 5),
)
REFUSED.update(("a_dictionary_that_holds_weakly", "a_weak_reference"))


def several(change_of: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """Optimizers in a dictionary, of which something changes."""

    def build() -> Change:
        torch.manual_seed(0)
        models = [nn.Linear(3, 3), nn.Linear(3, 3)]
        held = {
            "models": models,
            "optimizers": [torch.optim.SGD(m.parameters(), lr=0.1) for m in models],
        }

        def step(x):
            loss = sum(m(x).square().mean() for m in models)
            for m in models:
                m.zero_grad()
            loss.backward()
            for optimizer in held["optimizers"]:
                optimizer.step()
            return loss

        def seen():
            return [p.detach().clone() for m in models for p in m.parameters()]

        return Change(step, lambda: change_of(held), seen)

    CHANGES[change_of.__name__] = build
    return build


@several
def an_optimizer_out_of_a_list(held):
    held["optimizers"].pop()


@several
def optimizers_exchanged(held):
    held["optimizers"][0].param_groups[0]["lr"] = 0.5
    held["optimizers"].reverse()


@several
def groups_of_an_optimizer_replaced(held):
    optimizer = held["optimizers"][0]
    optimizer.param_groups = [dict(optimizer.param_groups[0], lr=0.7)]


@several
def a_group_of_an_optimizer_replaced(held):
    groups = held["optimizers"][0].param_groups
    groups[0] = dict(groups[0], lr=0.7, params=groups[0]["params"][:1])


@change
def a_module_out_of_a_list():
    torch.manual_seed(0)
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def step(x):
        for m in models:
            x = m(x)
        return x

    return Change(step, models.pop)
