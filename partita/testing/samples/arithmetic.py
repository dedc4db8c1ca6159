"""Sample calls for the prover: pointwise ops, products, linear algebra and reductions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from partita.rules.rule import RULES

from .values import Part, b, c, i, u, x

SPECIAL = {
    "mvlgamma": [c(torch.linspace(2, 3, 20, dtype=torch.float64).view(5, 4), 2)],
    "threshold": [c(torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4), 0.1, 2.0)],
}


def pointwise() -> Part:
    out: Part = []
    whole_numbers = {"bitwise_not", "gcd", "lcm"}
    done = set()
    for f, rule in RULES.items():
        if rule.derive is not None or rule.name in done or rule.name.endswith("_"):
            continue
        if rule.text in ("... -> ...", "+ ... -> ..."):
            if rule.name in SPECIAL:
                out.append((f, SPECIAL[rule.name]))
            elif rule.name in ("multigammaln", "special_multigammaln"):
                out.append((f, [c(u(5, 4) + 3, 2)]))
            elif rule.name in whole_numbers:
                out.append((f, [c(i(9, 5, 4))]))
            elif rule.name in ("fill", "leaky_relu", "dropout"):
                more = (0.0, True) if "dropout" in rule.name else (0.3,)
                out.append((f, [c(x(5, 4), *more)]))
            elif rule.name == "imag":
                out.append((f, [c(torch.view_as_complex(x(5, 4, 2)))]))
            elif rule.name in (
                "chalf",
                "cuda",
                "int_repr",
                "pin_memory",
                "rrelu",
                "reduced",
            ):
                continue
            elif rule.name not in ("native_channel_shuffle", "_settled"):
                out.append((f, [c(u(5, 4))]))
            done.add(rule.name)
        elif rule.text in ("..., ... -> ...", "... + ... -> ...", "... * ... -> ..."):
            whole = (
                "bitwise" in rule.name or rule.name in whole_numbers or "polynomial" in rule.name
            )
            if "polynomial" in rule.name:
                out.append((f, [c(u(5, 4), i(4, 5, 4))]))
            elif whole:
                out.append((f, [c(i(9, 5, 4) + 1, i(5, 5, 4) + 1)]))
            elif rule.name not in ("copy_", "fill", "reduced"):
                out.append((f, [c(u(5, 4), u(5, 4)), c(u(5, 4), u(4)), c(u(5, 1), u(1, 4))]))
            done.add(rule.name)
    out += [
        ((torch.add, torch.sub), [c(x(5, 4), x(5, 4)), c(x(5, 4), x(4), alpha=2), c(x(5, 4), 2.0)]),
        (torch.mul, [c(x(5, 4), x(5, 4)), c(x(5, 4), 2.0), c(x(2, 1, 4), x(5, 1))]),
        (torch.div, [c(x(5, 4), u(5, 4)), c(x(5, 4), u(4), rounding_mode="floor"), c(x(5), 2.0)]),
        (torch.ldexp, [c(x(5, 4), i(3, 4))]),
        (torch.clamp, [c(x(5, 4), -0.5, 0.5), c(x(5, 4), u(4) - 1, None), c(x(5), min=0.0)]),
        (torch.masked_fill, [c(x(5, 4), b(5, 4), 2.0), c(x(5, 4), b(4), x())]),
        (torch.addcmul, [c(x(5, 4), x(5, 4), x(4), value=0.5), c(x(4), x(5, 4), x(5, 1))]),
        (torch.addcdiv, [c(x(5, 4), x(5, 4), u(4), value=0.5)]),
        (torch.lerp, [c(x(5, 4), x(5, 4), 0.3), c(x(5, 4), x(4), u(5, 4))]),
        (torch.where, [c(b(5, 4), x(5, 4), x(4)), c(b(5, 1), x(5, 4), 0.0)]),
        (torch.Tensor.where, [c(x(5, 4), b(5, 4), x(4)), c(x(5, 4), b(4), 0.0)]),
        (torch.prelu, [c(x(5, 4, 2), u(4)), c(x(5, 4), u(1))]),
        (torch.polygamma, [c(1, u(5, 4))]),
        (torch.view_as_complex, [c(x(5, 4, 2))]),
        (torch.view_as_real, [c(torch.view_as_complex(x(5, 4, 2)))]),
        (torch.frexp, [c(u(5, 4))]),
        ((torch.equal, torch.allclose), [c(x(5, 4), x(5, 4))]),
        (torch.Tensor.type_as, [c(x(5, 4), i(3, 2))]),
        (torch.Tensor.type, [c(x(5, 4), torch.float32)]),
        (torch.complex, [c(x(5, 4), x(5, 4))]),
        (
            torch.Tensor.to,
            [
                c(x(5, 4), torch.float32),
                c(x(5, 4), dtype=torch.int64),
                c(i(9, 5, 4), torch.float64),
            ],
        ),
    ]
    return out


def matmul() -> Part:
    return [
        (
            torch.matmul,
            [
                c(x(5, 4), x(4, 7)),
                c(x(2, 5, 4), x(4, 7)),
                c(x(2, 1, 5, 4), x(3, 4, 7)),
                c(x(4), x(4)),
                c(x(4), x(2, 4, 5)),
                c(x(2, 5, 4), x(4)),
            ],
        ),
        (torch.mm, [c(x(5, 4), x(4, 7))]),
        (torch.bmm, [c(x(4, 5, 3), x(4, 3, 2))]),
        (torch.mv, [c(x(5, 4), x(4))]),
        ((torch.dot, torch.vdot), [c(x(5), x(5))]),
        ((torch.outer, torch.ger), [c(x(5), x(4))]),
        (torch.inner, [c(x(2, 4), x(5, 4)), c(x(4), x(4)), c(x(3), x())]),
        (F.linear, [c(x(2, 5, 4), x(7, 4), x(7)), c(x(5, 4), x(7, 4)), c(x(4), x(7, 4), x(7))]),
        (torch.addmm, [c(x(5, 7), x(5, 4), x(4, 7)), c(x(7), x(5, 4), x(4, 7), beta=2)]),
        (torch.addmv, [c(x(5), x(5, 4), x(4)), c(x(1), x(5, 4), x(4))]),
        (torch.addr, [c(x(5, 4), x(5), x(4))]),
        (torch.addbmm, [c(x(5, 7), x(2, 5, 4), x(2, 4, 7))]),
        (
            torch.baddbmm,
            [c(x(5, 7), x(2, 5, 4), x(2, 4, 7)), c(x(2, 1, 1), x(2, 5, 4), x(2, 4, 7))],
        ),
        (torch.bilinear, [c(x(5, 3), x(5, 4), x(2, 3, 4), x(2)), c(x(5, 3), x(5, 4), x(2, 3, 4))]),
        (
            torch.einsum,
            [
                c("bij,jk->bik", x(2, 3, 4), x(4, 5)),
                c("...ij,jk", x(2, 3, 4), x(4, 5)),
                c("ii->i", x(4, 4)),
                c("ij->ji", x(4, 5)),
                c("ij->", x(4, 5)),
                c("i,j,k->ijk", x(4), x(3), x(2)),
                c("bhqd,bhkd->bhqk", x(2, 2, 3, 4), x(2, 2, 5, 4)),
                c("ij,jk->ik", x(3, 4), x(1, 5)),
            ],
        ),
        (torch.tensordot, [c(x(2, 3, 4), x(3, 4, 5)), c(x(2, 3, 4), x(4, 2, 5), ([0, 2], [1, 0]))]),
        (torch.kron, [c(x(4, 3), x(2, 5)), c(x(4), x(2, 5))]),
        (torch.linalg.cross, [c(x(5, 3), x(5, 3), dim=1), c(x(3, 4), x(3, 4), dim=0)]),
        (torch.cdist, [c(x(2, 4, 3), x(2, 5, 3)), c(x(4, 3), x(5, 3))]),
    ]


def _of_this_torch(function: Callable[..., Any], example: torch.Tensor) -> list[Callable[..., Any]]:
    """A function that torch has removed, under a name that it left to say so, or has not yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(example)
        except RuntimeError:
            return []
    return [function]


def linalg() -> Part:
    L, f = torch.linalg, torch.fft
    square = x(5, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    even = square @ square.mT
    lines = [c(x(5, 4)), c(x(5, 4), None, 0), c(x(5, 2, 4), 6, 2)]
    planes = [c(x(5, 2, 4)), c(x(5, 2, 4), None, (0, 1))]
    return [
        ((torch.det, L.det, torch.logdet, L.cond, L.inv, torch.inverse), [c(square)]),
        ((L.cholesky, *_of_this_torch(torch.cholesky, even)), [c(even)]),
        ((torch.matrix_exp, L.matrix_exp, L.pinv, torch.pinverse), [c(square)]),
        (L.matrix_power, [c(square, 3)]),
        ((L.eigh, L.eigvalsh), [c(even)]),
        ((L.eigvals, L.eig, L.slogdet, torch.slogdet), [c(square)]),
        (L.svdvals, [c(x(5, 3, 2))]),
        ((L.qr, L.svd), [c(x(5, 4, 2))]),
        (L.svd, [c(x(5, 4, 2), False)]),
        (L.solve, [c(square, x(5, 3, 2))]),
        (L.solve_triangular, [c(square.tril(), x(5, 3, 2), upper=False)]),
        (L.vecdot, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(5, 4), dim=0)]),
        ((f.fft, f.ifft, f.rfft, f.irfft, f.hfft, f.ihfft), lines),
        ((f.fft2, f.ifft2, f.rfft2, f.irfft2), [c(x(5, 2, 4))]),
        ((f.fftn, f.ifftn, f.rfftn, f.irfftn), planes),
        ((f.fftshift, f.ifftshift), [c(x(5, 4)), c(x(5, 4), 0)]),
    ]


def reduce() -> Part:
    plain = [c(x(5, 4)), c(x(5, 4), 0), c(x(2, 5, 4), (0, 2)), c(x(5, 4), -1, True)]
    one = [c(x(5, 4), 0), c(x(5, 4), -1), c(x(2, 5, 4), 1)]
    kept = [c(x(5, 4), 0), c(x(5, 4), -1, True), c(x(2, 5, 4), 1)]
    return [
        (torch.sum, [*plain, c(x(5, 4), dtype=torch.int64), c(b(5, 4), 0)]),
        (torch.nanmean, plain),
        (torch.dist, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(4), 1)]),
        (torch.diff, [c(x(5, 4)), c(x(5, 4), 2, 0)]),
        (torch.nansum, [c(torch.where(b(5, 4), x(5, 4), torch.nan)), *plain]),
        (torch.mean, plain),
        (torch.count_nonzero, [c(i(2, 5, 4)), c(i(2, 5, 4), 0)]),
        (torch.trace, [c(x(4, 4))]),
        (torch.prod, [c(x(5, 4)), c(x(5, 4), 0), c(x(5, 4), 1, True)]),
        (
            (torch.amax, torch.amin),
            [*plain, c(i(99, 5, 4), 0), c(i(9, 4), 0, True), c(i(3, 5, 4).double())],
        ),
        (
            (torch.max, torch.min),
            [c(x(5, 4)), c(x(5, 4), 0), c(x(5, 4), 1, True), c(i(99, 5, 4)), c(x(5, 4), x(4))],
        ),
        ((torch.argmax, torch.argmin), [c(x(5, 4)), *kept]),
        (torch.aminmax, [c(x(5, 4)), c(x(5, 4), dim=1, keepdim=True)]),
        ((torch.any, torch.all), [c(b(5, 4)), c(b(5, 4), 0), c(i(2, 5, 2), 1, True)]),
        ((torch.median, torch.nanmedian), [c(x(5, 4)), c(x(5, 4), 0)]),
        (torch.mode, [c(x(5, 4))]),
        (torch.kthvalue, [c(x(5, 4), 2), c(x(5, 4), 2, 0, True)]),
        (torch.topk, [c(x(5, 4), 2), c(x(5, 4), 3, 0)]),
        ((torch.sort, torch.argsort), [c(x(5, 4)), c(x(5, 4), 0)]),
        (torch.msort, [c(x(5, 4))]),
        (torch.cumsum, one),
        ((torch.cumprod, torch.logcumsumexp), one),
        ((torch.cummax, torch.cummin), one),
        (torch.renorm, [c(x(5, 4, 2), 2.0, 1, 0.5)]),
        ((torch.softmax, torch.log_softmax), one),
        (torch.logsumexp, [*kept, c(x(2, 5, 4), (0, 1))]),
        (
            (torch.var, torch.std, torch.var_mean, torch.std_mean),
            [*plain[:3], c(x(5, 4), 0, keepdim=True), c(x(5, 4), 1, correction=0)],
        ),
        (
            torch.linalg.vector_norm,
            [c(x(5, 4)), c(x(5, 4), 1, 0), c(x(5, 4), 3.0, 1, True), c(x(5, 4), torch.inf, 0)],
        ),
        (torch.linalg.norm, [c(x(5, 4)), c(x(5, 4), 2, 0)]),
        (torch.norm, [c(x(5, 4)), c(x(5, 4), 2, 1), c(x(5, 4), 1.0, 0, True), c(x(5, 4) * 0)]),
    ]
