"""Do the local tensors that the ranks bring go together as one global tensor?"""

from __future__ import annotations

import torch

from partita.comm import user_line
from partita.layout import Fix, LayoutError

from .plain import checksum
from .spec import Spec

__all__ = ["compare", "does_not_fit"]


def does_not_fit(local: torch.Tensor, spec: Spec, rank: int | None = None) -> LayoutError:
    whose = "this rank" if rank is None else f"rank {rank}"
    return LayoutError(
        f"from_local: {whose}'s piece does not fit the stated shape {tuple(spec.shape)}",
        place=user_line(),
        operands=(
            f"local  {tuple(local.shape)}",
            f"layout {spec.layout.brief()} gives rank {spec.wire.rank} {tuple(spec.local_shape)}",
        ),
        reason="pieces are cut as torch.chunk cuts: equal ones first, then the rest",
        fixes=(Fix("pass shape= the true global shape"), Fix("pass the pieces that it asks for")),
    )


def compare(local: torch.Tensor, spec: Spec, fits: bool) -> None:
    """Compare what the ranks hold, and raise on all of them alike if it does not go together."""
    wire = spec.wire
    told = wire.gather_ints((int(fits), *checksum(local)))
    for rank, (ok, *_) in enumerate(told):
        if not ok:
            raise does_not_fit(local, spec, rank)
    whole = [a for a in wire.mesh.names if spec.layout.placement(a).is_replicate()]
    whole += list(spec.layout.invariant)
    at = {c: told[i] for i, c in enumerate(wire.mesh.coordinates())}
    for axis in whole:
        i = wire.mesh.index(axis)
        for c, mine in at.items():
            first = at[c[:i] + (0,) + c[i + 1 :]]
            if mine != first:
                raise LayoutError(
                    f"from_local: the ranks along {axis} do not hold the same value",
                    place=user_line(),
                    operands=(f"at {c}: checksum {mine[-1]:x}, first rank's {first[-1]:x}",),
                    reason=f"{spec.layout.placement(axis)} says that they do; nothing was changed",
                    fixes=(
                        Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
                        Fix(f"another placement on {axis}"),
                    ),
                )
