"""Views and permutations: ops that read a tensor as another shape, or reorder its dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..rule import Arg, Decomposition, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule
from ..sentence import Names, resolve_shape, view_sentence


def _local_shape(run: Callable[[Any, Sequence[int]], Any]) -> Callable[[KernelCall], Kernel | None]:
    """`run(input, shape)` with this rank's shape, where something is split: the arguments, which
    speak of the global shape, are for the whole tensor."""

    def make_shape_kernel(call: KernelCall) -> Kernel | None:
        shape = call.outputs[0]
        return (lambda input, *_, **__: run(input, shape)) if call.pieces else None

    return make_shape_kernel


# torch.Tensor's own: a method of a subclass, looked up on the operand, would be one call more.
_view = _local_shape(torch.Tensor.view)
_reshape = _local_shape(torch.reshape)
_expand = _local_shape(torch.Tensor.expand)


def _flatten_sizes(sizes: Sequence[Any], named: Any = None) -> tuple[Any, ...]:
    """Sizes that are given as x.view(2, 3), as x.view((2, 3)) or by name."""
    if named is not None:
        return tuple(named)
    one = len(sizes) == 1 and isinstance(sizes[0], list | tuple)
    return tuple(sizes[0]) if one else tuple(sizes)


def _derive_view(input: Arg, shape: Sequence[int]) -> str:
    return view_sentence(input.shape, resolve_shape(math.prod(input.shape), shape))


# -- the same elements in another shape ------------------------------------------------------------


@rule(torch.Tensor.view)
def view(input: Arg, *sizes: Any, shape: Any = None) -> KernelRule | str:
    shape = _flatten_sizes(sizes, shape)
    if len(shape) == 1 and isinstance(shape[0], torch.dtype):
        last = input.ndim - 1
        return f"{input.names.whole(last)} -> {input.names.put(last, 'z!')}" if input.ndim else "->"
    return KernelRule(_derive_view(input, shape), _view)


@rule(torch.reshape)
def reshape(input: Arg, *sizes: Any, shape: Any = None) -> KernelRule:
    return KernelRule(_derive_view(input, _flatten_sizes(sizes, shape)), _reshape)


@rule(torch.Tensor.view_as)
def view_as(input: Arg, other: Arg) -> Decomposition:
    return Decomposition(lambda input, other: input.view(other.shape))


@rule(torch.Tensor.reshape_as)
def reshape_as(input: Arg, other: Arg) -> Decomposition:
    return Decomposition(lambda input, other: input.reshape(other.shape))


@rule(torch.flatten)
def flatten(input: Arg, start_dim: int = 0, end_dim: int = -1) -> KernelRule:
    i, j = input.names.at(start_dim), input.names.at(end_dim)
    if i > j:
        raise ValueError(f"flatten from dimension {i} to {j}")
    middle = math.prod(input.shape[i : j + 1])
    return KernelRule(
        view_sentence(input.shape, (*input.shape[:i], middle, *input.shape[j + 1 :])), _reshape
    )


@rule(torch.ravel)
def ravel(input: Arg) -> str:
    return view_sentence(input.shape, (math.prod(input.shape),))


@rule(torch.unflatten, torch.Tensor.unflatten)
def unflatten(input: Arg, dim: int, sizes: Sequence[int]) -> KernelRule:
    i = input.names.at(dim)
    inner = resolve_shape(input.shape[i], sizes)
    return KernelRule(
        view_sentence(input.shape, (*input.shape[:i], *inner, *input.shape[i + 1 :])), _view
    )


@rule(torch.squeeze)
def squeeze(input: Arg, dim: int | Sequence[int] | None = None) -> KernelRule:
    gone = range(input.ndim) if dim is None else input.names.dims(dim) if dim != () else ()
    kept = [n for i, n in enumerate(input.shape) if i not in gone or n != 1]
    # A dimension of several that is split down to one on this rank must stay: hence the shape.
    return KernelRule(view_sentence(input.shape, kept), _reshape)


@rule(torch.unsqueeze)
def unsqueeze(input: Arg, dim: int) -> str:
    i = dim if dim >= 0 else dim + input.ndim + 1
    return f"+ {input.names} -> {input.names.insert(i, '1')}"


def _at_least(ndim: int) -> Callable[..., Decomposition | KernelRule]:
    def at_least(*tensors: Any) -> Decomposition | KernelRule:
        if len(tensors) != 1 or not isinstance(tensors[0], Arg):
            return Decomposition(
                lambda *xs: tuple(getattr(torch, f"atleast_{ndim}d")(x) for x in _flatten_sizes(xs))
            )
        shape = tensors[0].shape
        wide = {
            1: (1,),
            2: (1,) * (2 - len(shape)) + shape,
            3: {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}.get(len(shape), shape),
        }[ndim]
        return KernelRule(view_sentence(shape, shape if len(shape) >= ndim else wide), _view)

    return at_least


for _ndim in (1, 2, 3):
    rule(getattr(torch, f"atleast_{_ndim}d"))(_at_least(_ndim))


# -- the same dimensions in another order ----------------------------------------------------------


def _derive_permute(input: Arg, order: Sequence[int]) -> str:
    return f"+ {input.names} -> {Names(input.names[i] for i in order)}"


@rule(torch.transpose)
def transpose(input: Arg, dim0: int, dim1: int) -> str:
    order = list(range(input.ndim))
    i, j = input.names.at(dim0), input.names.at(dim1)
    if input.ndim:
        order[i], order[j] = order[j], order[i]
    return _derive_permute(input, order)


@rule(torch.permute)
def permute(input: Arg, *order: Any, dims: Any = None) -> str:
    return _derive_permute(input, [input.names.at(d) for d in _flatten_sizes(order, dims)])


@rule(torch.t)
def t(input: Arg) -> str:
    return _derive_permute(input, list(reversed(range(input.ndim))))


@rule(torch.adjoint)
def adjoint(input: Arg) -> str:
    return transpose(input, -2, -1)


@rule(torch.movedim)
def movedim(input: Arg, source: Any, destination: Any) -> str:
    sources, targets = input.names.dims(source), input.names.dims(destination)
    if source == () or source == []:
        sources = targets = ()
    rest = iter(i for i in range(input.ndim) if i not in sources)
    where = dict(zip(targets, sources, strict=True))
    return _derive_permute(
        input, [where[i] if i in where else next(rest) for i in range(input.ndim)]
    )


# -- more of the same elements ---------------------------------------------------------------------


@rule(torch.Tensor.expand, torch.broadcast_to)
def expand(input: Arg, *sizes: Any, size: Any = None) -> KernelRule:
    size = _flatten_sizes(sizes, size)
    new = len(size) - input.ndim
    if new < 0 or min(size[:new], default=0) < 0:
        raise ValueError(f"expand of {input.shape} to {size}")
    if any(n != 1 and want not in (n, -1) for n, want in zip(input.shape, size[new:], strict=True)):
        raise ValueError(f"expand of {input.shape} to {size}")
    left = [
        "1" if n == 1 != size[new + i] and size[new + i] != -1 else name
        for i, (name, n) in enumerate(zip(input.names, input.shape, strict=True))
    ]
    right = [f"z{i}={n}!" for i, n in enumerate(size[:new])]
    right += [f"y{i}={size[new + i]}!" if n == "1" else n for i, n in enumerate(left)]
    return KernelRule(f"+ {' '.join(left)} -> {' '.join(right)}", _expand)


@rule(torch.Tensor.expand_as)
def expand_as(input: Arg, other: Arg) -> Decomposition:
    return Decomposition(lambda input, other: input.expand(other.shape))


@rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Decomposition:
    def broadcast_all(*tensors: Any) -> Any:
        tensors = _flatten_sizes(tensors)
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        return tuple(t.expand(shape) for t in tensors)

    return Decomposition(broadcast_all)


@rule(torch.tile, torch.Tensor.repeat)
def repeat(input: Arg, *times: Any, dims: Any = None, repeats: Any = None) -> str:
    dims = _flatten_sizes(times, repeats if dims is None else dims)
    dims = (1,) * (input.ndim - len(dims)) + dims
    new = len(dims) - input.ndim
    right = [f"z{i}={n}!" if n != 1 else "1" for i, n in enumerate(dims[:new])]
    for i, (name, n) in enumerate(zip(input.names, dims[new:], strict=True)):
        # The copies are the outer part of the dimension, so its pieces are not pieces of the input.
        right.append(name if n == 1 else f"(y{i}={n} {name})!")
    return f"+ {' '.join(input.names)} -> {' '.join(right)}"


@rule(torch.repeat_interleave)
def repeat_interleave(input: Arg, repeats: Any = None, dim: int | None = None) -> str | None:
    if not isinstance(repeats, int) or isinstance(repeats, bool):
        return None  # how much it returns depends on the values
    if dim is None:
        return f"+ {input.names} -> ({input.names} z={repeats})"
    i = input.names.at(dim)
    return f"+ {input.names} -> {input.names.put(i, f'({input.names[i]} z={repeats})')}"


@rule(torch.meshgrid)
def meshgrid(*tensors: Any, indexing: str | None = None) -> Decomposition:
    def expand_to_grids(*tensors: Any, indexing: str | None = None) -> Any:
        tensors = _flatten_sizes(tensors)
        shape = [t.numel() for t in tensors]
        n = len(shape)
        grids = [
            t.reshape([-1 if i == j else 1 for j in range(n)]).expand(shape)
            for i, t in enumerate(tensors)
        ]
        swap = indexing == "xy" and n > 1
        return tuple(g.transpose(0, 1) if swap else g for g in grids)

    return Decomposition(expand_to_grids)


# -- pixels ----------------------------------------------------------------------------------------


@rule(torch.pixel_shuffle)
def pixel_shuffle(input: Arg, upscale_factor: int) -> str:
    r = upscale_factor
    return f"+ ...% (c r={r} s={r}) h w -> ...% c (h r) (w s)"


@rule(torch.pixel_unshuffle)
def pixel_unshuffle(input: Arg, downscale_factor: int) -> str:
    r = downscale_factor
    return f"+ ...% c (h r={r}) (w s={r}) -> ...% (c r s) h w"


@rule(torch.channel_shuffle)
def channel_shuffle(input: Arg, _groups: Any = None) -> str:
    return f"+ {input.names.whole(1)} -> {input.names.whole(1)}"
