"""How much memory does a kernel take for itself while it runs?

What an operator returns is in the graph. What it takes besides, and gives back before it returns,
is not, and nothing in torch tells it: here is what was measured of those that take much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from partita.comm import GroupWire, Wire
from partita.comm.compiled import all_gather
from partita.comm.gloo import SMALL

__all__ = ["staging", "workspace"]

_functional, _aten = torch.ops._c10d_functional, torch.ops.aten

Groups = dict[str, tuple[Wire, tuple[str, ...]]]


def workspace(target: Any, args: Sequence[Any], made: Any) -> int:
    """Bytes that a call of `target` takes and gives back; 0 where none are known of.

    Args:
        args: what it is called with, tensors without memory among it.
        made: what it gives.
    """
    takes = _TAKES.get(target)
    return 0 if takes is None else takes(args, made)


_TAKES: dict[Any, Callable[[Sequence[Any], Any], int]] = {}


# -- collectives -----------------------------------------------------------------------------------


def staging(target: Any, args: Sequence[Any], made: Any, groups: Groups, compiled: bool) -> int:
    """Bytes in which a collective of the program's groups keeps what is under way.

    Only of Gloo: NCCL works in the memory that it is given, and ranks of one process have none.

    Args:
        compiled: it is called as torch's functional collective, not through a wire.
    """
    wire, axes = groups.get(args[-1], (None, ())) if args else (None, ())
    if not (isinstance(wire, GroupWire) and wire.on_gloo):
        return 0
    x, n = args[0], wire.mesh_size(axes)
    if target is _functional.all_gather_into_tensor.default or (
        target is all_gather and not compiled
    ):
        return made.nbytes  # type: ignore[no-any-return]  # Gloo's ring ends in one flat buffer
    if target is _functional.reduce_scatter_tensor.default:
        return x.nbytes  # type: ignore[no-any-return]  # the shares, or the all-reduce of a copy
    if target is _functional.all_reduce.default and not compiled and args[1] == "sum":
        if x.nbytes <= SMALL:
            return n * x.nbytes  # type: ignore[no-any-return]
        if n > 2:
            piece = -(-x.numel() // n) * x.element_size()
            padded = n * piece if x.numel() % n else 0
            return piece + n * piece + padded  # type: ignore[no-any-return]
    return 0
