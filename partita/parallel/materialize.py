"""Materialization: memory and first values for a model that was made on the meta device.

Each rank makes room for its own pieces, then the model's own init functions run on them. They draw
one device's random numbers (`tensor/random`), so the values are those of the model made on one
device from the same seed, and no rank ever holds more than one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from partita.comm import user_line
from partita.comm.device import HOST
from partita.layout import Fix, LayoutError
from partita.tensor.construct import spread
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.spec import Spec
from partita.tensor.tensor_state import count_writes, was_written_since
from partita.tensor.uneven_pieces import empty_with_room

from .parameters import HeldParameter, find_parameters_and_buffers, replace_tensor

__all__ = ["materialize"]


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Give a model on the meta device memory and values, in place, each rank its own pieces.

        with torch.device("meta"):
            model = GPT(...)
        pt.parallelize(model, mesh, plan)
        torch.manual_seed(0)
        pt.materialize(model)       # as if GPT(...) had been called with this seed

    Args:
        device: where; that of the mesh where None (of a plain tensor: the CPU).
        init_fn: called with the model once it has memory; it writes every parameter and buffer. By
            default the constructors are followed: each module's `reset_parameters`, children
            first, and then the model's `init_weights` where it has one (of several nested ones,
            the outermost).

    Shared parameters stay shared. What is not on the meta device is left alone: of a module that
    holds such a parameter or buffer, in whatever depth, no function is called unless it is
    `init_fn`.

    Returns:
        `model`.

    Raises:
        LayoutError: naming each parameter and buffer that was left without values.
    """
    parameters, buffers = find_parameters_and_buffers(model)
    bare = [held for held in (*parameters, *buffers) if held.tensor.is_meta]
    specs: dict[str, Spec] = {}
    for held in bare:
        t = held.tensor
        if isinstance(t, DTensor):
            specs[held.name] = spec = t._spec
            where = spec.wire.device if device is None else device
            replace_tensor(
                held,
                tagged(empty_with_room(spec, t.dtype, where), spec),
                by="materialize",
            )
        else:
            replace_tensor(held, torch.empty_like(t, device=device or HOST), by="materialize")
    writes = {id(held.tensor): count_writes(held.tensor) for held in bare}
    if not bare:
        return model
    if init_fn is None:
        _run_initializers(model, {id(held.tensor) for held in bare})
    else:
        init_fn(model)
    _refuse_without_values(model, writes)
    _spread_assigned_values(model, specs)
    return model


def _run_initializers(model: nn.Module, bare: set[int]) -> None:
    """Run what the constructors of the modules ran, in their order: children come first."""
    seen: set[nn.Module] = set()

    def is_new(module: nn.Module) -> bool:
        return all(id(t) in bare for t in (*module.parameters(), *module.buffers()))

    def reset_new_parameters(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            reset_new_parameters(child)
        # torch's own modules call it one or the other.
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        if callable(reset) and is_new(module):
            reset()

    def init_new_weights(module: nn.Module) -> None:
        own = getattr(module, "init_weights", None)
        if callable(own) and is_new(module):
            own()
            return
        for child in module.children():
            init_new_weights(child)

    reset_new_parameters(model)
    init_new_weights(model)


def _refuse_without_values(model: nn.Module, writes: dict[int, int]) -> None:
    left: list[HeldParameter] = []
    for held in (found for kind in find_parameters_and_buffers(model) for found in kind):
        t = held.tensor
        count = writes.get(id(t))
        if count is not None and not was_written_since(t, count) and t.numel():
            left.append(held)
    if left:
        raise LayoutError(
            "materialize: nothing gave these a value",
            place=user_line(),
            operands=tuple(held.name for held in left),
            reason="no reset_parameters and no init_weights wrote them, and memory is not zeros",
            fixes=(
                Fix("pt.materialize(model, init_fn=...)", "a function that writes all of them"),
                Fix("def init_weights(self): ...", "in the model, called by its constructor too"),
            ),
        )


def _spread_assigned_values(model: nn.Module, specs: dict[str, Spec]) -> None:
    """Spread over the mesh again what an init function assigned instead of writing into it."""
    for held in (found for kind in find_parameters_and_buffers(model) for found in kind):
        spec = specs.get(held.name)
        if spec is not None and not isinstance(held.tensor, DTensor):
            replace_tensor(held, spread(held.tensor, spec), by="materialize")
