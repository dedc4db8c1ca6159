"""Programs whose closures, defaults and globals change between two calls."""

from __future__ import annotations

import contextvars
import functools
import os
import sys
import types
from typing import Any

import torch

from .state import Change, change, having, setting


@change
def a_number_in_a_closure():
    k = 2

    def change():
        nonlocal k
        k = 5

    return Change(lambda x: x * k, change)


@change
def a_number_in_a_closure_that_another_function_reads():
    k = 2

    def scaled(x):
        return x * k

    def change():
        nonlocal k
        k = 5

    return Change(lambda x: scaled(x), change)


@change
def a_function_in_a_closure_replaced():
    f = torch.sin

    def change():
        nonlocal f
        f = torch.cos

    return Change(lambda x: f(x), change)


@change
def a_function_of_the_users_in_a_closure_replaced():
    def f(x):
        return x * 2

    def change():
        nonlocal f
        f = lambda x: x * 3  # noqa: E731

    return Change(lambda x: f(x), change)


@change
def a_default_argument():
    def scaled(x, k=2):
        return x * k

    return Change(lambda x: scaled(x), lambda: having("__defaults__", (5,))(scaled))


@change
def a_dict_as_a_default():
    def scaled(x, cfg={"k": 2}):  # noqa: B006
        return x * cfg["k"]

    return Change(lambda x: scaled(x), lambda: scaled.__defaults__[0].update(k=5))


@change
def a_keyword_default():
    def scaled(x, *, k=2):
        return x * k

    return Change(lambda x: scaled(x), lambda: scaled.__kwdefaults__.update(k=5))


@change
def the_steps_own_default():
    def step(x, k=2):
        return x * k

    return Change(step, lambda: having("__defaults__", (5,))(step))


@change
def the_code_of_a_function():
    def scaled(x):
        return x * 2

    return Change(
        lambda x: scaled(x), lambda: having("__code__", (lambda x: x * 7).__code__)(scaled)
    )


@change
def an_attribute_of_a_function():
    def scaled(x):
        return x * scaled.k

    scaled.k = 2
    return Change(lambda x: scaled(x), lambda: having("k", 5)(scaled))


@change
def a_decorated_functions_closure():
    k = [2]

    def doubled(f):
        @functools.wraps(f)
        def run(x):
            return f(x) * 2

        return run

    @doubled
    def scaled(x):
        return x * k[0]

    return Change(lambda x: scaled(x), lambda: setting(0, 5)(k))


@change
def a_closure_under_no_grad():
    k = [2]

    @torch.no_grad()
    def scaled(x):
        return x * k[0]

    return Change(lambda x: scaled(x), lambda: setting(0, 5)(k))


@change
def a_partial_as_the_step():
    cfg = {"k": 2}
    return Change(functools.partial(lambda cfg, x: x * cfg["k"], cfg), lambda: cfg.update(k=5))


@change
def a_method_as_the_step():
    class Trainer:
        def __init__(self):
            self.cfg = {"k": 2}

        def step(self, x):
            return x * self.cfg["k"]

    trainer = Trainer()
    return Change(trainer.step, lambda: trainer.cfg.update(k=5))


@change
def a_callable_object_as_the_step():
    class Trainer:
        k = 2

        def __call__(self, x):
            return x * self.k

    trainer = Trainer()
    return Change(trainer, lambda: having("k", 5)(trainer))


@change
def a_class_attribute():
    class Config:
        k = 2

    return Change(lambda x: x * Config.k, lambda: having("k", 5)(Config))


@change
def a_class_attribute_by_an_instance():
    class Config:
        k = 2

    config = Config()
    return Change(lambda x: x * config.k, lambda: having("k", 5)(Config))


@change
def an_attribute_of_a_base_class():
    class Base:
        k = 2

    class Config(Base):
        pass

    return Change(lambda x: x * Config().k, lambda: having("k", 5)(Base))


@change
def a_dict_on_a_class():
    class Config:
        cfg = {"k": 2}

    return Change(lambda x: x * Config.cfg["k"], lambda: Config.cfg.update(k=5))


@change
def a_method_replaced_on_a_class():
    class Scale:
        def apply(self, x):
            return x * 2

    scale = Scale()
    return Change(lambda x: scale.apply(x), lambda: having("apply", lambda self, x: x * 5)(Scale))


@change
def a_method_replaced_on_an_object():
    class Scale:
        def apply(self, x):
            return x * 2

    scale = Scale()
    return Change(lambda x: scale.apply(x), lambda: having("apply", lambda x: x * 5)(scale))


@change
def a_static_method_replaced():
    class Scale:
        @staticmethod
        def apply(x):
            return x * 2

    return Change(
        lambda x: Scale.apply(x), lambda: having("apply", staticmethod(lambda x: x * 5))(Scale)
    )


@change
def a_class_method_that_reads_its_class():
    class Scale:
        k = 2

        @classmethod
        def apply(cls, x):
            return x * cls.k

    return Change(lambda x: Scale.apply(x), lambda: having("k", 5)(Scale))


@change
def a_class_replaced():
    class Scale:
        def __call__(self, x):
            return x * 2

    held = [Scale]
    other = type("Scale", (), {"__call__": lambda self, x: x * 5})
    return Change(lambda x: held[0]()(x), lambda: setting(0, other)(held))


NUMBER, CONFIG, FUNCTION = 2, {"k": 2}, torch.sin


@change
def a_global_number():
    globals()["NUMBER"] = 2
    return Change(lambda x: x * NUMBER, lambda: globals().update(NUMBER=5))


@change
def a_global_dict():
    CONFIG["k"] = 2
    return Change(lambda x: x * CONFIG["k"], lambda: CONFIG.update(k=5))


@change
def a_global_function_replaced():
    globals()["FUNCTION"] = torch.sin
    return Change(lambda x: FUNCTION(x), lambda: globals().update(FUNCTION=torch.cos))


@change
def a_global_that_comes():
    globals().pop("LATER", None)

    def step(x):
        try:
            return x * LATER
        except NameError:
            return x * 2

    return Change(step, lambda: globals().update(LATER=5))


def _module() -> Any:
    made = types.ModuleType("a_module_of_the_users")
    made.K, made.CFG, made.f = 2, {"k": 2}, torch.sin
    sys.modules[made.__name__] = made
    return made


@change
def a_variable_of_an_imported_module():
    made = _module()
    return Change(lambda x: x * made.K, lambda: having("K", 5)(made))


@change
def a_dict_of_an_imported_module():
    made = _module()
    return Change(lambda x: x * made.CFG["k"], lambda: made.CFG.update(k=5))


@change
def a_function_of_an_imported_module_replaced():
    made = _module()
    return Change(lambda x: made.f(x), lambda: having("f", torch.cos)(made))


@change
def a_module_imported_within_the_step():
    made = _module()

    def step(x):
        import a_module_of_the_users as there

        return x * there.K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_name_imported_within_the_step():
    made = _module()

    def step(x):
        from a_module_of_the_users import K

        return x * K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_variable_of_a_module_under_another_name():
    made = _module()

    def step(x):
        other = made
        return x * other.K

    return Change(step, lambda: having("K", 5)(made))


@change
def a_context_variable():
    var = contextvars.ContextVar("k", default=2)
    return Change(lambda x: x * var.get(), lambda: var.set(5))


@change
def a_variable_of_the_environment():
    os.environ["PARTITA_TEST_K"] = "2"

    def change():
        os.environ["PARTITA_TEST_K"] = "5"

    return Change(lambda x: x * int(os.environ["PARTITA_TEST_K"]), change)


@change
def a_variable_of_the_environment_by_getenv():
    os.environ.pop("PARTITA_TEST_K", None)

    def change():
        os.environ["PARTITA_TEST_K"] = "5"

    return Change(lambda x: x * int(os.getenv("PARTITA_TEST_K", "2")), change)


@change
def a_flag_of_torch():
    torch.set_default_dtype(torch.float32)

    def change():
        torch.set_default_dtype(torch.float64)

    return Change(lambda x: (x * torch.ones(())).to(torch.get_default_dtype()), change)
