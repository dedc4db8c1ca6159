"""Code objects: which are the user's, and which names they use."""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
from types import CodeType
from typing import Any

import torch

__all__ = [
    "asks_whether_true",
    "asks_which_object",
    "constants_of",
    "dotted_names",
    "global_names",
    "imported_names",
    "is_of_users",
    "is_recorded",
    "line_of_write",
    "names_of",
]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PARTITA = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Our own models and training loop stand where a user's program would.
_LIKE_USERS = (
    os.path.join(_PARTITA, "train", "models", ""),
    os.path.join(_PARTITA, "train", "trainer.py"),
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# What torch itself computes with while it traces.
_OF_TORCH = tuple(
    os.sep + name + os.sep
    for name in "filelock functorch mpmath networkx numpy optree sympy torchgen triton z3".split()
)
_LIBRARY = ("torch", "partita", "builtins", "numpy", "sympy", "mpmath", "functorch", "torchgen")
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_WRITES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL")
_METHODS = ("LOAD_METHOD", "LOAD_ATTR")
_THAT_CHANGE = frozenset(
    "append extend insert pop remove clear update setdefault add discard rotate popleft appendleft "
    "extendleft reverse sort popitem fill subtract".split()
)


@functools.cache
def is_recorded(filename: str) -> bool:
    """Is code of this file the user's, or a library's beside torch, partita and Python's own?"""
    if filename.startswith("<frozen"):
        return False
    path = os.path.abspath(filename)
    if path.startswith(_TORCH):
        return False
    if path.startswith(_PARTITA):
        return path.startswith(_LIKE_USERS)
    installed = any(part in path for part in _INSTALLED)
    if installed and any(part in path for part in _OF_TORCH):
        return False
    return installed or not path.startswith(_STDLIB)


def is_of_users(module: Any) -> bool:
    """Is the module of this name the user's, or a library's whose code is recorded?"""
    root = str(module).split(".")[0]
    return (root not in _LIBRARY and root not in sys.stdlib_module_names) or root == "__main__"


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The globals that it uses by itself. `co_names` has those of attributes and methods too."""
    used = [i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS]
    return tuple(dict.fromkeys(used))


@functools.lru_cache(maxsize=4096)
def dotted_names(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """What it reads of variables, attribute by attribute: ("torch", "relu")."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            chain = (i.argval,)
        elif i.opname in _METHODS and chain:
            chain = (*chain, i.argval)
            found[chain] = None
        elif i.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"):
            chain = ()
    return tuple(found)


def names_of(code: CodeType) -> set[str]:
    """All names that it may ask an object for: of attributes, and strings given to `getattr`."""
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}


def constants_of(code: CodeType) -> set[str]:
    return {c for c in code.co_consts if isinstance(c, str)}


def line_of_write(codes: list[CodeType], key: object) -> str | None:
    """`"file:line"` where one of these writes what is called `key`, if that can be told."""
    named, within = [], []
    for code in codes:
        line = code.co_firstlineno
        for step in dis.get_instructions(code):
            line = step.starts_line or line
            if step.opname in _WRITES and step.argval == key:
                named.append((code.co_filename, line))
            elif step.opname == "STORE_SUBSCR" or (
                step.opname in _METHODS and step.argval in _THAT_CHANGE
            ):
                within.append((code.co_filename, line))
    found = named or within
    if len(set(found)) == 0 or (not named and len(set(found)) > 1):
        return None
    name, line = found[0]
    near = os.path.relpath(name)
    return f"{name if near.startswith('..') else near}:{line}"


@functools.lru_cache(maxsize=4096)
def asks_whether_true(code: CodeType) -> bool:
    """Does it ask whether something `is True`, or `is False`, which nothing else can answer?"""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    asked = (steps[max(0, n - 2) : n] for n, i in enumerate(steps) if i.opname == "IS_OP")
    return any(i.opname == "LOAD_CONST" and type(i.argval) is bool for two in asked for i in two)


@functools.lru_cache(maxsize=4096)
def asks_which_object(code: CodeType) -> bool:
    """Does it ask whether something `is` another object, no constant, or for an `id`?"""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    asked = (steps[max(0, n - 2) : n] for n, i in enumerate(steps) if i.opname == "IS_OP")
    compared = any(all(i.opname != "LOAD_CONST" for i in two) for two in asked)
    return compared or "id" in global_names(code)


@functools.lru_cache(maxsize=4096)
def imported_names(code: CodeType, package: str | None) -> tuple[str, ...]:
    """The modules that it imports as it runs, as code of a module in `package`."""
    found, constants = [], []
    for i in dis.get_instructions(code):
        if i.opname == "LOAD_CONST":
            constants.append(i.argval)
        elif i.opname == "IMPORT_NAME":  # of how far above `package`, and of what it has
            dots, _ = constants[-2:]
            if not dots:
                found.append(i.argval)
            elif package:
                found.append(importlib.util.resolve_name("." * dots + i.argval, package))
    return tuple(found)
