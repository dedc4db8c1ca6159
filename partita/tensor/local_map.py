"""local_map: functions of local tensors, called with DTensors. A kernel of one's own is one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, LayoutError, Placement, own_placement

from .arguments import find_wire
from .dtensor import DTensor, tagged
from .spec import Spec, spec_on_wire
from .uneven_pieces import tie_to_operands

__all__ = ["local_map"]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function of DTensors that runs `func` on their local tensors. As torch's `local_map`.

    Arguments and results may be nested in lists, tuples and dicts; placements speak of the tensors
    and values in them, in order. Without `func`, a decorator. Without a DTensor among the arguments
    and without `device_mesh`, `func` runs as it is.

    Args:
        out_placements: the placements of the result (one list), or a tuple of lists for several
            results; None for a result that is no tensor.
        in_placements: for each positional argument the placements that it must have; None: any,
            or no tensor. Of keyword arguments any.
        in_grad_placements: for each argument how the gradient that `func` computes is placed;
            by default the dual of the argument's placement.
        redistribute_inputs: move arguments that have other placements, instead of raising.

    Raises:
        LayoutError: an argument has other placements than `in_placements` says; placements for
            more or fewer arguments or results than there are.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    name = getattr(func, "__name__", str(func))

    @functools.wraps(func)
    def run_local_map(*args: Any, **kwargs: Any) -> Any:
        flat, shape_of_args = pytree.tree_flatten(args)
        flat_kwargs, shape_of_kwargs = pytree.tree_flatten(kwargs)
        tensors = [t for t in (*flat, *flat_kwargs) if isinstance(t, DTensor)]
        if device_mesh is not None:
            wire = wire_of(device_mesh)
        elif tensors:
            wire = find_wire("local_map", tensors)
        else:
            return func(*args, **kwargs)
        wanted = _match_placements(in_placements, flat, "in_placements", name)
        grads = _match_placements(in_grad_placements, flat, "in_grad_placements", name)
        for i, x in enumerate(flat):
            if isinstance(x, DTensor):
                x = _require_placements(x, wanted[i], i, name, redistribute_inputs)
                flat[i] = _convert_to_local(x, grads[i])
        flat_kwargs = [
            _convert_to_local(x, None) if isinstance(x, DTensor) else x for x in flat_kwargs
        ]
        lacks_elements = torch.is_grad_enabled() and not all(t._piece().numel() for t in tensors)
        out = func(
            *pytree.tree_unflatten(flat, shape_of_args),
            **pytree.tree_unflatten(flat_kwargs, shape_of_kwargs),
        )
        results, shape_of_results = pytree.tree_flatten(out)
        if lacks_elements:
            results = _tie_lost_operands(results, [*flat, *flat_kwargs])
        given = _match_placements(_list_per_result(out_placements), results, "out_placements", name)
        even = all(_is_even(t._spec) for t in tensors)
        wrapped = [_wrap_result(o, p, wire, even) for o, p in zip(results, given, strict=True)]
        return pytree.tree_unflatten(wrapped, shape_of_results)

    return run_local_map


def _tie_lost_operands(results: list[Any], locals_: list[Any]) -> list[Any]:
    """The results of a rank with an empty piece, with all operands in their autograd graph: torch's
    kernels may have left some out that are in it on other ranks, and an `autograd.Function` may
    have no gradient for one."""
    operands = [t for t in locals_ if isinstance(t, torch.Tensor) and t.requires_grad]
    return [
        tie_to_operands(r, operands) if isinstance(r, torch.Tensor) and r.is_floating_point() else r
        for r in results
    ]


def _list_per_result(placements: Any) -> Any:
    """`out_placements` as a tuple with one entry for each result."""
    if placements is None or isinstance(own_placement(placements), Placement):
        return (placements,)
    several = all(p is None or isinstance(p, (list, tuple)) for p in placements)
    return placements if several else (placements,)


def _match_placements(given: Any, values: list[Any], what: str, name: str) -> Sequence[Placements]:
    """The placements of each value: `given`, or None for each. Raises LayoutError if their number
    is not that of the values."""
    if given is None:
        return [None] * len(values)
    if len(given) != len(values):
        raise LayoutError(
            f"local_map: {what} has {len(given)} entries, and {name} {len(values)} "
            + ("results" if what == "out_placements" else "arguments"),
            place=user_line(),
            reason="one entry for each tensor or value, also in lists and dicts; None for a value",
            fixes=(Fix(f"{what}=({', '.join(['[...]'] * len(values))},)"),),
        )
    return given  # type: ignore[no-any-return]


def _require_placements(x: DTensor, wanted: Placements, i: int, name: str, move: bool) -> DTensor:
    if wanted is None:
        return x
    wanted_spec = spec_on_wire(x._spec.wire, x._spec.layout.shape, wanted)
    if wanted_spec.layout == x._spec.layout:
        return x
    if not move:
        raise LayoutError(
            f"local_map: argument {i} of {name} has other placements than in_placements says",
            place=user_line(),
            operands=(
                f"has     {', '.join(map(str, x.placements))}",
                f"wanted  {', '.join(map(str, wanted_spec.placements))}",
            ),
            fixes=(
                Fix("local_map(..., redistribute_inputs=True)"),
                Fix(f"x.redistribute(placements={list(wanted_spec.placements)})"),
            ),
        )
    return x.redistribute(placements=wanted)


def _convert_to_local(x: DTensor, grads: Placements) -> torch.Tensor:
    if grads is None:  # the dual: nothing is asked, since `func` is said to compute on pieces
        return x._piece()
    return x.to_local(grad_placements=grads)


def _is_even(spec: Spec) -> bool:
    """Does every rank hold equally much?"""
    mesh = spec.wire.mesh
    return all(
        size % math.prod([mesh.size(a) for a in axes]) == 0
        for size, axes in zip(spec.layout.shape, spec.layout.shards, strict=True)
    )


def _wrap_result(out: Any, placements: Placements, wire: Wire, even: bool) -> Any:
    """A result of `func` as a DTensor. Where pieces may be uneven the ranks exchange their
    sizes."""
    if placements is None or not isinstance(out, torch.Tensor):
        return out
    probe = spec_on_wire(wire, out.shape, placements)
    shape = None
    if not even and probe.is_sharded:
        sizes_by_coordinate = dict(
            zip(wire.mesh.coordinates(), wire.gather_ints(tuple(out.shape)), strict=True)
        )
        shape = [
            sum(
                sizes[dim]
                for at, sizes in sizes_by_coordinate.items()
                if all(i == 0 or a in axes for a, i in zip(wire.mesh.names, at, strict=True))
            )
            for dim, axes in enumerate(probe.layout.shards)
        ]
    spec = DTensor._spec_of_local(out, wire.device_mesh, placements, shape)
    with Local():
        return tagged(out.view_as(out), spec)
