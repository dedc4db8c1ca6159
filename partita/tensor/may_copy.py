"""Ops that copy only where they must, `contiguous`, `reshape` and their kin: as one device does.

A piece of one row is contiguous whatever the whole is, so a rank could hand on the memory of its
operand where others, and one device, copy; and where a layout had to change, a copy is not always
of what would be a view. One device's strides decide, on all ranks: what would be copied there has
memory of its own here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

# Not public: what is asked of tensors without memory is no part of a step that is captured.
from torch.utils._python_dispatch import _disable_current_modes

from .dtensor import DTensor, tagged
from .one_device import laid_out_alike, without_memory
from .spec import Spec

__all__ = ["copy_as_on_one_device", "may_be_denser_than_whole", "wrap_copying_as_on_one_device"]

T = torch.Tensor


def may_be_denser_than_whole(spec: Spec) -> bool:
    """May a piece of `spec` be in one stretch of memory where the whole is not? It has a dimension
    of one element, or none, that has more in the whole."""
    return any(n < 2 <= whole for n, whole in zip(spec.local_shape, spec.shape, strict=True))


def copy_as_on_one_device(
    out: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], moved: bool
) -> tuple[Any, bool]:
    """The result of an op that may copy, with memory of its own where one device copies; and
    whether it has such where one device views.

    Args:
        moved: the operand came from another layout, or is itself a copy of what would be a view.
    """
    source, given = args[0], (*args[1:], *kwargs.values())
    modes = [m for m in given if m is torch.channels_last or m is torch.channels_last_3d]
    shared = _share_memory(out, source)
    if not (moved or modes or shared):  # a piece may be denser than the whole, and not less
        return out, False
    if out.device != source.device:
        return out, False
    with _disable_current_modes(), Local():
        alike = laid_out_alike(source)
        asked: Any = (tuple(args[1:]), kwargs)
        of_type = func is T.to or func is T.type
        others, named = _on_meta(asked, out) if of_type else without_memory(asked)
        there = func(alike, *others, **named)
        if _share_memory(there, alike):
            return out, moved or not shared
    if shared:
        with Local():
            mode = modes[0] if modes else torch.contiguous_format
            copy = T.clone(out, memory_format=mode)
        return (tagged(copy, out._spec) if isinstance(out, DTensor) else copy), False
    return out, False


def _on_meta(given: Any, out: torch.Tensor) -> Any:
    """Arguments of a call that gave `out`, for a tensor without memory: it stays such."""
    if isinstance(given, dict):
        return {key: _on_meta(v, out) for key, v in given.items()}
    if type(given) is tuple:
        return tuple(_on_meta(v, out) for v in given)
    if isinstance(given, torch.device) or type(given) is int:
        return torch.device("meta")
    if isinstance(given, str):  # a device, or a type of tensors
        return out.dtype if given.startswith("torch.") else torch.device("meta")
    return without_memory(given)


def wrap_copying_as_on_one_device(
    run: Callable[..., Any], func: Callable[..., Any], spec: Spec
) -> Callable[..., Any]:
    """`run`, an op that may copy and moves nothing, on a piece that `may_be_denser_than_whole`."""
    dense = torch.empty(spec.local_shape, device="meta").stride()
    held = spec.local_shape.numel()

    def run_and_restride(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = run(x, *args, **kwargs)
        in_order = x.stride() == dense and x.untyped_storage().nbytes() == held * x.element_size()
        if in_order and "memory_format" not in kwargs and (run is not T.contiguous or not args):
            return out
        return copy_as_on_one_device(out, func, (x, *args), kwargs, False)[0]

    return run_and_restride


def _share_memory(out: torch.Tensor, source: torch.Tensor) -> bool:
    with Local():
        return out.untyped_storage()._cdata == source.untyped_storage()._cdata
