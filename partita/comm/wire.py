"""Wires: a rank's connections to the other ranks of a mesh; also mesh handles and dry meshes.

Data leaves a rank only by `Wire.carry`, which runs one move (a step of a redistribution) and does
the layout arithmetic, the ledger and the checks. Subclasses run the collectives: over process
groups (`groups`), over threads (`ranks`), without other ranks (`DryWire`), and as nodes of a graph
during a capture (`trace`). A mesh handle replaces a `DeviceMesh` if there are no process groups. A
dry mesh has only one rank that runs.
"""

from __future__ import annotations

import functools
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import WeakValueDictionary

import torch
from torch._C import DisableTorchFunction  # also disables modes
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import Coordinate, Fix, Layout, LayoutError, Mesh
from partita.redistribute.move import BANDWIDTH, LATENCY, bytes_of, bytes_sent

from .backends import backend_named
from .backends.backend import Backend
from .collective import (
    ALL_DTYPES,
    Axes,
    PendingList,
    PendingWork,
    Request,
    Transport,
    shares_memory,
    view_as_bytes,
)
from .device import HOST, resolve_lazy_values
from .ledger import Record, Scope, human, place_of_user, refuse_implicit, scope, user_line
from .move_steps import Step, prepare, unravel

if TYPE_CHECKING:
    from partita.redistribute import Move

_PLANS_KEPT = 4096

_waiting: list[Callable[[], None]] | None = []
"""Functions to call when this process makes its first wire; None afterwards."""
_beginning = threading.Lock()


def on_first_wire(act: Callable[[], None]) -> None:
    """Calls `act` when this process makes its first wire, or now if it has one.

    A DTensor needs a wire. So the first wire applies the patches of torch that only DTensors need.
    A program that imports partita but has no DTensor runs an unchanged torch.
    """
    with _beginning:
        if _waiting is not None:
            _waiting.append(act)
            return
    act()


def _begin_wires() -> None:
    global _waiting
    with _beginning:  # other threads wait until all patches are done
        for act in _waiting or ():
            act()
        _waiting = None


def hidden_from_modes(run: Callable[..., Any]) -> Any:
    """Decorates the function `run`: hides its torch calls from every `TorchFunctionMode`.

    These calls belong to communication, and not to the program that a mode records or reruns.
    """

    @functools.wraps(run)
    def run_hidden(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():
            return run(*args, **kwargs)

    return run_hidden


class Reading(NamedTuple):
    """A read of a DTensor's value by the program, such as `x.item()`. Ranks compare what they read.

    Attributes:
        op: the op that reads it, such as "item".
        value: the layout and dtype of the tensor.
        origin: a text that identifies the tensor and is equal on all ranks; "" if unknown.
        made: the call that made the tensor; errors show it as text.
        verb: "reads", or "moves" if an op needs the value in another layout.
    """

    op: str
    value: str = ""
    origin: str = ""
    made: object = ""
    verb: str = "reads"

    @property
    def why(self) -> str:
        """Text by which other ranks' errors describe this read, such as "reads a value (item)"."""
        return f"{self.verb} a value ({self.op})"

    def at(self, place: str) -> tuple[str, str]:
        """Returns two texts about this read: one for comparison across ranks, and one for errors.

        Args:
            place: the user's "file:line".

        Returns:
            A text that must be equal on all ranks, and one that errors show after `why`.
        """
        shown = ", ".join(filter(None, (self.value, str(self.made))))
        return f"{self.why} {self.value} {self.origin} {place}", shown and f": {shown}"


class Wire(Transport):
    """A rank's connection to the other ranks of a mesh, which runs redistributions.

    Args:
        mesh: the axes and their sizes.
        at: this rank's coordinate.
        scope_of_rank: the rank's ledgers and checks; None: the current rank's (`ledger.scope`).

    Attributes:
        device_mesh: the user's mesh object.
        device: the device on which the wire creates tensors.
    """

    device = HOST
    device_mesh: object
    gathers_in_place = False
    """True if the input of an all-gather may lie at its own position in the output."""
    backend = Backend()
    """The backend of its collectives. Passes over graphs read it."""
    has_peers = True
    """True if there are other ranks to compare with."""
    runs_in_streams = False
    """True if its collectives are kernels of a device, which can be recorded. False if ranks meet
    in Python.
    """
    kind = "of process groups"
    """A few words that name this kind of wire, for errors."""

    def __init__(self, mesh: Mesh, at: Coordinate, scope_of_rank: Scope | None = None):
        if _waiting is not None:
            _begin_wires()
        super().__init__(mesh, at)
        self.scope = scope() if scope_of_rank is None else scope_of_rank
        self.agreed: dict[object, Any] = {}  # what ranks have compared: by series, `AgreedKeys`
        self.calls_compared: dict[object, int] = {}  # by series, see `is_due`
        self._reading: Reading | None = None  # of the value being moved
        self.data_axes: tuple[str, ...] = ()  # the axes over which `zero` has sharded a model
        self.sites: dict[int, int] = {}  # by call, how often it made DTensors (`tensor/origins`)
        self._steps: dict[int, tuple[Move, Step, tuple[int, ...]]] = {}
        self._shared: WeakValueDictionary[tuple[Any, ...], torch.Tensor] = WeakValueDictionary()

    # -- moves --------------------------------------------------------------------------------

    def carry(self, move: Move, x: torch.Tensor, *, op: str, reason: str) -> torch.Tensor:
        """Runs one move: a step of a redistribution, at most one collective.

        Args:
            move: the move: its kind, its axes, and the layouts before and after it.
            x: the local tensor, of shape `move.before.local_shape(mesh, at)`. Not modified.
            op: the operation that needs the move, for the ledger and for errors.
            reason: the reason in `ledger.Record`.

        Returns:
            The new local tensor: contiguous, with its own memory, not tracked by autograd. For a
            retype, an alias of `x`.

        Raises:
            LayoutError: the move is implicit under `strict()`; `x` has the wrong shape; or the
                ranks make different calls (always checked in `ranks`, otherwise under
                `check_ranks()`).
        """
        # Callers cache plans, so a repeated move is nearly always the same object. Looking it up
        # by id avoids hashing two layouts. The entry keeps the move alive, so its id stays unique.
        entry = self._steps.get(id(move))
        if entry is None:
            entry = self._prepare(move)
        if x.shape != entry[2]:
            raise self._wrong_shape(move, x, op)
        if self.scope.busy:
            self._note(move, x, op, reason)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return entry[1](x, op)
        return entry[1](x, op)

    def start(
        self, move: Move, x: torch.Tensor, out: torch.Tensor, *, op: str, reason: str
    ) -> PendingWork:
        """Begins an all-gather, reduce-scatter or all-reduce over flat buffers, without waiting.

        Args:
            move: an all_gather or reduce_scatter of one dimension that splits evenly, or an
                all_reduce, for which `out` is `x`.
            x: the local tensor in `move.before`, contiguous. Do not write to it before the wait.
            out: memory for the local tensor in `move.after`, contiguous. If `x` has another dtype,
                `x` is sent in its own dtype and summed in the dtype of `out`.
            op: the operation that needs the move, for the ledger and for errors.
            reason: the reason in `ledger.Record`.

        Returns:
            The work to wait for before `out` is read. All ranks must wait in the same order.
        """
        if self.scope.busy:
            self._note(move, x, op, reason)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._start_move(move, x, out, op)
        return self._start_move(move, x, out, op)

    def _start_move(self, move: Move, x: torch.Tensor, out: torch.Tensor, op: str) -> PendingWork:
        axes, _ = self.group_order(move.axes)
        if self.mesh_size(axes) == 1:
            if out is not x:
                out.view(-1).copy_(x.view(-1))
            return PendingList()
        if x.dtype not in self.moved_dtypes:
            view = view_as_bytes if move.kind == "all_gather" else _view_as_real
            out, x = view(out), view(x)
        return self.begin_collective(out, x, axes, Request(move.kind, move, op))

    def _prepare(self, move: Move) -> tuple[Move, Step, tuple[int, ...]]:
        for axis in move.axes:
            self.mesh.index(axis)
        if len(self._steps) >= _PLANS_KEPT:
            self._steps.clear()
        entry = (move, self._make_step(move), move.before.local_shape(self.mesh, self.at))
        self._steps[id(move)] = entry
        return entry

    def _make_step(self, move: Move) -> Step:
        return prepare(move, self)

    def _note(self, move: Move, x: torch.Tensor, op: str, reason: str) -> None:
        nbytes = bytes_sent(move, self.mesh, x.element_size())
        if self.scope.recomputing and reason in ("explicit", "implicit"):
            reason = "recompute"
        if self.scope.strict and reason == "implicit" and move.sends:
            refuse_implicit(move, op, nbytes)
        line = user_line()
        if self.scope.check is not None and move.sends:
            request = Request(move.kind, move, op).describe()
            self.check(f"{request} ({x.dtype}) at {line or 'no line'}")
        layouts = move.before.brief(), move.after.brief()
        self._record(Record(move.kind, move.axes, nbytes, op, line, reason, self.rank, *layouts))

    def record_kept_view(self, op: str, nbytes: int) -> None:
        """Records that `op` could not free `nbytes` bytes, because a user's view is alive."""
        what = f"{op}: {human(nbytes)} of a view"
        self._record(Record("kept", (), 0, what, user_line(), "a view is kept", self.rank))

    def _record(self, record: Record) -> None:
        for log in self.scope.ledgers:
            log.moves.append(record)

    def check(self, text: str) -> None:
        """Raises on all ranks if `text` differs between them, under `check_ranks()`."""
        if self.scope.check is not None and self.mesh.size() > 1:
            self.scope.check.compare(self, text)

    def _wrong_shape(self, move: Move, x: torch.Tensor, op: str) -> LayoutError:
        return LayoutError(
            f"{op}: rank {self.rank} holds {tuple(x.shape)} where the layout "
            f"{move.before.brief()} gives it {move.before.local_shape(self.mesh, self.at)}",
            place=user_line(),
            reason=f"on mesh {self.mesh}, at {self.at}",
        )

    # -- small exchanges over the whole mesh -----------------------------------------------------

    def exchange(
        self,
        why: str,
        mine: bytes,
        deadline: float | None = None,
        compared: str = "",
        shown: str = "",
    ) -> list[bytes]:
        """Sends the bytes `mine` to all ranks. Returns every rank's bytes, in mesh order.

        On a dry mesh, and during a capture, it returns this rank's bytes for all ranks.

        Args:
            why: the reason, which must be equal on all ranks: "compares from_local".
            deadline: seconds to wait for ranks that still compute; by default the timeout of the
                process group.
            compared: other text that must be equal on all ranks.
            shown: details of what this rank does, for errors.

        Raises:
            LayoutError: on all ranks, if they have different reasons, or some do not arrive.
        """
        return [mine] * self.mesh.size()

    def group_of_all(self) -> Any:
        """Returns the process group of all ranks of the mesh, for comparisons between ranks.

        None if there are no other ranks, and for simulated ranks, which need no group.
        """
        return None

    @property
    def ranks_to_wait_for(self) -> list[int]:
        """The global ranks that a collective waits for, if it could hang.

        [] for simulated ranks, which cannot hang.
        """
        return []

    def last_begun(self, axes: Axes) -> str:
        """Returns the kind of the last collective that was begun along `axes`; "" if unknown."""
        return ""

    @contextmanager
    def reading(self, value: Reading) -> Iterator[None]:
        """Marks moves inside the `with` block as parts of a read of a value, such as `x.item()`.

        Ranks compare what they read, and a rank that reads alone gets an error.

        Args:
            value: what the program reads.
        """
        before, self._reading = self._reading, value
        try:
            yield
        finally:
            self._reading = before

    @property
    def is_reading(self) -> bool:
        """True inside a `reading` block, while the program reads a value such as `x.item()`."""
        return self._reading is not None

    def meet_readers(self, read: Reading, mine: bytes) -> list[bytes]:
        """Waits until all ranks read the same value. Returns every rank's `mine`, in mesh order.

        Args:
            read: what this rank reads.

        Raises:
            LayoutError: on all ranks, if a rank reads alone, or reads another value.
        """
        reads = read.verb == "reads"
        compared, shown = read.at(place_of_user() if reads else "")
        timeout = self.read_timeout if reads else None
        return self.exchange(read.why, mine, timeout, compared, shown)

    @property
    def read_timeout(self) -> float | None:
        """The number of seconds that a rank which reads a value waits for ranks that still compute.

        None: there is no limit besides the timeout of the process group.
        """
        return None

    def gather_ints(
        self, values: tuple[int, ...], what: str = "gather_ints"
    ) -> list[tuple[int, ...]]:
        """Sends integers to all ranks. Returns every rank's values, in mesh order.

        Args:
            values: integers of at most 64 bits, equally many on all ranks.
            what: a few words that describe the values, for errors.
        """
        if self.mesh.size() == 1:
            return [tuple(values)]
        form = struct.Struct(f"<{len(values)}q")
        why = f"compares {what} ({len(values)} numbers)"
        if self.scope.check is not None:
            self.check(f"{why} at {user_line()}")
        return [form.unpack(row) for row in self.exchange(why, form.pack(*values))]

    @hidden_from_modes
    def from_first(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Returns the tensor `x` of rank `src` on every rank: a broadcast.

        Args:
            src: an index in mesh order.

        Returns:
            A new contiguous tensor on every rank.
        """
        with torch.no_grad():
            out = resolve_lazy_values(x).clone(memory_format=torch.contiguous_format)
            axes, members = self.group(self.mesh.names)
            if len(members) > 1:
                if self.scope.check is not None:
                    self.check(f"from_first of {tuple(x.shape)} {x.dtype} at {user_line()}")
                root = members.index(self.mesh.coordinates()[src])
                request = Request("broadcast", None, f"from_first(src={src})", root=root)
                self.run_collective(out, out, axes, request)
            return out

    def region(self, layout: Layout, *, beyond: bool = False) -> tuple[tuple[int, int], ...]:
        """Returns `(offset, length)` of this rank's shard in each dimension of a global tensor.

        Args:
            layout: the layout of the global tensor.
            beyond: True if the region includes the piece's padding, and so may overlap the next
                rank's region.
        """
        return layout.local_region(self.mesh, self.at)

    def refuse_padded_piece(self, layout: Layout, to: str) -> None:
        """Raises an error if a user would get a padded shard of a tensor, as in a capture.

        Args:
            layout: the layout of the tensor.
            to: the function that would return it, such as "to_local".
        """

    def fill_padding(
        self, x: torch.Tensor, layout: Layout, value: Any, dims: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Returns `x` with its padding along `dims` set to `value`. Differentiable.

        Args:
            layout: the layout of `x`, or of a tensor with which `x` is broadcast. In the second
                case the result has the shape of that tensor.
        """
        return x

    def share(self, name: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Returns the tensor stored under `name`; if it is not alive, stores and returns `make()`.

        Args:
            name: identifies the value: everything on which it depends, except this rank's
                coordinate.
        """
        name = (*name, torch.is_inference_mode_enabled())
        kept = self._shared.get(name)
        if kept is None:
            kept = self._shared[name] = make()
        return kept

    def is_first_along(self, of: Sequence[Sequence[str]], device: torch.device) -> torch.Tensor:
        """Returns a bool tensor with one element for each list of axes in `of`.

        The element is True if this rank's coordinate is 0 on all axes of the list. The tensor is on
        `device`.
        """
        at = dict(zip(self.mesh.names, self.at, strict=True))
        return torch.tensor([not any(at[a] for a in axes) for axes in of], device=device)


# -- mesh handles ----------------------------------------------------------------------------------

_number = itertools.count()
_known: weakref.WeakValueDictionary[int, MeshHandle] = weakref.WeakValueDictionary()

MakeWire = Callable[["MeshHandle", tuple[int, ...]], Wire]


def _view_as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).view(-1)


class MeshHandle:
    """The mesh object of `pt.ranks` and `pt.dry_mesh`: like a `DeviceMesh`, without process groups.

    Each rank has its own handle; handles are compared and hashed by identity. `deepcopy`, and
    unpickling in the same process, return the handle itself.

    Args:
        layout: the axes and their sizes.
        at: this rank's coordinate.
        ranks: the global ranks, an integer tensor with the mesh's shape.
        make_wire: `make_wire(handle, ranks)` makes the wire. `ranks` is a tuple of global ranks.

    Attributes:
        mesh: the global ranks, an integer tensor with the mesh's shape.
        wire: this rank's wire on this mesh.
        root: the whole mesh if this one is a sub-mesh; otherwise itself.
    """

    device_type = HOST.type

    def __init__(self, layout: Mesh, at: Coordinate, ranks: torch.Tensor, make_wire: MakeWire):
        self._layout, self._at, self.mesh, self._make_wire = layout, at, ranks, make_wire
        self._parts: dict[tuple[str, ...], MeshHandle] = {}
        self.root = self
        self._number = next(_number)
        _known[self._number] = self
        with _disable_current_modes():
            numbers = tuple(ranks.flatten().tolist())
        self.wire = make_wire(self, numbers)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self._layout.names

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout.sizes

    @property
    def number(self) -> int:
        """A number by which `find_handle` finds this mesh again in this process, for unpickling."""
        return self._number

    def size(self, mesh_dim: int | str | None = None) -> int:
        """Returns the number of ranks along the axis `mesh_dim`, or of all ranks if it is None.

        `mesh_dim` is the index or the name of the axis.
        """
        if mesh_dim is None:
            return self._layout.size()
        return self.shape[self._resolve_mesh_dim(mesh_dim)]

    def get_coordinate(self) -> list[int]:
        return list(self._at)

    def get_rank(self) -> int:
        """Returns the global rank of this process (or simulated rank)."""
        with _disable_current_modes():
            return int(self.mesh[self._at])

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Returns this rank's index along the axis `mesh_dim` (an index or a name).

        `mesh_dim` may be omitted if the mesh has only one axis. Otherwise this raises LayoutError.
        """
        if mesh_dim is None:
            if self.ndim > 1:
                raise LayoutError(f"get_local_rank needs an axis on mesh {self._layout}")
            mesh_dim = 0
        return self._at[self._resolve_mesh_dim(mesh_dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshHandle:
        """Returns the sub-mesh along the axes `names`, in that order."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names == self.mesh_dim_names:
            return self
        if names not in self._parts:
            where = [self._resolve_mesh_dim(a) for a in names]
            part = Mesh(names, tuple(self.shape[i] for i in where))
            line = tuple(slice(None) if i in where else self._at[i] for i in range(self.ndim))
            ordered = sorted(where)  # indexing leaves the axes in the order of this mesh
            with _disable_current_modes():
                ranks = self.mesh[line].permute([ordered.index(i) for i in where])
            at = tuple(self._at[i] for i in where)
            self._parts[names] = MeshHandle(part, at, ranks, self._make_wire)
            self._parts[names].root = self.root
        return self._parts[names]

    def has_part(self, part: object) -> bool:
        """True if `part` is this mesh, or a sub-mesh such as `mesh["dp"]`."""
        return part is self or any(one.has_part(part) for one in self._parts.values())

    def _resolve_mesh_dim(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim
        try:
            return self._layout.index(mesh_dim)  # type: ignore[arg-type]  # a bad one is named
        except LayoutError as error:
            raise error.with_place(user_line()) from None

    def __copy__(self) -> MeshHandle:
        return self

    def __deepcopy__(self, memo: object) -> MeshHandle:
        return self

    def __reduce__(self) -> tuple[Callable[[int], MeshHandle], tuple[int]]:
        return find_handle, (self._number,)

    def __repr__(self) -> str:
        return f"MeshHandle({self._layout}, rank {self.get_rank()})"


def find_handle(number: int) -> MeshHandle:
    """Returns the mesh with the number `number` (`MeshHandle.number`) in this process.

    Raises LayoutError if this process has no mesh with this number: it was freed, or saved by
    another process.
    """
    try:
        return _known[number]
    except KeyError:
        raise LayoutError(
            "this tensor was saved on a mesh of a process that has ended",
            reason="only meshes of process groups can be restored in another process",
        ) from None


# `torch.load(weights_only=True)` calls only functions that were declared safe.
torch.serialization.add_safe_globals([find_handle])


# -- dry meshes ------------------------------------------------------------------------------------
# A dry mesh runs one rank without the others. Its wire counts the bytes and the time of sending.

_MOST_RANKS = 1 << 24


class DryWire(Wire):
    """The wire of a dry mesh, without other ranks: shapes and dtypes are right, values are not.

    Data of other ranks is replaced by this rank's own data, or by zeros, so results are the same in
    every run.

    Attributes:
        nbytes: bytes that this rank would have sent with ring algorithms, padding included.
        seconds: the time that sending would have taken: `latency` for each collective, plus the
            bytes divided by `bandwidth` (bytes per second).
    """

    moved_dtypes = reduced_dtypes = ALL_DTYPES
    gathers_in_place = True
    has_peers = False
    runs_in_streams = True
    kind = "that is dry"

    def __init__(
        self,
        mesh: Mesh,
        at: Coordinate,
        scope_of_rank: Scope,
        device_mesh: object,
        device: torch.device,
        latency: float = LATENCY,
        bandwidth: float = BANDWIDTH,
        backend: str = "",
    ):
        super().__init__(mesh, at, scope_of_rank)
        self.backend = backend_named(backend, device.type, _begin_alone)
        self.device_mesh, self.device = device_mesh, device
        self.latency, self.bandwidth = latency, bandwidth
        self.nbytes, self.seconds = 0, 0.0

    @classmethod
    def from_wire(cls, wire: Wire) -> Self:
        """Makes a dry wire for the mesh of `wire`, without a ledger. It sends nothing."""
        return cls(wire.mesh, wire.at, Scope(), wire.device_mesh, wire.device)

    def _perform(self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request) -> None:
        self.begin_collective(out, x, axes, request).wait()
        if request.kind == "all_gather":
            _allocate(self.backend.staging_of_gather(out), x)
        elif request.kind == "reduce_scatter" and request.reduce_op != "sum":
            _allocate(self.backend.staging_of_scatter(x), x)

    def begin_collective(
        self, out: torch.Tensor, x: torch.Tensor, axes: Axes, request: Request
    ) -> PendingWork:
        kind, n, own = request.kind, self.mesh_size(axes), self.index(axes)
        nbytes = x.nbytes if kind == "broadcast" else bytes_of(kind, n, x.nbytes)
        if request.send is not None:
            nbytes = (request.send.total - request.send.place(own)[1]) * x.element_size()
        self.nbytes += nbytes
        self.seconds += self.latency + nbytes / self.bandwidth
        if kind != "all_gather":
            return self.backend.begin(_DryGroup(n, own), out, x, request)  # type: ignore[arg-type]
        mine, rows = x.reshape(1, -1), out.view(n, -1)
        for to in (rows[:own], rows[own + shares_memory(x, out) :]):
            to.copy_(mine.expand(to.shape[0], -1))
        return PendingList()


class _DryGroup(NamedTuple):
    """A replacement of the process group, for backends with their own steps and buffers."""

    members: int
    number: int

    def size(self) -> int:
        return self.members

    def rank(self) -> int:
        return self.number


def _begin_alone(
    group: _DryGroup, out: torch.Tensor, x: torch.Tensor, request: Request
) -> PendingWork:
    """Write this rank's own part of a collective's result, and zeros for the other ranks."""
    n, own, kind = group.members, group.number, request.kind
    if kind == "reduce_scatter":
        out.view(-1).copy_(x.reshape(n, -1)[own])
    elif kind == "all_gather":
        out.zero_().view(n, -1)[own].copy_(x)
    elif request.get is not None and request.send is not None:
        sent, kept = request.send.place(own), request.get.place(own)
        out.zero_().narrow(0, *kept).copy_(x.narrow(0, *sent))
    return PendingList()


def _allocate(nbytes: int, like: torch.Tensor) -> None:
    """Allocate and free `nbytes` bytes on the device of `like`, as the backend would."""
    if nbytes:
        torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def dry_mesh(
    rank: int = 0,
    *,
    device_type: str = HOST.type,
    latency: float = LATENCY,
    bandwidth: float = BANDWIDTH,
    backend: str = "",
    **axes: int,
) -> MeshHandle:
    """Returns a mesh without other ranks, for planning. This process acts as one rank of it.

    Programs run on it with the layouts, shapes and redistributions of that rank. Values are
    meaningless: data from other ranks is replaced by zeros or by this rank's own data. `pt.ledger`
    counts the bytes that the rank would have sent. There are no process groups. On the meta device
    nothing is allocated, so the mesh may be large.

        mesh = pt.dry_mesh(dp=1024, tp=8)
        with torch.device("meta"):
            model = MyModel()
        pt.zero(model, mesh["dp"], stage=3)

    Args:
        rank: the rank that this process acts as, from 0, in row-major order of the axes.
        device_type: the device on which `pt.zeros` and similar functions create tensors: "cpu" or
            "meta".
        latency: seconds to start a collective.
        bandwidth: bytes per second that a rank can send.
        backend: the name of a backend of process groups, as in torch. Collectives also allocate the
            buffers that this backend needs.
        axes: the size of each mesh axis, outermost first.

    Returns:
        An object like a `DeviceMesh`. It has `size`, `shape`, `mesh_dim_names`, `mesh["dp"]`,
        `get_coordinate`, `get_rank` and `get_local_rank`, but no process groups.

    Raises:
        LayoutError: no axis, an axis without ranks, a rank outside the mesh, more than 16,777,216
            ranks, or an unknown backend.
    """
    if not axes:
        raise LayoutError(
            "dry_mesh needs at least one axis",
            place=user_line(),
            reason="an axis has a name and a number of ranks",
            fixes=(Fix("pt.dry_mesh(dp=8)", "for 8 ranks"),),
        )
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    if not 0 <= rank < mesh.size():
        raise LayoutError(
            f"rank {rank} is not one of the {mesh.size()} of mesh {mesh}",
            place=user_line(),
            fixes=(Fix(f"0 <= rank < {mesh.size()}"),),
        )
    if mesh.size() > _MOST_RANKS:
        raise LayoutError(
            f"a dry mesh of {mesh.size():,} ranks is too large",
            place=user_line(),
            reason="the numbers of all ranks are stored",
            fixes=(Fix(f"at most {_MOST_RANKS:,} ranks"),),
        )
    try:
        backend_named(backend, device_type)
    except ValueError as error:
        raise LayoutError(str(error), place=user_line()) from None
    with _disable_current_modes():
        numbers = torch.arange(mesh.size(), device=HOST).view(mesh.sizes)
    at = tuple(unravel(rank, mesh.sizes))

    def make_wire(handle: MeshHandle, _: tuple[int, ...]) -> DryWire:
        handle.device_type = device_type
        device = torch.device(device_type)
        where = handle._layout, handle._at, scope(), handle, device
        return DryWire(*where, latency, bandwidth, backend)

    return MeshHandle(mesh, at, numbers, make_wire)
