"""The DTensor: the tensor that users hold.

A DTensor is this rank's piece of a global tensor: a plain tensor whose class was exchanged, with
its spec in an attribute. There is no wrapper and no second object.

    t.__class__, t._spec = DTensor, spec        `tagged`

`.shape` and all that a user reads speak of the global tensor. Kernels run with torch-function
disabled, where it is the plain piece.

What its functions compute is decided in `dispatch`, which also gives it `__torch_function__` and
its operators, since plans of calls are made of DTensors. `.grad` is in `gradient_overrides`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch._C import _is_torch_function_enabled as _global_view

from partita.comm import is_alone, user_line, wire_of
from partita.layout import Fix, Layout, LayoutError, Placement, Replicate
from partita.layout.picture import draw, html_of

from .agreement import agree_pieces, compare_pieces, make_no_strides_error
from .autograd import ask_gradient, convert_gradient, make_other_cut_error, moved
from .origin import current
from .pieces import piece_held
from .spec import Spec, spec_on_mesh, spec_on_wire
from .watch import HERE, Label

__all__ = ["PLAIN", "TYPED", "DTensor", "laid_out_as", "short_dtype", "tagged"]

_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
_size = torch._C.TensorBase.size
_numel = torch._C.TensorBase.numel


class DTensor(torch.Tensor):
    """A tensor spread over a mesh. Made by `distribute_tensor`, `from_local`, `zeros`, ...

    A subclass has no `__slots__` and no `__init__`: an instance is a plain tensor re-tagged.
    """

    _spec: Spec

    if TYPE_CHECKING:  # torch's own, which gives what it is asked of

        def requires_grad_(self, requires_grad: bool = True) -> DTensor: ...

    # -- what it is ------------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each axis of the mesh."""
        return self._spec.placements

    @property
    def device_mesh(self) -> Any:
        """The mesh that was given when the tensor was made."""
        return self._spec.wire.device_mesh

    @property
    def layout_over_mesh(self) -> Layout:
        """The layout, with its dtype; `str` of it is what `repr` shows."""
        layout = self._spec.layout
        return Layout(
            layout.shape,
            layout.shards,
            layout.partial,
            layout.invariant,
            short_dtype(self.dtype),
        )

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Of the global value, as `size()`; of this rank's piece with torch-function disabled."""
        return self._spec.shape if _global_view() else _shape(self)

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        """The shape of the global value, or its length along `dim`."""
        if not _global_view():
            return _size(self) if dim is None else _size(self, dim)
        return self._spec.shape if dim is None else self._spec.shape[dim]

    def numel(self) -> int:
        """Elements of the global value."""
        return self._spec.shape.numel() if _global_view() else _numel(self)

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global value; of this rank's piece with torch-function disabled."""
        return self.numel() * self.element_size()

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dimensions."""
        return len(self._spec.shape)

    def dim(self) -> int:
        """The number of dimensions."""
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
        """Take each rank's local tensor as its piece of one global tensor. Differentiable.

        The ranks compare shapes and dtypes the first time that a place of the program brings such
        a piece, and each time under `check_ranks()`, then as with `run_check`. A piece keeps its
        memory, gaps and all: pieces should lie alike on all ranks, and one that was expanded is
        not to be written, as in torch.

        Args:
            placements: one per mesh axis; all Replicate where not given.
            run_check: compare the ranks first: whole axes must hold equal values, and pieces must
                fit together, contiguous on all ranks or on none. Costs two small collectives.
                Nothing is overwritten.
            shape: the global shape in elements. Without it every rank of a sharded axis is taken
                to hold as much as this one.
            stride: as in torch; what the pieces say is kept: strides follow from theirs.
            grad_placements: how the gradient is given to `local_tensor`. By default as the gradient
                of the DTensor is placed. Where that is Replicate it must be given if a gradient
                arrives: Partial for each rank's part, Replicate for the whole, summed.

        Raises:
            LayoutError: in backward, if a gradient goes to a local tensor that was taken for
                Replicate and `grad_placements` was not given; naming this line.
            LayoutError: the local shape is not what `shape` and `placements` give this rank; with
                `run_check`, on every rank when any rank's does not fit.
        """
        spec = DTensor._spec_of_local(local_tensor, device_mesh, placements, shape, run_check)
        if grad_placements is None:
            return tagged(ask_gradient(local_tensor, spec, "from_local"), spec)
        given = spec_on_wire(spec.wire, spec.layout.shape, grad_placements)
        if given.local_shape != spec.local_shape:
            raise make_other_cut_error(spec, given, "from_local", user_line())
        return tagged(convert_gradient(local_tensor, spec.gradient, given, "from_local"), spec)

    @staticmethod
    def _spec_of_local(
        local_tensor: torch.Tensor,
        device_mesh: Any,
        placements: Sequence[Placement] | None,
        shape: Sequence[int] | None,
        run_check: bool = False,
    ) -> Spec:
        """Of what each rank's local tensor is a piece. Arguments and errors are `from_local`'s."""
        if isinstance(local_tensor, DTensor):
            raise LayoutError(
                "from_local of a DTensor: it has a layout already",
                place=user_line(),
                fixes=(Fix("x.redistribute(placements=...)"), Fix("from_local(x.to_local(), ...)")),
            )
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
            compare_pieces(local_tensor, spec)
        else:
            agree_pieces(local_tensor, spec)
            if spec.wire.scope.check is not None and not is_alone(spec.wire):
                compare_pieces(local_tensor, spec)
        return spec

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's piece, as a plain tensor that shares its memory. Differentiable.

        Args:
            grad_placements: how the gradient of the result will be placed. By default as the
                gradient of this tensor is: Shard for Shard, Replicate for Partial, Invariant for
                Invariant. Of a Replicate value it must be given if a gradient arrives: Partial
                where each rank computed its own part of it, Replicate where all computed the same.

        Raises:
            LayoutError: in backward, if a gradient arrives at what left as Replicate on an axis of
                several ranks and `grad_placements` was not given; naming this line.
        """
        spec, x = self._spec, current(self)
        spec.wire.refuse_padded_piece(spec.layout, "to_local")
        if grad_placements is None:
            return ask_gradient(x, spec, "to_local")
        given = spec_on_wire(spec.wire, spec.layout.shape, grad_placements)
        with Local():
            if given is spec.gradient:
                return x.view_as(x)  # type: ignore[no-any-return]
            return convert_gradient(x, given, spec.gradient, "to_local")

    def _piece(self) -> torch.Tensor:
        """As `to_local`, for a program that computes on pieces: the gradient is the dual's."""
        self._spec.wire.refuse_padded_piece(self._spec.layout, "to_local")
        x = current(self)
        with Local():
            return x.view_as(x)  # type: ignore[no-any-return]

    def redistribute(
        self,
        device_mesh: Any = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same global value in other placements. Differentiable; noted as explicit.

        Args:
            device_mesh: this tensor's own mesh, if given.
            placements: one per mesh axis.
            forward_dtype: the dtype in which the value travels and arrives.

        Raises:
            LayoutError: another mesh, a wrong number of placements, a dimension out of range.
        """
        spec = self._spec
        if device_mesh is not None and wire_of(device_mesh) is not spec.wire:
            raise LayoutError(
                "redistribute moves along the tensor's own mesh, not to another one",
                place=user_line(),
                fixes=(Fix("pt.distribute_tensor(x.full_tensor(), other_mesh, placements)"),),
            )
        if placements is None:
            raise LayoutError("redistribute needs placements", place=user_line())
        if backward_dtype is not None and backward_dtype != self.dtype:
            raise LayoutError(
                f"backward_dtype {backward_dtype}: the gradient travels in the value's dtype",
                place=user_line(),
                fixes=(Fix("x.to(dtype).redistribute(placements=...)"),),
            )
        x = self if forward_dtype is None else self.to(forward_dtype)
        after = spec_on_wire(spec.wire, spec.layout.shape, placements)
        return laid_out_as(x, after, "redistribute")  # type: ignore[arg-type]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole value on every rank, as a plain tensor. Differentiable.

        The gradient of the result is taken as whole and equal on every rank (the same computation
        follows everywhere), unless `grad_placements` says otherwise.
        """
        spec = self._spec
        wire = spec.wire
        if all(p.is_replicate() or p.is_invariant() for p in spec.placements) and (
            grad_placements is None and not self.requires_grad
        ):
            return self.to_local()
        out = moved(self, spec, spec.whole, "full_tensor", "explicit")
        if grad_placements is None:
            return out
        given = spec_on_wire(wire, spec.layout.shape, grad_placements)
        return convert_gradient(out, given, spec.whole, "full_tensor")

    # -- what torch.distributed.checkpoint asks a tensor that is spread, by these names ----------

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from partita.comm.dcp_writing import write_items  # it takes half a second

        return write_items(fqn, piece_held(self))

    def __create_chunk_list__(self) -> list[Any]:
        from partita.comm.dcp_reading import chunks

        piece = piece_held(self)
        return chunks(piece.region, piece.shape)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return piece_held(self).local

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Layout and values: a pending value is reduced first, a sharded one shows its piece."""
        value = current(self)
        if self._spec.is_pending:
            whole = [Replicate() if p.is_partial() else p for p in self.placements]
            with self._spec.wire.reading("print"):
                value = value.redistribute(placements=whole)
        with Local():
            text = torch.Tensor.__repr__(torch.Tensor.detach(value))
        held = "pieces" if self._spec.is_sharded else "value"
        return f"DTensor({self.layout_over_mesh} on {self._spec.wire.mesh}, {held}={text})"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        """For a notebook: which rank holds what, and the piece of this one. Nothing is sent."""
        picture = html_of(draw(self.layout_over_mesh, self._spec.wire.mesh))
        with Local():
            piece = torch.Tensor.__repr__(torch.Tensor.detach(current(self)))
        text = f"rank {self._spec.wire.rank} holds {piece}"
        return f"{picture}<pre>{escape(text)}</pre>"


# -- attributes of the piece, read without __torch_function__ ------------------------------------


def _make_shard_property(name: str) -> property:
    """A property that reads and sets an attribute of the piece directly: it is read often."""
    attribute = getattr(torch._C.TensorBase, name)

    def read(self: DTensor) -> Any:
        with Local():
            return attribute.__get__(self)

    def write(self: DTensor, value: Any) -> None:
        with Local():
            attribute.__set__(self, value)

    doc = f"`{name}` of this rank's piece, as of any tensor."
    return property(read, write, doc=doc)


for _name in "dtype device requires_grad is_leaf grad_fn is_sparse is_cuda is_cpu is_meta".split():
    setattr(DTensor, _name, _make_shard_property(_name))


def laid_out_as(x: DTensor, after: Spec, op: str) -> DTensor:
    """The same global value in the layout of `after`, as the user asks for it. Differentiable."""
    if HERE.block is not None:
        return HERE.block.call_ours(_laid_out_as, x, after, Label(op))  # type: ignore[no-any-return]
    return _laid_out_as(x, after, op)


def _laid_out_as(x: DTensor, after: Spec, op: str) -> DTensor:
    return tagged(moved(x, x._spec, after, op, "explicit"), after)


PLAIN: set[type] = {torch.Tensor}
"""The classes of results that are not tagged yet. Capture adds the class of traced tensors."""
TYPED: dict[type, type] = {torch.Tensor: DTensor}
"""For each class of plain tensors the class of DTensors that `tagged` makes of it."""


def tagged(local: torch.Tensor, spec: Spec) -> DTensor:
    """`local` itself, a piece of `spec`, turned into a DTensor. Nobody else may hold it as
    plain."""
    local.__class__ = TYPED.get(local.__class__, DTensor)
    local._spec = spec  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def short_dtype(dtype: torch.dtype) -> str:
    """`f32` for torch.float32; dtypes without a short form keep their name."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))
