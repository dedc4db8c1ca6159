"""Flat buffers: a block's shards end to end in memory, so that one collective gathers them all.

Each rank's part is padded to the size of the largest, so every rank sends equally many bytes. The
gathered data are sorted by parameter. Each parameter is a view of one storage, in its true shape:

    sent by rank r      [ w_r pad | b_r ]
    gathered            [ w_0 w_1 .. pad | b_0 b_1 .. ]

`release` frees that storage. DTensors that are views of it raise an error when they are used later.
A plain tensor may still be a view of it. Then this tensor keeps the storage, and the buffer
allocates a new one when it gathers again.
"""

from __future__ import annotations

import gc
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunction  # also disables modes
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import PendingWork, Wire, user_line
from partita.comm.device import Device, empty, new_empty
from partita.comm.move_steps import contiguous_strides
from partita.layout import Fix, Layout, LayoutError
from partita.redistribute import Move
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import HERE, Spec, count_holders
from partita.tensor.uneven_pieces import find_padded


@dataclass(frozen=True)
class PartialGradients:
    """This rank's gradients of a block's gathered parameters before the reduce-scatter.

    Parameters are in the order of the flat buffer.

    Attributes:
        sums: a tensor of shape (ranks, length). A row has the gradients of one rank's shards.
        used: for each parameter, True if it has a gradient.
    """

    sums: torch.Tensor
    used: list[bool]

    def add(self, other: PartialGradients) -> PartialGradients:
        """Adds `other` to `sums`, in place. Returns the sum."""
        used = [a or b for a, b in zip(self.used, other.used, strict=True)]
        return PartialGradients(self.sums.add_(other.sums), used)


@dataclass(frozen=True)
class _Run:
    """Shards of consecutive ranks, which have equal sizes and are adjacent in the parameter.

    Attributes:
        at, end: the first element in the gathered parameter, and the element after the last.
        ranks: the first of these ranks, and the rank after the last.
        length: elements of each shard.
    """

    at: int
    end: int
    ranks: tuple[int, int]
    length: int


@dataclass(frozen=True)
class _FlatPiece:
    """One parameter's place in a flat buffer.

    Attributes:
        whole: its layout when it is gathered; its local shape is what a kernel sees.
        shard: its layout at rest.
        strides: the strides of the gathered parameter, which is contiguous.
        start: its first element in a rank's flat shard.
        place: its first element in the gathered storage, aligned as an allocation is: the order in
            which a kernel sums may depend on it.
        length: its elements in a rank's flat shard, padding included.
        runs: where the ranks' shards lie in the gathered parameter.
    """

    whole: Spec
    shard: Spec
    strides: tuple[int, ...]
    start: int
    place: int
    length: int
    runs: Sequence[_Run]

    @property
    def is_in_order(self) -> bool:
        """True if the gathered rows, one after the other, are the parameter and then padding.

        A row has `length` elements, and there is one row for each rank.
        """
        # A run is in order if its first and its last rank are.
        return all(
            run.at == run.ranks[0] * self.length
            and run.end == (run.ranks[1] - 1) * self.length + run.length
            for run in self.runs
            if run.length
        )

    @property
    def is_even(self) -> bool:
        """True if the shards of all ranks have the same size, so that none has padding."""
        return len(self.runs) <= 1 and all(run.length == self.length for run in self.runs)

    def blocks(self, flat: torch.Tensor, rows: torch.Tensor) -> list[tuple[Any, Any]]:
        """Returns pairs of views of the same elements: in the parameter, and in the rows.

        Args:
            flat: the parameter, as one dimension.
            rows: a row for each rank, with that rank's shard.
        """
        pairs = []
        for run in self.runs:
            if run.length:
                part = flat[run.at : run.end].view(-1, run.length)
                pairs.append((part, rows[slice(*run.ranks), : run.length]))
        return pairs

    def padding(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the parts of `rows` (one row for each rank) that are padding."""
        short = [run for run in self.runs if run.length < self.length]
        return [rows[slice(*run.ranks), run.length :] for run in short]


_ALIGNED = 64  # bytes
LARGE = 1 << 20
"""If a block's gradients have at least so many bytes, only their padding is zeroed."""
_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


def _padded_numel(shape: Sequence[int], n: int) -> int:
    """Returns the elements of the largest of `n` pieces of `shape`, split along dimension 0."""
    return -(-shape[0] // n) * math.prod(shape[1:])


def _find_runs(whole: Spec, shard: Spec, axes: tuple[str, ...], length: int) -> list[_Run]:
    """Returns the runs of a parameter, for `_FlatPiece.runs`."""
    runs: list[_Run] = []
    for rank, (start, count) in enumerate(_find_rank_spans(whole, shard, axes, length)):
        last = runs[-1] if runs else None
        if last and count == last.length and (not count or start == last.end):
            ranks = (last.ranks[0], rank + 1)
            runs[-1] = _Run(last.at, last.end + count, ranks, count)
        else:
            runs.append(_Run(start, start + count, (rank, rank + 1), count))
    return runs


def _find_rank_spans(
    whole: Spec, shard: Spec, axes: tuple[str, ...], length: int
) -> Iterator[tuple[int, int]]:
    """Yields for each rank (start, size) of its shard in the gathered parameter, in elements."""
    mesh, shape = whole.wire.mesh, whole.local_shape
    if len(axes) == 1:
        for start in range(0, mesh.size(axes[0]) * length, max(length, 1)):
            yield start, max(0, min(length, shape.numel() - start))
        return
    # If several axes shard a dimension, ranks in the middle may hold less.
    row, first = math.prod(shape[1:]), whole.region[0][0]
    for at in product(*(range(mesh.size(a)) for a in axes)):
        there = list(whole.wire.at)
        for a, k in zip(axes, at, strict=True):
            there[mesh.index(a)] = k
        start, count = shard.layout.local_region(mesh, tuple(there))[0]
        yield (start - first) * row, count * row


class FlatBuffer:
    """One block of memory into which a collective gathers several parameters of one dtype.

    Args:
        name, names: the name of the block, and of each parameter.
        wholes, shards: each parameter's spec when gathered, and when sharded.
        axes: the mesh axes over which the parameters are sharded, in mesh order.
        dtype: the dtype in which they are gathered and used.
        device: the device of the parameters.

    Attributes:
        given_device: the argument `device`; `self.device` differs if that is "meta".
        n: the number of ranks along `axes`.
        length: the number of elements that each rank sends, padding included.
        pieces: where each parameter is in the gathered storage.
        gather, scatter, sum: the moves of its collectives.
        alive: bytes that are gathered, or being gathered, now.
        here: True if all parameters are gathered.
        span: the first address of the gathered memory, and the address after its end; (0, 0) if
            there is none.
        has_memory: True for real tensors. Fake tensors have no addresses.
    """

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        wholes: Sequence[Spec],
        shards: Sequence[Spec],
        axes: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.wire: Wire = wholes[0].wire
        self.given_device = device
        if device.type == "meta":  # until `materialize`
            device = self.wire.device
        self.name, self.names, self.dtype, self.device = name, names, dtype, device
        mesh = self.wire.mesh
        self.n = math.prod(mesh.size(a) for a in axes)
        self.pieces: list[_FlatPiece] = []
        start = place = longest = 0
        for whole, shard in zip(wholes, shards, strict=True):
            shape = whole.local_shape
            length = _padded_numel(shape, self.n)
            strides = contiguous_strides(shape)
            runs = _find_runs(whole, shard, axes, length)
            self.pieces.append(_FlatPiece(whole, shard, strides, start, place, length, runs))
            start += length
            place += -(-self.n * length * dtype.itemsize // _ALIGNED) * _ALIGNED // dtype.itemsize
            longest += _padded_numel(whole.layout.local_shape(mesh, (0,) * mesh.ndim), self.n)
        self.length, self._room = start, place
        # Ranks along other axes hold other elements, so the layout shards over these axes too. All
        # pieces are padded to the length of the first rank's, which is the largest.
        others = tuple(a for a in mesh.names if a not in axes)
        total = math.prod(mesh.size(a) for a in others) * self.n * longest
        at_rest = Layout((total,), ((*others, *axes),))
        self.gather = Move("all_gather", axes, at_rest, Layout((total,), (others,)))
        self.scatter = self.gather.transpose(mesh)
        self.sum = Move("all_reduce", axes, self.scatter.before, self.gather.after)
        # If all shards of each parameter have the same length, a few calls copy all of them.
        self._lengths = [p.length for p in self.pieces]
        self._is_even = all(p.is_even for p in self.pieces)
        self._is_in_order = all(p.is_in_order for p in self.pieces)
        self._full = empty(0, dtype=dtype, device=device)
        self._rows: list[torch.Tensor] = []  # of `_full`: each parameter as (n, length)
        self._sums = self._full
        with local_ops():
            self.has_memory = self._full.untyped_storage().device.type != "meta"
        self.alive = 0
        self.span = (0, 0)
        self._arriving: tuple[PendingWork, torch.Tensor, torch.Tensor] | None = None
        self.here = False
        self._holders = 2

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered storage, padding included."""
        return self._room * self.dtype.itemsize

    # -- gathered ----------------------------------------------------------------------------------

    def start_gather(self, shards: Sequence[torch.Tensor], reason: str) -> bool:
        """Begins the all-gather of the parameters, without waiting for it.

        Returns False if it has begun or ended before.

        Args:
            shards: the local shard of each parameter.
            reason: the reason for the ledger.

        Raises:
            LayoutError: the parameters are still on the meta device.
        """
        if self.here or self._arriving is not None:
            return False
        with local_ops(), torch.no_grad():
            if shards[0].is_meta and self.device.type != "meta":
                raise LayoutError(
                    f"parameters of {self.name or 'the model'} are still on the meta device",
                    place=user_line(),
                    fixes=(Fix('model.to_empty(device="cpu")', "then initialize or load them"),),
                )
            if self._arrives_in_place:
                self._allocate_storage()
                out = self._full[: self.n * self.length]
            else:
                out = empty(self.n * self.length, dtype=self.dtype, device=self.device)
                self.alive = out.nbytes
            mine = self._end_to_end(shards, out)
            work = self.wire.start(self.gather, mine, out, op=self.name, reason=reason)
            self._arriving = (work, mine, out)
        return True

    def _own_row(self, out: torch.Tensor) -> torch.Tensor:
        """Returns memory for this rank's flat shard: its row of `out`, if the backend allows it."""
        if not self.wire.gathers_in_place:
            return empty(self.length, dtype=self.dtype, device=self.device)
        _, members = self.wire.group(self.gather.axes)
        return out.view(self.n, self.length)[members.index(self.wire.at)]

    def _end_to_end(self, shards: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        """Returns this rank's flat shard: its padded local shards, one after the other.

        The shards are copied into this rank's row of `out`. A single shard is returned as it is if
        its storage has room for the padding.
        """
        if len(shards) == 1 and shards[0].dtype == self.dtype:
            own = shards[0].detach()
            only: torch.Tensor | None = own
            if own.numel() < self.length:
                only = find_padded(own, (self.length,))
            if only is not None and only.is_contiguous():
                return only.view(-1)
        mine = self._own_row(out)
        if self._is_even:
            rows = [s.reshape(-1) for s in shards]
            if all(_dtype(row) is self.dtype for row in rows):
                return torch.cat(rows, out=mine)
            torch._foreach_copy_(mine.split_with_sizes(self._lengths), rows)
            return mine
        into = []
        for p, s in zip(self.pieces, shards, strict=True):
            into.append(mine[p.start : p.start + s.numel()].view(s.shape))
            if s.numel() < p.length:
                mine[p.start + s.numel() : p.start + p.length] = 0
        torch._foreach_copy_(into, list(shards))
        return mine

    def finish_gather(self) -> None:
        """Wait for the all-gather that `start_gather` began, and sort the data by parameter."""
        if self._arriving is None:
            return
        out = self._wait_for_gather()
        if not self._arrives_in_place:
            with torch.no_grad():
                self._allocate_storage()
                self._sort_by_parameter(out)
        del out
        # On an accelerator, the collective may keep the storage alive for a while.
        at_once = Device(self.device.type).runs_at_once
        storage = self._full.untyped_storage()
        self._holders = 2 + len(self._rows) if at_once else count_holders(storage)
        self.here = True
        if self.has_memory:
            start = self._full.data_ptr()
            self.span = (start, start + self.nbytes)

    def finish_gather_into(self, wholes: Sequence[torch.Tensor]) -> None:
        """Wait for the all-gather, copy each parameter into a tensor of `wholes`, and release."""
        out = self._wait_for_gather()
        # A parameter may have another memory format, such as channels_last.
        flats = [w if w.is_contiguous() else new_empty(w, w.shape) for w in wholes]
        pairs = [
            pair
            for w, p in zip(flats, self.pieces, strict=True)
            for pair in p.blocks(w.view(-1), self._of_each(out, p))
        ]
        _copy_pairs(pairs)
        for w, flat in zip(wholes, flats, strict=True):
            if flat is not w:
                w.copy_(flat)
        del out, pairs  # they are views of the storage that is released
        self.release()

    def _wait_for_gather(self) -> torch.Tensor:
        assert self._arriving is not None
        work, _, out = self._arriving
        work.wait()
        self._arriving = None
        return out

    def views(self) -> list[torch.Tensor]:
        """Returns the gathered parameters as plain views of the buffer, each in its unsharded
        shape.
        """
        storage = self._full.untyped_storage()
        return [
            empty(0, dtype=self.dtype, device=self.device).set_(
                storage, p.place, p.whole.local_shape, p.strides
            )
            for p in self.pieces
        ]

    def is_view_here(self, t: torch.Tensor) -> bool:
        """True if `t` is a view of this buffer's gathered storage. Also works for fake tensors."""
        return t.untyped_storage()._cdata == self._full.untyped_storage()._cdata

    def release(self) -> None:
        """Frees the gathered memory. If a plain tensor is a view of it, that tensor keeps it."""
        if self._arriving is not None:
            self._wait_for_gather()
        held, self.alive = self.alive, 0
        self.here, self.span = False, (0, 0)
        if not held or not self._full.untyped_storage().nbytes():
            return
        own = [self._full, *self._rows]
        if _give_up_memory(own, self._holders, lambda at: self.names[self.find_piece(at)]):
            _resize_storage(self._full.untyped_storage(), 0)
        else:
            self.wire.record_kept_view(self.name, held)
            self._full, self._rows = empty(0, dtype=self.dtype, device=self.device), []

    def find_piece(self, element: Any) -> int:
        """Returns the index of the parameter that contains this element of the gathered storage."""
        return bisect_right([piece.place for piece in self.pieces], element) - 1

    def make_view(
        self, dtype: torch.dtype, offset: Any, size: Sequence[int], stride: Sequence[int]
    ) -> torch.Tensor:
        """Returns a view of the gathered storage in `dtype`.

        `offset`, `size` and `stride` are in elements.
        """
        view = empty(0, dtype=dtype, device=self.device)
        return view.set_(self._full.untyped_storage(), offset, size, stride)

    def _allocate_storage(self) -> None:
        storage = self._full.untyped_storage()
        _resize_storage(storage, self.nbytes)
        self.alive = self.nbytes
        if self._full.numel() == self._room:
            return
        self._full.set_(storage, 0, (self._room,))  # type: ignore[call-overload]
        if not self._arrives_in_place and self._is_in_order:
            self._rows = [self._room_of(p).view(self.n, p.length) for p in self.pieces]

    def _room_of(self, piece: _FlatPiece) -> torch.Tensor:
        return self._full[piece.place : piece.place + self.n * piece.length]

    @property
    def _arrives_in_place(self) -> bool:
        return len(self.pieces) == 1 and self._is_in_order

    def _sort_by_parameter(self, out: torch.Tensor) -> None:
        """Copy the gathered data in `out` to the parameters' positions in the gathered storage."""
        come = out.view(self.n, self.length).split_with_sizes(self._lengths, 1)
        if self._rows:  # one copy for each parameter, padding included
            torch._foreach_copy_(self._rows, come)
            return
        pairs: list[Any] = []
        for rows, p in zip(come, self.pieces, strict=True):
            pairs += p.blocks(self._room_of(p), rows)
        _copy_pairs(pairs)

    def _of_each(self, flat: torch.Tensor, piece: _FlatPiece) -> torch.Tensor:
        return flat.view(self.n, -1)[:, piece.start : piece.start + piece.length]

    # -- gradients ---------------------------------------------------------------------------------

    def pack_gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        held: PartialGradients | None = None,
        *,
        is_kept: bool = False,
    ) -> PartialGradients:
        """Copies gradients into a tensor with a row for each rank, for a reduce-scatter.

        Args:
            grads: the gradient of each parameter; None if it has none.
            dtype: the dtype of the rows.
            held: gradients of earlier backward passes. `grads` are added to them, in place.
            is_kept: True if later backward passes will add to the result. In this case even a
                single gradient is copied, because autograd may use its memory for other nodes.
        """
        is_full = all(g is not None for g in grads)
        if self._is_even and is_full and held is None:
            rows = [g.reshape(self.n, k) for g, k in zip(grads, self._lengths, strict=True)]  # type: ignore[union-attr]
            if any(row.dtype is not dtype for row in rows):
                packed = empty(self.n, self.length, dtype=dtype, device=self.device)
                torch._foreach_copy_(packed.split_with_sizes(self._lengths, 1), rows)
            elif len(rows) == 1 and not is_kept:
                packed = rows[0].contiguous()
            else:
                packed = torch.cat(rows, 1)
            return PartialGradients(packed, [True] * len(rows))
        used = [g is not None for g in grads]
        if held is not None:
            sums, used = held.sums, [a or b for a, b in zip(used, held.used, strict=True)]
        else:
            # Only the padding is set to zero, because that is faster than zeroing the whole buffer.
            is_large = self.n * self.length * dtype.itemsize >= LARGE
            new = empty if is_full and is_large else torch.zeros
            sums = new(self.n, self.length, dtype=dtype, device=self.device)
            if new is empty:
                each = [p.padding(self._of_each(sums, p)) for p in self.pieces]
                torch._foreach_zero_([part for parts in each for part in parts])
        to, come = [], []
        for g, p in zip(grads, self.pieces, strict=True):
            if g is None:
                continue
            for part, place in p.blocks(g.reshape(-1), self._of_each(sums, p)):
                to.append(place)
                come.append(part)
        if held is None and to:
            torch._foreach_copy_(to, come)
        else:
            for place, g in zip(to, come, strict=True):
                place.add_(g)
        return PartialGradients(sums, used)

    def start_all_reduce(self, grads: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begins an all-reduce (sum) of `grads`, without waiting for it.

        Returns:
            A function that waits and returns the sums.
        """
        flat = self._end_to_end_of(grads)
        work = self.wire.start(self.sum, flat, flat, op=self.name, reason="settle")

        def wait_for_all_reduce() -> list[torch.Tensor]:
            work.wait()
            pieces = flat.split([g.numel() for g in grads])
            return [piece.view(g.shape) for piece, g in zip(pieces, grads, strict=True)]

        return wait_for_all_reduce

    def _end_to_end_of(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns all gradients, copied end to end.

        If new memory is expensive, it reuses the memory of the last step, unless a view of it is
        alive.
        """
        rows = [g.reshape(-1) for g in grads]
        if not Device(self.device.type).clears_new_memory:
            return torch.cat(rows)
        size, dtype, known = sum(map(len, rows)), rows[0].dtype, self._sums
        if (
            known.numel() != size
            or known.dtype is not dtype
            or count_holders(known.untyped_storage()) > 2
        ):
            self._sums = empty(size, dtype=dtype, device=self.device)
        return torch.cat(rows, out=self._sums)

    def start_reduce_scatter(
        self, sums: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[], list[torch.Tensor]]:
        """Begins a reduce-scatter of `sums` (a row per rank), which adds in `dtype`. Does not wait.

        Returns:
            A function that waits, and returns this rank's shard of each gradient.
        """
        out = empty(self.length, dtype=dtype, device=self.device)
        work = self.wire.start(self.scatter, sums.view(-1), out, op=self.name, reason="gradient")

        # The caller drops this function after the wait, because the sums that it refers to need
        # as much memory as the gathered parameters.
        def wait_for_reduce_scatter(_sums: torch.Tensor = sums) -> list[torch.Tensor]:
            work.wait()
            shapes = [p.shard.local_shape for p in self.pieces]
            parts: Sequence[torch.Tensor] = out.split_with_sizes(self._lengths)
            if not self._is_even:
                parts = [g[: s.numel()] for g, s in zip(parts, shapes, strict=True)]
            return [g.view(shape) for g, shape in zip(parts, shapes, strict=True)]

        return wait_for_reduce_scatter


def _copy_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copies the second tensor of each pair into the first."""
    if pairs:  # parameters, or a rank of another axis, may have no elements
        torch._foreach_copy_([to for to, _ in pairs], [come for _, come in pairs])


# -- views of released memory ----------------------------------------------------------------------

_storage_of = torch._C.TensorBase.untyped_storage


class _Released:
    """The spec of a view of freed memory: every use of it raises an error."""

    # These attributes may be read without an error, such as the one that the memory is gone.
    is_whole = True
    is_copy = False

    def __init__(self, name: str):
        self._name = name

    def _raise_released(self) -> NoReturn:
        raise LayoutError(
            f"{self._name} was released: this view of it was kept after the forward of its block",
            place=user_line(),
            reason="between uses of a block each rank holds only its shard of a weight",
            fixes=(
                Fix("read the weight of the module again", "its shards, where they are needed"),
                Fix("keep w.detach().clone()", "made in the forward: the value of that step"),
                Fix("compute with it in the forward", "and return what depends on it"),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise_released()

    def __hash__(self) -> int:
        self._raise_released()

    def __eq__(self, other: object) -> bool:
        return self is other


def _resize_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Free or allocate the memory of a storage, and report it to memory counters."""
    storage.resize_(nbytes)
    if HERE.resized is not None:
        HERE.resized(storage)


def _give_up_memory(own: Sequence[torch.Tensor], known: int, name_of: Callable[[int], str]) -> bool:
    """Make the user's views of a block raise; return True if the block's memory may be freed.

    If the storage has holders that are not known, this searches the objects of Python's garbage
    collector for the views (`find_views_of_memory`), which takes time. A view that outlives the
    forward of its block would read empty memory, or another step's values. Views that are DTensors
    raise from now on. Other views (`to_local()`, NumPy arrays, C++) cannot raise: they keep the
    memory, and the block gets new memory.

    Args:
        own: the block's own tensors in the memory; the first has all of it.
        known: the number of holders of the storage if no one keeps a view.
        name_of: a function that returns the name of the weight at an element, for the error.
    """
    with DisableTorchFunction():  # not intercepted by modes or by the tensors' classes
        storage = _storage_of(own[0])
        kept = count_holders(storage) - known
        if kept <= 0:
            return True
        typed = [t for t in find_views_of_memory(own, storage, kept) if isinstance(t, DTensor)]
        for t in typed:
            t._spec = _Released(name_of(torch._C.TensorBase.storage_offset(t)))  # type: ignore[assignment, arg-type]
        return len(typed) == kept


def find_views_of_memory(
    own: Sequence[torch.Tensor], storage: torch.UntypedStorage, count: int
) -> list[Any]:
    """Returns the tensor objects that share `storage`, except the tensors in `own`.

    The search ends when `count` are found. Young objects are searched first, because the tensors of
    a running backward are among them. All objects are searched only if a tensor is older, or if
    only C++ refers to it.

    Args:
        own: tensors that are not returned.
    """
    kinds, found, ours = _kinds_of_tensors(), [], set(map(id, own))
    for generation in range(3):
        for t in [t for t in gc.get_objects(generation) if id(type(t)) in kinds]:
            if id(t) not in ours and _lies_in(t, storage):
                found.append(t)
        if len(found) >= count:
            break
    return found


def _kinds_of_tensors() -> set[int]:
    """Returns the ids of all tensor classes: `isinstance` could run code of the objects."""
    kinds: dict[int, type] = {}
    ahead: list[type] = [torch.Tensor]
    while ahead:
        kind = ahead.pop()
        if id(kind) not in kinds:
            kinds[id(kind)] = kind
            ahead += type.__subclasses__(kind)
    return set(kinds)


def _lies_in(t: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return _storage_of(t)._cdata == storage._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or without memory
        return False
