"""Matrix products, linear algebra, Fourier transforms, and the products of a mixture of experts.

A name over which a product sums may be split: the result is then Partial. Decompositions of a
matrix and Fourier transforms need the dimensions that they work on whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ..rule import (
    Arg,
    Kernel,
    KernelCall,
    KernelRule,
    decomposed,
    dim_rule,
    narrow_piece,
    rule_by_name,
)
from ..rule import builtin_rule as rule
from ..sentence import bind, parse

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


def _register_sum_with_product(takes: str, product: str, function: Any) -> None:
    """Register the sentence of a function that adds `input` to a product.

    `input` is broadcast to the result. It may have no names at all; a leading "+" keeps the
    sentence readable in this case.
    """
    out = product.partition(" -> ")[2]

    @rule_by_name(f"input {takes}", function)
    def derive_sum(given: dict[str, Any]) -> str:
        input, *factors = given.values()
        shape = bind(parse(product), [x.shape for x in factors]).output_shape(0, ())
        behind = [*zip(out.split(), shape, strict=True)][len(shape) - input.ndim :]
        stretched = [n == 1 != size for (_, size), n in zip(behind, input.shape, strict=True)]
        names = ["1" if s else name for s, (name, _) in zip(stretched, behind, strict=True)]
        if function is torch.addmv and any(stretched):
            return "1 + m! k! * k! -> m!"  # it returns one element where there is no row or column
        return f"+ {' '.join(names)} + {product}"


_register_sum_with_product("mat1 mat2", "m k * k n -> m n", torch.addmm)
_register_sum_with_product("mat vec", "m k * k -> m", torch.addmv)
_register_sum_with_product("vec1 vec2", "m * n -> m n", torch.addr)
_register_sum_with_product("batch1 batch2", "b m k * b k n -> m n", torch.addbmm)
_register_sum_with_product("batch1 batch2", "b m k * b k n -> b m n", torch.baddbmm)


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


@decomposed("x y", torch.linalg.vecdot)
def vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    return (x.conj() * y).sum(dim)


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


def _sentence_of_transform(input: Arg, dims: Sequence[int]) -> str:
    left = [f"{n}!" if d in dims else f"{n}%" for d, n in enumerate(input.names)]
    out = [f"z{d}!" if d in dims else n for d, n in enumerate(left)]
    return f"+ {' '.join(left)} -> {' '.join(out)}"


def _register_nd_transforms(last: int | None, *functions: Callable[..., Any]) -> None:
    @rule(*functions)
    def derive_nd_transform(
        input: Arg, s: Any = None, dim: int | Sequence[int] | None = None, _norm: Any = None
    ) -> str:
        count = last if s is None or last is not None else len(s)
        some = None if count is None else range(input.ndim - count, input.ndim)
        dims = input.names.dims(dim) if dim is not None else tuple(some or range(input.ndim))
        return _sentence_of_transform(input, dims)


_f = torch.fft


@rule(_f.fft, _f.ifft, _f.rfft, _f.irfft, _f.hfft, _f.ihfft)
def fft(input: Arg, n: int | None = None, dim: int = -1, _norm: Any = None) -> str:
    return _sentence_of_transform(input, (input.names.at(dim),))


_register_nd_transforms(2, _f.fft2, _f.ifft2, _f.rfft2, _f.irfft2)
_register_nd_transforms(None, _f.fftn, _f.ifftn, _f.rfftn, _f.irfftn)


dim_rule("input dim=None", "+ {whole} -> {whole}", _f.fftshift, _f.ifftshift)

# -- products of groups of rows, each by a matrix of its own: a mixture of experts -----------------

# `offs` is the end of each group of rows. A rank with some of the matrices multiplies their rows:
# it rotates these rows to the front, and returns zeros for all other rows. A rank with some of the
# rows multiplies them by all matrices.

_ALIGNED = 8
"""Elements: rows of 16 bytes are what torch's kernels ask for, in the smallest dtype they take."""


@rule(torch._grouped_mm)
def grouped_mm(
    self: Arg, mat2: Arg, offs: Arg | None = None, bias: Any = None
) -> str | KernelRule | None:
    a, b = self, mat2
    if bias is not None or (offs is None) != (a.ndim == b.ndim == 3):
        return None
    k = max(_name_aligned_dim("k", a, -1), _name_aligned_dim("k", b, -2))  # "!" is before "%"
    n = _name_aligned_dim("n", b, -1)
    if offs is None:
        return f"g m {k} * g {k} {n} -> g m {n}"
    if a.ndim == 2 == b.ndim:
        t = max(_name_aligned_dim("t", a, 1), _name_aligned_dim("t", b, 0))
        text = f"m {t} * {t} {n}, [o!] -> g={offs.shape[0]}! m {n}"
        return KernelRule(text, _make_kernel_factory(1, 0, None), work=("m t n",))
    if a.ndim == 2:
        return KernelRule(
            f"t {k} * g {k} {n}, [o!] -> t {n}",
            _make_kernel_factory(0, None, 0),
            work=("t k n [g]",),
        )
    t = _name_aligned_dim("t", b, 1)
    return KernelRule(
        f"g m {k} * {k} {t}, [o!] -> m {t}", _make_kernel_factory(None, 1, 1), work=("m k t [g]",)
    )


def _name_aligned_dim(name: str, x: Arg, dim: int) -> str:
    """Returns the term for a dimension whose pieces must be aligned: whole, or evenly split."""
    size, parts = x.shape[dim], x.split[dim] if x.split else 1
    cut = parts > 1 and size % parts == 0 and size // parts % _ALIGNED == 0
    return f"{name}%" if cut else f"{name}!"


def _make_kernel_factory(ours: int | None, theirs: int | None, result: int | None) -> Any:
    """Returns the factory of kernels for grouped rows.

    `ours`, `theirs` and `result` are the dimensions of grouped rows in the first factor, the second
    factor and the result; None for a tensor without grouped rows.
    """

    def local(call: KernelCall) -> Kernel | None:
        if not call.is_split("t", "g"):
            return None
        rows, groups = call.pieces.get("t"), call.pieces.get("g")

        def multiply_own_groups(a: Any, b: Any, offs: Any, *rest: Any, **more: Any) -> Any:
            if rows is not None:
                first = rows[0].to(offs.device) if isinstance(rows[0], torch.Tensor) else rows[0]
                offs = (offs - first).clamp(0, rows[1]).to(offs.dtype)
            if groups is None:
                return call.run(a, b, offs, *rest, **more)
            assert result is not None
            count = b.shape[theirs] if theirs is not None else a.shape[ours]
            if groups[1] == 0:
                return _make_differentiable_zeros(a, b, call.outputs[0], more.get("out_dtype"))
            turned = _OwnGroupsFirst(offs, groups, count)
            if ours is not None:
                a = turned.to_front(a, ours)
            if theirs is not None:
                b = turned.to_front(b, theirs)
            return turned.back(call.run(a, b, turned.ends, *rest, **more), result)

        return multiply_own_groups

    return local


def _make_differentiable_zeros(
    a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...], dtype: Any
) -> torch.Tensor:
    """Returns zeros for a rank without matrices, connected to both factors in autograd."""
    zeros = torch.zeros(shape, dtype=dtype or a.dtype, device=a.device)
    return zeros + (a.flatten()[:0].sum() + b.flatten()[:0].sum()).to(zeros.dtype)


class _OwnGroupsFirst:
    """Rotates grouped rows so that the rows of this rank's groups come first.

    Attributes:
        ends: the positions at which these groups end, after the rotation.
    """

    def __init__(self, offs: torch.Tensor, groups: tuple[Any, int, int], count: int):
        first, length, _ = groups
        ends = torch.cat([offs.new_zeros(1), offs])
        self.ends = narrow_piece(offs, 0, first, length)
        self.start = narrow_piece(ends, 0, first, 1)
        self.ends = self.ends - self.start
        self.places = torch.arange(count, device=offs.device)
        self.count = max(count, 1)

    def to_front(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        turned = x.index_select(dim, (self.places + self.start) % self.count)
        return self._zero_other_rows(turned, dim, self.places)

    def back(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        at = (self.places - self.start) % self.count
        return self._zero_other_rows(x.index_select(dim, at), dim, at)

    def _zero_other_rows(self, x: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
        """Returns `x` with zeros in the rows of other groups, and so in their gradients.

        Torch's kernels write neither, and the memory may contain nan.
        """
        shape = [-1] + [1] * (x.ndim - dim - 1)
        return x.masked_fill((at >= self.ends[-1]).view(shape), 0)
