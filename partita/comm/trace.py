"""The trace wire: during a capture it turns moves into nodes of a graph that is equal on every
rank.

A `TraceWire` replaces a rank's wire. The rank's coordinates are not numbers in the graph but
inputs: each is a tensor. Everything that differs between ranks is computed from it, by the
arithmetic of `move_steps`. Shapes are those of the first rank, which has the largest shards. A
smaller shard is padded with copies of its last element (an empty shard: of the element before it),
so that kernels compute finite values there. Gradients are padded with zeros, which do not change a
rank's sums.

    7 rows over 4 ranks:    0 1 | 2 3 | 4 5 | 6 6
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from partita.layout import Fix, Layout, LayoutError, Mesh
from partita.redistribute import Move

from .collective import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    REDUCE_SCATTER,
    WAIT,
    Axes,
    Request,
    all_to_all,
)
from .groups import GroupWire
from .ledger import Ledger, Scope, user_line
from .move_steps import (
    DimChange,
    Number,
    Step,
    ends_last,
    fill_where,
    find_cuts,
    identity_of_reduction,
    is_restack,
    move_to_device,
    outer_length,
    padded_length,
    prepare,
    span,
    take_padded_piece,
    zeros_signed_as,
)
from .wire import Wire

_Noting = Callable[[Move, int, str, str], AbstractContextManager[None]]
_Repeating = Callable[["TraceWire", Move, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]


def _no_repeating(
    wire: TraceWire, move: Move, x: torch.Tensor, run: Callable[[], torch.Tensor]
) -> torch.Tensor:
    return run()


def _no_noting(move: Move, itemsize: int, op: str, reason: str) -> AbstractContextManager[None]:
    return nullcontext()


class TraceWire(Wire):
    """A wire for a capture: it sends nothing; collectives become nodes of the graph.

    Attributes:
        real: the wire that it replaces.
        coordinate: this rank's coordinate on each axis of more than one rank, as a tensor.
        zeros: True while redistributions pad with zeros, as for gradients.
        groups: the axes of the process groups that the graph uses, by their names in it.
        noting: `noting(move, itemsize, op, reason)` returns a context manager for the move's nodes.
        repeating: `repeating(wire, move, x, run)` traces a move by `run()`, or copies the nodes of
            an equal move. It returns the result.
        admitted: copies of the plain tensors that the step uses as equal on all ranks.
        paddings: masks of padding, and other tensors that calls share, by the names that are passed
            to `share`.
    """

    padded = True

    def __init__(self, real: Wire, coordinate: dict[str, torch.Tensor]):
        scope = Scope()
        scope.set(strict=real.scope.strict, captured=Ledger())
        super().__init__(real.mesh, (0,) * real.mesh.ndim, scope)
        self.real, self.coordinate = real, coordinate
        self.noting: _Noting = _no_noting
        self.repeating: _Repeating = _no_repeating
        self.groups: dict[str, Axes] = {}
        self.admitted: list[torch.Tensor] = []
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        self.zeros = False
        self.paddings: dict[Any, torch.Tensor] = {}
        self._instead: dict[int, tuple[Move, tuple[Move, ...]]] = {}
        self.moved_dtypes, self.reduced_dtypes = real.moved_dtypes, real.reduced_dtypes
        self.device, self.device_mesh = real.device, real.device_mesh
        self.data_axes = real.data_axes

    def forget(self) -> None:
        """Drop the tensors and the graph of a capture. Called when it ends.

        The plan cache may keep this wire alive for longer.
        """
        self.coordinate, self.noting = {}, _no_noting
        self.repeating = _no_repeating
        self._steps.clear()
        self._instead.clear()
        self.admitted.clear()
        self._seen.clear()
        self.paddings.clear()

    def admit(self, value: torch.Tensor) -> None:
        """Records that the plain tensor `value` is used with DTensors, so all ranks must have it.

        It must be equal on all ranks. A copy is kept for the comparison, because the tensor may be
        written later.
        """
        if self._seen.setdefault((id(value), value._version), value) is value:
            with torch.no_grad():
                self.admitted.append(value.clone())

    def share(self, name: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        kept = self.paddings.get(name)
        if kept is None:
            kept = self.paddings[name] = make()
        return kept

    @property
    def work(self) -> list[tuple[str, str, tuple[str, ...], float]]:
        """The matrix products that were traced so far, in the form of `Ledger.work`."""
        return [] if self.scope.captured is None else self.scope.captured.work

    # -- what is padded ----------------------------------------------------------------------------

    def place(self, axes: Sequence[str]) -> torch.Tensor:
        """Returns this rank's index along `axes`, as a 0-d int64 tensor of the graph.

        The first axis varies slowest.
        """
        sizes, places = self.stack(axes)
        if not places:
            return torch.zeros((), dtype=torch.int64)
        place = places[0]
        for size, inner in zip(sizes[1:], places[1:], strict=True):
            place = place * size + inner
        return place

    def stack(self, axes: Sequence[str]) -> tuple[list[int], list[torch.Tensor]]:
        """Returns the sizes of `axes` and this rank's coordinate on each, as tensors of the graph.

        Axes of size 1 are left out.
        """
        cut = [a for a in axes if self.mesh.size(a) > 1]
        return [self.mesh.size(a) for a in cut], [self.coordinate[a] for a in cut]

    def region(self, layout: Layout, *, beyond: bool = False) -> tuple[tuple[Any, Any], ...]:
        region: list[tuple[Any, Any]] = []
        longest = layout.local_shape(self.mesh, self.at)
        for size, axes, length in zip(layout.shape, layout.shards, longest, strict=True):
            parts, places = self.stack(axes)
            if not parts:
                region.append((0, size))
            elif size % self.mesh_size(axes) == 0:
                region.append((self.place(axes) * length, length))
            elif beyond or ends_last(size, parts):  # otherwise padding would cover the next piece
                region.append((span(size, parts, places)[0], length))
            else:
                raise uneven(
                    f"{layout.brief()} is split unevenly twice, and a kernel needs its offset"
                )
        return tuple(region)

    def is_first_along(self, of: Sequence[Sequence[str]], device: torch.device) -> torch.Tensor:
        return torch.stack([self.place(axes) == 0 for axes in of]).to(device)

    def refuse_padded_piece(self, layout: Layout, to: str) -> None:
        if is_uneven(layout, self.mesh):
            raise uneven(f"{to} would show the padding of {layout.brief()}")

    def fill_padding(
        self, x: torch.Tensor, layout: Layout, value: Any, dims: Sequence[int] | None = None
    ) -> torch.Tensor:
        for dim, (size, axes) in enumerate(zip(layout.shape, layout.shards, strict=True)):
            if size % self.mesh_size(axes) == 0 or (dims is not None and dim not in dims):
                continue
            key = (size, axes, x.device)
            where = self.paddings.get(key)
            if where is None:
                parts, places = self.stack(axes)
                _, length = span(size, parts, places)
                at = torch.arange(padded_length(size, parts), device=x.device)
                where = self.paddings[key] = at >= move_to_device(length, x.device)
            # Not by the dimensions of `x`, which may be fewer and may be broadcast here.
            behind = len(layout.shape) - dim - 1
            x = x.masked_fill(where.view([-1] + [1] * behind), value)
        return x

    # -- moves -------------------------------------------------------------------------------------

    def carry(self, move: Move, x: torch.Tensor, *, op: str, reason: str) -> torch.Tensor:
        if move.kind == "all_to_all":
            for one in self._in_graph(move):
                x = self._trace_move(one, x, op=op, reason=reason)
            return x
        return self._trace_move(move, x, op=op, reason=reason)

    def _in_graph(self, move: Move) -> tuple[Move, ...]:
        """Returns the moves that do `move` in a graph.

        An all_to_all whose messages differ between ranks cannot be one graph for all ranks. In its
        place everything is gathered, and each rank slices its piece.
        """
        found = self._instead.get(id(move))
        if found is None:
            moves: tuple[Move, ...] = (move,)
            joined, divided = find_cuts(move, self.mesh)
            if joined and is_restack(joined, divided, move.axes, self.mesh):
                moves = self._gather_and_slice(move, {a for cut in joined for a in cut.inner})
            found = self._instead[id(move)] = (move, moves)
        return found[1]

    def _gather_and_slice(self, move: Move, moved: set[str]) -> tuple[Move, Move]:
        stacks = []
        for stack in move.before.shards:
            kept = next((i for i, a in enumerate(stack) if a in moved), len(stack))
            stacks.append(stack[:kept])
        whole = replace(move.before, shards=tuple(stacks))
        axes = tuple(a for a in self.mesh.names if a in moved)
        return (
            Move("all_gather", axes, move.before, whole),
            Move("slice", axes, whole, move.after),
        )

    def _trace_move(self, move: Move, x: torch.Tensor, *, op: str, reason: str) -> torch.Tensor:
        before, self.zeros = self.zeros, reason in ("gradient", "settle")
        try:
            with self.noting(move, x.element_size(), op, reason):
                if self.scope.strict and move.sends and reason == "implicit":
                    return super().carry(move, x, op=op, reason=reason)
                run = partial(super().carry, move, x, op=op, reason=reason)
                return self.repeating(self, move, x, run)
        finally:
            self.zeros = before

    def _make_step(self, move: Move) -> Step:
        return _make_padded_step(move, self)

    def group_name(self, axes: Axes) -> str:
        """Returns the name of the process group over `axes` in the graph's collectives."""
        name = _name_of(self.real, axes)
        self.groups[name] = axes
        return name

    # -- collectives, on contiguous memory ---------------------------------------------------------

    def _order(self, axes: Axes) -> list[int] | None:
        if self.real.group_order(axes)[1] is not None:
            raise LayoutError(
                f"capture: the ranks of mesh {self.mesh} are not in order along {' '.join(axes)}",
                place=user_line(),
                reason="each rank's graph would join pieces in a different order",
                fixes=(
                    Fix("pt.init_device_mesh(...)", "a mesh whose ranks ascend along each axis"),
                ),
            )
        return None

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        kind, n, name = request.kind, self.mesh_size(axes), self.group_name(axes)
        if kind == "all_gather":
            out.copy_(WAIT(ALL_GATHER(x.reshape(-1), n, name)).view(out.shape))
        elif kind == "reduce_scatter":
            part = REDUCE_SCATTER(x.reshape(-1), request.reduce_op, n, name)
            out.copy_(WAIT(part).view(out.shape))
        elif kind == "all_reduce":
            out.copy_(WAIT(ALL_REDUCE(x, request.reduce_op, name)))
        elif kind == "all_to_all":
            out.copy_(WAIT(all_to_all(x, n, name)))
        else:
            assert kind == "broadcast", kind
            out.copy_(WAIT(BROADCAST(x, request.root, name)))


class Uneven(LayoutError):
    """Raised during capture for an operation that padded shards (of uneven sizes) do not allow."""


def uneven(fact: str) -> Uneven:
    """Returns the error for an operation that cannot be captured with uneven shards.

    Capture converts it to a CaptureError. `fact` says what cannot be captured.
    """
    return Uneven(
        fact,
        place=user_line(),
        reason="while a step is captured every rank's piece is padded to the largest one",
    )


def is_uneven(layout: Layout, mesh: Mesh) -> bool:
    """True if some ranks of `mesh` have smaller shards of a tensor with this layout than others."""
    return any(
        size % math.prod(mesh.size(a) for a in axes)
        for size, axes in zip(layout.shape, layout.shards, strict=True)
    )


# -- moves between padded pieces -------------------------------------------------------------------


def _make_padded_step(move: Move, wire: TraceWire) -> Step:
    """Returns the step of a move between padded pieces: equally many nodes for any rank count.

    Raises:
        LayoutError: a single move of its kind cannot lead to its result.
    """
    if move.kind == "mask":
        return lambda x, op: _keep_on_first(x, move, wire)
    if move.kind in ("slice", "place"):
        joined, divided = find_cuts(move, wire.mesh)
        if move.kind == "slice":
            return lambda x, op: _slice_own_piece(x, divided, wire)
        return lambda x, op: _place_own_piece(x, joined, move.op, wire)
    return prepare(move, wire)


def _slice_own_piece(x: torch.Tensor, cuts: Sequence[DimChange], wire: TraceWire) -> torch.Tensor:
    for cut in cuts:
        if cut.even:
            rows = x.unflatten(cut.dim, (math.prod(cut.parts), cut.first_length))
            x = rows.index_select(cut.dim, _row_of(cut, wire, x.device)).squeeze(cut.dim)
        else:
            start, length = _place_of(cut, wire, x.device)
            offsets = torch.arange(cut.first_length, device=x.device)
            x = take_padded_piece(x, cut.dim, start, length, offsets, wire.zeros)
    return _own_memory(x, cuts)


def _place_own_piece(
    x: torch.Tensor, cuts: Sequence[DimChange], op: str, wire: TraceWire
) -> torch.Tensor:
    rest = identity_of_reduction(op, x.dtype)
    for cut in cuts:
        if cut.even:
            rows = x.new_full(
                [*x.shape[: cut.dim], math.prod(cut.parts), *x.shape[cut.dim :]], rest
            )
            row = _row_of(cut, wire, x.device)
            x = rows.index_copy(cut.dim, row, x.unsqueeze(cut.dim)).flatten(cut.dim, cut.dim + 1)
        else:
            start, length = _place_of(cut, wire, x.device)
            padded, _ = outer_length(cut, wire)
            at = torch.arange(padded, device=x.device) - start
            theirs = (at < 0) | (at >= length)
            out = x.index_select(cut.dim, at.clamp(0, cut.first_length - 1))
            x = fill_where(out, cut.dim, theirs, rest)
    return _own_memory(x, cuts)


def _keep_on_first(x: torch.Tensor, move: Move, wire: TraceWire) -> torch.Tensor:
    if move.op != "sum":
        return x.clone(memory_format=torch.contiguous_format)
    first = wire.place(move.axes).to(x.device) == 0
    return torch.where(first, x, zeros_signed_as(x)).contiguous()


def _own_memory(x: torch.Tensor, cuts: Sequence[DimChange]) -> torch.Tensor:
    """Returns `x` in contiguous memory of its own. For uneven cuts, `x` is a copy already."""
    if all(cut.even for cut in cuts):
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous()


def _row_of(cut: DimChange, wire: TraceWire, device: torch.device) -> torch.Tensor:
    """Returns this rank's index along the cut's inner axes, as a tensor of one element."""
    return wire.place(cut.inner).view(1).to(device)


def _place_of(cut: DimChange, wire: TraceWire, device: torch.device) -> tuple[Number, Number]:
    """Returns `(start, length)` of this rank's piece in the piece that the axes `inner` split."""
    parts, places = wire.stack(cut.inner)
    _, outer = outer_length(cut, wire)
    start, length = span(outer, parts, places)
    return move_to_device(start, device), move_to_device(length, device)


# -- groups, by the name that graphs call them -----------------------------------------------------

_registered: dict[str, Any] = {}


def _name_of(wire: Wire, axes: Axes) -> str:
    """The name of a group in a graph: of the mesh and the axes, and so the same on all ranks.

    Private torch: a functional collective finds its group by name, and the names that torch gives
    the groups of one axis differ from rank to rank.
    """
    name = base = f"{wire.mesh}/{' '.join(axes)}"
    if isinstance(wire, GroupWire):
        group = wire.process_group(axes)
        count = 1
        while _registered.get(name, group) is not group:
            count += 1
            name = f"{base}#{count}"
        if name not in _registered:
            _registered[name] = group
            torch._C._distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
    return name


# -- standing in -----------------------------------------------------------------------------------

_standing: dict[Wire, Wire] = {}


class _Making(threading.local):
    """This thread's function that makes the substitute of a wire, for a wire without one."""

    stand_in: Callable[[Wire], Wire] | None = None


_making = _Making()


def active_wire(wire: Wire) -> Wire:
    """Returns the wire that replaces `wire` during a capture or a rehearsal, else `wire` itself."""
    found = _standing.get(wire, wire) if _standing else wire
    if found is wire and _making.stand_in is not None and wire not in _standing.values():
        found = _standing[wire] = _making.stand_in(wire)
    return found


@contextmanager
def substitute_wires(
    wires: dict[Wire, Wire], make: Callable[[Wire], Wire] | None = None
) -> Iterator[None]:
    """Makes `active_wire` return the given wires in place of others, inside the `with` block.

    Args:
        wires: the replacement of each wire.
        make: a function that makes a replacement for a wire that is not in `wires`.
    """
    before, made_before = dict(_standing), _making.stand_in
    _standing.update(wires)
    _making.stand_in = make
    try:
        yield
    finally:
        _making.stand_in = made_before
        _standing.clear()
        _standing.update(before)
