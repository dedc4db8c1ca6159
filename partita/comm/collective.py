"""Collectives and transports: how a collective is described, begun and waited for, for any dtype.

A transport is a rank's connection to a mesh. It runs collectives with the ranks that differ from it
along some axes: over process groups in `groups`, over threads in `ranks`, with no other rank in
`wire`. `move_steps` builds redistributions on it, and `Wire.carry` runs them.

The addends of a Partial value are added in the order of the ranks (`reduce_in_rank_order`; in
graphs `sum_of_shares`). So the bits of a sum do not depend on the collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from partita.layout import Coordinate, LayoutError, Mesh

from .device import empty_like, new_empty, resolve_lazy_values

if TYPE_CHECKING:
    from partita.redistribute import Move


class Request(NamedTuple):
    """Describes a collective and its reason, without its tensors.

    Attributes:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast"; for an
            exchange of texts, a sentence that says what is compared.
        move: the move that it is a part of, or None.
        op: the op that needs it, such as "matmul".
        reduce_op: "sum", "max" or "min", for a reduction.
        get, send: for an all_to_all, the segments of the output and of the input buffer.
        root: for a broadcast, the index in the group of the sending rank.
    """

    kind: str
    move: Move | None
    op: str
    reduce_op: str = "sum"
    get: Splits | None = None
    send: Splits | None = None
    root: int = 0

    def describe(self) -> str:
        """Returns a text such as `all_gather over dp: 8@dp 16 -> 8 16, for matmul`."""
        what = self.kind if self.move is None else str(self.move)
        return f"{what}, for {self.op}" if self.op else what


# -- how a buffer is divided -----------------------------------------------------------------------


class Splits:
    """A division of a flat buffer into segments, one for each rank of a group in its order.

    A list of all sizes is made only if a backend needs it.

    Attributes:
        count: the number of segments.
        total: the number of elements of all segments together.
        even: True if all segments have one size.
        place: a function from the index of a segment to its `(start, length)`, in elements.
    """

    def __init__(self, count: int, total: int, even: bool, place: Callable[[int], tuple[int, int]]):
        self.count, self.total, self.even, self.place = count, total, even, place

    @classmethod
    def evenly(cls, count: int, each: int) -> Splits:
        return cls(count, count * each, True, lambda i: (i * each, each))

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Splits:
        starts = [0, *itertools.accumulate(sizes)]
        return cls(len(sizes), starts[-1], False, lambda i: (starts[i], sizes[i]))

    @cached_property
    def sizes(self) -> list[int]:
        return [self.place(i)[1] for i in range(self.count)]

    def times(self, k: int) -> Splits:
        """Returns the same splits counted in a smaller unit, such as bytes instead of elements.

        Args:
            k: the number of units per element, such as the bytes of an element.
        """

        def scale_place(i: int) -> tuple[int, int]:
            start, length = self.place(i)
            return k * start, k * length

        return Splits(self.count, k * self.total, self.even, scale_place)


# -- collectives under way -------------------------------------------------------------------------


class PendingWork(Protocol):
    """A collective that is running. Its result may be read after `wait`."""

    def wait(self) -> object:
        """Wait until the result may be read (on a GPU: by kernels that are launched afterwards)."""


class PendingList:
    """Several running collectives as one. `wait` waits for all `parts`, which may be empty."""

    def __init__(self, parts: Sequence[PendingWork] = ()):
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.wait()


@dataclass
class PendingCall:
    """A running collective whose `wait` is the given function."""

    wait: Callable[[], object]


class PendingSum:
    """A running exchange of the addends of a sum. `wait` adds them when they have arrived.

    Each rank gets its part of every rank's addend. It adds these parts in rank order, in the dtype
    of `out`, but in at least 32 bits.

    Args:
        exchange: the running exchange, which fills `shares`.
        shares: each rank's addend of this rank's part, in rank order.
        out: memory for this rank's part of the sum.
    """

    def __init__(self, exchange: PendingWork, shares: Sequence[torch.Tensor], out: torch.Tensor):
        self._exchange, self._shares, self._out = exchange, shares, out

    def wait(self) -> None:
        self._exchange.wait()
        with torch.no_grad():
            reduce_in_rank_order(self._shares, self._out)


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def reduce_in_rank_order(
    shares: Sequence[torch.Tensor], out: torch.Tensor, reduce_op: str = "sum"
) -> torch.Tensor:
    """Reduces the ranks' local parts of a Partial value into `out`, in rank order, and returns it.

    `out` may be the first of `shares`. Floats of less than 32 bits are reduced in float32, and
    rounded once at the end. `reduce_op` is "sum", "max" or "min".
    """
    narrow = out.is_floating_point() and out.element_size() < 4
    total = shares[0].to(torch.float32 if narrow else out.dtype, copy=narrow)
    into = total if narrow else out
    for share in shares[1:]:
        total = _COMBINE[reduce_op](total, share, out=into)
    return out if total is out else out.copy_(total)


def shares_memory(x: torch.Tensor, other: torch.Tensor) -> bool:
    """True if `x` and `other` use the same storage. Works on the meta device, too."""
    return x.untyped_storage()._cdata == other.untyped_storage()._cdata


# -- transports ------------------------------------------------------------------------------------

Axes = tuple[str, ...]
ALL_DTYPES = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))

# Where a backend cannot reduce a dtype, it reduces in a dtype that holds all its values.
_WIDER = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


class Transport:
    """The base of a rank's connection to a mesh: it runs collectives along mesh axes.

    Subclasses run collectives over process groups, over threads, or without other ranks.

    Attributes:
        mesh: the axes and their sizes.
        at: this rank's coordinate.
    """

    moved_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes that the backend can send; others are sent as bytes."""
    reduced_dtypes: frozenset[torch.dtype] = frozenset()
    """Dtypes that the backend can reduce; others are converted to a wider dtype."""
    padded = False
    """True if shards are padded to equal size, as while a step is captured."""
    zeros = False
    """True while padding is filled with zeros, so that sums over it are right: for gradients in a
    captured step.
    """

    def __init__(self, mesh: Mesh, at: Coordinate):
        self.mesh, self.at = mesh, at
        self._groups: dict[Axes, tuple[Axes, tuple[Coordinate, ...]]] = {}
        self._orders: dict[Axes, tuple[Axes, list[int] | None]] = {}

    # -- where this rank stands ------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's index in the mesh, row-major."""
        return self.index(self.mesh.names)

    def index(self, axes: Axes | str) -> int:
        """Returns this rank's index among the ranks along `axes`. The first axis varies slowest."""
        n = 0
        for axis in (axes,) if isinstance(axes, str) else axes:
            n = n * self.mesh.size(axis) + self.at[self.mesh.index(axis)]
        return n

    def stack(self, axes: Axes) -> tuple[list[int], list[Any]]:
        """Returns the sizes of `axes`, and this rank's position on each."""
        return [self.mesh.size(a) for a in axes], [self.index(a) for a in axes]

    def mesh_size(self, axes: Axes) -> int:
        """Returns the number of ranks along `axes`: the product of their sizes."""
        n = 1
        for axis in axes:
            n *= self.mesh.size(axis)
        return n

    def group(self, axes: Axes) -> tuple[Axes, tuple[Coordinate, ...]]:
        """Returns the group of ranks that differ from this one only along `axes`.

        The same axes in another order have the same process group.

        Returns:
            `axes` in mesh order, and the coordinates of the group's members in the group's order.
        """
        found = self._groups.get(axes)
        if found is None:
            key = tuple(a for a in self.mesh.names if a in axes)
            found = self._groups[axes] = (key, self._members(key))
        return found

    def group_order(self, axes: Axes) -> tuple[Axes, list[int] | None]:
        """Returns `axes` in mesh order, and the order of ranks in the process group.

        The second value has, for each member of the group, its index along `axes`. It is None if
        the two orders are the same.
        """
        found = self._orders.get(axes)
        if found is None:
            key = tuple(a for a in self.mesh.names if a in axes)
            found = self._orders[axes] = (key, self._order(key))
        return found

    # -- collectives -----------------------------------------------------------------------------

    def run_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> None:
        """Runs a collective along `axes`, from `x` into `out` (both contiguous), and waits.

        Any dtype works: it is converted to one that the backend has. Members of the group are in
        its order. `all_gather` concatenates their `x`. `reduce_scatter` gives each member its part
        of the reduction, and `all_to_all` its segment of each `x`. For `all_reduce` and
        `broadcast`, `out` is `x`.

        Args:
            request: which collective it is.
        """
        x = resolve_lazy_values(x)
        if request.kind in ("all_reduce", "reduce_scatter"):
            if x.dtype in self.reduced_dtypes:
                self._perform(out, x, axes, request)
                return
            wide = self._widen_for_reduction(x, request.reduce_op).reshape(-1)
            total = wide
            if request.kind == "reduce_scatter":
                total = new_empty(wide, wide.numel() // self.mesh_size(axes))
            self._perform(total, wide, axes, request)
            out.view(-1).copy_(_narrow_to_dtype(total, out.view(-1)))
        elif x.dtype in self.moved_dtypes:
            if request.kind == "all_to_all":
                out, x = out.view(-1), x.view(-1)
            self._perform(out, x, axes, request)
        else:
            kind, move, op, _, get, send, _ = request
            if get is not None and send is not None:
                get, send = (splits.times(x.element_size()) for splits in (get, send))
                request = Request(kind, move, op, get=get, send=send)
            self._perform(view_as_bytes(out), view_as_bytes(x), axes, request)

    def _widen_for_reduction(self, x: torch.Tensor, reduce_op: str) -> torch.Tensor:
        if x.is_complex():
            if reduce_op != "sum":
                raise LayoutError(f"complex numbers cannot be reduced by {reduce_op}")
            return torch.view_as_real(x)
        if x.dtype not in _WIDER:
            raise LayoutError(f"cannot reduce {x.dtype} over ranks")
        return x.to(_WIDER[x.dtype])

    # -- what a subclass implements; `axes` in mesh order, groups of more than one rank ------------

    def _members(self, axes: Axes) -> tuple[Coordinate, ...]:
        return self.mesh.group(axes, self.at)

    def _order(self, axes: Axes) -> list[int] | None:
        return None

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        """Run a collective, as `run_collective`, for a dtype that the backend has."""
        raise NotImplementedError

    def begin_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        """Begins a collective along `axes`, from `x` into `out`, without waiting for it.

        The backend must have the dtypes. `x` may be a part of `out`. If the dtype of `out` is wider
        than the dtype of `x`, a reduce_scatter adds in the wider one.

        Args:
            request: which collective it is.
        """
        self._perform(out, x, axes, request)
        return PendingList()


def view_as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of the contiguous tensor `x` as a flat uint8 view."""
    return x.reshape(-1).view(torch.uint8)


def _narrow_to_dtype(wide: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_complex():
        return torch.view_as_complex(wide.view(*like.shape, 2))
    return wide.to(like.dtype)


# -- in captured graphs ----------------------------------------------------------------------------
# Torch's functional collectives by name, and four that torch lacks. Compiled code finds a process
# group by its name, and waits with torch's `wait_tensor`, with which we register our pending work.

_functional = torch.ops._c10d_functional
ALL_GATHER = _functional.all_gather_into_tensor.default
ALL_REDUCE = _functional.all_reduce.default
ALL_TO_ALL = _functional.all_to_all_single.default
BROADCAST = _functional.broadcast.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
WAIT = _functional.wait_tensor.default

_library = torch.library.Library("partita", "DEF")
_library.define("all_gather(Tensor x, int group_size, str group_name) -> Tensor")
_library.define(
    "all_gather_pieces(Tensor x, int[] sizes, int group_size, str group_name) -> Tensor"
)
_library.define("all_to_all(Tensor x, int group_size, str group_name) -> Tensor")
_library.define("sum_of_shares(Tensor shares, int count) -> Tensor")


def _all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Returns the group's `x`, concatenated in group order; each rank broadcasts its own.

    On CPUs that takes half the processor time of a ring, and `x` is not read after this returns.
    """
    # Private torch: functional collectives find a group by its name, and pending work by its
    # tensor.
    c10d: Any = torch._C._distributed_c10d
    group = c10d._resolve_process_group(group_name)
    out = new_empty(x, (group_size * x.shape[0], *x.shape[1:]))
    pieces = out.view(group_size, *x.shape).unbind()
    pieces[group.rank()].copy_(x)
    for rank, piece in enumerate(pieces):
        c10d._register_work(out, group.broadcast(piece, rank))
    return out


def _shape_of_all_gather(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    return new_empty(x, (group_size * x.shape[0], *x.shape[1:]))


def _all_gather_pieces(
    x: torch.Tensor, sizes: list[int], group_size: int, group_name: str
) -> torch.Tensor:
    """Gathers each piece of the flat `x` separately; returns the results one after another.

    So each result is contiguous, and need not be copied. It is one call of the process group with a
    collective for each piece. `x` may be read until the wait.

    Args:
        sizes: the elements of each piece.
    """
    c10d: Any = torch._C._distributed_c10d
    out = new_empty(x, group_size * x.numel())
    into = list(out.split([group_size * size for size in sizes]))
    group = c10d._resolve_process_group(group_name)
    work = group.allgather_into_tensor_coalesced(into, list(x.split(sizes)))
    c10d._register_work(out, work)
    return out


def _all_to_all(x: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
    """Exchange equal pieces of `x` between the group's members.

    A graph holds no list of sizes, which would grow with the group.
    """
    sizes = [x.shape[0] // group_size] * group_size
    return ALL_TO_ALL(x, sizes, sizes, group_name)


def _sum_of_shares(shares: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the sum of `count` shares that are one after another in a flat tensor, in order.

    It is one operator, because a compiler would delay single additions until the sum is read, and
    keep the shares until then.
    """
    rows = shares.view(count, -1)
    return reduce_in_rank_order(rows.unbind(), new_empty(rows, rows.shape[1]))


def _shape_of_sum(shares: torch.Tensor, count: int) -> torch.Tensor:
    return new_empty(shares, (shares.numel() // count,))


_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")
torch.library.register_fake("partita::all_gather", _shape_of_all_gather, lib=_library)
_library.impl("all_gather_pieces", _all_gather_pieces, "CompositeExplicitAutograd")
torch.library.register_fake(
    "partita::all_gather_pieces", lambda x, _, n, *__: new_empty(x, n * x.numel()), lib=_library
)
_library.impl("all_to_all", _all_to_all, "CompositeExplicitAutograd")
torch.library.register_fake("partita::all_to_all", lambda x, *_: empty_like(x), lib=_library)
_library.impl("sum_of_shares", _sum_of_shares, "CompositeExplicitAutograd")
torch.library.register_fake("partita::sum_of_shares", _shape_of_sum, lib=_library)

all_gather = torch.ops.partita.all_gather.default
all_gather_pieces = torch.ops.partita.all_gather_pieces.default
all_to_all = torch.ops.partita.all_to_all.default
sum_of_shares = torch.ops.partita.sum_of_shares.default
