"""Autocast: the dtypes in which a decomposition, or a local kernel of ours, runs under it.

Torch casts the operands of the ops on its lists and runs what is inside without autocast. An op
that is written here as other ops has to be treated as the op that it stands for, not as those: its
operands are cast first, and autocast is off within. Which ops are listed for a device the
dispatcher is asked; what their list asks for is in the tables below, all else is in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from partita.comm import read_autocast_state
from partita.comm.device import Device

from .function_facts import Cast, facts_of_function

__all__ = ["Cast", "as_autocast_casts", "cast_of", "without_any_autocast", "without_autocast"]


_INSIDE = {"cross_entropy_loss": "nll_loss", "nll_loss_nd": "nll_loss"}
"""Composites whose work is done by an op on the lists, listed themselves or not."""


@cache
def _list_aten_overloads() -> dict[str, list[str]]:
    """The overloads of each of torch's own operators; not those that name dimensions."""
    found: dict[str, list[str]] = {}
    # Private: torch says nowhere else which ops its lists hold for a device.
    for name in torch._C._dispatch_get_all_op_names():
        space, _, op = name.partition("::")
        base, _, overload = op.partition(".")
        if space == "aten" and "name" not in overload:
            found.setdefault(base, []).append(name)
    return found


@cache
def cast_of(op: str, device_type: str) -> Cast | None:
    """What autocast does to an op's operands on a device; None where it acts on what is inside."""
    overloads = _list_aten_overloads().get(op)
    if overloads is None:
        return None
    device = Device(device_type)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    op = _INSIDE.get(op, op)
    key = f"Autocast{device_type.upper()}"
    listed = any(has_kernel(o, key) for o in _list_aten_overloads()[op])
    is_refused = op == "binary_cross_entropy" and device.autocast_refuses_probabilities
    if not listed or is_refused:
        composite = any(has_kernel(o, "CompositeImplicitAutograd") for o in overloads)
        return None if composite else Cast.NONE
    cast = facts_of_function(op).autocast
    is_told = cast is Cast.FLOAT32_UNLESS_TOLD and device.autocast_heeds_dtype
    return cast if is_told or cast in (Cast.LOWER, Cast.WIDEST) else Cast.FLOAT32


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Within, autocast does nothing on a device where it is on."""
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, True)


@contextmanager
def _without_all_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device_type, enabled, _ in read_autocast_state():
            if enabled:
                stack.enter_context(without_autocast(device_type))
        yield


def without_any_autocast() -> AbstractContextManager[None]:
    """Within, autocast does nothing on any device: what runs has been cast as it was asked to."""
    return _without_all_autocast() if torch._C._is_any_autocast_enabled() else nullcontext()


def as_autocast_casts(run: Callable[..., Any], op: str, inplace: bool) -> Callable[..., Any]:
    """`run`, which stands for `op`, in the dtypes that `op` has under autocast.

    Args:
        inplace: it stands for the op in place, which is on no list.
    """

    def cast_and_run(*args: Any, **kwargs: Any) -> Any:
        # Private, but one question for all devices: nothing is looked for where there is none.
        if not torch._C._is_any_autocast_enabled():
            return run(*args, **kwargs)
        device = next(t.device.type for t in _collect_tensors((args, list(kwargs.values()))))
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        cast = cast_of(op, device) if on else None
        if cast is None:
            return run(*args, **kwargs)
        dtype = None if inplace else _choose_cast_dtype(cast, args, kwargs, device)
        if dtype is not None:
            args = tuple(_cast_floating(a, dtype) for a in args)
            kwargs = {name: _cast_floating(value, dtype) for name, value in kwargs.items()}
        with without_autocast(device):
            return run(*args, **kwargs)

    return cast_and_run if op in _list_aten_overloads() else run


def _choose_cast_dtype(
    cast: Cast, args: Any, kwargs: dict[str, Any], device_type: str
) -> torch.dtype | None:
    """The dtype that floating operands are cast to; None to leave them."""
    if cast is Cast.FLOAT32:
        return torch.float32
    if cast is Cast.FLOAT32_UNLESS_TOLD:
        has_dtype = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
        return None if has_dtype else torch.float32
    if cast is Cast.LOWER:
        return torch.get_autocast_dtype(device_type)
    if cast is Cast.WIDEST:
        wide = any(
            t.dtype == torch.float32 for t in _collect_tensors((args, list(kwargs.values())))
        )
        return torch.float32 if wide else None
    return None


def _collect_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return (
        [t for v in value for t in _collect_tensors(v)] if isinstance(value, (list, tuple)) else []
    )


def _cast_floating(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if eligible and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return type(value)(_cast_floating(v, dtype) for v in value)
    return value
