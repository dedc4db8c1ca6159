"""The DTensor class: a tensor that is distributed over a mesh, as users hold it.

A DTensor is this rank's local tensor, whose class was replaced, with its spec (layout and wire) in
an attribute. There is no wrapper and no second object.

    t.__class__, t._spec = DTensor, spec        `as_dtensor`

`.shape` and everything else that a user reads describe the global tensor. Kernels run with
torch-function disabled; then the same object behaves as the local tensor. `dispatch` runs torch
functions on it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _is_torch_function_enabled as _global_view

from partita.comm import (
    Piece,
    Wire,
    call_site,
    digest_of_text,
    gather_texts,
    is_agreed,
    is_alone,
    make_disagreement_error,
    remember_agreed,
    user_line,
    wire_of,
)
from partita.layout import (
    Coordinate,
    Fix,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
)
from partita.redistribute import Plan, plan
from partita.report.picture import draw, html_of

from .op_facts import without_autocast
from .origins import describe_reading, find_origin, is_compared_when_moved, note_origin
from .tensor_state import (
    HERE,
    Function,
    Spec,
    current,
    make_argument_error,
    make_layout_error,
    make_two_meshes_error,
    spec_on_mesh,
    spec_on_wire,
)

_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
_size = torch._C.TensorBase.size
_numel = torch._C.TensorBase.numel


class DTensor(torch.Tensor):
    """A tensor distributed over a mesh, made by `distribute_tensor`, `from_local`, `zeros`, ...

    Its methods and attributes describe the global tensor, as on one device. A subclass must have no
    `__slots__` and no `__init__`, because an instance is made by replacing a plain tensor's class.
    """

    # Other modules add attributes when they are imported: `dispatch` adds `__torch_function__` and
    # frequent methods, `dtensor_gradients` adds `grad`, `torch_patches` adds one for Dynamo.
    _spec: Spec

    if TYPE_CHECKING:  # added by `dtensor_gradients`; and attributes of torch's
        grad: DTensor | None

        def requires_grad_(self, requires_grad: bool = True) -> DTensor: ...

    # -- what it is ------------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh."""
        return self._spec.placements

    @property
    def device_mesh(self) -> Any:
        """The mesh of the tensor, as the object that the user passed when it was made."""
        return self._spec.wire.device_mesh

    @property
    def layout_over_mesh(self) -> Layout:
        """The tensor's `Layout`: its global shape, its dtype, and its placement on each axis."""
        return replace(self._spec.layout, dtype=short_dtype(self.dtype))

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape. With torch-function disabled: the local shape."""
        return self._spec.shape if _global_view() else _shape(self)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """Returns the global shape, or the global length of dimension `dim`.

        With torch-function disabled: the local shape or length.
        """
        if not _global_view():
            return _size(self) if dim is None else _size(self, dim)
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def numel(self) -> int:
        """Returns the number of global elements. With torch-function disabled: of local ones."""
        return self._spec.shape.numel() if _global_view() else _numel(self)

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global tensor. With torch-function disabled: of the local tensor."""
        return self.numel() * self.element_size()

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dimensions."""
        return len(self._spec.shape)

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self._spec.shape)

    ndimension = dim

    def __round__(self, ndigits: int | None = None) -> Any:
        """`round(x)`, which a plain tensor does not have: `torch.round`."""
        return torch.round(self, decimals=ndigits or 0)

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    # -- from and to local -----------------------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: Any,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Returns the DTensor that consists of all ranks' local tensors. Differentiable.

        It shares the memory of `local_tensor`. The ranks compare shapes and dtypes the first time
        that a line of the program calls this. Under `check_ranks()` each call compares what
        `run_check` compares.

        Local tensors should have the same strides on all ranks. As in torch, do not write to one
        made by `expand`: its elements share memory.

        Args:
            local_tensor: this rank's piece.
            device_mesh: a `DeviceMesh`, or the mesh of `ranks`.
            placements: one per mesh axis; Replicate on all axes by default.
            run_check: True compares the ranks first. Ranks with the whole value must have equal
                values. Shapes of pieces must fit together, and pieces must be contiguous on all
                ranks or on none. Costs two small collectives. Nothing is overwritten.
            shape: the global shape in elements. By default every rank of a sharded axis is assumed
                to hold as many elements as this one.
            stride: accepted as in torch. Strides always follow from the pieces' strides.
            grad_placements: the placements of the gradient that `local_tensor` gets. By default
                they are the placements of the DTensor's gradient. If the DTensor is Replicate there
                is no default: Partial gives each rank its own part, Replicate gives each rank the
                sum.

        Raises:
            LayoutError: the local shape differs from what `shape` and `placements` give this rank.
                With `run_check`, every rank raises if any rank's shape differs.
            LayoutError: in backward, a gradient goes to a Replicate local tensor, and
                `grad_placements` was not passed. The error names this line.
        """
        spec = DTensor._spec_of_local(local_tensor, device_mesh, placements, shape, run_check)
        if grad_placements is None:
            out = as_dtensor(refuse_ambiguous_gradient(local_tensor, spec, "from_local"), spec)
        else:
            given = spec_on_wire(spec.wire, spec.layout.shape, grad_placements)
            if given.local_shape != spec.local_shape:
                raise make_other_cut_error(spec, given, "from_local", user_line())
            local = convert_gradient(local_tensor, spec.gradient, given, "from_local")
            out = as_dtensor(local, spec)
        note_origin(out, spec.wire)
        return out

    @staticmethod
    def _spec_of_local(
        local_tensor: torch.Tensor,
        device_mesh: Any,
        placements: Sequence[Placement] | None,
        shape: Sequence[int] | None,
        run_check: bool = False,
    ) -> Spec:
        """Returns the spec of the DTensor that `from_local` makes of the same arguments."""
        if isinstance(local_tensor, DTensor):
            raise make_layout_error(
                "from_local of a DTensor: it has a layout already",
                Fix("x.redistribute(placements=...)"),
                Fix("from_local(x.to_local(), ...)"),
            )
        if not isinstance(local_tensor, torch.Tensor):
            fix = "from_local(torch.as_tensor(values), mesh, placements)"
            raise make_argument_error("from_local", "a torch.Tensor", local_tensor, fix)
        if local_tensor.layout is not torch.strided:
            raise make_no_strides_error("from_local", local_tensor)
        if shape is None:
            probe = spec_on_mesh(device_mesh, local_tensor.shape, placements)
            sizes = probe.wire.mesh.size
            shape = [
                n * math.prod([sizes(a) for a in axes])
                for n, axes in zip(local_tensor.shape, probe.layout.shards, strict=True)
            ]
        spec = spec_on_mesh(device_mesh, shape, placements)
        spec.wire.refuse_padded_piece(spec.layout, "from_local")
        if run_check:
            _compare_pieces(local_tensor, spec)
        else:
            _agree_pieces(local_tensor, spec)
            if spec.wire.scope.check is not None and not is_alone(spec.wire):
                _compare_pieces(local_tensor, spec)
        return spec

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns this rank's local tensor as a plain tensor in the same memory. Differentiable.

        Args:
            grad_placements: the placements of the result's gradient. By default they follow from
                this tensor's placements: Shard for Shard, Replicate for Partial, Invariant for
                Invariant. For Replicate there is no default: pass Partial if each rank computes its
                own part of the gradient, and Replicate if all ranks compute the same.

        Raises:
            LayoutError: in backward, a gradient arrives at a result that was Replicate on an axis
                of several ranks, and `grad_placements` was not passed. The error names this line.
        """
        spec, x = self._spec, current(self)
        spec.wire.refuse_padded_piece(spec.layout, "to_local")
        if grad_placements is None:
            return refuse_ambiguous_gradient(_complete_gradient(x), spec, "to_local")
        given = spec_on_wire(spec.wire, spec.layout.shape, grad_placements)
        with local_ops():
            if given is not spec.gradient:
                x = convert_gradient(x, given, spec.gradient, "to_local")
            return _complete_gradient(x)

    def _piece(self) -> torch.Tensor:
        """Like `to_local`, for code on local tensors: the gradient always has the dual layout."""
        self._spec.wire.refuse_padded_piece(self._spec.layout, "to_local")
        x = current(self)
        with local_ops():
            return _complete_gradient(x)

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Returns the same global value with other placements. Differentiable.

        The ledger records the moves as explicit.

        Args:
            device_mesh: this tensor's own mesh, or None.
            placements: one per mesh axis.
            async_op: accepted as in torch, without effect.
            forward_dtype: the dtype in which the value is sent, and the dtype of the result.
            backward_dtype: None, or the dtype of this tensor.

        Raises:
            LayoutError: another mesh, a wrong number of placements, a dimension out of range, or
                another `backward_dtype`.
        """
        spec = self._spec
        if device_mesh is not None and wire_of(device_mesh) is not spec.wire:
            raise make_layout_error(
                "redistribute works on the tensor's own mesh, not on another one",
                Fix("pt.distribute_tensor(x.full_tensor(), other_mesh, placements)"),
            )
        if placements is None:
            raise make_layout_error("redistribute needs placements")
        if backward_dtype is not None and backward_dtype != self.dtype:
            raise make_layout_error(
                f"backward_dtype {backward_dtype}: the gradient travels in the value's dtype",
                Fix("x.to(dtype).redistribute(placements=...)"),
            )
        x = self if forward_dtype is None else self.to(forward_dtype)
        after = spec_on_wire(spec.wire, spec.layout.shape, placements)
        return redistribute_to(x, after, "redistribute")  # type: ignore[arg-type]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Returns the whole value on every rank, as a plain tensor. Differentiable.

        Args:
            grad_placements: the placements of the result's gradient. By default it is assumed that
                all ranks do the same computation with the result, so that its gradient is whole
                and equal on every rank.
        """
        spec = self._spec
        wire = spec.wire
        if all(p.is_replicate() or p.is_invariant() for p in spec.placements) and (
            grad_placements is None and not self.requires_grad
        ):
            return self.to_local()
        out = move_local(self, spec, spec.whole, "full_tensor", "explicit")
        if grad_placements is None:
            return out
        given = spec_on_wire(wire, spec.layout.shape, grad_placements)
        return _complete_gradient(convert_gradient(out, given, spec.whole, "full_tensor"))

    # -- memory: each rank has another part of it ------------------------------------------------

    def as_subclass(self, cls: type) -> Any:
        """Raises an error, because other tensor classes expect the memory of the global tensor.

        With torch-function disabled, this is torch.Tensor.as_subclass of the local tensor.
        """
        if _global_view():
            raise make_memory_error("as_subclass")
        return super().as_subclass(cls)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Replaces this tensor's data by the data of the DTensor `source`, like `x.data = source`.

        Returns `self`. Any other argument raises an error. With torch-function disabled, this is
        torch.Tensor.set_ of the local tensor.
        """
        if not _global_view():
            return super().set_(*(() if source is None else (source,)), *args, **kwargs)
        if not isinstance(source, DTensor) or args or kwargs:
            raise make_memory_error("set_")
        self.data = source.detach()
        return self

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shows the layout and the values (this rank's piece); a Partial value is reduced first."""
        value = current(self)
        if self._spec.is_pending:
            whole = [Replicate() if p.is_partial() else p for p in self.placements]
            with self._spec.wire.reading(describe_reading(self, "print", self._spec)):
                value = value.redistribute(placements=whole)
        with local_ops():
            text = torch.Tensor.__repr__(torch.Tensor.detach(value))
        held = "pieces" if self._spec.is_sharded else "value"
        return f"DTensor({self.layout_over_mesh} on {self._spec.wire.mesh}, {held}={text})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook: which rank holds what, and this rank's piece."""
        picture = html_of(draw(self.layout_over_mesh, self._spec.wire.mesh))
        with local_ops():
            piece = torch.Tensor.__repr__(torch.Tensor.detach(current(self)))
        text = f"rank {self._spec.wire.rank} holds {piece}"
        return f"{picture}<pre>{escape(text)}</pre>"


# -- attributes of the piece, read without __torch_function__ ------------------------------------


def _make_shard_property(name: str) -> property:
    """Returns a fast property for an attribute of the local tensor."""
    attribute = getattr(torch._C.TensorBase, name)

    def read(self: DTensor) -> Any:
        with local_ops():
            return attribute.__get__(self)

    def write(self: DTensor, value: Any) -> None:
        with local_ops():
            attribute.__set__(self, value)

    doc = f"As torch.Tensor.{name}, of this rank's piece."
    return property(read, write, doc=doc)


for _name in "dtype device requires_grad is_leaf is_sparse is_cuda is_cpu is_meta".split():
    setattr(DTensor, _name, _make_shard_property(_name))


def redistribute_to(x: DTensor, after: Spec, op: str) -> DTensor:
    """Returns `x` redistributed to the spec (layout and wire) `after`. Differentiable.

    The ledger records the traffic as requested by the user ("explicit") in the op `op`.
    """
    return as_dtensor(move_local(x, x._spec, after, op, "explicit"), after)


PLAIN: set[type] = {torch.Tensor}
"""The classes of local results that are to become DTensors. Capture adds that of traced tensors."""
TYPED: dict[type, type] = {torch.Tensor: DTensor}
"""Maps a class of plain tensors to the class that `as_dtensor` gives them."""


def as_dtensor(local: torch.Tensor, spec: Spec) -> DTensor:
    """Turn a local tensor into a DTensor in place: replace its class, set its spec, and return it.

    No other code may use the object as a plain tensor any more.
    """
    local.__class__ = TYPED.get(local.__class__, DTensor)
    local._spec = spec  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


_NAMES_OF_DTYPES = """f64=float64 f32=float32 f16=float16 bf16=bfloat16 i64=int64 i32=int32
    i16=int16 i8=int8 u8=uint8 bool=bool c64=complex64 c128=complex128""".split()
DTYPES: dict[str, torch.dtype] = {
    short: getattr(torch, name) for short, name in (pair.split("=") for pair in _NAMES_OF_DTYPES)
}
"""The dtypes by their short forms, such as "f32"."""
_SHORT = {dtype: short for short, dtype in DTYPES.items()}


def short_dtype(dtype: torch.dtype) -> str:
    """Returns a dtype's short name: "f32" for torch.float32. Dtypes without one keep their name."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


# -- a value and its gradient cross a change of layout ---------------------------------------------
# `move_local` redistributes a local tensor. If it requires grad, this is an autograd node whose
# backward runs the transposed moves in reverse order. That is the only Python code in a backward
# pass. All other nodes are torch's, on local tensors, whose gradients have the layouts of
# `Placement.dual`.
#
#     forward   Partial  -> Replicate  all-reduce   backward  Partial -> Replicate  all-reduce
#     forward   Shard(0) -> Replicate  all-gather   backward  Partial -> Shard(0)   reduce-scatter


def carry_all(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    """Runs the moves of a redistribution on the local tensor `x`, and returns the new one.

    Autograd does not record the moves.

    Args:
        moves: the redistribution, as a list of moves (each at most one collective).
        wire: the connection over which the ranks communicate.
        op, reason: the op that needs the redistribution, and why, for the ledger.
    """
    watcher = HERE.watcher
    if watcher is not None and reason != "gradient":
        return watcher.run_redistribution(
            op, reason, moves, x, lambda: _run_moves(moves, x, wire, op, reason)
        )
    return _run_moves(moves, x, wire, op, reason)


def _run_moves(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        with without_autocast(x.device.type):  # a redistribution must not change the dtype
            return _run_moves(moves, x, wire, op, reason)
    for move in moves.moves:
        x = wire.carry(move, x, op=op, reason=reason)
    return x


class _Moved(torch.autograd.Function):
    """The autograd function of a plan of moves; its backward runs the transposed plan."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str) -> Any:
        ctx.moves, ctx.wire, ctx.op = moves, wire, op
        # A gradient that does not exist, as of a Function that returns None, exists on no rank.
        ctx.set_materialize_grads(False)
        return _carry_to_write(moves, x, wire, op, reason)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is None:
            return None, None, None, None, None
        back = ctx.moves.transpose(ctx.wire.mesh)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()  # a sparse gradient, as of gather(sparse_grad=True)
        # Through apply again, so that a backward pass of the backward pass works too.
        return _move_with_gradient(grad, back, ctx.wire, ctx.op, "gradient"), None, None, None, None


def _move_with_gradient(
    x: torch.Tensor, moves: Plan, wire: Wire, op: str, reason: str
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return carry_all(moves, x, wire, op, reason)
    if x.requires_grad:
        return _Moved.apply(x, moves, wire, op, reason)
    with torch.no_grad():
        return _carry_to_write(moves, x, wire, op, reason)


def _carry_to_write(moves: Plan, x: torch.Tensor, wire: Wire, op: str, reason: str) -> torch.Tensor:
    """Runs the moves of a redistribution; the result may be written in place under autograd.

    If the result is a view, it is detached: autograd refuses writes to a view that a Function
    returned, or that was made without gradients.
    """
    found = carry_all(moves, x, wire, op, reason)
    with torch._C.DisableTorchFunction():  # a region records the program's calls alone
        return found.detach() if found._is_view() else found


def _complete_gradient(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of the local tensor `x` whose missing gradient is replaced by zeros.

    User code on a local tensor may return no gradient on one rank alone. If `x` is the result of a
    redistribution, all ranks must redistribute the gradient together.
    """
    with local_ops():
        view = x.view_as(x)
        # A region's inputs have other histories when it runs again, in which it makes equal calls.
        in_region = HERE.watcher is not None and x.requires_grad
        may_be_moved = in_region or (x.grad_fn is not None and _may_be_moved(x.grad_fn))
        if not (torch.is_grad_enabled() and may_be_moved):
            return view
        piece: torch.Tensor = _ZerosForNone.apply(x)
        # Private torch: autograd refuses writes to a view that a Function returned.
        meta = torch._C._autograd._get_creation_meta(view)
        torch._C._autograd._set_creation_meta(piece, meta)
        return piece


def _may_be_moved(node: Any) -> bool:
    """True if a redistribution is in the history of an autograd node, or if it is very long."""
    seen, ahead = {node}, [node]
    for one in ahead:
        if hasattr(one, "moves") or getattr(one, "on_gradient", None) is _move_gradient:
            return True
        new = {n for n, _ in one.next_functions if n is not None} - seen
        seen |= new
        ahead += new
        if len(ahead) > 1000:
            return True
    return False


class _ZerosForNone(torch.autograd.Function):
    """The identity. If its output gets no gradient, its input gets zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def move_local(x: torch.Tensor, before: Spec, after: Spec, op: str, reason: str) -> torch.Tensor:
    """Redistributes a local tensor from the spec (layout and wire) `before` to `after`.

    Returns the new local tensor. Differentiable. If nothing changes, the result is an alias of `x`,
    never `x` itself.

    Args:
        x: the local tensor of a DTensor with the spec `before`.
        op, reason: the op that needs the redistribution, and why, for the ledger.
    """
    if before.is_copy:
        x = current(x)
    with local_ops():
        if before is after or (before.layout == after.layout and before.wire is after.wire):
            return x.view_as(x)
        if before.wire is not after.wire:
            raise make_two_meshes_error(op, before.wire, after.wire)
        moves = plan(before.layout, after.layout, before.wire.mesh, x.element_size())
        if find_origin(x) is None or not is_compared_when_moved(before, after, op, reason):
            return _move_with_gradient(x, moves, before.wire, op, reason)
        with before.wire.reading(describe_reading(x, op, before, verb="moves")):
            return _move_with_gradient(x, moves, before.wire, op, reason)


class _NoView(torch.autograd.Function):
    """The identity, whose result autograd does not treat as a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


def alias_without_base(x: torch.Tensor) -> torch.Tensor:
    """Returns an alias of `x`, with its history, that does not keep the object `x` alive."""
    alias: torch.Tensor = _NoView.apply(x)
    return alias


class _OnGradient(torch.autograd.Function):
    """The identity, whose gradient is `on_gradient(gradient, *args)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, on_gradient: Function, *args: Any) -> Any:
        ctx.on_gradient, ctx.args = on_gradient, args
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        given = None if grad is None else ctx.on_gradient(grad, *ctx.args)
        return given, None, *[None] * len(ctx.args)


def convert_gradient(x: torch.Tensor, given: Spec, wanted: Spec, op: str) -> torch.Tensor:
    """Returns an alias of the local tensor `x` whose gradient is redistributed in backward.

    The alias's gradient has the spec `given`, and the gradient that `x` gets has `wanted`.

    Args:
        given: the spec (layout and wire) of the gradient that arrives in backward.
        wanted: the spec of the gradient that `x` needs.
        op: the op that needs the redistribution, for the ledger.
    """
    line = "" if given.layout.shards == wanted.layout.shards else user_line()
    with local_ops():
        return _OnGradient.apply(x, _move_gradient, given, wanted, op, line)


def _move_gradient(
    grad: torch.Tensor, given: Spec, wanted: Spec, op: str, line: str
) -> torch.Tensor:
    if given.layout.shards != wanted.layout.shards:
        raise make_other_cut_error(wanted, given, op, line)
    return move_local(grad, given, wanted, op, "gradient")


def make_other_cut_error(wanted: Spec, given: Spec, op: str, line: str) -> LayoutError:
    """Returns the error for `grad_placements` that shard another dimension than the value.

    Args:
        wanted: the spec of the value.
        given: the spec of the gradient by `grad_placements`.
        op: the function to which `grad_placements` was passed.
        line: the user's line, as "file:line".
    """
    return LayoutError(
        f"{op}: grad_placements shard the gradient differently from the value",
        place=line,
        operands=(
            f"value     {wanted.layout.brief()} on {wanted.wire.mesh}",
            f"gradient  {given.layout.brief()}",
        ),
        reason="each rank computes the gradient of its own piece",
        fixes=(Fix("Shard where the value has Shard, and nowhere else"),),
    )


def refuse_ambiguous_gradient(x: torch.Tensor, spec: Spec, op: str) -> torch.Tensor:
    """Returns an alias of the local tensor `x`. Backward raises if its gradient is ambiguous.

    The gradient is ambiguous if `x` is Replicate on an axis of several ranks. It may be this rank's
    part of a sum, or the whole value on every rank. partita's placements suggest a part, and
    torch.distributed.tensor assumes the whole value. So the user must say which by
    `grad_placements`.

    Args:
        spec: the spec of the DTensor that has the local tensor `x`.
        op: the function that returns the alias, for the error.
    """
    with local_ops():
        if not (spec.used_differently and x.requires_grad and torch.is_grad_enabled()):
            return x.view_as(x)
        return _OnGradient.apply(x, _refuse_to_guess, spec, op, user_line())


def _refuse_to_guess(grad: torch.Tensor, spec: Spec, op: str, line: str) -> None:
    def format_call(gradient: Placement) -> str:
        axes = spec.used_differently
        given = [gradient if a in axes else p.dual() for a, p in spec.by_axis()]
        text = ", ".join(map(_format_placement, given))
        if op == "to_local":
            return f"x.to_local(grad_placements=[{text}])"
        return f"from_local(x, mesh, placements, grad_placements=[{text}])"

    axes = " and ".join(spec.used_differently)
    ahead = HERE.trace.is_behind_forward()
    if op == "to_local":
        comes = "may come" if ahead else "came"
        whose = f"a gradient {comes} back to a value that left as Replicate"
    else:
        goes = "may go" if ahead else "goes"
        whose = f"a gradient {goes} to a value that entered as Replicate"
    # A region's backward is traced before the program calls it.
    none = (Fix("x.detach().to_local()", "no gradient comes back"),) if ahead else ()
    raise LayoutError(
        f"{op}: {whose} on axis {axes}, and its meaning is ambiguous",
        place=line,
        operands=(f"x  {spec.layout.brief()} on {spec.wire.mesh}",),
        reason="each rank may have its own part of the gradient, or all ranks the whole gradient",
        fixes=(
            Fix(
                format_call(Partial()),
                "each rank has a part, and the parts add up, as for different rows of a batch",
            ),
            Fix(
                format_call(Replicate()),
                "all ranks have the same gradient, as torch.distributed.tensor assumes",
            ),
            *(none if op == "to_local" else ()),
        ),
    )


def _format_placement(p: Placement) -> str:
    """Returns the placement as a user writes it; `repr` names the fields, too."""
    return f"Shard({p.dim})" if isinstance(p, Shard) else f"{type(p).__name__}()"


# -- pieces for checkpoints ------------------------------------------------------------------------


def piece_held(x: torch.Tensor) -> Piece:
    """Returns the part of `x` that this rank saves in a checkpoint: an alias, not a copy.

    For a plain tensor, that is the whole tensor.

    Raises:
        LayoutError: `x` is Partial, so no rank has a part of the value.
    """
    spec = getattr(x, "_spec", None)
    if spec is not None and spec.is_pending:
        raise make_layout_error(
            "a checkpoint holds values, and this tensor is pending",
            Fix("x.redistribute(placements=...) first"),
            Fix("pt.save, which does so"),
            operands=(spec.layout.brief(),),
        )
    return _read_piece(x, spec)


def _read_piece(x: torch.Tensor, spec: Spec | None) -> Piece:
    with local_ops(), torch.no_grad():
        local = current(x).detach()
    if spec is None:
        return Piece(local, tuple(local.shape), tuple((0, n) for n in local.shape))
    return Piece(local, tuple(spec.shape), spec.region)


def destination(x: torch.Tensor) -> Piece | None:
    """Returns the part of `x` on this rank into which a checkpoint is loaded, in the memory of `x`.

    For a Partial sum only the first rank gets the value. On other ranks the result is None, and the
    caller writes zeros.
    """
    spec = getattr(x, "_spec", None)
    if spec is not None:
        mesh, at = spec.wire.mesh, spec.wire.at
        if any(op == "sum" and at[mesh.index(a)] for a, op in spec.layout.partial):
            return None
    return _read_piece(x, spec)


def holders_of_piece(spec: Spec) -> tuple[tuple[str, ...], int, int]:
    """Finds the ranks that have the same local tensor as this rank. Only one of them saves it.

    Returns:
        `(axes, index, count)`: the axes along which pieces are equal, this rank's index among the
        holders, and their number.
    """
    mesh = spec.wire.mesh
    axes = tuple(a for a in mesh.names if not spec.layout.placement(a).is_shard())
    return axes, spec.wire.index(axes), spec.wire.mesh_size(axes)


# -- checks that pieces make one tensor ------------------------------------------------------------
# A fault may occur on one rank only. So the ranks exchange what they found, and then all raise the
# same error, or none.


def _make_misfit_error(
    shape: Sequence[int], layout: Layout, wire: Wire, at: Coordinate, *, fix: Fix | None = None
) -> LayoutError:
    """Returns the error for a piece of `shape` on the rank at `at` that does not fit `layout`."""
    rank, due = wire.mesh.coordinates().index(at), layout.local_shape(wire.mesh, at)
    return make_layout_error(
        f"from_local: the piece of rank {rank} does not fit the stated shape {layout.shape}",
        fix or Fix(f"a piece of shape {due}", f"on rank {rank}"),
        operands=(
            f"local_tensor  {tuple(shape)}",
            f"layout {layout.brief()} on {wire.mesh} gives rank {rank} {due}",
        ),
        reason="pieces are cut as torch.chunk cuts: equal ones first, then the rest",
    )


def _agree_pieces(local: torch.Tensor, spec: Spec) -> None:
    """Compare the ranks' shapes and dtypes, unless this line has compared the same before.

    If a piece differs from earlier ones on one rank alone, only this rank compares, and the error
    names it.

    Raises:
        LayoutError: on every rank, if the pieces do not fit together. On this rank alone, if only
            its piece does not fit a stated shape that was compared before.
    """
    wire, fits = spec.wire, local.shape == spec.local_shape
    graded = local.requires_grad and torch.is_grad_enabled()
    line, key = (call_site(), "from_local"), (spec, local.dtype, graded)
    if not is_agreed(wire, line, key):
        description = f"{spec.layout} of {local.dtype}{' with a gradient' if graded else ''}"
        gathered = wire.gather_ints((digest_of_text(description), int(fits)), "shapes of pieces")
        if len(set(gathered)) > 1:
            raise _make_disagreement_error(local, spec.layout, description, wire)
        if fits:
            remember_agreed(wire, line, key)
    if not fits:
        raise _make_misfit_error(local.shape, spec.layout, wire, wire.at)


def _compare_pieces(local: torch.Tensor, spec: Spec) -> None:
    """Compare shapes, dtypes, values and memory order of the ranks' local tensors.

    Raises:
        LayoutError: on all ranks, if the local tensors do not form a tensor of `spec`.
    """
    wire, layout = spec.wire, spec.layout
    fits = local.shape == spec.local_shape
    description = f"{layout} of {local.dtype}"
    order = _order_of_memory(local, spec)
    gathered = wire.gather_ints(
        (digest_of_text(description), int(fits), order, *checksum(local)), "pieces of a tensor"
    )
    if len({digest for digest, *_ in gathered}) > 1 or not all(ok for _, ok, *_ in gathered):
        raise _make_disagreement_error(local, layout, description, wire)
    if {1, 2} <= {order for _, _, order, *_ in gathered}:
        raise _make_order_error([order for _, _, order, *_ in gathered])
    by_coordinate = {c: tuple(gathered[i][3:]) for i, c in enumerate(wire.mesh.coordinates())}
    for axis in wire.mesh.names:
        placement = layout.placement(axis)
        if placement.is_shard() or placement.is_partial():
            continue
        i = wire.mesh.index(axis)
        for c, summary in by_coordinate.items():
            first = by_coordinate[c[:i] + (0,) + c[i + 1 :]]
            if summary != first:
                shares = [Partial() if a == axis else layout.placement(a) for a in wire.mesh.names]
                raise make_layout_error(
                    f"from_local: the ranks along {axis} do not hold the same value",
                    Fix("pt.distribute_tensor(t, mesh, placements)", "to use rank 0's value"),
                    Fix(f"placements={shares}", "if they are shares of a sum"),
                    operands=(
                        f"layout {layout.brief()} on {wire.mesh}",
                        f"at {c} the checksum is {summary[-1]:x}, of the first along {axis} "
                        f"{first[-1]:x}",
                    ),
                    reason=f"{placement} on {axis} says that they do; nothing was changed",
                )


def _order_of_memory(local: torch.Tensor, spec: Spec) -> int:
    """Returns 1 if the piece is contiguous, 2 if not, and 0 if a single row does not show it."""
    if any(n < 2 <= whole for n, whole in zip(local.shape, spec.shape, strict=False)):
        return 0
    return 1 if local.is_contiguous() else 2


def _make_order_error(orders: Sequence[int]) -> LayoutError:
    ranks = (orders.index(1), orders.index(2))
    return make_layout_error(
        "from_local: the ranks' pieces lie differently in memory",
        Fix("pt.DTensor.from_local(t.contiguous(), ...)", "on every rank"),
        operands=tuple(
            f"rank {rank}  {'contiguous' if orders[rank] == 1 else 'with gaps, or transposed'}"
            for rank in sorted(ranks)
        ),
        reason="strides, and whether an op returns a view or a copy, would differ between ranks",
    )


def make_memory_error(name: str) -> LayoutError:
    """Returns the error for calling `name`, which needs the memory of the global tensor."""
    return make_layout_error(
        f"{name} cannot take a DTensor",
        Fix(f"x.to_local().{name}(...)", "on this rank's piece"),
        reason="it works on memory, and each rank has a different part of it",
    )


def make_no_strides_error(what: str, t: torch.Tensor) -> LayoutError:
    """Returns the error of the function `what` for a tensor without strides (a sparse one)."""
    return make_layout_error(
        f"{what}: a tensor of layout {t.layout} cannot be a DTensor",
        Fix("t.to_dense()"),
        Fix("pt.local_map(f, out_placements)", "if f takes or makes a sparse tensor"),
        operands=(f"t  {tuple(t.shape)}",),
        reason="placements split dimensions, and those of a sparse tensor cannot be split",
    )


def _make_disagreement_error(
    local: torch.Tensor, layout: Layout, description: str, wire: Wire
) -> LayoutError:
    """Returns the error for pieces that do not fit. Every rank calls this, to gather texts."""
    own_answer = [description, f"{layout.shards} {local.dtype}", list(local.shape)]
    gathered = [json.loads(t) for t in gather_texts(json.dumps(own_answer), wire)]
    texts = [text for text, _, _ in gathered]
    shapes = [tuple(shape) for _, _, shape in gathered]
    by_coordinate = dict(zip(wire.mesh.coordinates(), shapes, strict=True))
    # Pieces determine the shape only if the ranks agree on everything else.
    cut_alike = len({cut for _, cut, _ in gathered}) == 1
    true = _find_true_shape(shapes, layout, wire.mesh) if cut_alike else None
    fix = None if true is None else Fix(f"shape={true}", "the global shape of the pieces")
    if len(set(texts)) > 1:
        uneven = fix is None and cut_alike and len({len(shape) for shape in shapes}) == 1
        way = Fix(
            "split as torch.chunk does",
            "with the larger pieces on the first ranks; then pass shape=",
        )
        fixes = [fix] if fix else [way] if uneven else []
        return make_disagreement_error("from_local", texts, fixes=fixes)
    wrong = next(c for c, s in by_coordinate.items() if s != layout.local_shape(wire.mesh, c))
    return _make_misfit_error(by_coordinate[wrong], layout, wire, wrong, fix=fix)


def shape_of_pieces(
    pieces: Sequence[Sequence[int]], shards: Sequence[Sequence[str]], mesh: Mesh
) -> tuple[int, ...]:
    """Returns the global shape of a tensor, computed from the local shapes of all ranks.

    Args:
        pieces: the local shape on each rank, in rank order.
        shards: for each dimension the axes that split it.
        mesh: the mesh over which the tensor is sharded.
    """
    by_coordinate = list(zip(mesh.coordinates(), pieces, strict=True))
    return tuple(
        sum(
            piece[dim]
            for at, piece in by_coordinate
            if all(i == 0 or a in axes for a, i in zip(mesh.names, at, strict=True))
        )
        for dim, axes in enumerate(shards)
    )


def _find_true_shape(
    pieces: Sequence[tuple[int, ...]], layout: Layout, mesh: Mesh
) -> tuple[int, ...] | None:
    """Returns the shape of the tensor that is cut into just these pieces, if there is one."""
    if any(len(shape) != len(layout.shape) for shape in pieces):
        return None
    shape = shape_of_pieces(pieces, layout.shards, mesh)
    fits = pieces == [Layout(shape, layout.shards).local_shape(mesh, c) for c in mesh.coordinates()]
    return shape if fits and 0 not in shape else None


# -- checksums -------------------------------------------------------------------------------------

_WORDS = 1 << 18
"""64-bit words that are weighted at a time, so that a large tensor is not copied whole."""


def checksum(value: torch.Tensor) -> tuple[int, int, int]:
    """Returns three numbers by which ranks compare the plain tensor `value` without sending it.

    They are the number of dimensions, a hash of sizes and dtype, and a 63-bit hash of the bytes.

    Each 64-bit word is multiplied by an odd weight, modulo 2**64. So two tensors of one shape that
    differ in a single word have different hashes. A tensor without memory (on "meta") counts as
    empty.
    """
    # Also hidden from modes, such as one that records a program's calls (remat).
    with torch._C.DisableTorchFunction(), torch.no_grad():
        shape = zlib.crc32(str(value.dtype).encode())
        for n in value.shape:
            shape = (shape * 1000003 + n + 1) & 0x7FFFFFFFFFFFFFFF
        if value.numel() == 0 or value.is_meta:
            return value.dim(), shape, 0
        flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if flat.stride(0) != 1:  # a single element is contiguous with any stride
            flat = flat.as_strided(flat.shape, (1,))
        if flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone()  # 64-bit words must be aligned
        data = flat.view(torch.uint8)
        whole = data.numel() // 8 * 8
        rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
        total = (rest * 2 + 1) * 0x9E3779B97F4A7C15
        words = data[:whole].view(torch.int64)
        weights = torch.arange(1, min(_WORDS, words.numel()) + 1, device=data.device)
        # Odd, and without a pattern that elements of tensors may also have.
        weights = weights.mul_(-7046029254386353131).bitwise_or_(1)
        for i, part in enumerate(words.split(_WORDS)):
            total += int((part * weights[: part.numel()]).sum()) * (2 * i + 1)
        return value.dim(), shape, (total ^ (total >> 64)) & 0x7FFFFFFFFFFFFFFF
