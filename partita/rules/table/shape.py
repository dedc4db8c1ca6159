"""Rules of ops that change shapes: views, slices and splits, concatenations, flips and pads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import (
    Arg,
    Decomposition,
    Kernel,
    KernelCall,
    KernelRule,
    decomposed,
    dim_rule,
    rule_by_name,
)
from ..rule import builtin_rule as rule
from ..sentence import Names, resolve_shape, view_sentence
from .index import make_pick_kernel


def _local_shape(run: Callable[[Any, Sequence[int]], Any]) -> Callable[[KernelCall], Kernel | None]:
    """Returns a factory of the kernel `run(input, shape)` with this rank's shape.

    It is used if a dimension is split, because the arguments describe the global shape.
    """

    def make_shape_kernel(call: KernelCall) -> Kernel | None:
        shape = call.outputs[0]
        return (lambda input, *_, **__: run(input, shape)) if call.pieces else None

    return make_shape_kernel


# torch.Tensor's own: a method of a subclass, looked up on the operand, would be one call more.
_view = _local_shape(torch.Tensor.view)
_reshape = _local_shape(torch.reshape)
_expand = _local_shape(torch.Tensor.expand)


def _flatten_sizes(sizes: Sequence[Any], named: Any = None) -> tuple[Any, ...]:
    """Returns the sizes that are passed as x.view(2, 3), as x.view((2, 3)) or by name."""
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


@decomposed("input other", torch.Tensor.view_as)
def view_as(input: Any, other: Any) -> Any:
    return input.view(other.shape)


@decomposed("input other", torch.Tensor.reshape_as)
def reshape_as(input: Any, other: Any) -> Any:
    return input.reshape(other.shape)


@decomposed("input other", torch.Tensor.expand_as)
def expand_as(input: Any, other: Any) -> Any:
    return input.expand(other.shape)


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
    # By shape, because a dimension of which this rank has one element must stay.
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


@decomposed("*tensors", torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> Any:
    tensors = _flatten_sizes(tensors)
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(t.expand(shape) for t in tensors)


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


@decomposed("*tensors indexing=None", torch.meshgrid)
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    tensors = _flatten_sizes(tensors)
    shape, n = [t.numel() for t in tensors], len(tensors)
    grids = []
    for i, t in enumerate(tensors):
        grids.append(t.reshape([-1 if i == j else 1 for j in range(n)]).expand(shape))
    swap = indexing == "xy" and n > 1
    return tuple(g.transpose(0, 1) if swap else g for g in grids)


# -- pixels ----------------------------------------------------------------------------------------


@rule(torch.pixel_shuffle)
def pixel_shuffle(input: Arg, upscale_factor: int) -> str:
    r = upscale_factor
    return f"+ ...% (c r={r} s={r}) h w -> ...% c (h r) (w s)"


@rule(torch.pixel_unshuffle)
def pixel_unshuffle(input: Arg, downscale_factor: int) -> str:
    r = downscale_factor
    return f"+ ...% c (h r={r}) (w s={r}) -> ...% (c r s) h w"


# -- parts of a dimension --------------------------------------------------------------------------


@rule(torch.select)
def select(input: Arg, dim: int, index: int) -> KernelRule | None:
    if not isinstance(index, int):
        return None
    names = input.names
    i = names.at(dim)
    if not -input.shape[i] <= index < input.shape[i]:
        raise IndexError(f"select: index {index} of {input.shape[i]}")
    entries = [index if d == i else slice(None) for d in range(input.ndim)]
    chosen = {names[i]: index % input.shape[i]}
    return KernelRule(
        f"+ {names} -> {names.without(i)}",
        lambda call: make_pick_kernel(call, entries, names, chosen),
    )


@rule(torch.narrow)
def narrow(input: Arg, dim: int, start: Any, length: int) -> str | None:
    if not isinstance(start, int):
        return None
    i = input.names.at(dim)
    if length == input.shape[i]:
        return f"+ {input.names.whole(i)} -> {input.names.whole(i)}"
    return f"+ {input.names.whole(i)} -> {input.names.put(i, f'z={length}!')}"


# -- moving along a dimension ----------------------------------------------------------------------


_WHOLE = "+ {whole} -> {whole}"
dim_rule("input _shifts=None dims=None", _WHOLE, torch.roll)
dim_rule("input dim=1", _WHOLE, torch.fliplr)
dim_rule("input dim=0", _WHOLE, torch.flipud)
dim_rule("input _groups=None dim=1", _WHOLE, torch.channel_shuffle)


@rule(torch.flip)
def flip(input: Arg, *order: Any, dims: Any = None) -> str:
    where = [
        d
        for item in (*order, dims or ())
        for d in (item if isinstance(item, list | tuple) else [item])
    ]
    names = input.names.whole(where) if where else input.names
    return f"+ {names} -> {names}"


@rule(torch.rot90)
def rot90(input: Arg, k: int = 1, dims: Sequence[int] = (0, 1)) -> str:
    i, j = (input.names.at(d) for d in dims)
    if k % 4 == 0:
        return f"+ {input.names} -> {input.names}"
    # A quarter turn exchanges two dimensions and turns one of them round.
    turned = (i, j) if k % 2 == 0 else (j,) if k % 4 == 1 else (i,)
    left = list(input.names.whole(turned))
    out = [f"y{d}={input.shape[d]}!" if d in turned else n for d, n in enumerate(left)]
    if k % 2:
        out[i], out[j] = out[j], out[i]
    return f"+ {' '.join(left)} -> {' '.join(out)}"


@rule(F.pad)
def _derive_pad(input: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None) -> str:
    left, out = list(input.names), list(input.names)
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        d = input.ndim - 1 - i
        if before or after:
            left[d] = f"{input.names[d]}!"
            out[d] = f"z{d}={input.shape[d] + before + after}!"
    if mode != "constant":  # such pads are for 1 to 3 last dimensions, of a batch that is not empty
        for d, name in enumerate(input.names):
            if left[d] == name:
                left[d] = out[d] = f"{name}%"
    # The value of a float is not in the key, so 0.0 is not distinguished from others.
    linear = mode != "constant" or value is None or (isinstance(value, int) and value == 0)
    return f"{'+ ' * linear}{' '.join(left)} -> {' '.join(out)}"


@rule(torch.constant_pad_nd)
def constant_pad_nd(input: Arg, pad: Sequence[int], value: Any = None) -> str:
    return _derive_pad(input, pad, "constant", value)


# -- triangles and diagonals -----------------------------------------------------------------------


def _register_triangle(function: Any, lower: bool) -> None:
    @rule(function)
    def derive_triangle(input: Arg) -> KernelRule:
        rows, columns = input.names[-2:]

        def make_triangle_kernel(call: KernelCall) -> Kernel | None:
            # Row i of this rank's piece is row i + offset of the whole: the diagonal is shifted.
            shift = call.pieces.get(rows, (0,))[0] - call.pieces.get(columns, (0,))[0]
            if isinstance(shift, torch.Tensor):
                return _make_traced_triangle(lower, shift)
            return (lambda input, diagonal=0: call.run(input, diagonal + shift)) if shift else None

        return KernelRule(f"+ {input.names} -> {input.names}", make_triangle_kernel)


_register_triangle(torch.tril, True)
_register_triangle(torch.triu, False)


def _make_traced_triangle(lower: bool, shift: torch.Tensor) -> Kernel:
    """Returns `tril` or `triu` for a captured step, in which a tensor has the first row's index."""

    def mask_triangle(input: Any, diagonal: int = 0) -> Any:
        rows, columns = (torch.arange(n, device=input.device) for n in input.shape[-2:])
        behind = columns - rows.unsqueeze(-1) - (shift.to(input.device) + diagonal)
        return input.masked_fill(behind > 0 if lower else behind < 0, 0)

    return mask_triangle


def _length_of_diagonal(a: int, b: int, offset: int) -> int:
    return max(min(a, b - offset) if offset >= 0 else min(a + offset, b), 0)


@rule(torch.diagonal)
def _derive_diagonal(input: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    i, j = input.names.at(dim1), input.names.at(dim2)
    n = _length_of_diagonal(input.shape[i], input.shape[j], offset)
    left = input.names.whole((i, j))
    return f"+ {left} -> {Names(input.names.without((i, j))).insert(-1, f'z={n}!')}"


@rule(torch.linalg.diagonal)
def linalg_diagonal(input: Arg, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    return _derive_diagonal(input, offset, dim1, dim2)


@rule(torch.diag_embed)
def diag_embed(input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    n = input.shape[-1] + abs(offset)
    i, j = sorted(d % (input.ndim + 1) for d in (dim1, dim2))
    out = input.names.without(-1).insert(i, f"y={n}!").insert(j, f"z={n}!")
    return f"+ {input.names.whole(-1)} -> {out}"


@rule(torch.diag)
def diag(input: Arg, diagonal: int = 0) -> str:
    return diag_embed(input, diagonal) if input.ndim == 1 else _derive_diagonal(input, diagonal)


@rule(torch.Tensor.unfold)
def unfold(input: Arg, dimension: int, size: int, step: int) -> str:
    i = input.names.at(dimension) if input.ndim else 0
    if input.ndim == 0:
        return f"+  -> z={size}!"
    count = (input.shape[i] - size) // step + 1
    out = input.names.put(i, f"y={count}!").insert(-1, f"z={size}!")
    return f"+ {input.names.whole(i)} -> {out}"


# -- joining ---------------------------------------------------------------------------------------


@rule(torch.cat)
def cat(tensors: Sequence[Any], dim: int = 0) -> str | None:
    if not all(isinstance(t, Arg) for t in tensors):
        return None
    full = [t for t in tensors if t.shape != (0,)]  # torch skips what is empty in one dimension
    if not full:
        return f"{' + '.join('z!' for _ in tensors)} -> z!"
    names = full[0].names
    i = names.at(dim)
    terms = [
        "y!" if t.shape == (0,) else str(names.put(i, f"z{k}!")) for k, t in enumerate(tensors)
    ]
    length = sum(t.shape[i] for t in full)
    return f"+ {' + '.join(terms)} -> {names.put(i, f'z={length}!')}"


@rule(torch.stack)
def stack(tensors: Sequence[Any], dim: int = 0) -> str | None:
    if not all(isinstance(t, Arg) for t in tensors):
        return None
    names = tensors[0].names
    i = dim if dim >= 0 else dim + len(names) + 1
    terms = " + ".join(str(names) for _ in tensors)
    return f"+ {terms} -> {names.insert(i, f'z={len(tensors)}!')}"


def _make_stack_along(dim: int, ndim: int) -> Kernel:
    """Returns a function like `hstack`: `cat` along `dim` of tensors with `ndim` or more
    dimensions.
    """

    def run(tensors: Sequence[Any]) -> Any:
        wide = [getattr(torch, f"atleast_{ndim}d")(t) for t in tensors]
        return torch.cat(wide, 0 if dim == 1 and wide[0].ndim == 1 else dim)

    return run


decomposed("tensors", torch.hstack)(_make_stack_along(1, 1))
decomposed("tensors", torch.vstack, torch.row_stack)(_make_stack_along(0, 2))
decomposed("tensors", torch.dstack)(_make_stack_along(2, 3))


@decomposed("tensors", torch.column_stack)
def column_stack(tensors: Sequence[Any]) -> Any:
    return torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1)


# -- splitting -------------------------------------------------------------------------------------


def _sentence_of_pieces(input: Arg, dim: int, lengths: Sequence[int]) -> str:
    i = input.names.at(dim)
    outs = [str(input.names.put(i, f"z{k}={n}!")) for k, n in enumerate(lengths)]
    return f"+ {input.names.whole(i)} -> {', '.join(outs)}"


def _split_into_lengths(size: int, step: int) -> list[int]:
    return [min(step, size - at) for at in range(0, size, step)] or [size]


def _register_split(takes: str, *functions: Any) -> None:
    @rule_by_name(takes, *functions)
    def derive_split(given: dict[str, Any]) -> str:
        input, lengths, dim = given.values()
        size = input.shape[input.names.at(dim)]
        each = isinstance(lengths, int)
        pieces = _split_into_lengths(size, max(lengths, 1)) if each else lengths
        return _sentence_of_pieces(input, dim, pieces)


_register_split("tensor split_size_or_sections dim=0", torch.split)
_register_split("input split_size dim=0", torch.Tensor.split)
_register_split("input split_sizes dim=0", torch.split_with_sizes)
_register_split("input split_size dim=0", torch.unsafe_split)


@rule(torch.chunk, torch.unsafe_chunk)
def chunk(input: Arg, chunks: int, dim: int = 0) -> str:
    size = input.shape[input.names.at(dim)]
    if size == 0:
        return _sentence_of_pieces(input, dim, [0] * chunks)
    return _sentence_of_pieces(input, dim, _split_into_lengths(size, -(-size // chunks)))


@rule(torch.tensor_split)
def tensor_split(input: Arg, indices_or_sections: Any, dim: int = 0) -> str | None:
    size = input.shape[input.names.at(dim)]
    if isinstance(indices_or_sections, int):
        n = indices_or_sections
        return _sentence_of_pieces(input, dim, [size // n + (i < size % n) for i in range(n)])
    if not isinstance(indices_or_sections, list | tuple):
        return None
    ends = [slice(None, i).indices(size)[1] for i in indices_or_sections]
    starts = zip([0, *ends], [*ends, size], strict=True)
    return _sentence_of_pieces(input, dim, [max(b - a, 0) for a, b in starts])


@rule(torch.unbind)
def unbind(input: Arg, dim: int = 0) -> str | None:
    i = input.names.at(dim)
    count = input.shape[i]
    if not count:
        return None
    left = input.names.without(i)
    return f"+ {input.names.whole(i)} -> {', '.join([str(left)] * count)}"


def _make_split_along(dim: int, ndim: int) -> Kernel:
    return lambda x, n: torch.tensor_split(x, n, 0 if x.ndim < ndim else dim)


_takes = "input _indices_or_sections=None"
decomposed(_takes, torch.hsplit)(_make_split_along(1, 2))
decomposed(_takes, torch.vsplit)(_make_split_along(0, 2))
decomposed(_takes, torch.dsplit)(_make_split_along(2, 3))
