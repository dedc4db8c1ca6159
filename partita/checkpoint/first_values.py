"""First values of tensors that no file has: buffers that are not persistent, missing parameters.

They are made by the init function of the module that holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.parallel.parameters import HeldParameter, allocate_tensor, find_parameters_and_buffers
from partita.tensor.tensor_state import count_writes, was_written_since

__all__ = ["initialize_missing"]


def initialize_missing(model: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> None:
    """Allocate and initialize what of a loaded model is still on the meta device.

    By the init function of the module that holds it (see `load_safetensors`). Other tensors of that
    module keep their loaded values.

    Raises:
        LayoutError: naming the tensors that still have no value.
    """
    rest = [
        held for kind in find_parameters_and_buffers(model) for held in kind if held.tensor.is_meta
    ]
    for held in rest:
        allocate_tensor(held, by="load")
    writes = {id(held.tensor): count_writes(held.tensor) for held in rest}
    above = _ancestors_of_modules(model)
    for module in dict.fromkeys(module for held in rest for module, _ in held.homes):
        _initialize_module(module, above[module], init_fn, writes)
    left = [held for held in rest if not _was_written(held, writes)]
    if left:
        raise LayoutError(
            "load_safetensors: no file has these, and nothing gave them a value",
            place=user_line(),
            operands=tuple(held.name for held in left),
            reason="they are made where the model is made, which was on the meta device",
            fixes=(
                Fix("load_safetensors(..., init_fn=...)", "called with the module that has them"),
                Fix("def reset_parameters(self): ...", "in that module"),
            ),
        )


def _initialize_module(
    module: nn.Module, above: list[nn.Module], init_fn: Any, rest: dict[int, int]
) -> None:
    """Run one module's initializer; its loaded tensors keep their values."""
    initialize = init_fn
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if initialize is None and callable(own):
            initialize = _called_without(own)
    for outer in above:  # as in models of transformers
        own = getattr(outer, "_init_weights", None)
        if initialize is None and callable(own):
            initialize = own
    if initialize is None:
        return
    held = [
        t
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if id(t) not in rest and not t.is_meta
    ]
    with Local(), torch.no_grad():
        kept = [t.detach().clone() for t in held]
    initialize(module)
    with Local(), torch.no_grad():
        for t, value in zip(held, kept, strict=True):
            t.detach().copy_(value)


def _called_without(own: Callable[[], Any]) -> Callable[[nn.Module], Any]:
    return lambda module: own()


def _ancestors_of_modules(model: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """For each module those around it, the innermost first."""
    found: dict[nn.Module, list[nn.Module]] = {model: []}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        for child in module.children():
            if child not in found:
                found[child] = [module, *found[module]]
                waiting.append(child)
    return found


def _was_written(held: HeldParameter, writes: dict[int, int]) -> bool:
    module, key = held.homes[0]
    t = getattr(module, key)
    if t is not held.tensor:  # assigned anew
        return True
    return was_written_since(t, writes[id(t)]) or not t.numel()
