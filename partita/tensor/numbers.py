"""Numbers given as DTensors: where an op of torch takes a number, the value is read on all ranks.

torch takes a tensor of no dimensions for a number (`x.topk(k)`, `x[:n]`, `x.view(n, -1)`) and
reads it in C++, which finds this rank's share or piece. So it is read, as `int(k)` would, before a
rule or a kernel sees the call. A number is what torch's schemas say is one in all forms of an op.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .dtensor import DTensor
from .library import overloads_of

__all__ = ["may_have_numbers", "read_number", "takes_numbers", "with_numbers"]

_INTEGERS = frozenset(("int", "List[int]", "Optional[int]", "Optional[List[int]]"))
_NUMBERS = _INTEGERS | frozenset(
    ("float", "number", "bool", "List[float]", "Optional[float]", "Optional[number]")
    + ("Optional[bool]", "Optional[List[float]]")
)


def may_have_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Is an argument a DTensor of one element, or a slice or list with such?"""
    return any(map(_may_be_number, args)) or any(map(_may_be_number, kwargs.values()))


def _may_be_number(value: Any) -> bool:
    kind = type(value)
    if kind is DTensor:
        return value._spec.shape.numel() == 1  # type: ignore[no-any-return]
    if kind is slice:
        return any(type(v) is DTensor for v in (value.start, value.stop, value.step))
    return (kind is tuple or kind is list) and any(map(_may_be_number, value))


def with_numbers(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """A call of `func` with Python's numbers where torch takes numbers, and in slices."""
    by_place, by_name = _numbers_of(func)
    new: list[Any] = []
    sizes: frozenset[str] = frozenset()
    for i, value in enumerate(args):
        kinds = sizes or (by_place[i] if i < len(by_place) else frozenset())
        if _in_lists(kinds) and _are_numbers(kinds) and not isinstance(value, (tuple, list)):
            sizes = kinds  # one by one, to the end
        new.append(_with_numbers(value, kinds))
    return new, {key: _with_numbers(v, by_name.get(key, frozenset())) for key, v in kwargs.items()}


def _with_numbers(value: Any, kinds: frozenset[str]) -> Any:
    """`value` read where a tensor in its place would be a number; `kinds` are what may stand there
    in one form of the op or another."""
    if type(value) is slice:
        return slice(*(_with_numbers(v, _INTEGERS) for v in (value.start, value.stop, value.step)))
    if type(value) is tuple or type(value) is list:
        return type(value)(_with_numbers(v, _in_lists(kinds) or kinds) for v in value)
    if type(value) is not DTensor or not _are_numbers(kinds) or value.requires_grad:
        return value
    # A float that this rank has whole may be an input of a step that is captured: it stays one.
    return read_number(value) if kinds & _INTEGERS or not value._spec.is_whole else value


def _are_numbers(kinds: frozenset[str]) -> bool:
    return not kinds.isdisjoint(_NUMBERS) and not any("Tensor" in kind for kind in kinds)


def _in_lists(kinds: frozenset[str]) -> frozenset[str]:
    return frozenset(kind for kind in kinds if "List" in kind)


def takes_numbers(func: Callable[..., Any]) -> bool:
    """Has an argument of `func` to be a number, in whichever form?"""
    return any(map(_are_numbers, _numbers_of(func)[1].values()))


def read_number(x: DTensor) -> Any:
    """The value of a tensor of one element as Python has it."""
    has_index = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    return operator.index(x) if has_index else x.item()  # type: ignore[arg-type]


Kinds = frozenset[str]


@cache
def _numbers_of(func: Callable[..., Any]) -> tuple[list[Kinds], dict[str, Kinds]]:
    """By place and by name what an op's arguments may be, in all its forms."""
    by_place: list[set[str]] = []
    by_name: dict[str, set[str]] = {}
    for arguments in _forms_of(func):
        by_place += [set() for _ in arguments[len(by_place) :]]
        for place, (name, kind, has_place) in enumerate(arguments):
            by_name.setdefault(name, set()).add(kind)
            if has_place:
                by_place[place].add(kind)
    return list(map(frozenset, by_place)), {name: frozenset(k) for name, k in by_name.items()}


Parameters = list[tuple[str, str, bool]]
"""Of each argument: what it is called, what it may be ("" if that is not said), has it a place?"""


def _forms_of(func: Callable[..., Any]) -> list[Parameters]:
    """What torch says of an op's arguments: in schemas, or in hints of one written in Python."""
    forms = []
    for overload in overloads_of(getattr(torch.ops.aten, getattr(func, "__name__", ""), None)):
        arguments = [a for a in overload._schema.arguments if not a.is_out]
        if isinstance(func, types.MethodDescriptorType):  # x.polygamma(n)
            arguments.sort(key=lambda a: a.name != "self")
        # TorchScript has operators on Python's own lists and texts.
        if any("Tensor" in str(a.type) for a in arguments):
            forms.append([(a.name, str(a.type), not a.kwarg_only) for a in arguments])
    if not isinstance(func, types.FunctionType):
        return forms
    try:
        own = list(inspect.signature(func).parameters.values())
    except ValueError:  # it stands for a builtin
        return forms
    if all(p.annotation is p.empty for p in own):
        return forms
    hints = [{p.name: _hint_of(p) for p in own if p.annotation is not p.empty}]
    hints += [{name: kind for name, kind, _ in form if name not in hints[0]} for form in forms]
    return [
        [(p.name, hint.get(p.name, ""), p.kind is not p.KEYWORD_ONLY) for p in own]
        for hint in hints
    ]


def _hint_of(parameter: inspect.Parameter) -> str:
    """What a function written in Python says of an argument, as schemas say it."""
    if parameter.annotation in (None, type(None)):  # a BroadcastingList[int] of TorchScript
        return "List[int]"
    text = str(parameter.annotation)
    if "Tensor" in text or not re.search(r"\b(int|float|bool)\b", text):
        return text
    return "int" if re.search(r"\bint\b", text) else "number"
