"""Reflection: code that may read names which do not stand in it (`getattr(x, key)`, `vars(x)`).

Of a class, module or function that such code reads, all names are recorded as read, and that there
are no others. The same is done for modules in `sys.modules` and for registered subclasses.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import functools
import operator
import sys
import types
from types import CodeType
from typing import TYPE_CHECKING, Any

from .codes import is_user_module
from .objects import variables_of
from .places import Place, place_of_entry, place_of_function_part

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = ["names_asked_by", "read_all_names", "read_module", "read_modules", "read_registry"]

# Special attributes of classes and functions that reflection reads.
_CLASS_ATTRIBUTES = """__annotations__ __doc__ __name__ __qualname__ __module__ __match_args__
    __dataclass_fields__""".split()
_FUNCTION_ATTRIBUTES = """__code__ __defaults__ __kwdefaults__ __annotations__ __doc__ __name__
    __qualname__ __module__ __signature__""".split()


def read_all_names(record: StateReader, space: Any, name: str) -> None:
    """Record all that a class, a module or a function has, and that it has no more."""
    if isinstance(space, type):
        if not is_user_module(space.__module__):
            return
        for key in [key for key in vars(space) if not _is_special_name(key)]:
            record.read_class_attribute(space, key)
        for key in _CLASS_ATTRIBUTES:
            get = functools.partial(getattr, space, key, None)
            record.read_place(Place(f"{name}.{key}", space, key, get), get())
    elif isinstance(space, (types.ModuleType, types.FunctionType, dict)):
        held = variables_of(space)
        users = not isinstance(space, types.ModuleType) or is_user_module(space.__name__)
        for key in [key for key in held if not _is_special_name(key)]:
            record.read_place(
                place_of_entry(f"{name}.{key}", held, key), held[key], shallow=not users
            )
        if isinstance(space, types.FunctionType):
            for key in _FUNCTION_ATTRIBUTES:
                place = place_of_function_part(f"{name}.{key}", space, key)
                record.read_place(place, place.value)
    else:
        return
    names = functools.partial(_names_in_space, space)
    record.read_place(Place(f"the names in {name}", space, "()", names), names(), shallow=True)


def _is_special_name(key: Any) -> bool:
    """Is it a special name of the language? (A dictionary may have keys that are no strings.)"""
    return isinstance(key, str) and key.startswith("__")


def names_asked_by(getter: Any) -> set[str]:
    """The names that `attrgetter("a.b")` or `methodcaller("c")` asks an object for."""
    _, given = getter.__reduce__()[:2]
    texts = given if isinstance(getter, operator.attrgetter) else given[:1]
    return {name for text in texts for name in text.split(".")}


def _names_in_space(space: Any) -> tuple[Any, ...]:
    return tuple([key for key in variables_of(space) if not _is_special_name(key)])


def read_modules(record: StateReader, code: CodeType) -> None:
    """Record a read of `sys.modules`: of the modules that code spells out, or of all names."""
    names = [c for c in code.co_consts if isinstance(c, str)]
    spelled = [name for name in names if name.replace(".", "_").isidentifier()]
    for key in spelled:
        read_module(record, key)
    if not spelled:
        get = functools.partial(tuple, sys.modules)
        record.read_place(Place("sys.modules", sys.modules, "()", get), get(), shallow=True)


def read_module(record: StateReader, key: str) -> None:
    """Record whether a module is imported (not what it has)."""
    get = functools.partial(sys.modules.get, key)
    record.read_place(Place(f"sys.modules[{key!r}]", sys.modules, key, get), get(), shallow=True)


def read_registry(record: StateReader, kind: abc.ABCMeta, name: str) -> None:
    """Record which classes are registered as subclasses of an abstract class."""
    get = _RegisteredClasses(kind)
    record.read_place(Place(f"the classes of {name}", kind, "registered", get), get(), shallow=True)


class _RegisteredClasses:
    """Returns the classes registered with an abstract one: the same set while none is added."""

    def __init__(self, kind: abc.ABCMeta):
        self._kind, self._token, self._found = kind, -1, frozenset[Any]()

    def __call__(self) -> frozenset[Any]:
        token = abc.get_cache_token()
        if token != self._token:
            found = frozenset(_find_abc_registrations(self._kind))
            if found != self._found:
                self._found = found
            self._token = token  # type: ignore[assignment]
        return self._found


def _find_abc_registrations(kind: Any) -> list[Any]:
    # Private Python: what `ABCMeta.register` was given, which nothing else shows.
    found = list(_abc._get_dump(kind)[0]) if isinstance(kind, abc.ABCMeta) else []
    for part in type.__subclasses__(kind):
        found += _find_abc_registrations(part)
    return found
