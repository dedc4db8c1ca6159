"""Gradient buckets: how pending gradients are reduced, many in one collective.

A gradient object that is reduced keeps its identity, not its memory: what else looks at that memory
(a view that somebody took before) goes on holding shares, which are right as shares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Wire, agree, is_agreed, remember_agreed
from partita.layout import Fix, Layout
from partita.redistribute import plan

from .autograd import moved
from .dtensor import DTensor
from .grad_state import mark_settled, settled_spec
from .tensor_state import state_of
from .watch import HERE

__all__ = ["BUCKET_BYTES", "pending_gradients", "reduce_pending_gradients"]

BUCKET_BYTES = 64 << 20
"""Bytes of gradients that one all-reduce takes, at most; a larger gradient goes by itself."""

_base: Any = torch._C.TensorBase
_data, _grad = _base.data, _base.grad.__get__


def _find_owner(grad: torch.Tensor) -> DTensor | None:
    """The tensor whose `.grad` this object is now, or None."""
    reference = state_of(grad).gradient_of
    owner: DTensor | None = None if reference is None else reference()
    return owner if owner is not None and owner.grad is grad else None


def pending_gradients(values: Iterable[Any]) -> list[DTensor]:
    """The tensors whose gradients are among `values` and are pending, each once, in order."""
    owners: dict[int, DTensor] = {}
    for value in values:
        if isinstance(value, DTensor) and value._spec.is_pending:
            owner = _find_owner(value)
            if owner is not None:
                owners[id(owner)] = owner
    return list(owners.values())


def reduce_pending_gradients(params: Iterable[DTensor]) -> None:
    """Reduce the pending gradients of `params`; each is then in the layout of `settled_spec`.

    One all-reduce for each set of axes, dtype and `BUCKET_BYTES`, noted with the reason "settle".
    Gradients that are not pending are left alone. Waits for those that ZeRO is reducing already.
    """
    params = list({id(p): p for p in params}.values())
    rests = [state_of(p).rest for p in params]
    for owner in dict.fromkeys(rest.owner for rest in rests if rest is not None):
        owner.finish()
    groups: dict[Any, list[DTensor]] = {}
    with Local():
        stored = [_grad(p) for p in params]
    for p, g in zip(params, stored, strict=True):
        if g is None or (isinstance(g, DTensor) and not g._spec.is_pending):
            continue
        grad: Any = p.grad  # which types it
        if not grad._spec.is_pending:
            continue
        if settled_spec(p) is not p._spec:
            _reduce_scatter_gradient(p, grad)
            continue
        key = (grad._spec.wire, grad._spec.layout.partial, grad.dtype, grad.device)
        groups.setdefault(key, []).append(p)
    _agree_on_gradients(params, groups)
    for (wire, partial, _, _), group in groups.items():
        for bucket in _split_into_buckets(group):
            _reduce_bucket(bucket, wire, partial)


def _agree_on_gradients(params: list[DTensor], groups: dict[Any, list[DTensor]]) -> None:
    """Raise on all ranks unless they have gradients of the same parameters, else their buckets
    would differ. Compared the first time that these parameters have gradients."""
    wires: dict[Wire, list[DTensor]] = {}
    for key, group in groups.items():
        wires.setdefault(key[0], []).extend(group)
    for wire, group in wires.items():
        # By places and specs, which are alike on all ranks; what an object's number is, is not.
        place = {id(p): i for i, p in enumerate(params)}
        key = ("gradients", len(params), *[(place[id(p)], p._spec) for p in group])
        if is_agreed(wire, key):
            continue
        descriptions = [f"{place[id(p)]}: {list(p._spec.shape)}" for p in group]
        agree(
            "gradients",
            f"of {len(descriptions)} of {len(params)} parameters: {', '.join(descriptions)}",
            wire,
            fact="the ranks have them for other parameters",
            reason="a parameter's gradient is a sum over ranks, each of which must have its share",
            fixes=(
                Fix("loss = loss + 0 * p.sum()", "on ranks that do not use a parameter p"),
                Fix("the same branch on every rank", "where a condition reads this rank's data"),
            ),
        )
        remember_agreed(wire, key)


def _reduce_scatter_gradient(p: DTensor, grad: DTensor) -> None:
    """Reduce-scatter a gradient of which ZeRO leaves each rank a shard."""
    wanted = settled_spec(p)
    with torch.no_grad():
        rest = state_of(p).rest
        name = (rest and rest.name) or "gradients"
        shard = moved(grad, grad._spec, wanted, name, "settle")
    if type(grad) is DTensor:
        with Local():
            _data.__set__(grad, shard)
    else:  # while a step is captured
        HERE.recorder.exchange(grad, shard)
    grad._spec = wanted
    mark_settled(p)


def _split_into_buckets(params: list[DTensor]) -> Iterable[list[DTensor]]:
    if HERE.capturing:  # when each gradient is there, and so which go together, its graph will tell
        yield from ([p] for p in params)
        return
    bucket: list[DTensor] = []
    size = 0
    for p in params:
        # The largest piece, not this rank's: every rank cuts the same buckets.
        nbytes = p._spec.largest * p.element_size()
        if bucket and size + nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(p)
        size += nbytes
    if bucket:
        yield bucket


def _reduce_bucket(params: list[DTensor], wire: Wire, partial: tuple[tuple[str, str], ...]) -> None:
    """One all-reduce of a flat buffer, in which the gradients then live."""
    mesh = wire.mesh
    pending = {axis for axis, _ in partial}
    others = tuple(a for a in mesh.names if a not in pending)
    # The flat buffers of ranks that hold other shards may differ in size where shards are uneven;
    # the first rank's is the largest, and all are made as long, so that all make one move.
    longest = sum(p._spec.largest for p in params)
    copies = math.prod([mesh.size(a) for a in others])
    before = Layout((longest * copies,), (others,), partial)
    after = Layout((longest * copies,), (others,))
    grads: list[Any] = [p.grad for p in params]
    with Local(), torch.no_grad():
        rows = [g.reshape(-1) for g in grads]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        used = flat.numel()
        if used < longest:
            flat = torch.nn.functional.pad(flat, (0, longest - used))
        for move in plan(before, after, mesh, flat.element_size()).moves:
            flat = wire.carry(move, flat, op="gradients", reason="settle")
        pieces = flat[:used].split([g.numel() for g in grads])
        for g, piece in zip(grads, pieces, strict=True):
            whole = piece.view(g.shape)
            if not g.is_contiguous():  # it keeps the order in memory that autograd gave it
                whole = torch.empty_like(g).copy_(whole)
            if type(g) is DTensor:
                _data.__set__(g, whole)
            else:  # traced: a graph knows a tensor by its object, and sees only what is written
                g.copy_(whole)
    for p, g in zip(params, grads, strict=True):
        g._spec = p._spec
        mark_settled(p)
