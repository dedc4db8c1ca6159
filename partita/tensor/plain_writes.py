"""Plain tensors that are written with DTensors: `torch.zeros(n).scatter_add_(0, index, x)`.

A plain tensor that is the same on all ranks is a whole value, and its memory can take a whole
result: it is written through an alias that is typed as just that, Invariant on every axis. So each
alias of it reads what one device's would. Without a gradient the user's tensor stays plain. With
one it becomes a DTensor, as does what it is a view of: its history then speaks of DTensors, and
what it meets next must know how its gradient lies. Whoever else holds it loses nothing: an
Invariant value and its gradient are, on each rank, those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire
from partita.layout import Layout

from .arguments import Path, all_tensors, find_wire, get_at_path, replace_at_paths
from .dtensor import PLAIN, DTensor, tagged
from .mixed_operands import WHOLE, admit
from .spec import Spec, spec_of

__all__ = ["alias_as_invariant", "give_history", "write_into_plain"]


def _make_replicated_spec(x: torch.Tensor, wire: Wire) -> Spec:
    return spec_of(Layout(tuple(x.shape), invariant=wire.mesh.names), wire)


def alias_as_invariant(x: torch.Tensor, wire: Wire) -> DTensor:
    """The memory of plain `x`, which every rank holds alike, as a DTensor that may be written."""
    with Local():
        return tagged(x.view_as(x), _make_replicated_spec(x, wire))


def give_history(x: torch.Tensor, wire: Wire) -> None:
    """Type plain `x`, whose alias was written, where it has got a history from a DTensor by that;
    and what it is a view of, which has got one, too."""
    for t in (x, x._base if x._is_view() else None):
        if t is not None and type(t) in PLAIN and t.requires_grad and not t.is_leaf:
            t.grad_fn.metadata[WHOLE] = True  # type: ignore[union-attr, index]
            tagged(t, _make_replicated_spec(t, wire))


def write_into_plain(
    func: Callable[..., Any], op: str, paths: Sequence[Path], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call `func`, which writes the plain tensors at `paths`.

    Raises:
        LayoutError: one of them is not a whole value (see `plain.admit`).
    """
    wire = find_wire(op, [t for _, t in all_tensors(args, kwargs)])
    written = {path: get_at_path(args, kwargs, path) for path in paths}
    for path, x in written.items():
        admit(x, wire, op, path, with_gradient=True)
    aliases = {path: alias_as_invariant(x, wire) for path, x in written.items()}
    args, kwargs = replace_at_paths(args, kwargs, aliases)
    out = func(*args, **kwargs)
    for path, x in written.items():
        give_history(x, wire)
        if out is aliases[path]:
            out = x
    return out
