"""Memory of DTensors: their strides, their addresses, copies of them, and what C++ reads of them.

Shape and size speak of the global tensor, so whoever reads that many elements from the address of
a piece reads memory that is not the tensor's. What has a global meaning is answered so: strides,
their order, whether they are contiguous. What has none (`ADDRESSES`) raises, on all ranks alike,
unless torch-function is disabled or every rank holds the whole value.
"""

from __future__ import annotations

import copy
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]  # for modes, too
from torch._C import DisableTorchFunctionSubclass as Local
from torch._C import _is_torch_function_enabled as _global_view

from partita.comm import describe_saved_mesh, find_saved_wire, user_line
from partita.comm.device import is_seen_by_processes, keys_of_kernels
from partita.layout import Fix, Layout, LayoutError

from .aliasing import global_strides, make_meta_twin, write_through_copy
from .arguments import admit, alias_as_invariant, give_history, read_number
from .autograd import moved
from .dispatch import run_gathered
from .dtensor import DTensor, tagged
from .dtensor_gradients import gradient_of
from .forms import form_of
from .op_facts import ADDRESSES
from .spec import ON_NEW_SPEC, Spec, spec_for_write_into, spec_of
from .tensor_overrides import implements
from .tensor_state import OURS, current
from .uneven_pieces import copy_with_room, find_padded, with_room

T = torch.Tensor


@implements(T.stride)
def _global_stride(x: DTensor, dim: int | None = None) -> Any:
    strides = global_strides(current(x))
    if dim is None:
        return strides
    if not -len(strides) <= dim < max(len(strides), 1):
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-len(strides)}, "
            f"{len(strides) - 1}], but got {dim})"
        )
    return strides[dim]


@implements(T.is_contiguous)
def _is_contiguous(
    x: DTensor, memory_format: torch.memory_format = torch.contiguous_format
) -> bool:
    with Local():
        return make_meta_twin(current(x)).is_contiguous(memory_format=memory_format)


@implements(T.dim_order)
def _dim_order(x: DTensor, **options: Any) -> tuple[int, ...]:
    with Local():
        return make_meta_twin(current(x)).dim_order(**options)


@implements(torch.as_strided, T.as_strided)
def _as_strided(
    x: DTensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    """The strides count elements of the global tensor, which is gathered.

    Raises:
        LayoutError: on one device this would reach into what `x` is a part of.
    """
    if not x._spec.is_whole and (not x.is_contiguous() or _is_part_of_another(x)):
        raise LayoutError(
            "as_strided cannot take this DTensor",
            place=user_line(),
            operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
            reason="it goes by memory, and x is a part of another tensor's, or not in its order",
            fixes=(
                Fix("x.contiguous().as_strided(...)", "counts in x's own elements"),
                Fix("x.full_tensor().as_strided(...)", "the whole value"),
            ),
        )
    args = (x, size, stride) if storage_offset is None else (x, size, stride, storage_offset)
    return run_gathered(torch.as_strided, args, {}, form_of(torch.as_strided))


def _is_part_of_another(x: DTensor) -> bool:
    if x._spec.is_copy:
        return True
    with Local():
        return x.untyped_storage().nbytes() != math.prod(x.shape) * x.element_size()


# -- what has no global meaning --------------------------------------------------------------------


def _refuse_for_pieces(name: str, fix: Fix, answer: Callable[..., Any]) -> Callable[..., Any]:
    """The override of `name`: `answer` where each rank has the whole value, else an error."""

    def answer_if_replicated(x: Any, *args: Any, **kwargs: Any) -> Any:
        for t in (x, *args):
            if isinstance(t, DTensor) and not t._spec.is_whole:
                raise _make_piece_error(name, t, fix)
        x = current(x) if isinstance(x, DTensor) else x
        with Local():
            return answer(x, *args, **kwargs)

    return answer_if_replicated


def _make_piece_error(name: str, x: DTensor, fix: Fix) -> LayoutError:
    spec = x._spec
    held = "share" if spec.is_pending else "piece"
    return LayoutError(
        f"{name} of a DTensor of which this rank holds a {held}",
        place=user_line(),
        operands=(f"x  {spec.layout.brief()} on {spec.wire.mesh}",),
        reason=f"x's shape says more than the {held} has: a reader would run over its end",
        fixes=(
            Fix("pt.full_state_dict(model)", "a model's whole values, for files of others"),
            Fix("x.full_tensor()", "one whole value"),
            fix,
        ),
    )


for _name in ADDRESSES:
    _fix = Fix(f"x.to_local().{_name}()", "of this rank's piece")
    implements(getattr(T, _name))(_refuse_for_pieces(_name, _fix, getattr(T, _name)))

_interface = T.__cuda_array_interface__  # type: ignore[attr-defined]
implements(_interface.__get__)(
    _refuse_for_pieces(
        "__cuda_array_interface__",
        Fix("x.to_local().__cuda_array_interface__", "of this rank's piece"),
        _interface.__get__,
    )
)

# -- copies and pickles ----------------------------------------------------------------------------


@implements(T.copy_)
def _copy_into(x: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> Any:
    """`x.copy_(src)`: src is moved into x's layout."""
    if not isinstance(x, DTensor):
        wire = src._spec.wire  # type: ignore[attr-defined]
        _copy_into(alias_as_invariant(x, wire), src, non_blocking)
        give_history(x, wire)
        return x
    spec = x._spec
    if spec.is_copy:
        return write_through_copy(T.copy_, x, src, non_blocking)
    if not isinstance(src, DTensor):
        admit(src, spec.wire, "copy_")
        src = tagged(src.view_as(src), spec_of(Layout(tuple(src.shape)), spec.wire))
    fitting = _fit_broadcast_spec(src, spec)
    if src._spec is not fitting:
        fitting = spec_for_write_into(fitting)
    with Local():
        local = src if src._spec is fitting else moved(src, src._spec, fitting, "copy_", "implicit")
        torch._C.TensorBase.copy_(x, local, non_blocking)
    return x


def _fit_broadcast_spec(src: DTensor, spec: Spec) -> Spec:
    """The spec in which `src`, which is broadcast, is copied into a tensor of `spec`.

    Raises:
        RuntimeError: it cannot be broadcast.
    """
    shape, wanted = tuple(src._spec.shape), spec.layout
    if shape == wanted.shape:
        return spec
    if torch.broadcast_shapes(shape, wanted.shape) != spec.shape:
        raise RuntimeError(f"copy_ of a tensor of {shape} into one of {tuple(wanted.shape)}")
    last = zip(shape, wanted.shape[-len(shape) :], wanted.shards[-len(shape) :], strict=True)
    shards = tuple(axes if n == m else () for n, m, axes in last) if shape else ()
    return spec_of(Layout(shape, shards, wanted.partial, wanted.invariant), spec.wire)


@implements(T.__deepcopy__)
def _deepcopy_dtensor(x: DTensor, memo: dict[int, Any]) -> DTensor:
    if id(x) in memo:
        return memo[id(x)]
    with Local(), torch.no_grad():
        if not x.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
                "protocol at the moment."
            )
        new = tagged(_clone_piece(x.detach(), x._spec), x._spec)
        new.requires_grad_(x.requires_grad)
        # Of a parameter torch copies no gradient.
        if x.grad is not None and not getattr(x, "_is_param", False):
            grad = gradient_of(x)
            assert grad is not None
            new.grad = tagged(T.clone(grad), grad._spec)
    for name, value in x.__dict__.items():
        if name not in OURS:
            new.__dict__[name] = copy.deepcopy(value, memo)
    memo[id(x)] = new
    return new


def _clone_piece(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """A copy of a rank's piece, with room for padding where the piece has it."""
    if find_padded(local, spec.padded_shape) is not None:
        return copy_with_room(local, spec)
    return local.clone()


def _rebuild(
    local: torch.Tensor,
    mesh: tuple[Any, ...],
    layout: str,
    at: tuple[int, ...],
    names: dict[str, Any],
) -> DTensor:
    """Make the DTensor that was pickled. At module level, so that `weights_only=True` can allow it.

    Raises:
        LayoutError: this rank has no such mesh, or `local` is another rank's piece.
    """
    spec = spec_of(Layout.parse(layout), find_saved_wire(mesh))
    where = spec.wire.mesh
    elsewhere = [
        a
        for a in where.names
        if at[where.index(a)] != spec.wire.at[where.index(a)]
        and (spec.layout.placement(a).is_shard() or spec.layout.placement(a).is_partial())
    ]
    if elsewhere:
        raise LayoutError(
            f"the piece of another rank of axis {elsewhere[0]} was loaded",
            place=user_line(),
            operands=(
                f"{spec.layout.brief()} on {where}, saved at {at}, loaded at {spec.wire.at}",
            ),
            reason="torch.save writes the piece of one rank, and only that rank can take it back",
            fixes=(
                Fix("torch.save(..., f'{rank}.pt')", "a file for each rank"),
                Fix("pt.save(state, path)", "one folder for all, on any mesh"),
                Fix("torch.save(x.full_tensor(), path)", "the whole value"),
            ),
        )
    mine = local.detach()
    if not is_seen_by_processes(mine.untyped_storage()):
        mine = with_room(mine, spec)
    out = tagged(mine, spec).requires_grad_(local.requires_grad)
    out.__dict__.update(names)
    return out


torch.serialization.add_safe_globals([_rebuild])


@implements(T.__reduce_ex__)
def _reduce_dtensor(x: DTensor, protocol: Any) -> Any:
    with Local():
        local = x.detach().requires_grad_(x.requires_grad)
    names = {k: v for k, v in x.__dict__.items() if k not in OURS}
    spec = x._spec
    return _rebuild, (local, describe_saved_mesh(spec.wire), str(spec.layout), spec.wire.at, names)


# -- numbers that C++ reads ------------------------------------------------------------------------
# As `s` in `torch.add(a, b, alpha=s)`, a and b plain: torch takes a tensor of no dimensions for a
# number, and where no operand is a DTensor no `__torch_function__` is called. What reads the number
# is one operator of ATen, `_local_scalar_dense`, which would find this rank's share. From the first
# DTensor on of which a rank does not hold the number, that operator is replaced by one in Python,
# which costs each plain `x.item()` about a microsecond. A program without such DTensors, or of one
# rank, keeps torch's own.

# C++ that no operator is behind: it reads the memory of one rank.
_value_held = torch._C.TensorBase.tolist


def is_read_in_part(x: torch.Tensor) -> bool:
    """Is `x` a DTensor of which torch would read, as the number that it is, this rank's part?"""
    return isinstance(x, DTensor) and _global_view() and not x._spec.is_whole


def _read_scalar(x: torch.Tensor) -> Any:
    if is_read_in_part(x):
        return read_number(x)  # type: ignore[arg-type]
    with DisableTorchFunction():
        value = _value_held(x)
    while type(value) is list:
        (value,) = value
    return value


installed_libraries: list[torch.library.Library] = []
"""What stands before torch\'s own kernels: nothing until a number is read that no rank holds."""
_installing = threading.Lock()


def _install_read_kernels(spec: Spec) -> None:
    """Take the operator's place where `spec` is of a number that no rank holds whole."""
    if spec.shape.numel() != 1 or spec.is_whole:
        return
    with _installing:
        if installed_libraries:
            return
        ON_NEW_SPEC.remove(_install_read_kernels)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there was a kernel before
            for key in keys_of_kernels():
                if torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key):
                    library.impl("_local_scalar_dense", _read_scalar, key, allow_override=True)
        installed_libraries.append(library)


_OPERATOR = "aten::_local_scalar_dense"
ON_NEW_SPEC.append(_install_read_kernels)
