"""Numbers given as DTensors: where an op of torch takes a number, the value is read on all ranks.

torch takes a tensor of no dimensions for a number (`x.topk(k)`, `x[:n]`, `x.view(n, -1)`) and
reads it in C++, which finds this rank's share or piece. So it is read, as `int(k)` would, before a
rule or a kernel sees the call. A number is what torch's schemas say is one in all forms of an op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .dtensor import DTensor
from .library import overloads_of

__all__ = ["may_have_numbers", "read_number", "with_numbers"]

_INTEGERS = frozenset(("int", "List[int]", "Optional[int]", "Optional[List[int]]"))
_NUMBERS = _INTEGERS | {"float", "number", "bool", "Optional[float]", "Optional[number]"}


def may_have_numbers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Is an argument, except the first, a DTensor of one element, or a slice or list of such?"""
    return any(map(_may_be_number, args[1:])) or any(map(_may_be_number, kwargs.values()))


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
    by_place, by_name = _numbers_of(getattr(func, "__name__", ""))
    new: list[Any] = []
    sizes = ""
    for i, value in enumerate(args):
        kind = sizes or (by_place[i] if i < len(by_place) else "")
        if "List" in kind and not isinstance(value, (tuple, list)):
            sizes = kind  # one by one, to the end
        new.append(_with_numbers(value, kind))
    return new, {key: _with_numbers(v, by_name.get(key, "")) for key, v in kwargs.items()}


def _with_numbers(value: Any, kind: str) -> Any:
    if type(value) is slice:
        return slice(*(_with_numbers(v, "int") for v in (value.start, value.stop, value.step)))
    if type(value) is tuple or type(value) is list:
        return type(value)(_with_numbers(v, kind) for v in value)
    if type(value) is not DTensor or not kind or value.requires_grad:
        return value
    # A float that this rank has whole may be an input of a step that is captured: it stays one.
    return read_number(value) if kind in _INTEGERS or not value._spec.is_whole else value


def read_number(x: DTensor) -> Any:
    """The value of a tensor of one element as Python has it."""
    has_index = not (x.is_floating_point() or x.is_complex() or x.dtype is torch.bool)
    return operator.index(x) if has_index else x.item()  # type: ignore[arg-type]


@cache
def _numbers_of(name: str) -> tuple[list[str], dict[str, str]]:
    """By place and by name the types of an op's arguments that are numbers in all its forms; of
    others nothing."""
    by_place: list[set[str]] = []
    by_name: dict[str, set[str]] = {}
    for overload in overloads_of(getattr(torch.ops.aten, name, None)):
        arguments = [a for a in overload._schema.arguments if not a.is_out]
        if not arguments or "Tensor" not in str(arguments[0].type):
            continue  # TorchScript has operators on Python's own lists and texts
        by_place += [set() for _ in arguments[len(by_place) :]]
        for kinds, a in zip(by_place, arguments, strict=False):
            kinds.add(str(a.type))
            by_name.setdefault(a.name, set()).add(str(a.type))
    return list(map(_one_type, by_place)), {key: _one_type(k) for key, k in by_name.items()}


def _one_type(kinds: set[str]) -> str:
    if not kinds <= _NUMBERS:
        return ""
    return min(kinds, key=lambda kind: ("List" not in kind, kind not in _INTEGERS))
