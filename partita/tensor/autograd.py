"""Autograd across layouts: how a value and its gradient cross a change of layout.

`moved` redistributes a local tensor. Where it needs a gradient this is a node of autograd, whose
backward runs the transposed moves in reverse order: the only Python in a backward pass. All else is
plain local autograd, whose gradients are laid out by `Placement.dual` and need no handling.

    forward   Partial  -> Replicate  all-reduce     backward  Partial -> Replicate  all-reduce
    forward   Shard(0) -> Replicate  all-gather     backward  Partial -> Shard(0)   reduce-scatter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, user_line
from partita.layout import Fix, LayoutError, Partial, Placement, Replicate, Shard
from partita.redistribute import Plan, plan

from .op_facts import without_autocast
from .tensor_state import HERE, Function, Spec, current, make_two_meshes_error


def carry_all(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    """Carry local `x` along each move of a plan, without autograd."""
    watcher = HERE.watcher
    if watcher is not None and reason != "gradient":
        return watcher.run_redistribution(
            op, reason, moves, x, lambda: _run_moves(moves, x, wire, op, reason)
        )
    return _run_moves(moves, x, wire, op, reason)


def _run_moves(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        with without_autocast(x.device.type):  # bytes are moved, in whatever dtype
            return _run_moves(moves, x, wire, op, reason)
    for move in moves.moves:
        x = wire.carry(move, x, op=op, reason=reason)
    return x


def keep_missing_gradients(ctx: Any) -> None:
    """In a captured step, have a function that no gradient reaches hear of None, not of zeros.

    A block is one node there: behind it are also parameters of which nothing came into the loss.
    An optimizer leaves alone what has no gradient, but not what has one of zeros. It is one program
    for all ranks; in eager a rank that has no gradient takes part in what the others send.
    """
    if HERE.capturing:
        ctx.set_materialize_grads(False)


class _Moved(torch.autograd.Function):
    """Forward a plan of moves; backward its transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str) -> Any:
        ctx.moves, ctx.wire, ctx.op = moves, wire, op
        if not x.is_floating_point() and not x.is_complex():
            ctx.set_materialize_grads(False)
        keep_missing_gradients(ctx)
        return carry_all(moves, x, wire, op, reason)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        back = ctx.moves.transpose(ctx.wire.mesh)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # a sparse one, as gather(sparse_grad=True) makes it
        # Through apply again, so that a backward pass of the backward pass works too.
        return _move_with_gradient(grad, back, ctx.wire, ctx.op, "gradient"), None, None, None, None


def _move_with_gradient(
    x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str
) -> torch.Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _Moved.apply(x, moves, wire, op, reason)
    with torch.no_grad():
        return carry_all(moves, x, wire, op, reason)


def moved(x: torch.Tensor, before: Spec, after: Spec, op: str, reason: str) -> torch.Tensor:
    """The local tensor of spec `after` that holds the same global value as local `x` of `before`.

    Differentiable. Never `x` itself: where nothing has to move the result is an alias.
    """
    if before.is_copy:
        x = current(x)
    with Local():
        if before is after or (before.layout == after.layout and before.wire is after.wire):
            return x.view_as(x)
        if before.wire is not after.wire:
            raise make_two_meshes_error(op, before.wire, after.wire)
        moves = plan(before.layout, after.layout, before.wire.mesh, x.element_size())
        return _move_with_gradient(x, moves, before.wire, op, reason)


class _NoView(torch.autograd.Function):
    """The identity, whose result autograd does not take for a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        keep_missing_gradients(ctx)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


def alias_without_base(x: torch.Tensor) -> torch.Tensor:
    """A plain alias of `x` with its gradient that holds neither `x` nor what that is a view of."""
    alias: torch.Tensor = _NoView.apply(x)
    return alias


class _OnGradient(torch.autograd.Function):
    """The identity, whose gradient is what `on_gradient(gradient, *args)` gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, on_gradient: Function, *args: Any) -> Any:
        ctx.on_gradient, ctx.args = on_gradient, args
        keep_missing_gradients(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        given = None if grad is None else ctx.on_gradient(grad, *ctx.args)
        return given, None, *[None] * len(ctx.args)


def convert_gradient(x: torch.Tensor, given: Spec, wanted: Spec, op: str) -> torch.Tensor:
    """An alias of local `x` whose incoming gradient is laid out as `given`; it is made `wanted`."""
    line = "" if given.layout.shards == wanted.layout.shards else user_line()
    with Local():
        return _OnGradient.apply(x, _move_gradient, given, wanted, op, line)


def _move_gradient(
    grad: torch.Tensor, given: Spec, wanted: Spec, op: str, line: str
) -> torch.Tensor:
    if given.layout.shards != wanted.layout.shards:
        raise make_other_cut_error(wanted, given, op, line)
    return moved(grad, given, wanted, op, "gradient")


def make_other_cut_error(wanted: Spec, given: Spec, op: str, line: str) -> LayoutError:
    """The error to raise where `grad_placements` shard the gradient otherwise than the value is
    sharded: each rank has the gradient of the piece that it has."""
    return LayoutError(
        f"{op}: grad_placements cut the gradient otherwise than the value is",
        place=line,
        operands=(
            f"value     {wanted.layout.brief()} on {wanted.wire.mesh}",
            f"gradient  {given.layout.brief()}",
        ),
        reason="each rank has the gradient of what it has",
        fixes=(Fix("Shard where the value has Shard, and nowhere else"),),
    )


def ask_gradient(x: torch.Tensor, spec: Spec, op: str) -> torch.Tensor:
    """An alias of local `x`, a value of `spec` that leaves or enters the typed world as Replicate.

    If a gradient arrives, it is either each rank's part of it or the same whole on all of them. By
    duality it would be the first, in torch.distributed.tensor it is the second, and only the user
    knows. Where nothing is to be asked this is a plain alias.
    """
    with Local():
        if not (spec.used_differently and x.requires_grad and torch.is_grad_enabled()):
            return x.view_as(x)
        return _OnGradient.apply(x, _refuse_to_guess, spec, op, user_line())


def _refuse_to_guess(grad: torch.Tensor, spec: Spec, op: str, line: str) -> None:
    def format_call(gradient: Placement) -> str:
        asked = spec.used_differently
        given = [gradient if a in asked else p.dual() for a, p in spec.by_axis()]
        text = ", ".join(map(_format_placement, given))
        if op == "to_local":
            return f"x.to_local(grad_placements=[{text}])"
        return f"from_local(x, mesh, placements, grad_placements=[{text}])"

    axes = " and ".join(spec.used_differently)
    ahead = HERE.recorder is not None and HERE.recorder.is_behind_forward
    if op == "to_local":
        whose = f"a gradient {'may come' if ahead else 'came'} back to what left as Replicate"
    else:
        goes = "may go" if ahead else "goes"
        whose = f"a gradient {goes} to a local tensor that was taken for Replicate"
    # A region has its backward before anybody asks for it.
    none = (Fix("x.detach().to_local()", "no gradient comes back"),) if ahead else ()
    raise LayoutError(
        f"{op}: {whose} on axis {axes}, and it may mean two things",
        place=line,
        operands=(f"x  {spec.layout.brief()} on {spec.wire.mesh}",),
        reason="each rank may have its own part of the gradient, or all of them the whole one",
        fixes=(
            Fix(
                format_call(Partial()),
                "each rank's part: they add up, as after other rows of a batch",
            ),
            Fix(
                format_call(Replicate()), "all ranks the same: as torch.distributed.tensor takes it"
            ),
            *(none if op == "to_local" else ()),
        ),
    )


def _format_placement(p: Placement) -> str:
    """The placement as a user writes it; `repr` names the fields, too."""
    return f"Shard({p.dim})" if isinstance(p, Shard) else f"{type(p).__name__}()"


# -- what the engine is doing ----------------------------------------------------------------------
# Private torch, since there is no public way to ask: `tests/ranks/test_private_torch.py` says what
# is expected of it.


def in_backward() -> bool:
    """Is a backward pass at work?"""
    return torch._C._current_graph_task_id() != -1


def backward_pass() -> int:
    """The number of the backward pass that is at work: no two have the same. -1 if none is."""
    return torch._C._current_graph_task_id()


def frees_graph() -> bool:
    """Is a backward pass at work that no second one over the same nodes can follow?"""
    keeps = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
    return in_backward() and not keeps()


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` made when the backward pass that is at work ends; not if it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def next_node() -> int:
    """The number of the next node that autograd makes in this thread: they count up."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def saving_hooks() -> tuple[Any, Any] | None:
    """What packs and unpacks saved tensors now (a checkpoint, an offload); None if nothing does.

    Of nested `saved_tensors_hooks` torch calls the innermost alone: one that wants only some of the
    tensors must give the others to the next.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def without_history(t: torch.Tensor) -> torch.Tensor:
    """`t` as a hook that packs saved tensors may keep it: an alias of its memory, without history.

    A node may save what it gives. Kept as it is, that holds the node, which holds what was packed:
    a circle through C++ that is never collected unless a backward pass comes by.
    """
    with Local():
        return t if t.grad_fn is None else t.detach()


def count_holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages have this memory? Whoever asks has one of them in hand."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
