"""Modes of a region: how it sees the functions of torch that its program calls (`CallMode`), and
the kernels that run within them (`KernelMode`).

`CallMode` stands above autograd and passes each function to the watcher of this thread, the
region's first or second run. `KernelMode` stands below autograd and below layouts: it sees each
ATen call, in backward too, with the rank's own pieces as plain tensors.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from partita.tensor.dispatch import op_of
from partita.tensor.forms import enter_function
from partita.tensor.op_facts import VIEW_ATTRIBUTES, facts_of, facts_of_function
from partita.tensor.tensor_overrides import OVERRIDES, runs_as_torch_has_it
from partita.tensor.tensor_state import HERE

__all__ = ["CallMode", "FunctionKind", "KernelMode", "is_internal", "make_call_mode"]


@dataclass(frozen=True)
class FunctionKind:
    """A function of torch, as a region treats it.

    Attributes:
        op: its op's name.
        func: the function.
        is_call: False where it computes nothing.
        body: a Python function to run instead, so that the calls inside are seen.
        writes: the places and names of the arguments that it writes, but for `out`.
    """

    op: str
    func: Callable[..., Any]
    is_call: bool = True
    body: Callable[..., Any] | None = None
    writes: tuple[tuple[int, str], ...] = ()


def _make_function_kind(func: Callable[..., Any]) -> FunctionKind:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return FunctionKind(
            attribute, func, is_call=name == "__get__" and attribute in VIEW_ATTRIBUTES
        )
    if facts_of_function(name).computes_nothing or (
        runs_as_torch_has_it(func) and func not in OVERRIDES
    ):
        return FunctionKind(name, func, is_call=False)
    form = op_of(func).form
    body = None
    if (
        isinstance(func, types.FunctionType)
        and func.__module__ in ("torch.nn.functional", "torch.functional")
        and form.rule is None
        and func not in OVERRIDES
    ):
        body = enter_function(func)  # as DTensors enter it too
    writes = tuple((one.place, one.name) for one in form.writes)
    if form.inplace or name == "__setitem__":
        writes = ((0, "input"),)
    elif isinstance(func, torch._ops.OpOverload):  # an op of the user's says so in its schema
        writes = tuple((one.place, one.name) for one in facts_of(func).writes)
    return FunctionKind(form.name, func, body=body, writes=writes)


_KINDS: dict[Callable[..., Any], FunctionKind] = {}


class CallMode(TorchFunctionMode):
    """Passes each function of torch that the program calls to this thread's watcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() and not HERE.capturing:  # no business of ours
            return func(*args, **kwargs)
        run = HERE.watcher
        if run is None:
            return func(*args, **kwargs)
        kind = _KINDS.get(func)
        if kind is None:
            kind = _KINDS[func] = _make_function_kind(func)
        if not kind.is_call:
            return func(*args, **kwargs)
        if kind.body is not None and kind.op not in run.policy.ops:
            with self:  # which torch has taken off for this call
                return kind.body(*args, **kwargs)
        return run.run_call(kind, args, kwargs)


def is_internal(function: Any) -> bool:
    """Is it an `autograd.Function` of partita's own, within a call of the program's?"""
    return isinstance(function, type) and function.__module__.startswith("partita.")


def make_call_mode() -> CallMode | None:
    """A `CallMode` to enter; None where one is on: compiled regions guard on the number of modes.

    Private torch: there is no public way to ask which modes are on.
    """
    for i in range(torch._C._len_torch_function_stack()):
        if isinstance(torch._C._get_function_stack_at(i), CallMode):
            return None
    return CallMode()


# -- kernels --------------------------------------------------------------------------------------


class KernelMode(TorchDispatchMode):
    """Calls `kernel` in place of each kernel that runs while it is entered.

    Regions of torch.compile run compiled: otherwise torch.compile would stand aside, and another
    program be seen. What such a region computes in kernels of its own is not seen.
    """

    supports_higher_order_operators = True  # a compiled region may be one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Local():
            return self.kernel(func, args, kwargs or {})

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, or something in its place, and return the result."""
        raise NotImplementedError
