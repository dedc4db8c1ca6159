"""Reflection: code that asks a class, a module or a function for names that it does not spell."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import dis
import functools
import operator
import sys
import types
from types import CodeType
from typing import TYPE_CHECKING, Any

from . import places
from .codes import is_of_users
from .objects import variables_of
from .places import Place

if TYPE_CHECKING:
    from .reader import StateReader

__all__ = [
    "names_asked_by",
    "read_module",
    "read_modules",
    "read_registry",
    "reflects",
    "take_whole",
]

_BY_NAME = ("getattr", "hasattr")
_WHOLE = frozenset(
    "vars dir globals eval exec attrgetter getmembers signature getattr_static fields "
    "get_type_hints".split()
)
# What a class or a function has beside what a program puts there, and others read of it.
_OF_CLASSES = """__annotations__ __doc__ __name__ __qualname__ __module__ __match_args__
    __dataclass_fields__""".split()
_OF_FUNCTIONS = """__code__ __defaults__ __kwdefaults__ __annotations__ __doc__ __name__
    __qualname__ __module__ __signature__""".split()
_OF_SPACES = frozenset(
    "__dict__ __annotations__ __doc__ __name__ __match_args__ __dataclass_fields__ __code__ "
    "__defaults__ __kwdefaults__ __signature__ __closure__".split()
)
_COMPUTES = ("BINARY_OP", "BINARY_SUBSCR", "BUILD_STRING", "FORMAT_VALUE")
_PASSED = ("CACHE", "EXTENDED_ARG", "PRECALL")


@functools.lru_cache(maxsize=4096)
def reflects(code: CodeType) -> bool:
    """May it ask for an attribute by a name that does not stand in it?"""
    if not _WHOLE.isdisjoint(code.co_names) or not _OF_SPACES.isdisjoint(code.co_names):
        return True
    asked: list[dis.Instruction] | None = None
    within = 0  # calls whose arguments are being pushed
    for step in dis.get_instructions(code):
        if step.opname in _PASSED:
            continue
        if step.opname == "MATCH_CLASS":  # a class says which attributes a pattern means
            return True
        if step.opname == "LOAD_GLOBAL" and step.argval in _BY_NAME:
            asked, within = [], 0
        elif asked is not None:
            if step.opname.startswith("CALL") and not within:
                if not _is_spelled(asked):
                    return True
                asked = None
                continue
            within += _opens_call(step) - step.opname.startswith("CALL")
            asked.append(step)
    return asked is not None  # it is handed on, to `map` say


def _opens_call(step: dis.Instruction) -> bool:
    null = step.opname == "LOAD_GLOBAL" and bool((step.arg or 0) & 1)
    return null or step.opname in ("LOAD_METHOD", "PUSH_NULL")


def _is_spelled(asked: list[dis.Instruction]) -> bool:
    """Does a name stand in what is pushed for a call, and is nothing made of it?"""
    text = next((n for n, step in enumerate(asked) if _is_text(step)), None)
    if text is None or any(step.opname in _COMPUTES for step in asked):
        return False
    return not any(step.opname.startswith("CALL") for step in asked[text:])


def _is_text(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str)


def take_whole(record: StateReader, space: Any, name: str) -> None:
    """All that a class, a module or a function has is read, and that it has no more."""
    if isinstance(space, type):
        if not is_of_users(space.__module__):
            return
        for key in [key for key in vars(space) if not _is_pythons(key)]:
            record.read_of_class(space, key)
        for key in _OF_CLASSES:
            get = functools.partial(getattr, space, key, None)
            record.read_at(Place(f"{name}.{key}", space, key, get), get())
    elif isinstance(space, (types.ModuleType, types.FunctionType, dict)):
        held = variables_of(space)
        users = not isinstance(space, types.ModuleType) or is_of_users(space.__name__)
        for key in [key for key in held if not _is_pythons(key)]:
            record.read_at(places.entry(f"{name}.{key}", held, key), held[key], alone=not users)
        if isinstance(space, types.FunctionType):
            for key in _OF_FUNCTIONS:
                place = places.function_part(f"{name}.{key}", space, key)
                record.read_at(place, place.value)
    else:
        return
    names = functools.partial(_names_in_space, space)
    record.read_at(Place(f"the names in {name}", space, "()", names), names(), alone=True)


def _is_pythons(key: Any) -> bool:
    """Is it a name of the language's own? A dictionary may have keys that are no names at all."""
    return isinstance(key, str) and key.startswith("__")


def names_asked_by(getter: Any) -> set[str]:
    """What `attrgetter("a.b")` or `methodcaller("c")` asks an object for, in C."""
    _, given = getter.__reduce__()[:2]
    texts = given if isinstance(getter, operator.attrgetter) else given[:1]
    return {name for text in texts for name in text.split(".")}


def _names_in_space(space: Any) -> tuple[Any, ...]:
    return tuple([key for key in variables_of(space) if not _is_pythons(key)])


def read_modules(record: StateReader, code: CodeType) -> None:
    """`sys.modules` is asked for what is spelled out, or for what it has."""
    names = [c for c in code.co_consts if isinstance(c, str)]
    spelled = [name for name in names if name.replace(".", "_").isidentifier()]
    for key in spelled:
        read_module(record, key)
    if not spelled:
        get = functools.partial(tuple, sys.modules)
        record.read_at(Place("sys.modules", sys.modules, "()", get), get(), alone=True)


def read_module(record: StateReader, key: str) -> None:
    """Whether a module was imported: not what it has, nor is its import a write."""
    get = functools.partial(sys.modules.get, key)
    record.read_at(Place(f"sys.modules[{key!r}]", sys.modules, key, get), get(), alone=True)


def read_registry(record: StateReader, kind: abc.ABCMeta, name: str) -> None:
    """Which classes are registered as subclasses of an abstract one."""
    get = _Registered(kind)
    record.read_at(Place(f"the classes of {name}", kind, "registered", get), get(), alone=True)


class _Registered:
    """Those registered with an abstract class: the same object as long as nothing is registered."""

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
