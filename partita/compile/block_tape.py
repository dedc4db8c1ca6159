"""Block tapes: what a module's forward asks of torch, written so that two can be compared.

A tape is a list of calls. Tensors stand in it by number, other operands by value; so the tapes of
two blocks are equal where they call the same of torch, on values that come about in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = [
    "BlockTape",
    "Made",
    "Named",
    "NotABlock",
    "Same",
    "Taken",
    "TapedCall",
    "contains",
    "with_tensors",
]


class NotABlock(BaseException):
    """A module does what no call of a program can do for it: its class is traced as it runs.

    No `except Exception` of the user's may catch it.
    """

    def __init__(self, kind: type, reason: str):
        super().__init__(f"{kind.__name__}: {reason}")
        self.kind, self.reason = kind, reason


@dataclass(frozen=True, slots=True)
class Made:
    """The tensor that a tape makes under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The tensor that a tape takes from outside under this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Same:
    """An object that is compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True)
class Named:
    """What a call is called: each other one is as good."""

    value: str

    def __eq__(self, other: object) -> bool:
        return type(other) is Named

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class TapedCall:
    """One call of torch.

    Attributes:
        func: what is called.
        around: the modes in which it is.
        operands: args and kwargs, tensors by number.
        result: likewise.
    """

    func: Any
    around: tuple[Any, ...]
    operands: Any
    result: Any


@dataclass(eq=False)
class BlockTape:
    """What a block of one structure calls, in order.

    Attributes:
        calls: of torch.
        taken: what it takes from outside, described, in the order of first use.
        made: by number, tensors like those that it makes.
        escapes: the numbers of those that were still held when its forward had returned.
        admitted: plain values that were taken for equal on all ranks of a wire.
    """

    calls: list[TapedCall] = field(default_factory=list)
    taken: list[tuple[Any, ...]] = field(default_factory=list)
    made: dict[int, FakeTensor] = field(default_factory=dict)
    escapes: frozenset[int] = frozenset()
    admitted: list[tuple[Any, Made | Taken]] = field(default_factory=list)


def with_tensors(value: Any, made: Callable[[int], Any], taken: Callable[[int], Any]) -> Any:
    """What a tape has written, with these tensors."""
    kind = type(value)
    if kind is Made:
        return made(value.number)
    if kind is Taken:
        return taken(value.number)
    if kind is Same or kind is Named:
        return value.value
    if kind is not tuple:
        return value
    of, *rest = value
    if of is int or of is bool:
        return rest[0]
    if of is float:
        return float.fromhex(rest[0])
    if of is dict:
        return {k: with_tensors(v, made, taken) for k, v in rest}
    parts = [with_tensors(v, made, taken) for v in rest]
    if of is slice:
        return slice(*parts)
    if of is tuple or of is list or of is torch.Size:
        return of(parts)
    return of(*parts) if hasattr(of, "_fields") else of(parts)  # as torch.max gives them


def contains(value: Any, kind: type) -> bool:
    if type(value) is kind:
        return True
    return type(value) is tuple and any(contains(v, kind) for v in value)
