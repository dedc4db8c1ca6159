"""Block functions: which functions of torch a block may call, and which of them only ask.

While a block is followed a tensor is one that only says what it is. What hangs on a tensor, or
reads what is in it, cannot be asked of it.
"""

from __future__ import annotations

from functools import cache
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from partita.tensor.function_facts import VIEW_ATTRIBUTES, facts_of_function

__all__ = ["is_closed", "is_question", "scalar_places", "why_refused", "writes_first"]

_REFUSED_ATTRIBUTES = frozenset(
    "grad data grad_fn _base _version _grad _grad_fn _backward_hooks output_nr retains_grad".split()
)


def why_refused(func: Any) -> str:
    """Why a block cannot call it; "" where it can."""
    name = getattr(func, "__name__", "")
    if facts_of_function(name).needs_itself or name in ("__set__", "__delete__"):
        return f"it calls {name} of a tensor"
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in _REFUSED_ATTRIBUTES:
            return f"it asks for .{attribute} of a tensor"
    if getattr(func, "__module__", "") == "torch.autograd" and name == "grad":
        return "it asks for gradients"
    return ""


def is_closed(value: Any) -> bool:
    """Is it a function that holds nothing but what is written in it?"""
    if isinstance(value, FunctionType):
        return not value.__closure__ and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (BuiltinFunctionType, torch._ops.OpOverload))


def writes_first(name: str) -> bool:
    """Does a method or function of this name write into its first operand?"""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")


_NO_WRITES = ("__invert__", "__index__", "__int__", "__init__")


def is_question(func: Any) -> bool:
    """Does it ask what a tensor is, and makes none?"""
    name = getattr(func, "__name__", "")
    return facts_of_function(name).is_question or (
        name == "__get__" and getattr(func.__self__, "__name__", "") not in VIEW_ATTRIBUTES
    )


def scalar_places(func: Any) -> frozenset[int | str]:
    """Where among its operands a function of torch takes a number of any kind for what it reckons
    with, and never a size or a dimension: positions and keywords.

    A tensor of floats takes an int there as it takes the float of that value.
    """
    owner, _, name = getattr(func, "__qualname__", "").rpartition(".")
    if owner not in ("TensorBase", "Tensor", "_VariableFunctionsClass"):
        return frozenset()  # Python's own functions may do with a number what they like
    return _scalar_places(name.strip("_"))


@cache
def _scalar_places(name: str) -> frozenset[int | str]:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return frozenset()
    scalars: set[int | str] = set()
    others: set[int | str] = set()
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        if not arguments or str(arguments[0].type) != "Tensor":
            continue  # of Python's numbers and lists, for scripts
        for position, argument in enumerate(arguments):
            kind = str(argument.type)
            if "Tensor" not in kind:
                found = scalars if "number" in kind else others
                found |= {argument.name} if argument.kwarg_only else {position, argument.name}
    return frozenset(scalars - others)
