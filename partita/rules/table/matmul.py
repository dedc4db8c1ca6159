"""Matrix products, linear algebra and Fourier transforms.

Products multiply and add up, so that a name that is summed over may be split. Decompositions of a
matrix and transforms of a line take each by itself, whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import Arg, Decomposition
from ..rule import table_rule as rule

rule("m k * k n -> m n", torch.mm)
rule("b m k * b k n -> b m n", torch.bmm)
rule("m k * k -> m", torch.mv)
rule("k * k -> ", torch.dot, torch.vdot)
rule("m * n -> m n", torch.outer, torch.ger)
rule("... i * o i + o -> ... o", F.linear)


@rule(torch.matmul, torch.linalg.matmul)
def matmul(input: Arg, other: Arg) -> str:
    left = "k" if input.ndim == 1 else "... m k"
    right = "k" if other.ndim == 1 else "... k n"
    dots = "..." if max(input.ndim, other.ndim) > 1 else ""
    return f"{left} * {right} -> {dots}{' m' * (input.ndim > 1)}{' n' * (other.ndim > 1)}"


@rule(torch.inner)
def inner(input: Arg, other: Arg) -> str:
    if 0 in (input.ndim, other.ndim):
        return "... * ... -> ..."
    a, b = list(input.names[:-1]), [f"{n}2" for n in other.names[:-1]]
    return f"{' '.join(a)} k * {' '.join(b)} k -> {' '.join(a)} {' '.join(b)}"


# -- a product added to something ------------------------------------------------------------------


def _names_of_addend(input: Arg, sizes: dict[str, int]) -> str:
    """The names of a term that is broadcast to `sizes`.

    It may have none at all: the sentences say "+" at their beginning, so that this can be read.
    """
    names = list(sizes)[len(sizes) - input.ndim :]
    return " ".join(
        "1" if n == 1 and sizes[name] != 1 else name
        for name, n in zip(names, input.shape, strict=True)
    )


@rule(torch.addmm)
def addmm(input: Arg, mat1: Arg, mat2: Arg) -> str:
    return (
        f"+ {_names_of_addend(input, {'m': mat1.shape[0], 'n': mat2.shape[1]})} + m k * k n -> m n"
    )


@rule(torch.addmv)
def addmv(input: Arg, mat: Arg, vec: Arg) -> str:
    added = _names_of_addend(input, {"m": mat.shape[0]})
    if added == "1":  # torch returns one element where a rank has no row or no column
        return "1 + m! k! * k! -> m!"
    return f"+ {added} + m k * k -> m"


@rule(torch.addr)
def addr(input: Arg, vec1: Arg, vec2: Arg) -> str:
    return f"+ {_names_of_addend(input, {'m': vec1.shape[0], 'n': vec2.shape[0]})} + m * n -> m n"


@rule(torch.addbmm)
def addbmm(input: Arg, batch1: Arg, batch2: Arg) -> str:
    sizes = {"m": batch1.shape[1], "n": batch2.shape[2]}
    return f"+ {_names_of_addend(input, sizes)} + b m k * b k n -> m n"


@rule(torch.baddbmm)
def baddbmm(input: Arg, batch1: Arg, batch2: Arg) -> str:
    sizes = {"b": batch1.shape[0], "m": batch1.shape[1], "n": batch2.shape[2]}
    return f"+ {_names_of_addend(input, sizes)} + b m k * b k n -> b m n"


@rule(torch.bilinear)
def bilinear(input1: Arg, input2: Arg, weight: Arg, bias: Arg | None = None) -> str:
    return f"... i% * ... j% * o i% j%{' + o' * (bias is not None)} -> ... o"


# -- equations -------------------------------------------------------------------------------------


@rule(torch.einsum)
def einsum(equation: Any, *operands: Any) -> str | None:
    if not isinstance(equation, str):
        return None  # the form einsum(x, [0, 1], y, [1, 2])
    args = [x for item in operands for x in (item if isinstance(item, list | tuple) else [item])]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [re.findall(r"\.\.\.|[A-Za-z]", t) for t in left.split(",")]
    if not arrow:
        letters = [n for t in terms for n in t if n != "..."]
        out = ["..."] * ("..." in left) + sorted(n for n in letters if letters.count(n) == 1)
    else:
        out = re.findall(r"\.\.\.|[A-Za-z]", right)
    if len(terms) != len(args) or not all(isinstance(x, Arg) for x in args):
        return None
    spread = [_with_sizes(t, x) for t, x in zip(terms, args, strict=True)]
    largest: dict[str, int] = {}
    for t in spread:
        for name, size in t:
            largest[name] = max(largest.get(name, 0), size)
    words = [
        " ".join("1" if n == 1 != largest[name] and name != "..." else name for name, n in t)
        for t in spread
    ]
    return f"{'+ ' * (len(words) == 1)}{' * '.join(words)} -> {' '.join(out)}"


def _with_sizes(term: list[str], arg: Arg) -> list[tuple[str, int]]:
    if "..." not in term:
        return list(zip(term, arg.shape, strict=True))
    at = term.index("...")
    back = len(term) - at - 1
    left = list(zip(term[:at], arg.shape, strict=False))
    right = list(zip(term[at + 1 :], arg.shape[arg.ndim - back :], strict=True))
    return [*left, ("...", 0), *right]


@rule(torch.tensordot)
def tensordot(a: Arg, b: Arg, dims: int | Sequence[Any] = 2) -> str | None:
    if isinstance(dims, int):
        ours, theirs = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    elif isinstance(dims, list | tuple):
        ours, theirs = ([d] if isinstance(d, int) else list(d) for d in dims)
    else:
        return None
    left = list(a.names)
    right = [f"{n}2" for n in b.names]
    for i, j in zip(ours, theirs, strict=True):
        i, j = a.names.at(i), b.names.at(j)
        if a.shape[i] != b.shape[j]:
            return None  # a size of 1 is stretched
        right[j] = left[i]
    kept = [n for n in left if n not in right] + [n for n in right if n not in left]
    return f"{' '.join(left)} * {' '.join(right)} -> {' '.join(kept)}"


@rule(torch.kron)
def kron(input: Arg, other: Arg) -> str:
    ndim = max(input.ndim, other.ndim)
    ours = [f"a{i}" if i >= 0 else "" for i in range(input.ndim - ndim, input.ndim)]
    theirs = [f"b{i}" if i >= 0 else "" for i in range(other.ndim - ndim, other.ndim)]
    both = [f"({i} {j})" for i, j in zip(ours, theirs, strict=True)]
    return f"{' '.join(ours)} * {' '.join(theirs)} -> {' '.join(both)}"


@rule(torch.linalg.cross, torch.cross)
def cross(input: Arg, other: Arg, dim: int | None = None) -> str | None:
    if dim is None or input.ndim != other.ndim:
        return None
    back = input.ndim - input.names.at(dim)
    tail = "".join(f" t{i}" for i in range(1, back))
    return f"... d!{tail} * ... d!{tail} -> ... d!{tail}"


@rule(torch.cdist)
def cdist(x1: Arg, x2: Arg) -> str:
    return "... p d!, ... r d! -> ... p r"


@rule(torch.linalg.vecdot)
def vecdot(x: Arg, y: Arg) -> Decomposition:
    return Decomposition(lambda x, y, *, dim=-1: (x.conj() * y).sum(dim))


# -- linear algebra of each matrix -----------------------------------------------------------------

_L = torch.linalg

rule("...% m! n! -> ...%", torch.det, _L.det, torch.logdet, _L.cond)
rule("...% m! n! -> ...% m! n!", _L.inv, torch.inverse, _L.cholesky, torch.cholesky)
rule("...% m! n! -> ...% m! n!", torch.matrix_exp, _L.matrix_exp, _L.matrix_power)
rule("...% m! n! -> ...% n! m!", _L.pinv, torch.pinverse)
rule("...% m! n! -> ...% n!, ...% m! n!", _L.eigh, _L.eig)
rule("...% m! n! -> ...% n!", _L.eigvalsh, _L.eigvals)
rule("...% m! n! -> ...% s!", _L.svdvals)
rule("...% m! n! -> ...%, ...%", _L.slogdet, torch.slogdet)


@rule(_L.qr)
def qr(A: Arg, mode: str = "reduced") -> str:
    return "...% m! n! -> ...% m! r!, ...% s! n!"


@rule(_L.svd)
def svd(A: Arg, full_matrices: bool = True) -> str:
    return "...% m! n! -> ...% m! u!, ...% s!, ...% v! n!"


@rule(_L.solve)
def solve(A: Arg, B: Arg) -> str | None:
    if B.ndim != A.ndim:
        return None  # B may be vectors: which, depends on the shapes
    return "...% m! n!, + ...% n! k -> ...% n! k"


@rule(_L.solve_triangular)
def solve_triangular(A: Arg, B: Arg, *, upper: bool, left: bool = True) -> str:
    return f"...% m! n!, + ...% {'n! k' if left else 'k n!'} -> ...% {'n! k' if left else 'k n!'}"


# -- Fourier transforms, linear along lines that must be whole -------------------------------------


def _register_1d_transforms(*functions: Callable[..., Any]) -> None:
    def derive(input: Arg, n: int | None = None, dim: int = -1, _norm: Any = None) -> str:
        i = input.names.at(dim)
        kept = [n if d == i else f"{n}%" for d, n in enumerate(input.names.whole(i))]
        return (
            f"+ {' '.join(kept)} -> {' '.join('z!' if d == i else n for d, n in enumerate(kept))}"
        )

    rule(*functions)(derive)


def _register_nd_transforms(last: int | None, *functions: Callable[..., Any]) -> None:
    def derive(
        input: Arg, s: Any = None, dim: int | Sequence[int] | None = None, _norm: Any = None
    ) -> str:
        count = last if s is None or last is not None else len(s)
        some = None if count is None else range(input.ndim - count, input.ndim)
        dims = input.names.dims(dim) if dim is not None else tuple(some or range(input.ndim))
        left = [f"{n}!" if d in dims else f"{n}%" for d, n in enumerate(input.names)]
        out = [f"z{d}!" if d in dims else n for d, n in enumerate(left)]
        return f"+ {' '.join(left)} -> {' '.join(out)}"

    rule(*functions)(derive)


_f = torch.fft
_register_1d_transforms(_f.fft, _f.ifft, _f.rfft, _f.irfft, _f.hfft, _f.ihfft)
_register_nd_transforms(2, _f.fft2, _f.ifft2, _f.rfft2, _f.irfft2)
_register_nd_transforms(None, _f.fftn, _f.ifftn, _f.rfftn, _f.irfftn)


@rule(_f.fftshift, _f.ifftshift)
def fftshift(input: Arg, dim: int | Sequence[int] | None = None) -> str:
    return f"+ {input.names.whole(dim)} -> {input.names.whole(dim)}"
