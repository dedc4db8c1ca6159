"""Which elements does a move take from whom, and where do they go?

`prepare` answers once per move and rank and returns a function of the local tensor. Regions come
from `Layout.local_region`, so uneven, nested and empty shards need no case of their own; even
shards of dimension 0 take a path that copies nothing beyond the collective itself.

Pieces that differ in size travel padded to the largest, behind the data, and the padding is cut
off with `resize_`, so that no result is a view of something larger that a later in-place op or
autograd would trip over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..layout import LayoutError

if TYPE_CHECKING:
    from ..redistribute import Move
    from .ask import Ask
    from .wire import Wire

__all__ = ["Step", "neutral", "prepare"]

Region = tuple[tuple[int, int], ...]
Step = Callable[[torch.Tensor, "Ask"], torch.Tensor]

_CONTIGUOUS = torch.contiguous_format


def prepare(move: Move, wire: Wire) -> Step:
    """The function that carries `move` for the rank of `wire`; it never modifies its input.

    Raises:
        LayoutError: the layouts are not what a move of this kind gets from or gives to.
    """
    try:
        build = _BUILD[move.kind]
    except KeyError:
        raise LayoutError(
            f"no move is called {move.kind!r}", reason=f"there are {', '.join(_BUILD)}"
        ) from None
    if not move.sends or wire.mesh_size(move.axes) > 1:
        return build(move, wire)
    return _alone


# -- moves that send -----------------------------------------------------------------------------


def _all_gather(move: Move, wire: Wire) -> Step:
    axes, members = wire.group(move.axes)
    target = move.after.local_region(wire.mesh, wire.at)
    regions = [_within(move.before.local_region(wire.mesh, m), target, move) for m in members]
    _check_cover(regions, target, move)
    shape, n = _shape(target), len(members)
    sizes = [_numel(r) for r in regions]
    pad = max(sizes)
    gather = wire.gather

    if _in_order_on_dim_0(regions, shape):
        step = max(r[0][1] for r in regions)
        mine, padded, whole = (step, *shape[1:]), (n * step, *shape[1:]), n * step == shape[0]

        def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
            out = x.new_empty(padded)
            gather(out, _padded(x, mine), axes, ask)
            return out if whole else out.resize_(shape)

        return run

    shapes = [_shape(r) for r in regions]
    dim = _single_dim(regions, shape)
    order = sorted(range(n), key=lambda i: regions[i][dim][0]) if dim is not None else []
    slices = [_slices(r) for r in regions]

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        flat = x.new_empty(n * pad)
        gather(flat, _padded(x, (pad,)), axes, ask)
        parts = [
            flat[i * pad : i * pad + size].view(s)
            for i, (size, s) in enumerate(zip(sizes, shapes, strict=True))
        ]
        if dim is not None:
            return torch.cat([parts[i] for i in order], dim)
        out = x.new_empty(shape)
        for part, where in zip(parts, slices, strict=True):
            out[where] = part
        return out

    return run


def _reduce_scatter(move: Move, wire: Wire) -> Step:
    axes, members = wire.group(move.axes)
    reduce_op = move.op
    source = move.before.local_region(wire.mesh, wire.at)
    regions = [_within(move.after.local_region(wire.mesh, m), source, move) for m in members]
    _check_cover(regions, source, move)
    shape, n = _shape(source), len(members)
    mine = _shape(move.after.local_region(wire.mesh, wire.at))
    slices = [_slices(r) for r in regions]
    sizes = [_numel(r) for r in regions]
    pad = max(sizes)
    even = len(set(map(_shape, regions))) == 1
    in_order = _in_order_on_dim_0(regions, shape)
    as_it_is = in_order and even
    scatter = wire.reduce_scatter

    def pack(x: torch.Tensor) -> torch.Tensor:
        if in_order:
            return _padded(x, (n * pad,))
        if even:
            return torch.stack([x[where] for where in slices]).view(-1)
        buffer = x.new_zeros((n, pad))
        for i, (where, size) in enumerate(zip(slices, sizes, strict=True)):
            buffer[i, :size] = x[where].reshape(-1)
        return buffer.view(-1)

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        if as_it_is:
            out = x.new_empty(mine)
            scatter(out, x.contiguous(), axes, reduce_op, ask)
            return out
        out = x.new_empty(pad)
        scatter(out, pack(x), axes, reduce_op, ask)
        return out.resize_(mine)

    return run


def _all_reduce(move: Move, wire: Wire) -> Step:
    axes, _ = wire.group(move.axes)
    reduce_op, reduce = move.op, wire.all_reduce

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        return reduce(x.clone(memory_format=_CONTIGUOUS), axes, reduce_op, ask)

    return run


def _all_to_all(move: Move, wire: Wire) -> Step:
    axes, members = wire.group(move.axes)
    mesh, at = wire.mesh, wire.at
    mine_before = move.before.local_region(mesh, at)
    mine_after = move.after.local_region(mesh, at)
    sent = [_overlap(mine_before, move.after.local_region(mesh, m)) for m in members]
    got = [_overlap(move.before.local_region(mesh, m), mine_after) for m in members]
    sent = [_within(r, mine_before, move) for r in sent]
    got = [_within(r, mine_after, move) for r in got]
    _check_cover(sent, mine_before, move)
    _check_cover(got, mine_after, move)
    shape = _shape(mine_after)
    send_sizes, get_sizes = [_numel(r) for r in sent], [_numel(r) for r in got]
    send_slices, get_slices = [_slices(r) for r in sent], [_slices(r) for r in got]
    get_shapes = [_shape(r) for r in got]
    packed = _in_order_on_dim_0(sent, _shape(mine_before), even=False)
    unpacked = _in_order_on_dim_0(got, shape, even=False)
    dim = _single_dim(got, shape)
    order = sorted(range(len(got)), key=lambda i: got[i][dim][0]) if dim is not None else []
    exchange = wire.all_to_all

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        if packed:
            source = x.contiguous()
        else:
            source = torch.cat([x[where].reshape(-1) for where in send_slices])
        flat = x.new_empty(shape)
        exchange(flat, source, axes, get_sizes, send_sizes, ask)
        if unpacked:
            return flat
        parts = [p.view(s) for p, s in zip(flat.view(-1).split(get_sizes), get_shapes, strict=True)]
        if dim is not None:
            return torch.cat([parts[i] for i in order], dim)
        out = x.new_empty(shape)
        for part, where in zip(parts, get_slices, strict=True):
            out[where] = part
        return out

    return run


def _alone(x: torch.Tensor, ask: Ask) -> torch.Tensor:
    """Any of the four above in a group of one rank."""
    return x.clone(memory_format=_CONTIGUOUS)


# -- moves that stay on the rank -----------------------------------------------------------------


def _slice(move: Move, wire: Wire) -> Step:
    source = move.before.local_region(wire.mesh, wire.at)
    where = _slices(_within(move.after.local_region(wire.mesh, wire.at), source, move))
    # Cloned, not viewed: an in-place op on the slice must not write into the whole.
    return lambda x, ask: x[where].clone(memory_format=_CONTIGUOUS)


def _place(move: Move, wire: Wire) -> Step:
    target = move.after.local_region(wire.mesh, wire.at)
    where = _slices(_within(move.before.local_region(wire.mesh, wire.at), target, move))
    shape, reduce_op = _shape(target), move.op

    def run(x: torch.Tensor, ask: Ask) -> torch.Tensor:
        out = x.new_full(shape, neutral(reduce_op, x.dtype))
        out[where] = x
        return out

    return run


def _mask(move: Move, wire: Wire) -> Step:
    first = all(wire.at[wire.mesh.index(a)] == 0 for a in move.axes)
    # Of equal values the greatest and the least are the value itself: only a sum needs the zeros.
    if first or move.op != "sum":
        return lambda x, ask: x.clone(memory_format=_CONTIGUOUS)
    return lambda x, ask: torch.zeros_like(x, memory_format=_CONTIGUOUS)


def _retype(move: Move, wire: Wire) -> Step:
    return lambda x, ask: x.view_as(x)


def neutral(reduce_op: str, dtype: torch.dtype) -> float | int | bool:
    """The value that changes nothing when `reduce_op` meets it."""
    if reduce_op == "sum":
        return 0
    least = reduce_op == "max"
    if dtype == torch.bool:
        return not least
    if dtype.is_floating_point:
        # The 8-bit floats have no infinity that all of them share.
        limit = torch.finfo(dtype)
        if dtype.itemsize > 1:
            return -math.inf if least else math.inf
    else:
        limit = torch.iinfo(dtype)
    return limit.min if least else limit.max


_BUILD = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "slice": _slice,
    "place": _place,
    "mask": _mask,
    "retype": _retype,
}

# -- regions -------------------------------------------------------------------------------------


def _shape(region: Region) -> tuple[int, ...]:
    return tuple(length for _, length in region)


def _numel(region: Region) -> int:
    return math.prod(length for _, length in region)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in region)


def _overlap(a: Region, b: Region) -> Region:
    both = []
    for (i, n), (j, m) in zip(a, b, strict=True):
        start = max(i, j)
        both.append((start, max(0, min(i + n, j + m) - start)))
    return tuple(both)


def _within(inner: Region, outer: Region, move: Move) -> Region:
    """`inner` counted from the start of `outer`; where it is empty, at a place that is in range."""
    if any(length == 0 for _, length in inner):
        empty = []
        for (i, n), (j, m) in zip(inner, outer, strict=True):
            length = min(n, m)
            empty.append((min(max(i - j, 0), m - length), length))
        return tuple(empty)
    for (i, n), (j, m) in zip(inner, outer, strict=True):
        if i < j or i + n > j + m:
            raise _no_such_move(move)
    return tuple((i - j, n) for (i, n), (j, _) in zip(inner, outer, strict=True))


def _check_cover(parts: list[Region], whole: Region, move: Move) -> None:
    """Parts of a shard never overlap, so that it is enough to count."""
    if sum(map(_numel, parts)) != _numel(whole):
        raise _no_such_move(move)


def _no_such_move(move: Move) -> LayoutError:
    return LayoutError(
        f"one {move.kind} over {' '.join(move.axes)} cannot make "
        f"{move.after.brief()} of {move.before.brief()}",
        reason="the pieces that its ranks hold do not tile what they are to hold",
    )


def _in_order_on_dim_0(parts: list[Region], shape: tuple[int, ...], even: bool = True) -> bool:
    """Whether the parts, in the group's order, simply follow each other in memory.

    With `even`, also whether all are of one size but for those at the end, so that padding each
    to the first one's size pads only the end of the whole.
    """
    if not shape:
        return False
    step, at = parts[0][0][1], 0
    for i, part in enumerate(parts):
        if any(p != (0, n) for p, n in zip(part[1:], shape[1:], strict=True)):
            return False
        start, length = part[0]
        if length and (start != at or (even and (start != i * step or length > step))):
            return False
        at += length
    return at == shape[0]


def _single_dim(parts: list[Region], shape: tuple[int, ...]) -> int | None:
    """The one dimension along which the parts follow each other, if there is just one."""
    dims = [d for d, n in enumerate(shape) if any(part[d] != (0, n) for part in parts)]
    # Parts of an empty whole may all be as long as it is: they do not add up, so never join them.
    if len(dims) == 1 and sum(part[dims[0]][1] for part in parts) == shape[dims[0]]:
        return dims[0]
    return None


def _padded(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`x`, contiguous, behind it as many zeros as fill `shape`."""
    if x.shape == shape:
        return x.contiguous()
    n = x.numel()
    if n == math.prod(shape):
        return x.reshape(shape)
    buffer = x.new_empty(shape)
    flat = buffer.view(-1)
    flat[:n] = x.reshape(-1)
    flat[n:] = 0
    return buffer
