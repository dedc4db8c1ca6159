"""Patches of torch: functions that take a DTensor without asking it.

Most of torch asks a tensor's class what a function means for it (`__torch_function__`). These do
not: they would take this rank's piece for the whole tensor and say nothing. Each is replaced, under
its public name, by one that asks: where it can mean the right thing it does (see `constructors`,
too), and the others raise.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.func
import torch.utils.dlpack
from torch._C import DisableTorchFunctionSubclass as Local
from torch._C import _is_torch_function_enabled as _global_view
from torch.jit import _builtins

from partita.comm import inspect_collectives, user_line
from partita.layout import Fix, LayoutError

from .dtensor import DTensor
from .forms import Form
from .gathered import run_gathered
from .mixed_operands import refuse_transform
from .tensor_overrides import MEMORY, OVERRIDES, make_refusal

__all__ = ["TRANSFORMS", "holds_dtensor", "put_in_place_of", "refuse_piece"]

TRANSFORMS = (
    "functionalize grad grad_and_value hessian jacfwd jacrev jvp linearize vjp vmap"
).split()
"""The function transforms of torch.func."""


def holds_dtensor(value: Any) -> bool:
    """Is it a DTensor, or are there any in its lists and dicts?"""
    if isinstance(value, DTensor):
        return True
    if isinstance(value, dict):
        return any(map(holds_dtensor, value.values()))
    return isinstance(value, (tuple, list)) and any(map(holds_dtensor, value))


def put_in_place_of(name: str, function: Callable[..., Any], *homes: Any) -> Any:
    """Put `function` in the place of `name` for all who look it up: users, pickle, TorchScript.

    Returns:
        What was there.
    """
    replaced = getattr(homes[0], name)
    functools.update_wrapper(function, replaced)
    function.__module__, function.__qualname__ = homes[0].__name__, name
    del function.__wrapped__  # type: ignore[attr-defined]  # a compiler would go round it
    with contextlib.suppress(ValueError):  # a builtin may not say
        function.__signature__ = inspect.signature(replaced)  # type: ignore[attr-defined]
    for home in homes:
        setattr(home, name, function)
    # TorchScript knows its builtins by what they are and not by their names.
    builtin = _builtins._find_builtin(replaced)
    if builtin is not None:
        _builtins._register_builtin(function, builtin)
    return replaced


# -- what refuses ----------------------------------------------------------------------------------


def _make_checked_transform(name: str, transform: Callable[..., Any]) -> Callable[..., Any]:
    """A transform, and the function that it makes, which look at their arguments first."""

    def look(args: Any, kwargs: Any) -> None:
        if holds_dtensor(args) or holds_dtensor(kwargs):
            raise refuse_transform(name)

    def asking(*args: Any, **kwargs: Any) -> Any:
        look(args, kwargs)
        made = transform(*args, **kwargs)
        if not callable(made):
            return made

        @functools.wraps(made)
        def made_asking(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return made(*args, **kwargs)

        return made_asking

    return asking


for _name in TRANSFORMS:
    put_in_place_of(_name, _make_checked_transform(_name, getattr(torch.func, _name)), torch.func)
torch.vmap = torch.func.vmap


_plain_to_dlpack = torch.utils.dlpack.to_dlpack


def _to_dlpack(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.__dlpack__()  # which says why not
    return _plain_to_dlpack(tensor)


put_in_place_of("to_dlpack", _to_dlpack, torch, torch.utils.dlpack)
OVERRIDES[torch.Tensor.__dlpack_device__] = lambda x: x.__dlpack__()


def _refusing_method(name: str) -> Callable[..., Any]:
    base = getattr(torch.Tensor, name)
    refused = make_refusal(name, MEMORY, Fix(f"x.to_local().{name}(...)", "on this rank's piece"))

    @functools.wraps(base)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        return (refused if _global_view() else base)(self, *args, **kwargs)

    return method


DTensor.as_subclass = _refusing_method("as_subclass")  # type: ignore[method-assign]
_refuse_set = _refusing_method("set_")


@functools.wraps(torch.Tensor.set_)
def _set_memory(self: DTensor, source: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(source, DTensor) and not args and not kwargs and _global_view():
        self.data = source.detach()
        return self
    return _refuse_set(self, *(() if source is None else (source,)), *args, **kwargs)


DTensor.set_ = _set_memory  # type: ignore[method-assign, assignment]


def refuse_piece(name: str, x: Any) -> None:
    """Raise if `x`, of whose memory `name` makes a plain tensor, is a DTensor that is more."""
    if isinstance(x, DTensor) and _global_view() and not x._spec.is_whole:
        raise LayoutError(
            f"{name} of a DTensor of which this rank holds a piece",
            place=user_line(),
            operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
            reason="it makes a plain tensor of this rank's memory, and x is more than that",
            fixes=(
                Fix("x.detach()", "another tensor of the same values"),
                Fix("x.full_tensor()", "the whole value, plain"),
                Fix("x.to_local()", "this rank's piece, plain"),
            ),
        )


# A class takes its arguments itself. `nn.Parameter` and other classes of tensors come here, too.
def _refuse_piece_operands(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    for value in args:
        refuse_piece(f"{type(self).__name__}(x)", value)


torch.Tensor.__init__ = _refuse_piece_operands  # type: ignore[method-assign,assignment]


# -- TorchScript -----------------------------------------------------------------------------------


def _of_whole_operands(kind: type) -> None:
    """Let a function or method of TorchScript run as an op without a rule, on whole operands."""
    base = kind.__call__  # type: ignore[operator]

    @functools.wraps(base)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _global_view() and (holds_dtensor(args) or holds_dtensor(kwargs)):
            # Not by way of `dispatch`, which remembers each function: here they come and go.
            form = Form(self, f"TorchScript {self.name}", None)
            return run_gathered(functools.partial(base, self), args, kwargs, form)
        return base(self, *args, **kwargs)

    kind.__call__ = __call__  # type: ignore[method-assign, operator]


_of_whole_operands(torch.jit.ScriptFunction)
_of_whole_operands(torch._C.ScriptMethod)


def _refuse_script(what: str) -> LayoutError:
    return LayoutError(
        f"{what} cannot take a DTensor",
        place=user_line(),
        reason="TorchScript would keep this rank's piece as if that were the whole tensor",
        fixes=(
            Fix("pt.compile(step)", "compiles a program of DTensors"),
            Fix("x.full_tensor()", "the whole value, for TorchScript"),
        ),
    )


def _module_of_dtensors(f: Any) -> bool:
    return isinstance(f, torch.nn.Module) and holds_dtensor([*f.parameters(), *f.buffers()])


def _trace_or_refuse(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    if holds_dtensor(example_inputs) or holds_dtensor(kwargs) or _module_of_dtensors(func):
        raise _refuse_script("torch.jit.trace")
    return _plain_trace(func, example_inputs, *args, **kwargs)


def _create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
    if _module_of_dtensors(nn_module):
        raise _refuse_script(f"torch.jit of {type(nn_module).__name__}")
    return _plain_script_module(nn_module, *args, **kwargs)


_plain_trace = put_in_place_of("trace", _trace_or_refuse, torch.jit)
_plain_script_module = put_in_place_of(
    "create_script_module", _create_script_module, torch.jit._recursive
)


# torch.autograd.forward_ad ends here, as jvp does.
def _make_dual(*_: Any, **__: Any) -> Any:
    raise refuse_transform("jvp")


OVERRIDES[torch._VF._make_dual] = _make_dual  # type: ignore[attr-defined]


# -- collectives -----------------------------------------------------------------------------------


def operands_of_collective(name: str, given: Any) -> Any:
    """What a collective of torch.distributed gets for what it was given.

    What every rank holds whole is, on each, the plain tensor of the same memory.

    Raises:
        LayoutError: a rank holds a part of a DTensor, which would be taken for its value.
    """
    if not holds_dtensor(given):
        return given
    parted = [t for t in _collect_dtensors(given) if not t._spec.is_whole]
    if not parted:
        return given if "object" in name else _as_plain(given)
    raise LayoutError(
        f"torch.distributed: {name} cannot take a DTensor of which a rank holds a part",
        place=user_line(),
        operands=tuple(f"DTensor  {t._spec.layout.brief()}" for t in parted)[:2],
        reason="it would exchange the ranks' pieces as if each were the whole value",
        fixes=(
            Fix("x.redistribute(placements=[...])", "reduces or gathers as the layouts say"),
            Fix("x.full_tensor()", "the whole value, on every rank"),
            Fix(f"{name}(x.to_local(), ...)", "if it is meant for the pieces"),
        ),
    )


def _as_plain(value: Any) -> Any:
    if isinstance(value, DTensor):
        with Local():
            return value.view_as(value)
    if isinstance(value, dict):
        return {key: _as_plain(v) for key, v in value.items()}
    return type(value)(map(_as_plain, value)) if isinstance(value, (list, tuple)) else value


def _collect_dtensors(value: Any) -> list[DTensor]:
    if isinstance(value, DTensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [t for v in parts if holds_dtensor(v) for t in _collect_dtensors(v)]


inspect_collectives(operands_of_collective)
