"""Copies of DTensors: `copy_`, `copy.deepcopy`, and pickling of this rank's piece."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import describe_saved_mesh, find_saved_wire, user_line
from partita.comm.device import is_seen_by_processes
from partita.layout import Fix, Layout, LayoutError

from .aliasing import write_through_copy
from .autograd import moved
from .dtensor import DTensor, tagged
from .gradient_overrides import gradient_of
from .mixed_operands import admit, alias_as_invariant, give_history
from .padded_storage import copy_with_room, find_padded, with_room
from .spec import Spec, spec_for_write_into, spec_of
from .tensor_overrides import implements
from .tensor_state import OURS

__all__: list[str] = []

T = torch.Tensor


@implements(T.copy_)
def _copy_into(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """`x.copy_(src)`: src is moved into x's layout."""
    if not isinstance(x, DTensor):
        wire = src._spec.wire  # type: ignore[attr-defined]
        _copy_into(alias_as_invariant(x, wire), src, non_blocking)
        give_history(x, wire)
        return x
    spec = x._spec
    if spec.is_copy:
        return write_through_copy(T.copy_, x, src, non_blocking)
    if not isinstance(src, DTensor):
        admit(src, spec.wire, "copy_")
        src = tagged(src.view_as(src), spec_of(Layout(tuple(src.shape)), spec.wire))
    fitting = _fit_broadcast_spec(src, spec)
    if src._spec is not fitting:
        fitting = spec_for_write_into(fitting)
    with Local():
        local = src if src._spec is fitting else moved(src, src._spec, fitting, "copy_", "implicit")
        torch._C.TensorBase.copy_(x, local, non_blocking)
    return x


def _fit_broadcast_spec(src: DTensor, spec: Spec) -> Spec:
    """The spec in which `src`, which is broadcast, is copied into a tensor of `spec`.

    Raises:
        RuntimeError: it cannot be broadcast.
    """
    shape, wanted = tuple(src._spec.shape), spec.layout
    if shape == wanted.shape:
        return spec
    if torch.broadcast_shapes(shape, wanted.shape) != spec.shape:
        raise RuntimeError(f"copy_ of a tensor of {shape} into one of {tuple(wanted.shape)}")
    last = zip(shape, wanted.shape[-len(shape) :], wanted.shards[-len(shape) :], strict=True)
    shards = tuple(axes if n == m else () for n, m, axes in last) if shape else ()
    return spec_of(Layout(shape, shards, wanted.partial, wanted.invariant), spec.wire)


@implements(T.__deepcopy__)
def _deepcopy_dtensor(x: DTensor, memo: dict[int, Any]) -> DTensor:
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    with Local(), torch.no_grad():
        if not x.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        new = tagged(_clone_piece(x.detach(), x._spec), x._spec)
        new.requires_grad_(x.requires_grad)
        if x.grad is not None:
            grad = gradient_of(x)
            assert grad is not None
            new.grad = tagged(T.clone(grad), grad._spec)
    for name, value in x.__dict__.items():
        if name not in OURS:
            new.__dict__[name] = copy.deepcopy(value, memo)
    memo[id(x)] = new
    return new


def _clone_piece(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of a rank's piece, with room for padding where the piece has it."""
    if find_padded(local, spec.padded_shape) is not None:
        return copy_with_room(local, spec)
    return local.clone()


def _rebuild(
    local: torch.Tensor,
    mesh: tuple[Any, ...],
    layout: str,
    at: tuple[int, ...],
    names: dict[str, Any],
) -> DTensor:
    """Make the DTensor that was pickled. At module level, so that `weights_only=True` can allow it.

    Raises:
        LayoutError: this rank has no such mesh, or `local` is another rank's piece.
    """
    spec = spec_of(Layout.parse(layout), find_saved_wire(mesh))
    where = spec.wire.mesh
    elsewhere = [
        a
        for a in where.names
        if at[where.index(a)] != spec.wire.at[where.index(a)]
        and (spec.layout.placement(a).is_shard() or spec.layout.placement(a).is_partial())
    ]
    if elsewhere:
        raise LayoutError(
            f"the piece of another rank of axis {elsewhere[0]} was loaded",
            place=user_line(),
            operands=(
                f"{spec.layout.brief()} on {where}, saved at {at}, loaded at {spec.wire.at}",
            ),
            reason="torch.save writes the piece of one rank, and only that rank can take it back",
            fixes=(
                Fix("torch.save(..., f'{rank}.pt')", "a file for each rank"),
                Fix("pt.save(state, path)", "one folder for all, on any mesh"),
                Fix("torch.save(x.full_tensor(), path)", "the whole value"),
            ),
        )
    mine = local.detach()
    if not is_seen_by_processes(mine.untyped_storage()):
        mine = with_room(mine, spec)
    out = tagged(mine, spec).requires_grad_(local.requires_grad)
    out.__dict__.update(names)
    return out


torch.serialization.add_safe_globals([_rebuild])


@implements(T.__reduce_ex__)
def _reduce_dtensor(x: DTensor, protocol: Any) -> Any:
    with Local():
        local = x.detach().requires_grad_(x.requires_grad)
    names = {k: v for k, v in x.__dict__.items() if k not in OURS}
    spec = x._spec
    return _rebuild, (local, describe_saved_mesh(spec.wire), str(spec.layout), spec.wire.at, names)
