"""A DTensor's memory: strides of the global tensor, and no address where a rank holds a piece.

Shape and size speak of the global tensor, so whoever reads that many elements from the address of
a piece reads memory that is not the tensor's. What has a global meaning is answered so: strides,
their order, whether they are contiguous. What has none (`ADDRESSES`) raises, on all ranks alike,
unless torch-function is disabled or every rank holds the whole value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import user_line
from partita.layout import Fix, LayoutError

from .aliasing import global_strides, make_meta_twin
from .dtensor import DTensor
from .forms import form_of
from .function_facts import ADDRESSES
from .gathered import run_gathered
from .origin import current
from .tensor_overrides import implements

__all__: list[str] = []

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
