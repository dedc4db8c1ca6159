"""Parts of a dimension: slices, shifts, pads, triangles and diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, Kernel, KernelCall, KernelRule
from ..rule import table_rule as rule
from ..sentence import Names
from .getitem import make_pick_kernel

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


@rule(torch.roll)
def roll(input: Arg, _shifts: Any = None, dims: Any = None) -> str:
    if dims is None or dims == () or dims == []:
        return f"+ {input.names.whole()} -> {input.names.whole()}"
    return f"+ {input.names.whole(dims)} -> {input.names.whole(dims)}"


@rule(torch.flip)
def flip(input: Arg, *order: Any, dims: Any = None) -> str:
    where = [
        d
        for item in (*order, dims or ())
        for d in (item if isinstance(item, list | tuple) else [item])
    ]
    names = input.names.whole(where) if where else input.names
    return f"+ {names} -> {names}"


@rule(torch.fliplr)
def fliplr(input: Arg) -> str:
    return flip(input, 1)


@rule(torch.flipud)
def flipud(input: Arg) -> str:
    return flip(input, 0)


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
def pad(input: Arg, pad: Sequence[int], mode: str = "constant", value: Any = None) -> str:
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
    # The value of a float is not in the key, so 0.0 cannot be told from another.
    linear = mode != "constant" or value is None or (isinstance(value, int) and value == 0)
    return f"{'+ ' * linear}{' '.join(left)} -> {' '.join(out)}"


@rule(torch.constant_pad_nd)
def constant_pad_nd(input: Arg, pad_: Sequence[int], value: Any = None) -> str:
    return pad(input, pad_, "constant", value)


# -- triangles and diagonals -----------------------------------------------------------------------


@rule(torch.tril)
def tril(input: Arg) -> KernelRule:
    return _derive_triangle(input, True)


@rule(torch.triu)
def triu(input: Arg) -> KernelRule:
    return _derive_triangle(input, False)


def _derive_triangle(input: Arg, lower: bool) -> KernelRule:
    rows, columns = input.names[-2:]

    def local(call: KernelCall) -> Kernel | None:
        # Row i of this rank's piece is row i + offset of the whole: the diagonal is shifted.
        shift = call.pieces.get(rows, (0,))[0] - call.pieces.get(columns, (0,))[0]
        if isinstance(shift, torch.Tensor):
            return _triangle_traced(lower, shift)
        return (lambda input, diagonal=0: call.run(input, diagonal + shift)) if shift else None

    return KernelRule(f"+ {input.names} -> {input.names}", local)


def _triangle_traced(lower: bool, shift: torch.Tensor) -> Kernel:
    """`tril` or `triu` in a captured step, where no number says at which row a piece begins."""

    def mask_triangle(input: Any, diagonal: int = 0) -> Any:
        rows, columns = (torch.arange(n, device=input.device) for n in input.shape[-2:])
        behind = columns - rows.unsqueeze(-1) - (shift.to(input.device) + diagonal)
        return input.masked_fill(behind > 0 if lower else behind < 0, 0)

    return mask_triangle


def _length_of_diagonal(a: int, b: int, offset: int) -> int:
    return max(min(a, b - offset) if offset >= 0 else min(a + offset, b), 0)


@rule(torch.diagonal)
def diagonal(input: Arg, offset: int = 0, dim1: int = 0, dim2: int = 1) -> str:
    i, j = input.names.at(dim1), input.names.at(dim2)
    n = _length_of_diagonal(input.shape[i], input.shape[j], offset)
    left = input.names.whole((i, j))
    return f"+ {left} -> {Names(input.names.without((i, j))).insert(-1, f'z={n}!')}"


@rule(torch.linalg.diagonal)
def linalg_diagonal(input: Arg, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    return diagonal(input, offset, dim1, dim2)


@rule(torch.diag_embed)
def diag_embed(input: Arg, offset: int = 0, dim1: int = -2, dim2: int = -1) -> str:
    n = input.shape[-1] + abs(offset)
    i, j = sorted(d % (input.ndim + 1) for d in (dim1, dim2))
    out = input.names.without(-1).insert(i, f"y={n}!").insert(j, f"z={n}!")
    return f"+ {input.names.whole(-1)} -> {out}"


@rule(torch.diag)
def diag(input: Arg, diagonal_: int = 0) -> str:
    return diag_embed(input, diagonal_) if input.ndim == 1 else diagonal(input, diagonal_)


@rule(torch.Tensor.unfold)
def unfold(input: Arg, dimension: int, size: int, step: int) -> str:
    i = input.names.at(dimension) if input.ndim else 0
    if input.ndim == 0:
        return f"+  -> z={size}!"
    count = (input.shape[i] - size) // step + 1
    out = input.names.put(i, f"y={count}!").insert(-1, f"z={size}!")
    return f"+ {input.names.whole(i)} -> {out}"
