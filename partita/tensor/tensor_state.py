"""What is stored for a DTensor besides its elements: its spec, and other data (`TensorState`).

A spec is a global layout and this rank's wire (connection to the mesh). `spec_of` makes one for
each layout and wire. So two specs are equal exactly if they are the same object, and a plan is
looked up by the identity of its operands' specs.

All other data of a tensor are in one `TensorState`, stored in one attribute. A tensor that replaces
it gets this attribute, a copy does not. `HERE` has the objects that intercept this thread's calls
where torch has no hook: for remat, a capture and `explain`. (With `pt.ranks`, each rank is a
thread.)
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

# Private torch: a view copy may be made while torch-function is disabled, and nothing public
# enables it again. Without it the view would be one of the local tensor.
from torch._C import (
    DisableTorchFunction,  # also disables modes
    _EnableTorchFunction,
)
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from partita.comm import Wire, is_alone, is_uneven, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Placement, Replicate

from .trace_hooks import TraceHooks

Function = Callable[..., Any]
"""A function of torch, or one that runs in its place."""
Args = Sequence[Any]
Kwargs = dict[str, Any]


KEPT_IN_CLASS = "_partita_kept"
"""The beginning of the names of attributes that `keep_in_class` adds to users' classes."""


def keep_in_class(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator: caches the result of `make(cls)` as an attribute of the class `cls`.

    A dictionary as cache would keep every class alive that a program defines inside a function.
    """
    name = KEPT_IN_CLASS + make.__name__

    def find(cls: Any) -> Any:
        # Not a base's, and not that of a class whose `__dict__` was copied.
        owner, found = vars(cls).get(name, (None, None))
        if owner is not cls:
            found = make(cls)
            setattr(cls, name, (cls, found))
        return found

    return find


def make_layout_error(fact: str, *fixes: Fix, **more: Any) -> LayoutError:
    """Returns a LayoutError with the user's file and line.

    Args:
        fact: what was requested, and why it is impossible.
        *fixes: what the user can write instead.
        more: other arguments of `LayoutError`.
    """
    return LayoutError(fact, place=user_line(), fixes=fixes, **more)


def make_argument_error(by: str, takes: str, given: Any, fix: str) -> TypeError:
    """Returns the error for an argument of a wrong type; it names the user's line.

    Args:
        by: the function that was called.
        takes: the types that it accepts, as text.
        given: the argument; the error names its type.
        fix: the code to write instead.
    """
    is_class = isinstance(given, type)
    text = "the class " + given.__name__ if is_class else f"a {type(given).__name__}"
    if isinstance(given, (str, int, float, type(None))):
        text = repr(given)
    place = user_line()
    return TypeError(f"{by} takes {takes}, not {text}{f' (at {place})' if place else ''}: {fix}")


_MOST_NOTED = 8
"""Elements of a result whose origin is noted."""


class Spec:
    """A global layout and a wire (connection to a mesh's ranks): what makes a tensor a DTensor.

    Only `spec_of` makes specs, except the specs of view copies (`as_copy`).

    Attributes:
        layout: the global layout.
        wire: this rank's connection to the other ranks of the mesh.
        shape: the global shape, in elements.
        local_shape: the local shape on this rank.
    """

    __slots__ = ("__dict__", "__weakref__", "layout", "local_shape", "shape", "wire")

    is_copy = False
    """True if a tensor of this spec is a view copy: a copy of what would be a view on one device.
    See `aliasing`.
    """

    def __init__(self, layout: Layout, wire: Wire):
        self.layout, self.wire = layout, wire
        self.shape = torch.Size(layout.shape)
        self.local_shape = torch.Size(layout.local_shape(wire.mesh, wire.at))

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self.layout.placements(self.wire.mesh)

    @cached_property
    def gradient(self) -> Spec:
        """The spec of the gradient of a value with this spec: Replicate becomes Partial, and so on.

        Raises:
            ValueError: the value is a Partial max or min, which has no gradient.
        """
        return spec_of(self.layout.gradient(self.wire.mesh), self.wire)

    @cached_property
    def whole(self) -> Spec:
        """The spec of the same shape that is Invariant (whole, equal on all ranks) everywhere."""
        return spec_of(Layout(self.layout.shape, invariant=self.wire.mesh.names), self.wire)

    @cached_property
    def reduced(self) -> Spec:
        """The spec after reduction: as this one, but Replicate on axes that are Partial here."""
        layout = self.layout
        return spec_of(Layout(layout.shape, layout.shards, (), layout.invariant), self.wire)

    def invariant_of(self, shape: Sequence[int]) -> Spec:
        """Returns the spec of a tensor of `shape` that is whole on every rank.

        Axes that are Replicate in this spec stay Replicate; others become Invariant.
        """
        axes = tuple(a for a, p in self.by_axis() if not p.is_replicate())
        return spec_of(Layout(tuple(shape), invariant=axes), self.wire)

    @cached_property
    def is_pending(self) -> bool:
        """True if the value is Partial on some axis, so that it must still be reduced."""
        return bool(self.layout.partial)

    @cached_property
    def is_sharded(self) -> bool:
        """True if any axis is Shard."""
        return any(self.layout.shards)

    @cached_property
    def is_whole(self) -> bool:
        """True if every rank holds the whole value."""
        mesh = self.wire.mesh
        parted = (a for a in mesh.names if mesh.size(a) > 1)
        return not any(p.is_shard() or p.is_partial() for p in map(self.layout.placement, parted))

    @cached_property
    def has_noted_origin(self) -> bool:
        """True if results with this spec record which call made them (see `origins`).

        These results are small, and to read them a rank needs other ranks.
        """
        is_small = self.shape.numel() <= _MOST_NOTED
        return is_small and not self.is_whole and not is_alone(self.wire)

    @cached_property
    def used_differently(self) -> tuple[str, ...]:
        """The axes on which the value is Replicate over several ranks.

        Along these axes, ranks may compute different things with the value. So its gradient is
        Partial.
        """
        return tuple(
            a for a, p in self.by_axis() if p.is_replicate() and self.wire.mesh.size(a) > 1
        )

    def by_axis(self) -> list[tuple[str, Placement]]:
        """Returns `(axis, placement)` for each axis of the mesh."""
        return list(zip(self.wire.mesh.names, self.placements, strict=True))

    @cached_property
    def largest(self) -> int:
        """The number of elements in the largest local shard, which the first rank has."""
        return math.prod(self.padded_shape)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the largest local shard (the first rank's), to which others are padded."""
        mesh = self.wire.mesh
        return self.layout.local_shape(mesh, (0,) * mesh.ndim)

    @cached_property
    def is_uneven(self) -> bool:
        """True if some ranks have smaller shards than others. It is the same on all ranks."""
        return is_uneven(self.layout, self.wire.mesh)

    @cached_property
    def is_padded_behind(self) -> bool:
        """True if on all ranks padding only adds elements at the end of a shard's memory."""
        mesh, layout = self.wire.mesh, self.layout
        uneven = [
            dim
            for dim, axes in enumerate(layout.shards)
            if layout.shape[dim] % math.prod([mesh.size(a) for a in axes])
        ]
        return len(uneven) == 1 and math.prod(self.padded_shape[: uneven[0]]) == 1

    @cached_property
    def as_copy(self) -> Spec:
        """The same layout and wire, but marked as a view copy by `is_copy` (see `aliasing`)."""
        if self.is_copy:
            return self
        copy = Spec(self.layout, self.wire)
        copy.__dict__["is_copy"] = True
        for on_new_spec in list(ON_NEW_SPEC):
            on_new_spec(copy)
        return copy

    @property
    def without_mark(self) -> Spec:
        """The same layout and wire, not marked as a view copy."""
        return spec_of(self.layout, self.wire) if self.is_copy else self

    @cached_property
    def region(self) -> tuple[tuple[int, int], ...]:
        """`(offset, length)` of this rank's shard in each dimension of the global tensor."""
        return self.wire.region(self.layout)

    def __repr__(self) -> str:
        return f"Spec({self.layout} on {self.wire.mesh} at {self.wire.at})"


_INTERNED: weakref.WeakValueDictionary[tuple[Layout, Wire], Spec] = weakref.WeakValueDictionary()


ON_NEW_SPEC: list[Callable[[Spec], None]] = []
"""Functions to call with each new spec."""


def spec_of(layout: Layout, wire: Wire) -> Spec:
    """Returns the spec of `layout` on `wire`. Equal arguments return the same object."""
    spec = _INTERNED.get((layout, wire))
    if spec is None:
        spec = _INTERNED.setdefault((layout, wire), Spec(layout, wire))
        for on_new_spec in list(ON_NEW_SPEC):
            on_new_spec(spec)
    return spec


def any_spec(kind: type = Wire) -> Spec | None:
    """Returns any spec in use on a wire of the class `kind`; None if there is none."""
    return next((s for s in list(_INTERNED.values()) if isinstance(s.wire, kind)), None)


def spec_on_mesh(mesh: Any, shape: Sequence[int], placements: Sequence[Placement] | None) -> Spec:
    """Returns the Spec of a global `shape` on a user's mesh; by default Replicate on all axes.

    Args:
        mesh: a `DeviceMesh`, or the mesh of `ranks` or `dry_mesh`.

    Raises:
        LayoutError: placements that do not fit the mesh or the shape. It names the user's line.
    """
    try:
        wire = wire_of(mesh)
    except LayoutError as error:
        raise error.with_place(user_line()) from None
    if placements is None:
        placements = [Replicate()] * wire.mesh.ndim
    return spec_on_wire(wire, shape, placements)


def spec_on_wire(wire: Wire, shape: Sequence[int], placements: Sequence[Placement]) -> Spec:
    """Returns the Spec of a global `shape` with a user's `placements` on the mesh of `wire`.

    Raises LayoutError if the placements do not fit the mesh or the shape.
    """
    try:
        return spec_of(Layout.of(wire.mesh, shape, placements), wire)
    except LayoutError as error:
        raise error.with_place(user_line()) from None


def spec_for_write_into(spec: Spec) -> Spec:
    """Returns the spec to which a value is redistributed before a write into `spec`.

    It is `spec`, except for a Partial max or min: there each rank gets the whole value.
    """
    return spec if all(op == "sum" for _, op in spec.layout.partial) else spec.reduced


def make_two_meshes_error(op: str, one: Wire, other: Wire) -> LayoutError:
    """Returns the error for a call of `op` with tensors on the meshes of two wires."""
    shown = [f"mesh {one.mesh}", f"mesh {other.mesh}"]
    if len(set(shown)) == 1:  # equal meshes of different worlds
        shown = [f"mesh {one.mesh} {one.kind}", f"mesh {other.mesh} {other.kind}"]
        if one.kind == other.kind:
            shown[1] += ", made by another call"
    return make_layout_error(
        f"{op}: two meshes in one operation",
        Fix("pt.distribute_tensor(x.full_tensor(), mesh, placements)"),
        Fix("pt.init_device_mesh(...)", "one mesh with all the axes, for both tensors"),
        operands=tuple(shown),
        reason="moves are planned along the axes of one mesh",
    )


# -- state of a tensor -----------------------------------------------------------------------------

WRITTEN_UNSEEN = "written_unseen"
"""The attribute of a storage that a program may write through `x.data`.

Torch does not count these writes.
"""
_STATE = "_partita"
OURS = frozenset(("_spec", _STATE, "_origin"))
"""Attributes of a DTensor that belong to partita. Copies get only the user's attributes."""


@dataclass(frozen=True)
class ZeroLayouts:
    """How ZeRO lays out a parameter's gradient and update.

    Attributes:
        gradient: the spec (layout and wire) of the gradient after reduction.
        update: the spec in which the optimizer updates the parameter, and keeps its state.
        owner: the object that reduces the gradient during backward, and gathers updated parameters.
        name: the name of the block whose gradients are reduced together.
    """

    gradient: Spec
    update: Spec
    owner: Any
    name: str = ""


@dataclass(frozen=True, slots=True)
class RetypedValue:
    """A cached alias of a tensor in the spec that an op needed. No data was sent to make it.

    For example, an op needs an Invariant value as Replicate. Backward then reduces the gradient of
    the alias. It may be used while the tensor's memory, version and grad_fn are unchanged.

    Attributes:
        spec: the spec of the alias.
        version, grad_fn: the tensor's version and `grad_fn` when the alias was made.
        value: the alias, a local tensor.
    """

    spec: Spec
    version: int
    grad_fn: Any
    value: torch.Tensor

    def is_of(self, x: torch.Tensor, spec: Spec) -> bool:
        """True if this alias has the spec `spec`, and `x` has not changed since.

        A write to x, or another autograd graph, counts as a change.
        """
        return (
            self.spec is spec
            and self.version == x._version
            and self.grad_fn is x.grad_fn
            and self.value.untyped_storage()._cdata == x.untyped_storage()._cdata
        )


@dataclass(slots=True)
class TensorState:
    """What partita stores about one tensor, besides its spec; most tensors have none.

    Attributes:
        zero_layouts: the layouts in which ZeRO keeps the tensor's gradient and update.
        gradient_of: the tensors whose `.grad` this object is, or was.
        copied_view: for a view copy, its source (a `CopiedView`).
        retyped: an alias of the tensor in the last other layout that an op needed.
        restoring_hook: (id, hook). The hook makes a reduced gradient Partial again before backward
            adds to it. It is removed and registered again in every step.
        unseen_writes: the number of writes that torch does not count; see `count_unseen_writes`.
        replaced_at: the result of `count_unseen_writes` at the time when the tensor last got other
            memory.
        data: an alias of the tensor, from which each `x.data` is made. Its version counts writes
            through them.
        gathered_from: the sharded parameter whose gathered value this is, and its version.
        node: the object that a user got for its `grad_fn`.
        has_node_hooks: True if a user registered hooks on the node that accumulates its gradient.
        replaced_in_model: for a parameter that its model no longer has: its name, and the function
            that has replaced it.
    """

    zero_layouts: ZeroLayouts | None = None
    gradient_of: tuple[weakref.ref[Any], ...] = ()
    copied_view: Any = None
    retyped: RetypedValue | None = None
    restoring_hook: tuple[int, Any] | None = None
    unseen_writes: int = 0
    replaced_at: int = 0
    data: torch.Tensor | None = None
    gathered_from: tuple[torch.Tensor, int] | None = None
    node: Any = None
    has_node_hooks: bool = False
    replaced_in_model: tuple[str, str] | None = None

    @property
    def written_unseen(self) -> bool:
        """True if a program may write through `x.data`, which does not change `x._version`."""
        return self.unseen_writes > 0 or self.data is not None


_NOTHING = TensorState()


def state_of(x: torch.Tensor) -> TensorState:
    """Returns partita's data about the tensor `x`, for reading only.

    Tensors without data share one object.
    """
    state: TensorState = x.__dict__.get(_STATE, _NOTHING)
    return state


def states_of(tensors: Iterable[torch.Tensor]) -> list[TensorState]:
    """Returns partita's data about each tensor of `tensors`, for reading only."""
    return [x.__dict__.get(_STATE, _NOTHING) for x in tensors]


def own_state(x: torch.Tensor) -> TensorState:
    """Returns partita's data about `x`, for changes. Creates the object if there is none."""
    state: TensorState | None = x.__dict__.get(_STATE)
    if state is None:
        state = x.__dict__[_STATE] = TensorState()
    return state


def count_writes(x: torch.Tensor) -> int:
    """Returns the number of in-place writes to `x`, as torch counts them (`x._version`).

    0 for a tensor made in inference mode, which has no version.
    """
    with DisableTorchFunction():
        return 0 if x.is_inference() else x._version


def count_writes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `count_writes(x)` for each tensor `x` of `tensors`."""
    with DisableTorchFunction():
        try:
            return [x._version for x in tensors]
        except RuntimeError:  # a tensor made in inference mode has no version
            return [count_writes(x) for x in tensors]


def count_unseen_writes(x: torch.Tensor) -> int:
    """Returns how often `x` was written through an `x.data`, or got other data by `x.data = y`.

    Torch does not count these writes in `x._version`, by which autograd checks saved tensors. Code
    that keeps a copy of the value compares this count, and renews the copy if it has changed.
    """
    state = state_of(x)
    return state.unseen_writes + (0 if state.data is None else count_writes(state.data))


def count_unseen_writes_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns `count_unseen_writes(x)` for each tensor `x` of `tensors`."""
    # Nearly all have nothing to count, and ZeRO calls this for each gradient of each step.
    return [
        state.unseen_writes if state.data is None else count_unseen_writes(x)
        for x in tensors
        for state in [x.__dict__.get(_STATE, _NOTHING)]
    ]


def note_unseen_write(x: torch.Tensor) -> None:
    """Count a write of `x` that torch does not count in `x._version`, as through `x.data`."""
    own_state(x).unseen_writes += 1


def note_other_memory(x: torch.Tensor) -> None:
    """Record that the memory of `x` was replaced, as by `x.data = y`."""
    note_unseen_write(x)
    state = own_state(x)
    if (known := state.data) is not None:
        with DisableTorchFunction():
            is_same = known.untyped_storage()._cdata == x.untyped_storage()._cdata
        if not is_same:  # otherwise writes through `data` still count
            state.unseen_writes += count_writes(known)
            state.data = None
    state.replaced_at = count_unseen_writes(x)


def was_written_since(x: torch.Tensor, count: int) -> bool:
    """True if `x` may have been written in place since `count_writes(x)` returned `count`."""
    return count_writes(x) != count or state_of(x).written_unseen


# -- where a view copy comes from ------------------------------------------------------------------


@dataclass(slots=True)
class CopiedView:
    """How to compute a view copy again: the tensor that it is a view of, and the view op.

    The copy is result `index` of `view(source, *args, **kwargs)`.

    A view copy has its own memory, but in plain PyTorch it would be a view, which changes with its
    base. So it is copied again when it is read after a write to its source. Torch counts writes
    equally on all ranks, so all ranks copy together. Writes in inference mode and through `.data`
    are not counted. In these cases each read copies again. Writes outside of torch
    (`to_local().numpy()`) are not detected.

    Attributes:
        source: an alias of the tensor, with the shape that it had.
        source_writes: the write count of `source` when the copy was made.
        retaken: the newest copy, as a tuple: the source, its write count, True if gradients were
            enabled, the copy.
        graded: True if the view copy was made with gradients enabled. Otherwise no gradient flows
            through it.
    """

    source: Any
    view: Function
    args: Any
    kwargs: dict[str, Any]
    index: int | None
    source_writes: int
    retaken: tuple[Any, int, bool, Any] | None = None
    graded: bool = field(default_factory=torch.is_grad_enabled)

    def take_again(self, copy: Any) -> Any:
        """Returns the view copy `copy` if it is up to date; otherwise makes a new one."""
        source = current(self.source)
        count, graded = count_writes(source), self.graded and torch.is_grad_enabled()
        with DisableTorchFunction():
            unseen = WRITTEN_UNSEEN in vars(source.untyped_storage())
            is_counted = not (unseen or source.is_inference())
        if is_counted:
            if source is self.source and count == self.source_writes:
                return copy
            retaken = self.retaken
            if retaken is not None and retaken[0] is source and retaken[1:3] == (count, graded):
                return retaken[3]
        with _EnableTorchFunction(), torch.set_grad_enabled(graded):
            part = self.view(source, *self.args, **self.kwargs)
            if self.index is not None:
                part = part[self.index]
            if part.requires_grad and copy.retains_grad:
                part.retain_grad()
        with DisableTorchFunction():
            is_trained = copy._base is None and copy.requires_grad and copy.is_leaf
        layout = copy._spec.layout
        if is_trained and part._spec.layout != layout:
            part = part.redistribute(placements=copy.placements)
        # Placements do not say in which order several axes split one dimension.
        if is_trained and part._spec.layout == layout:  # its gradient is its own: it gets values
            with local_ops(), torch.no_grad():
                part = copy.copy_(part)
            self.note_new_values()
            if source is self.source:
                self.source_writes = count
        if is_counted:
            self.retaken = (source, count, graded, part)
        return part

    def note_new_values(self) -> None:
        """Called after a view copy that is a leaf has got the values of its source."""

    def note_write_through(self, copy: Any) -> None:
        """Records that the source now has the values of the view copy `copy`."""
        self.source_writes, self.retaken = count_writes(self.source), None


def current(x: Any) -> Any:
    """Returns `x` itself; for a view copy whose source was written, an up-to-date copy."""
    copied = state_of(x).copied_view
    return x if copied is None else copied.take_again(x)


# -- watchers of a thread --------------------------------------------------------------------------


class Watcher(Protocol):
    """The interface by which remat intercepts calls that a `TorchFunctionMode` does not see.

    These are calls of an `autograd.Function` (such as a region compiled by torch), regions compiled
    by partita, and redistributions. Remat runs a part of the program a second time, and must find
    the same calls in both runs.
    """

    def run_function(
        self, function: Any, args: tuple[Any, ...], kwargs: Kwargs, run: Callable[[], Any]
    ) -> Any:
        """Runs a call of an `autograd.Function` or of a compiled region, and returns its result.

        Args:
            function: the function whose `apply(*args, **kwargs)` is called.
            run: makes the call and returns its result.
        """

    def announce_write(self, t: torch.Tensor) -> None:
        """Records that the `autograd.Function` that runs now is about to write `t` in place."""

    def run_redistribution(
        self, op: str, reason: str, what: Any, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Runs a redistribution of the local tensor `x`, and returns its result.

        Args:
            op, reason: the op that needs the redistribution, and why, as for the ledger.
            what: the redistribution: a plan of moves.
            run: redistributes `x` and returns the result.
        """


class _Here(threading.local):
    """The objects that intercept calls of this thread, which runs a rank.

    Attributes:
        watcher: the `Watcher` of calls, or None.
        trace: the `TraceHooks` that tensors and regions call; a capture records them as nodes.
        explainer: an object that gets each call's plan. While set, every call is planned anew.
        resized: a function that gets each storage whose owner has freed or allocated its memory.
        rerunnable: the number of things that may run a part of the program again in backward: hooks
            of saved tensors (a checkpoint's), autograd.Functions.
    """

    watcher: Any = None
    trace: Any = TraceHooks()
    explainer: Any = None
    resized: Any = None
    rerunnable: int = 0

    @cached_property
    def unfinished(self) -> list[Callable[[], None]]:
        """Functions that end what has begun in this thread, such as a forward; innermost last."""
        return []

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Ends the forward of blocks that began inside the `with` block, also after an exception.

        Torch does not call a module's forward hooks if its forward raises a bare BaseException.
        """
        n = len(self.unfinished)
        try:
            yield
        finally:
            while len(self.unfinished) > n:
                self.unfinished.pop()()

    @cached_property
    def roots(self) -> list[list[torch.Tensor]]:
        """The roots of each backward pass of DTensors that runs in this thread; innermost last."""
        return []


HERE = _Here()


# -- state of the autograd engine ------------------------------------------------------------------
# Private torch, because nothing public has this. `tests/tensor/test_private_torch.py` tests it.


backward_pass = torch._C._current_graph_task_id
"""Returns the unique number of the running backward pass; -1 if none is running."""


def in_backward() -> bool:
    """True if a backward pass is running in this thread."""
    return backward_pass() != -1


def in_formula_of_backward() -> bool:
    """True if torch's own backward of an op, not a hook, called the running TorchDispatchMode."""
    below_autograd = torch._C._dispatch_tls_is_dispatch_key_excluded
    return (
        in_backward()
        and not torch.is_inference_mode_enabled()  # which excludes this key, too
        and below_autograd(torch._C.DispatchKey.AutogradFunctionality)
    )


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""`will_execute(node)`: True if the running backward pass executes this autograd node. A pass that
computes only some gradients may skip it.
"""


def is_only_returned(leaf: torch.Tensor) -> bool:
    """True if the running backward returns the gradient of `leaf`, and leaves `.grad` alone."""
    with local_ops():
        try:
            return leaf.requires_grad and not will_execute(get_gradient_edge(leaf).node)
        except RuntimeError:  # of a leaf in torch.autograd.grad
            return True


def frees_graph() -> bool:
    """True if a backward pass is running that frees the graph (`retain_graph=False`)."""
    keeps = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
    return in_backward() and not keeps()


def after_backward(call: Callable[[], None]) -> None:
    """Calls `call` at the end of the running backward pass, unless the pass raises an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def next_node() -> int:
    """Returns the sequence number of the next autograd node in this thread. They increase."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined]


def saving_hooks() -> tuple[Any, Any] | None:
    """Returns the current `saved_tensors_hooks` (pack, unpack), or None.

    Torch calls only the innermost hooks. If these handle only some tensors, they must pass the
    others to the hooks outside of them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class HooksWithoutRerun(saved_tensors_hooks):
    """Hooks of saved tensors that run no code of the program again in backward."""


def without_history(t: torch.Tensor) -> torch.Tensor:
    """Returns a detached alias of `t`, for `saved_tensors_hooks` that store tensors.

    A node may save its own result, which refers to the node. If the hooks stored that result, node
    and result would keep each other alive until a backward pass runs.
    """
    with local_ops():
        return t if t.grad_fn is None else t.detach()


def count_holders(storage: torch.UntypedStorage) -> int:
    """Returns the number of tensors and storage objects that share this memory."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
