"""Frequent methods: which calls are so frequent that they skip torch's argument parser?

`x + y` on a subclass goes through C++ that parses the arguments, builds tuples and calls
`__torch_function__`: more than the kernel costs. The operators and methods named here are Python
methods of DTensor instead, generated from one template that does what `dispatch.handle` does. With
torch-function disabled, or under a TorchFunctionMode, they stand aside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (
    DisableTorchFunctionSubclass,
    _is_torch_function_enabled,
    _len_torch_function_stack,
)

from partita.rules.rule import ON_NEW_RULE

from . import keys
from .dispatch import call, op_of
from .dtensor import DTensor
from .hot_path import IN_C
from .op import Op

__all__ = ["FAST"]

FAST = {
    "self": """abs neg exp log sqrt rsqrt tanh sigmoid relu sin cos square reciprocal detach t erf
        __neg__ __abs__ __invert__""",
    "self, other": """add sub mul div matmul mm pow maximum minimum __add__ __radd__ __sub__
        __mul__ __rmul__ __truediv__ __matmul__ __pow__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
        __and__ __or__ bmm""",
    "self, other, inplace": """add_ mul_ sub_ div_ __iadd__ __isub__ __imul__ __itruediv__""",
    "self, *args": """view reshape transpose permute sum mean unsqueeze squeeze flatten expand
        softmax to type_as __getitem__ split chunk amax amin repeat clone contiguous float""",
}
"""By signature, the names of the methods."""

_BARE = {"__pow__": "pow", "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le"}
_BARE |= {"__gt__": "gt", "__ge__": "ge", "__neg__": "neg", "__abs__": "abs"}

_TEMPLATE = """
def {name}({parameters}):
    if {aside}:
        return base({parameters})
    try:
        plan = find({key})
    except TypeError:
        return call(base, ({call_tuple}), {{}})
    if plan is not None and plan.direct:
        plan.hits += 1
        with Local():
            out = (plan.kernel or base)({call_args})
        if type(out) is Tensor and out.shape == plan.local_shape:
            out.__class__ = DTensor
            out._spec = plan.spec
            return out
        return {otherwise}
    return call(base, ({call_tuple}), {{}})
"""


_installed: dict[str, Any] = {}
"""For each method the key function that it was made with; a later rule brings another."""


def _install_fast_methods() -> None:
    for kind, names in FAST.items():
        for name in names.split():
            # Some operators of Tensor are Python wrappers of a method that is not.
            base = getattr(torch.Tensor, _BARE.get(name, name))
            op = op_of(base)
            # Without a rule, or written in Python, there is nothing to skip to.
            if op.run is None and _installed.get(name) is not op.key:
                setattr(DTensor, name, _make_method(name, kind, base, op))
                _installed[name] = op.key
    # Defining __eq__ took it away. As torch.Tensor's, since a tensor may be re-tagged as a key.
    DTensor.__hash__ = lambda self: id(self)  # type: ignore[method-assign,assignment]


def _make_method(name: str, kind: str, base: Any, op: Op) -> Any:
    method = _method_in_python(name, kind, base, op) if IN_C is None else IN_C.Method(op, base)
    method.__name__ = name
    method.__doc__ = f"As torch.Tensor.{name}."
    method.__qualname__ = f"DTensor.{name}"
    return method


def _method_in_python(name: str, kind: str, base: Any, op: Op) -> Any:
    signature = kind.removesuffix(", inplace")
    fixed = op.form.rule is not None and op.form.rule.derive is None
    aside = "not enabled() or stack_length()"
    if (name.startswith("__") or signature == "self") and fixed:
        parameters, key = signature, "self._spec"
        if signature == "self, other":
            key = "(self._spec, other._spec if type(other) is DTensor else kind(other))"
    else:
        parameters, aside, key = f"{signature}, **kwargs", f"kwargs or {aside}", f"key({signature})"
    source = _TEMPLATE.format(
        name=name,
        parameters=parameters,
        aside=aside,
        call_args=signature,
        call_tuple=signature + ("," if signature == "self" else ""),
        key=key,
        otherwise="self if out is self else plan.tag(out)"
        if kind != signature
        else "plan.tag(out)",
    )
    space: dict[str, Any] = {
        "DTensor": DTensor,
        "Tensor": torch.Tensor,
        "Local": DisableTorchFunctionSubclass,
        "enabled": _is_torch_function_enabled,
        "stack_length": _len_torch_function_stack,
        "find": op.find,
        "key": op.key,
        "kind": keys.operand_kind,
        "call": call,
        "base": base,
    }
    # Under this file's name, so that a user's line is not sought in generated code.
    exec(compile(source, __file__, "exec"), space)
    return space[name]


_install_fast_methods()
ON_NEW_RULE.append(_install_fast_methods)
