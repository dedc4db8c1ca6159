"""How does a user run a kernel, or an `autograd.Function`, of their own on the shards?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.comm import Wire, user_line, wire_of
from partita.layout import Fix, LayoutError, Placement

from .arguments import one_wire
from .dtensor import DTensor
from .plan import tensors_of
from .spec import Spec, laid_out

__all__ = ["local_map"]

Placements = Sequence[Placement] | None


def local_map(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """A function of DTensors that runs `func` on their local tensors. As torch's `local_map`.

    Args:
        out_placements: the placements of the result (one list), or a tuple of lists for several
            results; None for a result that is no tensor.
        in_placements: for each positional argument the placements that it must have; None: any,
            or no tensor.
        in_grad_placements: for each argument how the gradient that `func` computes is placed;
            by default the dual of the argument's placement.
        redistribute_inputs: move arguments that have other placements, instead of raising.

    Raises:
        LayoutError: an argument has other placements than `in_placements` says.
    """

    @functools.wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for a in args for t in tensors_of(a)]
        if device_mesh is not None:
            wire = wire_of(device_mesh)
        else:
            wire = one_wire("local_map", tensors)
        ins = []
        for i, arg in enumerate(args):
            if not isinstance(arg, DTensor):
                ins.append(arg)
                continue
            wanted = in_placements[i] if in_placements is not None else None
            if wanted is not None and tuple(wanted) != arg.placements:
                if not redistribute_inputs:
                    raise LayoutError(
                        f"local_map: argument {i} of {getattr(func, '__name__', func)} has other "
                        f"placements than in_placements says",
                        place=user_line(),
                        operands=(
                            f"has     {', '.join(map(str, arg.placements))}",
                            f"wanted  {', '.join(map(str, wanted))}",
                        ),
                        fixes=(
                            Fix("local_map(..., redistribute_inputs=True)"),
                            Fix(f"x.redistribute(placements={list(wanted)})"),
                        ),
                    )
                arg = arg.redistribute(placements=wanted)
            grads = in_grad_placements[i] if in_grad_placements is not None else None
            # By default the dual: nothing is asked, since `func` is said to compute on pieces.
            grads = [p.dual() for p in arg.placements] if grads is None else grads
            ins.append(arg.to_local(grad_placements=grads))
        out = func(*ins, **kwargs)
        even = all(_is_even(t._spec) for t in tensors if isinstance(t, DTensor))
        if isinstance(out, (tuple, list)):
            made = [_typed(o, p, wire, even) for o, p in zip(out, out_placements, strict=True)]
            return type(out)(made)
        return _typed(out, out_placements, wire, even)

    return run


def _is_even(spec: Spec) -> bool:
    """Does every rank hold equally much?"""
    mesh = spec.wire.mesh
    return all(
        size % math.prod([mesh.size(a) for a in axes]) == 0
        for size, axes in zip(spec.layout.shape, spec.layout.shards, strict=True)
    )


def _typed(out: Any, placements: Placements, wire: Wire, even: bool) -> Any:
    """A result of `func` as a DTensor. Where pieces may be uneven the ranks tell their sizes."""
    if placements is None or not isinstance(out, torch.Tensor):
        return out
    shape = None
    if not even and any(p.is_shard() for p in placements):
        layout = laid_out(wire, out.shape, placements).layout
        told = dict(zip(wire.mesh.coordinates(), wire.gather_ints(tuple(out.shape)), strict=True))
        shape = [
            sum(
                sizes[dim]
                for at, sizes in told.items()
                if all(i == 0 or a in axes for a, i in zip(wire.mesh.names, at, strict=True))
            )
            for dim, axes in enumerate(layout.shards)
        ]
    duals = [p.dual() for p in placements] if out.requires_grad else None
    return DTensor.from_local(out, wire.device_mesh, placements, shape=shape, grad_placements=duals)
