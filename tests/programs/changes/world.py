"""Programs that read what no object of theirs holds: one entry for each place where it stands."""

from __future__ import annotations

import abc
import builtins
import collections
import ctypes
import datetime
import decimal
import functools
import io
import logging
import os
import pathlib
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .state import (
    CHANGES,
    HOOKS,
    REFUSED,
    Change,
    change,
    item,
    refused,
    setting,
)

__all__: list[str] = []

FOLDER = tempfile.mkdtemp()


def afterwards(undo: Callable[[], Any]) -> None:
    HOOKS.append(types.SimpleNamespace(remove=undo))


def named(name: str, read: Callable[[], Any], put: Callable[[], Any], undo: Callable[[], Any]):
    """A factor that is read from the world, and what changes there."""

    def build() -> Change:
        undo()
        afterwards(undo)
        return Change(lambda x: x * read(), put)

    CHANGES[name] = build


# -- names that do not stand in the code -----------------------------------------------------------


def spaces() -> list[Any]:
    class Holder:
        k_1 = 2

    def function() -> None:
        pass

    function.k_1 = 2
    module = types.ModuleType("a_module_of_the_users")
    module.k_1 = 2
    return [Holder, function, module]


def reflecting(at: int, how: str) -> Callable[[], Change]:
    def build() -> Change:
        space = spaces()[at]
        step = {
            "getattr": lambda x: x * getattr(space, f"k_{1}"),
            "getattr_or_else": lambda x: x * getattr(space, "k_" + str(2), 2),
            "hasattr": lambda x: x * (5 if hasattr(space, "_".join(["k", "2"])) else 2),
            "vars": lambda x: x * len([k for k in vars(space) if k.startswith("k_")]),
            "dir": lambda x: x * len([k for k in dir(space) if k.startswith("k_")]),
            "dict": lambda x: x * space.__dict__["k" + "_1"],
        }[how]
        return Change(step, lambda: (setattr(space, "k_1", 5), setattr(space, "k_2", 7)))

    return build


for at, kind in enumerate(("class", "function", "module")):
    for how in ("getattr", "getattr_or_else", "hasattr", "vars", "dir", "dict"):
        CHANGES[f"a_name_that_a_{kind}_is_asked_for_by_{how}"] = reflecting(at, how)


@change
def a_name_among_pythons_own():
    builtins.of_users = 2
    return Change(lambda x: x * of_users, lambda: setattr(builtins, "of_users", 5))  # noqa: F821


def a_module_imported(name: str, read: Callable[[], Any]) -> None:
    named(
        name,
        read,
        lambda: sys.modules.__setitem__("not_imported_yet", types.ModuleType("not_imported_yet")),
        lambda: sys.modules.pop("not_imported_yet", None),
    )


def imports() -> int:
    try:
        import not_imported_yet  # noqa: F401
    except ImportError:
        return 2
    return 5


a_module_imported(
    "whether_a_module_is_there", lambda: 5 if "not_imported_yet" in sys.modules else 2
)
a_module_imported("an_import_that_fails", imports)


@change
def a_class_registered_with_an_abstract_one():
    class Abstract(abc.ABC):  # noqa: B024
        pass

    class Concrete:
        pass

    held = Concrete()
    return Change(
        lambda x: x * (5 if isinstance(held, Abstract) else 2), lambda: Abstract.register(Concrete)
    )


@change
def a_class_registered_with_one_of_pythons():
    held = type("Concrete", (), {})()
    return Change(
        lambda x: x * (5 if isinstance(held, collections.abc.Sequence) else 2),
        lambda: collections.abc.Sequence.register(type(held)),
    )


@change
def a_variable_of_the_environment_that_python_asks_for():
    home = os.environ.get("HOME", "/")
    afterwards(lambda: os.environ.__setitem__("HOME", home))
    return Change(
        lambda x: x * len(os.path.expanduser("~")),
        lambda: os.environ.__setitem__("HOME", "/home/of/nobody"),
    )


# -- objects that hold it without an attribute -----------------------------------------------------

item(
    "a_view_of_a_dict",
    lambda: (d := {"a": 1}, d.values()),
    lambda c: sum(c[1]),
    lambda c: setting("a", 5)(c[0]),
)
item(
    "a_text_in_memory",
    lambda: io.StringIO("ab"),
    lambda c: len(c.getvalue()),
    lambda c: c.write("abcd"),
)
item(
    "bytes_in_memory",
    lambda: io.BytesIO(b"ab"),
    lambda c: len(c.getvalue()),
    lambda c: c.write(b"abcd"),
)
item("a_number_of_c", lambda: ctypes.c_int(2), lambda c: c.value, lambda c: setattr(c, "value", 5))
item("an_array_without_dimensions", lambda: np.array(2), int, setting((), 5))
item("a_semaphore", lambda: threading.Semaphore(2), lambda c: c._value, lambda c: c.acquire())
item(
    "a_pointer", lambda: ctypes.pointer(ctypes.c_int(2)), lambda c: c.contents.value, lambda c: None
)
item("a_lock", threading.Lock, lambda c: 5 if c.locked() else 2, lambda c: c.acquire())
REFUSED.update(("a_pointer", "a_lock"))


# -- settings of the process -----------------------------------------------------------------------

LOG = logging.getLogger("tests.programs.world.inner")
ABOVE = logging.getLogger("tests.programs.world")


def level_is(how: str, read: Callable[[], Any], logger: logging.Logger) -> None:
    named(
        how,
        read,
        lambda: logger.setLevel(logging.DEBUG),
        lambda: (LOG.setLevel(0), ABOVE.setLevel(logging.WARNING)),
    )


level_is("a_level_of_a_logger", lambda: LOG.level + 1, LOG)
level_is("whether_a_logger_tells", lambda: 5 if LOG.isEnabledFor(logging.DEBUG) else 2, LOG)
level_is("a_level_of_the_logger_above", lambda: LOG.getEffectiveLevel(), ABOVE)
level_is("whether_the_logger_above_tells", lambda: 5 if LOG.isEnabledFor(10) else 2, ABOVE)


def warned() -> int:
    try:
        warnings.warn("of no concern", stacklevel=1)
    except UserWarning:
        return 5
    return 2


@change
def a_warning_that_becomes_an_error():
    held = warnings.catch_warnings()
    held.__enter__()
    warnings.simplefilter("ignore")
    afterwards(lambda: held.__exit__(None, None, None))
    return Change(lambda x: x * warned(), lambda: warnings.simplefilter("error"))


named(
    "how_numpy_takes_errors",
    lambda: len(np.geterr()["divide"]),
    lambda: np.seterr(divide="raise"),
    lambda: np.seterr(divide="warn"),
)
named(
    "the_places_of_decimals",
    lambda: len(str(decimal.Decimal(2).sqrt())),
    lambda: setattr(decimal.getcontext(), "prec", 5),
    lambda: setattr(decimal.getcontext(), "prec", 28),
)
named(
    "how_deep_python_may_go",
    lambda: sys.getrecursionlimit() / 1000,
    lambda: sys.setrecursionlimit(3000),
    lambda: sys.setrecursionlimit(1000),
)
HERE = os.getcwd()
named(
    "where_the_process_is", lambda: len(os.getcwd()), lambda: os.chdir("/"), lambda: os.chdir(HERE)
)
named(
    "a_path_from_there",
    lambda: len(os.path.abspath("a")),
    lambda: os.chdir("/"),
    lambda: os.chdir(HERE),
)


# -- what no guard can hold ------------------------------------------------------------------------


def outside(name: str, read: Callable[[], Any]) -> None:
    REFUSED.add(name)
    CHANGES[name] = lambda: Change(lambda x: x * read(), lambda: None)


PATH = pathlib.Path(FOLDER) / "file"
outside("whether_a_file_is_there", lambda: 5 if os.path.exists(PATH) else 2)
outside("whether_a_path_is_there", lambda: 5 if PATH.exists() else 2)
outside("what_a_folder_holds", lambda: len(os.listdir(FOLDER)))
outside("what_another_program_says", lambda: os.system("true") + 1)
outside("the_date", lambda: datetime.datetime.now().year)


@refused
def a_file_that_is_open():
    PATH.write_text("1234")
    held = PATH.open()
    afterwards(held.close)
    return Change(lambda x: x * int(held.read(1)), lambda: None)


CHANGES["what_only_reckons_with_paths"] = lambda: Change(
    lambda x: x * len(os.path.join("a", os.fspath(PATH))) * bool(os.getpid()), int
)


# -- modes of torch --------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    factor = 3

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * self.factor if getattr(func, "__name__", "") == "relu" else out


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 3 if func is torch.ops.aten.relu.default else out


def moded(make: Callable[[], Any], entered: bool) -> Callable[[], Change]:
    """A mode that is entered between two calls, or left."""

    def build() -> Change:
        mode, stack = make(), []

        def enter() -> None:
            mode.__enter__()
            stack.append(mode)

        def leave() -> None:
            if stack:
                stack.pop().__exit__(None, None, None)

        afterwards(leave)
        if not entered:
            enter()
        return Change(lambda x: torch.relu(x), enter if entered else leave)

    return build


for name, make in (("functions", Functions), ("ops", Ops)):
    CHANGES[f"a_mode_of_{name}_that_is_entered"] = moded(make, True)
    CHANGES[f"a_mode_of_{name}_that_is_left"] = moded(make, False)


@change
def what_a_mode_reads():
    mode = Functions()
    mode.__enter__()
    afterwards(functools.partial(mode.__exit__, None, None, None))
    return Change(lambda x: torch.relu(x), lambda: setattr(mode, "factor", 5))
