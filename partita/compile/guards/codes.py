"""Code objects: which of them are the user's, and which names their bytecode uses.

Functions of the user, and of libraries beside torch and Python's own, are *recorded*: what they
read is guarded. What a function may read is found in its bytecode, without running it.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PARTITA = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# Our own models and training loop are recorded like a user's.
_RECORDED_OF_PARTITA = (
    os.path.join(_PARTITA, "app", "models", ""),
    os.path.join(_PARTITA, "app", "trainer.py"),
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_INSTALLED = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
# Libraries that torch itself runs while it traces.
_LIBRARIES_OF_TORCH = tuple(
    os.sep + name + os.sep
    for name in "filelock functorch mpmath networkx numpy optree sympy torchgen triton z3".split()
)
_LIBRARY_MODULES = "torch partita builtins numpy sympy mpmath functorch torchgen".split()
_GLOBAL_OPS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME")
_WRITE_OPS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL")
_ATTRIBUTE_OPS = ("LOAD_METHOD", "LOAD_ATTR")
_MUTATING_METHODS = frozenset(
    "append extend insert pop remove clear update setdefault add discard rotate popleft appendleft "
    "extendleft reverse sort popitem fill subtract".split()
)


@functools.cache
def is_recorded(filename: str) -> bool:
    """Is a file's code recorded: not torch's, partita's or Python's own?"""
    if filename.startswith("<frozen"):
        return False
    path = os.path.abspath(filename)
    if path.startswith(_TORCH):
        return False
    if path.startswith(_PARTITA):
        return path.startswith(_RECORDED_OF_PARTITA)
    installed = any(part in path for part in _INSTALLED)
    if installed and any(part in path for part in _LIBRARIES_OF_TORCH):
        return False
    return installed or not path.startswith(_STDLIB)


def is_user_module(module: Any) -> bool:
    """Is the module of this name the user's, or of a library whose code is recorded?"""
    root = str(module).split(".")[0]
    return (
        root not in _LIBRARY_MODULES and root not in sys.stdlib_module_names
    ) or root == "__main__"


def codes_within(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions that it defines."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_within(const)


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names of the globals that code uses. (`co_names` has names of attributes, too.)"""
    used = [i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL_OPS]
    return tuple(dict.fromkeys(used))


@functools.lru_cache(maxsize=4096)
def dotted_names(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """The chains of attributes that code reads of variables: ("torch", "relu")."""
    found: dict[tuple[str, ...], None] = {}
    chain: tuple[str, ...] = ()
    for i in dis.get_instructions(code):
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            chain = (i.argval,)
        elif i.opname in _ATTRIBUTE_OPS and chain:
            chain = (*chain, i.argval)
            found[chain] = None
        elif i.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL", "PUSH_NULL"):
            chain = ()
    return tuple(found)


def names_asked_for(code: CodeType) -> set[str]:
    """The names that code may ask an object for: of attributes, and strings (as for `getattr`)."""
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())}


def strings_of(code: CodeType) -> set[str]:
    """The string constants of code."""
    return {c for c in code.co_consts if isinstance(c, str)}


def line_of_write(codes: list[CodeType], key: object) -> str | None:
    """The `"file:line"` where one of `codes` writes the name `key`; None where unsure."""
    writes_by_name, mutations = [], []
    for code in codes:
        line = code.co_firstlineno
        for step in dis.get_instructions(code):
            line = step.starts_line or line
            if step.opname in _WRITE_OPS and step.argval == key:
                writes_by_name.append((code.co_filename, line))
            elif step.opname == "STORE_SUBSCR" or (
                step.opname in _ATTRIBUTE_OPS and step.argval in _MUTATING_METHODS
            ):
                mutations.append((code.co_filename, line))
    found = writes_by_name or mutations
    if len(set(found)) == 0 or (not writes_by_name and len(set(found)) > 1):
        return None
    name, line = found[0]
    relative = os.path.relpath(name)
    return f"{name if relative.startswith('..') else relative}:{line}"


@functools.lru_cache(maxsize=4096)
def asks_whether_true(code: CodeType) -> bool:
    """Does code ask whether something `is True` or `is False`, which no stand-in can answer?"""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    operands = (steps[max(0, n - 2) : n] for n, i in enumerate(steps) if i.opname == "IS_OP")
    return any(
        i.opname == "LOAD_CONST" and type(i.argval) is bool for pair in operands for i in pair
    )


@functools.lru_cache(maxsize=4096)
def asks_which_object(code: CodeType) -> bool:
    """Does code compare two objects, neither a constant, by `is`, or ask for an `id`?"""
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    operands = (steps[max(0, n - 2) : n] for n, i in enumerate(steps) if i.opname == "IS_OP")
    compared = any(all(i.opname != "LOAD_CONST" for i in pair) for pair in operands)
    return compared or "id" in global_names(code)


@functools.lru_cache(maxsize=4096)
def imported_names(code: CodeType, package: str | None) -> tuple[str, ...]:
    """The modules that code, of a module in `package`, imports when it runs."""
    found, constants = [], []
    for i in dis.get_instructions(code):
        if i.opname == "LOAD_CONST":
            constants.append(i.argval)
        elif i.opname == "IMPORT_NAME":  # the level and the names imported were pushed
            dots, _ = constants[-2:]
            if not dots:
                found.append(i.argval)
            elif package:
                found.append(importlib.util.resolve_name("." * dots + i.argval, package))
    return tuple(found)


# -- reflection ------------------------------------------------------------------------------------

_GETTERS = ("getattr", "hasattr")
_REFLECTING_NAMES = frozenset(
    "vars dir globals eval exec attrgetter getmembers signature getattr_static fields "
    "get_type_hints".split()
)
_REFLECTING_ATTRIBUTES = frozenset(
    "__dict__ __annotations__ __doc__ __name__ __match_args__ __dataclass_fields__ __code__ "
    "__defaults__ __kwdefaults__ __signature__ __closure__".split()
)
_COMPUTING_OPS = ("BINARY_OP", "BINARY_SUBSCR", "BUILD_STRING", "FORMAT_VALUE")
_IGNORED_OPS = ("CACHE", "EXTENDED_ARG", "PRECALL")


@functools.lru_cache(maxsize=4096)
def reflects(code: CodeType) -> bool:
    """May code ask for an attribute by a name that does not stand in it?"""
    if not _REFLECTING_NAMES.isdisjoint(code.co_names) or not _REFLECTING_ATTRIBUTES.isdisjoint(
        code.co_names
    ):
        return True
    asked: list[dis.Instruction] | None = None
    open_calls = 0  # calls whose arguments are being pushed
    for step in dis.get_instructions(code):
        if step.opname in _IGNORED_OPS:
            continue
        if step.opname == "MATCH_CLASS":  # a class says which attributes a pattern means
            return True
        if step.opname == "LOAD_GLOBAL" and step.argval in _GETTERS:
            asked, open_calls = [], 0
        elif asked is not None:
            if step.opname.startswith("CALL") and not open_calls:
                if not _is_spelled(asked):
                    return True
                asked = None
                continue
            open_calls += _opens_call(step) - step.opname.startswith("CALL")
            asked.append(step)
    return asked is not None  # `getattr` itself is passed on, say to `map`


def _opens_call(step: dis.Instruction) -> bool:
    """Does an instruction push the NULL or the method with which a call begins?"""
    null = step.opname == "LOAD_GLOBAL" and bool((step.arg or 0) & 1)
    return null or step.opname in ("LOAD_METHOD", "PUSH_NULL")


def _is_spelled(asked: list[dis.Instruction]) -> bool:
    """Is the name a constant among what is pushed for a call of `getattr`, and not computed?"""
    text = next((n for n, step in enumerate(asked) if _is_text(step)), None)
    if text is None or any(step.opname in _COMPUTING_OPS for step in asked):
        return False
    return not any(step.opname.startswith("CALL") for step in asked[text:])


def _is_text(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str)
