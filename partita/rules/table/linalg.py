"""Linear algebra and Fourier transforms: ops on each matrix, or along each line, by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..rule import Arg
from ..rule import table_rule as rule

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
