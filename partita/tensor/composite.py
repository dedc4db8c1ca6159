"""Composite functions: Python functions of torch that are entered, so that their ops are found.

`torch.nn.functional` is full of functions that ask `has_torch_function(...)` and, if so, hand
themselves over whole. To enter one is to run its body as if that question were answered no: a copy
of the function whose globals say so. The ops inside ask again, and are dispatched one by one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["enter_function"]

# An init function hands itself over by its name in its module, where transformers puts functions of
# its own while it initialises a model; these call torch's. To enter one of them would not end.
_INITS = {
    name: func
    for name, func in vars(torch.nn.init).items()
    if isinstance(func, types.FunctionType) and name.endswith("_") and name[0] != "_"
}

_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _answer_false(*_: object) -> bool:
    return False


_OVERRIDES = types.SimpleNamespace(
    **vars(torch.overrides) | dict.fromkeys(_QUESTIONS, _answer_false)
)


class _Torch(types.ModuleType):
    """Stands for torch where a function asks `torch.overrides.has_torch_function...`."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.overrides = _OVERRIDES

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_entered_globals: dict[tuple[int, bool], dict[str, Any]] = {}


def _make_globals_answering_no(space: dict[str, Any], through_torch: bool) -> dict[str, Any]:
    """A copy of a module's globals in which nothing has a torch function. One per module."""
    key = (id(space), through_torch)
    if key not in _entered_globals:
        changed = dict(space)
        changed.update((q, _answer_false) for q in _QUESTIONS if q in changed)
        if through_torch and changed.get("torch") is torch:
            changed["torch"] = _Torch()
        if through_torch and changed.get("overrides") is torch.overrides:  # in torch itself
            changed["overrides"] = _OVERRIDES
        _entered_globals[key] = changed
        for name, helper in space.items():
            # A module's private helper asks on behalf of the public function that calls it.
            if name.startswith("_") and _has_questions(helper) and helper.__globals__ is space:
                changed[name] = _copy_function(helper, changed)
    return _entered_globals[key]


def _has_questions(func: Any) -> bool:
    return isinstance(func, types.FunctionType) and any(
        q in func.__code__.co_names for q in _QUESTIONS
    )


def _copy_function(func: types.FunctionType, space: dict[str, Any], closure: Any = None) -> Any:
    copy = types.FunctionType(
        func.__code__, space, func.__name__, func.__defaults__, closure or func.__closure__
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _entered_cell(cell: types.CellType, func: types.FunctionType) -> types.CellType:
    """A cell of `func`'s closure; a function in it that asks is entered too.

    `boolean_dispatch` makes functions that hold two others, of which one may be such a one again.
    """
    try:
        held = cell.cell_contents
    except ValueError:  # nothing in it yet
        return cell
    again = isinstance(held, types.FunctionType) and held.__code__ is func.__code__
    if again and held is not func:
        return types.CellType(enter_function(held))
    return (
        types.CellType(_copy_function(held, _globals_to_enter(held)))
        if _has_questions(held)
        else cell
    )


def _globals_to_enter(func: types.FunctionType) -> dict[str, Any]:
    return _make_globals_answering_no(func.__globals__, "overrides" in func.__code__.co_names)


@cache
def enter_function(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a Python function that runs its body on DTensors; None if it is not Python."""
    if not isinstance(func, types.FunctionType):
        return None
    if func.__module__ != torch.nn.init.__name__:
        func = _INITS.get(func.__name__, func)
    closure = func.__closure__ and tuple(_entered_cell(c, func) for c in func.__closure__)
    return _copy_function(func, _globals_to_enter(func), closure)
