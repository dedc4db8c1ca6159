"""Written operands.

Which operands does a function write, besides `out` and the first of one in place?

What is written must be the user's own tensor, not what it became when it was moved. Torch's schemas
say what an operator writes, except the running statistics of the older normalisations.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from .library import overloads_of

__all__ = ["Written", "written_by"]

_STATISTICS = ("running_mean", "running_var")
_UPDATING = ("training", "use_input_stats")


@dataclass(frozen=True)
class Written:
    """An operand that is written.

    Attributes:
        place, name: in the call.
        flag: place and name of the argument without which it is left alone, if there is one.
    """

    place: int
    name: str
    flag: tuple[int, str] | None = None

    def path(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | str] | None:
        """Where it stands in a call; None if this call does not write it."""
        if self.flag is not None:
            i, name = self.flag
            if not (args[i] if i < len(args) else kwargs.get(name, i and name != "training")):
                return None
        return (self.place,) if self.place < len(args) else (self.name,)


def written_by(func: Callable[..., Any]) -> tuple[Written, ...]:
    """The operands that `func` writes, as far as can be known."""
    if isinstance(func, types.FunctionType):
        # As it is written: what it wraps, as Tensor.__pow__ does, may be a builtin without one.
        return _find_written_statistics(
            list(inspect.signature(func, follow_wrapped=False).parameters)
        )
    overloads = overloads_of(func)
    if not overloads:  # a builtin, or a method: known as the operator of its name
        packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        overloads = overloads_of(packet) if packet is not None else []
    found: dict[Written, None] = {}
    for overload in overloads:
        arguments = overload._schema.arguments
        for i, a in enumerate(arguments):
            if a.is_write and not a.is_out and _holds_tensors(overload, a.type):
                found[Written(i, a.name)] = None
        if not found:
            found |= dict.fromkeys(_find_written_statistics([a.name for a in arguments]))
    return tuple(found)


def _holds_tensors(overload: OpOverload, type: torch.JitType) -> bool:
    # TorchScript has operators on Python's lists, `aten::sort` among them: no tensor is written.
    if isinstance(type, torch.ListType):
        return overload._opname.endswith("_")
    return "Tensor" in str(type)


def _find_written_statistics(names: list[str]) -> tuple[Written, ...]:
    flag = next(((i, n) for i, n in enumerate(names) if n in _UPDATING), None)
    return tuple(Written(i, n, flag) for i, n in enumerate(names) if n in _STATISTICS)
