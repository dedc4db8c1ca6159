"""Plain tensors beside DTensors: when one may be an operand, and what happens when one is written.

A plain operand that needs no gradient is taken as a whole value: an `arange`, a mask made in
forward. If it is in truth each rank's own data, that would be a silent fault, so the ranks compare
a checksum the first time that each place of the user's program does this (each time under
`check_ranks()`).

A plain tensor that is written with DTensors, `torch.zeros(n).scatter_add_(0, index, x)`, is a whole
value too, and its memory can take a whole result: it is written through an alias that is typed as
just that, Invariant on every axis. So each alias of it reads what one device's would. Without a
gradient the user's tensor stays plain. With one it becomes a DTensor, as does what it is a view of:
its history then speaks of DTensors, and what it meets next must know how its gradient lies. Whoever
else holds it loses nothing: an Invariant value and its gradient are, on each rank, those of one
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import BackwardCFunction

from partita.comm import TraceWire, Wire, call_site, is_agreed, remember_agreed, user_line
from partita.layout import Fix, Layout, LayoutError

from .agreement import make_no_strides_error
from .arguments import Path, all_tensors, find_wire, get_at_path, replace_at_paths
from .checksum import checksum
from .dtensor import PLAIN, DTensor, tagged
from .spec import Spec, spec_of

__all__ = ["admit", "alias_as_invariant", "give_history", "refuse_transform", "write_into_plain"]


def refuse_transform(name: str) -> LayoutError:
    """What to raise where a function transform would get hold of a DTensor."""
    return LayoutError(
        f"torch.func: {name} cannot take a DTensor",
        place=user_line(),
        reason="it would run the function on this rank's piece as if that were the whole tensor",
        fixes=(
            Fix("torch.autograd.grad(f(x), x)", "for gradients: it knows of layouts"),
            Fix("x.full_tensor()", "to transform a function of the whole value"),
            Fix(f"pt.local_map(torch.func.{name}(f), placements)", "if f is meant for the pieces"),
        ),
    )


def admit(
    value: torch.Tensor,
    wire: Wire,
    op: str,
    where: tuple[Any, ...] = (),
    with_gradient: bool = False,
) -> None:
    """Let a plain tensor pass as a whole value, or say why not.

    Args:
        where: which of the op's arguments it is, where an op takes several.
        with_gradient: the caller sees to it that the gradient comes back whole; then it may require
            grad, unless a parameter or a DTensor is in its history.

    Raises:
        LayoutError: it is sparse; it requires grad (its gradient would have no layout); it differs
            between ranks; `strict()` is on; or a torch.func transform is at work on it.
    """
    if is_functorch_wrapped_tensor(value):
        raise refuse_transform("grad" if value.requires_grad else "vmap")
    graded = value.requires_grad and torch.is_grad_enabled()
    if graded and not (with_gradient and _is_made_of_leaves(value)):
        raise LayoutError(
            f"{op}: a plain tensor that requires grad stands next to a DTensor",
            place=user_line(),
            operands=(
                f"plain tensor of shape {tuple(value.shape)}",
                f"DTensor on mesh {wire.mesh}",
            ),
            reason="its gradient would have no layout, and ranks would go apart unseen",
            fixes=(
                Fix("pt.distribute_tensor(t, mesh, placements)", "one copy from rank 0"),
                Fix("pt.DTensor.from_local(t, mesh, placements)", "each rank's own piece"),
                Fix("t.detach()", "if no gradient is wanted"),
            ),
        )
    if value.layout is not torch.strided:
        raise make_no_strides_error(op, value)
    scope = wire.scope
    if scope.strict:
        raise LayoutError(
            f"{op}: a plain tensor stands next to a DTensor, which strict() refuses",
            place=user_line(),
            operands=(
                f"plain tensor of shape {tuple(value.shape)}",
                f"DTensor on mesh {wire.mesh}",
            ),
            reason="under strict() nothing is taken for equal on all ranks unless it is said to be",
            fixes=(
                Fix("pt.distribute_tensor(t, mesh, placements)"),
                Fix("with pt.strict(False): ...", "around this line"),
            ),
        )
    if wire.mesh.size() == 1:
        return
    if isinstance(wire, TraceWire):  # there is no value yet to compare
        wire.admit(value)
        return
    site = (call_site(), "plain", op, *where)
    if is_agreed(wire, site):
        return
    checksums = wire.gather_ints(checksum(value))
    for rank, theirs in enumerate(checksums):
        if theirs != checksums[0]:
            raise LayoutError(
                f"{op}: a plain tensor next to a DTensor differs between ranks",
                place=user_line(),
                operands=(
                    f"rank 0  {checksums[0][0]} dimensions, checksum {checksums[0][-1]:x}",
                    f"rank {rank}  {theirs[0]} dimensions, checksum {theirs[-1]:x}",
                ),
                reason="a plain tensor is taken as one whole value, the same on every rank",
                fixes=(
                    Fix("pt.DTensor.from_local(t, mesh, placements)", "if it is this rank's piece"),
                    Fix('pt.distribute_batch(..., each_rank_has="piece")', "its rows of a batch"),
                    Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
                ),
            )
    remember_agreed(wire, site)


_MOST_NODES = 1000
WHOLE = "partita: a whole gradient"
"""What the metadata of a node of autograd holds that takes a whole gradient, equal on all ranks."""


def _is_made_of_leaves(value: torch.Tensor) -> bool:
    """Does plain `value` get its gradient from plain leaves alone that are no parameters?

    What a model makes in forward, and is the same on all ranks. A parameter beside DTensors was
    forgotten when the others were spread; and what left the DTensors has a gradient of its own.
    """
    if value.grad_fn is None:
        return not isinstance(value, torch.nn.Parameter)
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if WHOLE in node.metadata:  # type: ignore[operator]
            continue
        leaf = getattr(node, "variable", None)
        if len(seen) > _MOST_NODES or isinstance(node, BackwardCFunction):
            return False
        if leaf is not None and type(leaf) is not torch.Tensor:
            return False
        todo += [n for n, _ in node.next_functions if n is not None]
    return True


# -- plain tensors that are written ----------------------------------------------------------------


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
        LayoutError: one of them is not a whole value (see `admit`).
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
