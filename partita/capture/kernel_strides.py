"""Strides of fake results, found by running the real kernel on small operands.

A step may depend on strides: `reshape` is a view or a copy. Torch computes many fakes by a
decomposition, whose result may have other strides than the kernel's if operands are transposed:

    softplus_backward(grad, x)    the fake has the strides of x, the kernel's result those of grad

So if an operand is not contiguous, the kernel is called on small tensors of zeros, on the graph's
device. They have the operands' stride order; a size above 6 is replaced by a smaller one. The
result has the stride order of the real result. Equal calls are made once in a process.

If an op computes with sizes, as padding does, the kernel is called with the operands' own sizes, if
these are small. Otherwise torch's fake is used, whose strides may be wrong. So the executor makes
no view that the real tensor does not allow (`backend/executor.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from partita.tensor.op_facts import facts_of, without_any_autocast

_LARGEST_KEPT = 6
"""Sizes up to this are kept, because such a number in the arguments may be a dimension index."""
_MOST_ELEMENTS = 1 << 16
"""The most elements of operands that are made in their own sizes."""
_RESULTS_KEPT = 4096

Order = tuple[int, ...]
"""The dimensions of a tensor without gaps, by stride, the longest first."""


class KernelStridesMode(FakeTensorMode):
    """A fake tensor mode in which results have the strides that real kernels return.

    Private torch: `dispatch`, which the mode calls for each op.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = super().dispatch(func, types, args, kwargs)
        if found is None or not _is_kernels_choice(func):
            return found
        with torch._C._DisableTorchDispatch(), DisableTorchFunction():  # type: ignore[attr-defined]
            return _with_kernel_strides(self, func, args, kwargs, found)


@lru_cache(maxsize=4096)
def _is_kernels_choice(func: Any) -> bool:
    """True if the kernel of an op chooses the strides of its results."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    facts, name = facts_of(func), func._opname
    by_data = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    is_over_lists = name.startswith(("_foreach_", "_fused_", "_amp_"))
    by_arguments = "empty" in name or facts.by_storage
    return facts.makes_new and not (is_over_lists or by_arguments or by_data & {*func.tags})


def _with_kernel_strides(
    mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, found: Any
) -> Any:
    given = [*_tensors_in((*args, *kwargs.values()))]
    if all(t.layout is torch.strided and t.is_contiguous() for t in given):
        return found
    made = list(found) if isinstance(found, (tuple, list)) else [found]
    strided = [t for t in made if isinstance(t, torch.Tensor) and t.dim() > 1]
    if not strided or not all(map(_is_plain, (*given, *strided))):
        return found
    orders = _find_orders(func, args, kwargs, made)
    for i, (t, order) in enumerate(zip(made, orders, strict=True)):
        if order is None:
            continue
        strides = strides_in_order(t.shape, order)
        if not have_same_strides(t.shape, strides, t.stride()):
            meta = torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta")
            made[i] = FakeTensor(mode, meta, t.fake_device)
    if hasattr(found, "_fields"):  # a named tuple, as some decompositions give
        return type(found)(*made)
    return type(found)(made) if isinstance(found, (tuple, list)) else made[0]


def _tensors_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


def _is_plain(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.is_conj() or t.is_neg() or t.is_quantized:
        return False
    return isinstance(t, FakeTensor) or t.dim() == 0


def strides_in_order(shape: Sequence[int], order: Order) -> tuple[int, ...]:
    """Returns the strides of a dense tensor with this shape.

    Args:
        order: the dimensions in their order in memory; the first one varies slowest.
    """
    strides, size = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = size
        size *= max(shape[d], 1)
    return tuple(strides)


def have_same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """True if strides `one` and `other` of a tensor of this shape are equal where it matters.

    Dimensions of size 1 do not count, and any strides of an empty tensor are equal.
    """
    return 0 in shape or all(n < 2 or a == b for n, a, b in zip(shape, one, other, strict=True))


# -- calling the kernel ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operand:
    """The metadata of the operand that a kernel gets in place of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        return torch.empty_strided(
            self.shape, self.strides, dtype=self.dtype, device=self.device
        ).zero_()


_Result = tuple[tuple[int, ...], Order | None] | None
"""The shape and order of a result; None if it is no tensor."""
_results: dict[Any, list[_Result]] = {}


def _find_orders(func: Any, args: Any, kwargs: Any, made: Sequence[Any]) -> list[Order | None]:
    """Returns each result's dimensions in their order in memory; None if the order is unknown."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    for size_of in _smaller_sizes([t for t in leaves if isinstance(t, torch.Tensor)]):
        try:
            twins = [_twin_of(leaf, size_of) for leaf in leaves]
        except ValueError:
            continue
        # No stride depends on the value of a float.
        key = func, structure, tuple(type(t) if isinstance(t, float) else t for t in twins)
        if key not in _results:
            if len(_results) >= _RESULTS_KEPT:
                _results.clear()
            _results[key] = _call_kernel(func, *pytree.tree_unflatten(twins, structure))
        wanted = [_sizes_of(t, size_of) for t in made]
        if wanted == [None if result is None else result[0] for result in _results[key]]:
            return [None if result is None else result[1] for result in _results[key]]
    return [None for _ in made]


def _smaller_sizes(operands: Sequence[torch.Tensor]) -> Iterator[dict[int, int]]:
    """Yields maps from sizes to smaller sizes; last an empty map, if the operands are small."""
    large = sorted({n for t in operands for n in t.shape if n > _LARGEST_KEPT})
    yield {n: _LARGEST_KEPT + 1 + i for i, n in enumerate(large)}
    if large and sum(t.numel() for t in operands) <= _MOST_ELEMENTS:
        yield {}


def _sizes_of(t: Any, size_of: dict[int, int]) -> tuple[int, ...] | None:
    return tuple(size_of.get(n, n) for n in t.shape) if isinstance(t, torch.Tensor) else None


def _twin_of(leaf: Any, size_of: dict[int, int]) -> Any:
    """Returns the small operand that replaces an argument in the trial call of a kernel.

    Raises:
        ValueError: there is none.
    """
    if isinstance(leaf, torch.Tensor):
        shape = _sizes_of(leaf, size_of)
        assert shape is not None
        return _Operand(shape, _strides_of_twin(leaf, shape), leaf.dtype, leaf.device)
    if isinstance(leaf, torch.SymFloat):
        return 0.5
    if isinstance(leaf, (torch.SymInt, torch.SymBool)):
        raise ValueError("a number that is not known")
    if type(leaf) is not int or not size_of or abs(leaf) <= _LARGEST_KEPT:
        return leaf
    if leaf not in size_of:  # perhaps a length, beyond the end of a smaller operand
        raise ValueError("a number that is none of the sizes")
    return size_of[leaf]


def _strides_of_twin(t: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns strides for `shape` with the order, the gaps and the repeated elements of `t`."""
    strides, size, size_of_twin = [0] * t.dim(), 1, 1
    for d in sorted(range(t.dim()), key=lambda d: (t.stride(d), t.shape[d] > 1)):
        n, stride = t.shape[d], t.stride(d)
        if n > 1 and stride == 0:
            continue
        if n > 1 and stride < size:
            raise ValueError("its elements overlap")
        if n > 1 and stride > size:
            size_of_twin *= 2
        strides[d] = size_of_twin
        if n > 1:
            size, size_of_twin = stride * n, size_of_twin * shape[d]
    return tuple(strides)


def _call_kernel(func: Any, args: Any, kwargs: Any) -> list[_Result]:
    """Returns the shape and order of each result of a call; [] if it fails."""
    kept = torch.random.fork_rng() if facts_of(func).draws else nullcontext()
    below_autograd = torch._C._AutoDispatchBelowAutograd()
    try:
        with kept, torch.no_grad(), without_any_autocast(), below_autograd:
            args, kwargs = pytree.tree_map_only(_Operand, _Operand.make, (args, kwargs))
            found = func(*args, **kwargs)
    except Exception:  # it rejects the small sizes, or the device does not exist
        return []
    made = found if isinstance(found, (tuple, list)) else [found]
    return [(tuple(t.shape), _order_of(t)) if isinstance(t, torch.Tensor) else None for t in made]


def _order_of(t: torch.Tensor) -> Order | None:
    """Returns the order of a tensor's dimensions in memory; None if it has gaps."""
    if t.layout is not torch.strided:
        return None
    strides = t.stride()
    order = tuple(sorted(range(t.dim()), key=lambda d: (-strides[d], d)))
    is_dense = have_same_strides(t.shape, strides_in_order(t.shape, order), strides)
    return order if is_dense and t.numel() else None
