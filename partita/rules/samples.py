"""With which arguments is each rule proved?

Sizes are small, differ from each other and do not divide evenly by 3, so that on some rank a piece
is short or missing. Floating values are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from . import exceptions
from .rule import RULES
from .table.attention import attention
from .table.getitem import picked
from .table.pool import resized

__all__ = ["samples"]

Sample = tuple[tuple[Any, ...], dict[str, Any]]
_random = torch.Generator()


def x(*shape: int) -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=_random, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    """Values between 0.1 and 0.9, where most functions are defined."""
    return torch.rand(shape, generator=_random, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    """Integers from 0 to high - 1."""
    return torch.randint(0, high, shape, generator=_random)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_random) > 0.5


def c(*args: Any, **kwargs: Any) -> Sample:
    """One call."""
    return args, kwargs


def samples() -> dict[Callable[..., Any], list[Sample]]:
    """For each function that has a rule and samples: its calls. The same ones every time."""
    out: dict[Callable[..., Any], list[Sample]] = {}
    for part in (_pointwise, _matmul, _linalg, _shape, _join, _reduce, _nn, _index, _losses, _ours):
        _random.manual_seed(3)
        for functions, cases in part():
            for f in functions if isinstance(functions, tuple) else (functions,):
                out[f] = cases
    return out


Part = list[tuple[Any, list[Sample]]]

SPECIAL = {
    "mvlgamma": [c(torch.linspace(2, 3, 20, dtype=torch.float64).view(5, 4), 2)],
    "threshold": [c(torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4), 0.1, 2.0)],
}


def _pointwise() -> Part:
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
                "settled",
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
            elif rule.name not in ("copy_", "fill", "settled"):
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


def _matmul() -> Part:
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


def _shape() -> Part:
    return [
        (
            (torch.Tensor.view, torch.reshape),
            [
                c(x(12, 4), (3, 4, 4)),
                c(x(4, 6, 5), (24, 5)),
                c(x(4, 6), (6, 4)),
                c(x(4, 5), (-1,)),
                c(x(2, 3, 4), (2, 1, 3, 4)),
            ],
        ),
        (torch.flatten, [c(x(4, 3, 5)), c(x(4, 3, 5), 1), c(x())]),
        (torch.ravel, [c(x(4, 3))]),
        (torch.unflatten, [c(x(5, 12), 1, (3, 4)), c(x(12), 0, (2, -1))]),
        (torch.squeeze, [c(x(2, 1, 4)), c(x(2, 1, 4), 1), c(x(2, 1, 3), 0), c(x(2, 1, 1), (0, 1))]),
        (torch.unsqueeze, [c(x(5, 4), 1), c(x(5, 4), -1)]),
        ((torch.atleast_1d, torch.atleast_2d, torch.atleast_3d), [c(x()), c(x(5)), c(x(5, 4))]),
        (torch.transpose, [c(x(2, 4, 5), 0, -1), c(x(5, 4), 0, 1)]),
        (torch.permute, [c(x(2, 4, 5), (2, 0, 1))]),
        (torch.t, [c(x(5, 4)), c(x(5))]),
        (torch.adjoint, [c(x(2, 5, 4))]),
        (torch.movedim, [c(x(2, 4, 5), 0, 2), c(x(2, 4, 5), (0, 1), (2, 0))]),
        (
            torch.Tensor.expand,
            [c(x(5, 1), 5, 4), c(x(4), 3, 4), c(x(5, 1, 2), -1, 4, -1), c(x(1, 4), 1, 4)],
        ),
        (torch.broadcast_to, [c(x(5, 1), (2, 5, 4))]),
        ((torch.Tensor.expand_as,), [c(x(1, 4), x(5, 4))]),
        ((torch.Tensor.view_as, torch.Tensor.reshape_as), [c(x(5, 4), x(4, 5))]),
        (torch.broadcast_tensors, [c(x(5, 1), x(4))]),
        (torch.Tensor.repeat, [c(x(5, 4), 2, 1), c(x(4), 3, 2), c(x(5, 4), 1, 1, 1)]),
        (torch.tile, [c(x(5, 4), (2,)), c(x(5, 4), (3, 1, 2))]),
        (torch.repeat_interleave, [c(x(5, 4), 2), c(x(6, 4), 2, 0), c(x(5), 3)]),
        (torch.meshgrid, [c(x(5), x(4), indexing="ij"), c(x(5), x(4), indexing="xy")]),
        (torch.pixel_shuffle, [c(x(2, 8, 4, 3), 2)]),
        (torch.pixel_unshuffle, [c(x(2, 2, 8, 6), 2)]),
        (torch.channel_shuffle, [c(x(5, 6, 2), 3)]),
    ]


def _join() -> Part:
    return [
        (torch.cat, [c([x(5, 4), x(2, 4)]), c([x(5, 4), x(5, 2), x(5, 1)], 1), c([x(5), x(0)])]),
        (torch.stack, [c([x(5, 4), x(5, 4)]), c([x(5, 4), x(5, 4)], -1)]),
        ((torch.hstack, torch.vstack, torch.dstack), [c([x(5, 4), x(5, 4)]), c([x(5), x(5)])]),
        (torch.column_stack, [c([x(5), x(5, 4)])]),
        (torch.split, [c(x(5, 4), 2), c(x(5, 4), [1, 3], 1)]),
        (torch.Tensor.split, [c(x(5, 4), 2)]),
        (torch.split_with_sizes, [c(x(5, 4), [1, 4])]),
        (torch.chunk, [c(x(5, 4), 3), c(x(5, 4), 2, 1)]),
        (torch.tensor_split, [c(x(5, 4), 3), c(x(5, 4), (1, 3), 1)]),
        (torch.unbind, [c(x(3, 5)), c(x(5, 2), 1)]),
        ((torch.hsplit, torch.vsplit), [c(x(6, 4), 2)]),
        (torch.dsplit, [c(x(2, 5, 4), 2)]),
    ]


def _reduce() -> Part:
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


def _nn() -> Part:
    def conv(n: int, transposed: bool) -> list[Sample]:
        w = (lambda i, o, g: x(i, o // g, *k)) if transposed else (lambda i, o, g: x(o, i // g, *k))
        size, k = (6, 5, 4)[:n], (3, 2, 1)[:n]
        return [
            c(x(4, 4, *size), w(4, 6, 1), x(6)),
            c(x(4, 4, *size), w(4, 6, 1), None, 2, 1),
            c(x(3, 4, *size), w(4, 6, 2), x(6), groups=2),
            c(x(2, 6, *size), w(6, 6, 6), x(6), 1, 0, *([0] if transposed else [1]), 6),
            c(x(4, *size), w(4, 6, 1), x(6)),
        ]

    scale = [c(x(4, 5, 6), (6,), x(6), x(6)), c(x(5, 6), (6,)), c(x(5, 3, 2), (3, 2), x(3, 2))]
    out: Part = [
        (torch.layer_norm, scale),
        (torch.rms_norm, [c(x(4, 5, 6), (6,), x(6)), c(x(5, 6), (6,)), c(x(5, 3, 2), (3, 2))]),
        (
            torch.group_norm,
            [c(x(5, 6, 3), 3, x(6), x(6)), c(x(4, 4, 2, 2), 1, x(4)), c(x(4, 6, 2), 6)],
        ),
        (
            F.batch_norm,
            [
                c(x(5, 4, 3), x(4), u(4), x(4), x(4)),
                c(x(5, 4), x(4), u(4)),
                c(x(5, 4, 2), None, None, x(4), x(4), True),
                c(x(5, 4), None, None, None, None, True),
            ],
        ),
        (F.instance_norm, [c(x(5, 4, 3), None, None, x(4), x(4)), c(x(4, 2, 3, 2))]),
        (
            F.scaled_dot_product_attention,
            [
                c(x(2, 4, 5, 3), x(2, 4, 7, 3), x(2, 4, 7, 2)),
                c(x(3, 4, 5, 3), x(3, 2, 5, 3), x(3, 2, 5, 3), is_causal=True, enable_gqa=True),
            ],
        ),
        (
            F.interpolate,
            [c(x(4, 2, 4, 5), (7, 6)), c(x(4, 2, 4, 5), scale_factor=2, mode="bilinear")],
        ),
        (F.grid_sample, [c(x(4, 2, 4, 5), x(4, 3, 2, 2), align_corners=False)]),
        (
            torch.batch_norm,
            [c(x(5, 4), x(4), x(4), None, None, True, 0.1, 1e-5, False)],
        ),
        (F.unfold, [c(x(4, 4, 5, 4), 2), c(x(2, 3, 5, 4), (2, 3), padding=1)]),
        (F.fold, [c(x(4, 8, 12), (4, 5), 2)]),
        (F.glu, [c(x(5, 4)), c(x(4, 5, 2), 0)]),
        (F.one_hot, [c(i(6, 5, 4), 6)]),
        (F.cosine_similarity, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(5, 4), 0)]),
        (F.pairwise_distance, [c(x(5, 4), x(5, 4)), c(x(5, 4), x(5, 4), keepdim=True)]),
    ]
    for n in (1, 2, 3):
        out.append((getattr(torch, f"conv{n}d"), conv(n, False)))
        out.append((getattr(torch, f"conv_transpose{n}d"), conv(n, True)))
        shape = (5, 4, 4)[:n]
        pools = [c(x(4, 2, *shape), 2), c(x(2, *shape), 2)]
        for name in ("avg_pool", "adaptive_avg_pool", "max_pool", "adaptive_max_pool"):
            out.append((getattr(F, f"{name}{n}d"), pools))
        out.append((getattr(torch, f"max_pool{n}d"), pools))
        out.append((getattr(F, f"lp_pool{n}d"), [c(u(4, 2, *shape), 2.0, 2)]))
        out.append((getattr(F, f"max_pool{n}d_with_indices"), pools))
        out.append((getattr(F, f"adaptive_max_pool{n}d_with_indices"), pools))
    return out


def _linalg() -> Part:
    L, f = torch.linalg, torch.fft
    square = x(5, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    even = square @ square.mT
    lines = [c(x(5, 4)), c(x(5, 4), None, 0), c(x(5, 2, 4), 6, 2)]
    planes = [c(x(5, 2, 4)), c(x(5, 2, 4), None, (0, 1))]
    return [
        ((torch.det, L.det, torch.logdet, L.cond, L.inv, torch.inverse), [c(square)]),
        ((L.cholesky, torch.cholesky), [c(even)]),
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


def _index() -> Part:
    s = slice
    return [
        (
            F.embedding,
            [c(i(7, 5, 2), x(7, 4)), c(i(7, 5), x(7, 4), 2), c(i(4, 5), x(4, 2), padding_idx=-1)],
        ),
        (torch.embedding, [c(x(7, 4), i(7, 5, 2)), c(x(7, 4), i(7, 5), 2)]),
        (F.embedding_bag, [c(i(7, 4, 3), x(7, 4)), c(i(7, 4, 3), x(7, 4), mode="max")]),
        (torch.index_select, [c(x(5, 4), 0, i(5, 3)), c(x(5, 4), -1, i(4, 7))]),
        (
            torch.gather,
            [c(x(5, 4), 0, i(5, 2, 4)), c(x(5, 4), 1, i(4, 5, 3)), c(x(5, 4), 1, i(4, 2, 3))],
        ),
        (torch.take, [c(x(5, 4), i(20, 4, 2))]),
        (torch.take_along_dim, [c(x(5, 4), i(5, 2, 4), 0), c(x(5, 4), i(4, 5, 1), 1)]),
        (
            torch.scatter,
            [
                c(
                    x(5, 4),
                    1,
                    torch.stack([torch.randperm(4, generator=_random)[:2] for _ in range(5)]),
                    x(5, 2),
                ),
                c(x(5, 4), 0, i(5, 2, 4), 2.0),
            ],
        ),
        (
            torch.scatter_add,
            [c(x(5, 4), 0, i(5, 7, 4), x(7, 4)), c(x(5, 4), 1, i(4, 3, 2), x(4, 3))],
        ),
        (torch.scatter_reduce, [c(x(5, 4), 0, i(5, 7, 4), x(7, 4), "amax")]),
        (
            torch.index_add,
            [c(x(5, 4), 0, i(5, 7), x(7, 4)), c(x(5, 4), 1, i(4, 3), x(5, 3), alpha=2)],
        ),
        (torch.index_copy, [c(x(5, 4), 0, torch.tensor([3, 1]), x(2, 4))]),
        (torch.index_fill, [c(x(5, 4), 0, i(5, 2), 2.0), c(x(5, 4), 1, i(4, 2), x())]),
        (torch.select, [c(x(5, 4), 0, 3), c(x(5, 4), 1, -1)]),
        (torch.narrow, [c(x(5, 4), 0, 1, 3), c(x(5, 4), 1, 0, 4)]),
        (
            torch.Tensor.__getitem__,
            [
                c(x(5, 4), 2),
                c(x(5, 4), s(1, 3)),
                c(x(5, 4), (s(None), s(None, None, 2))),
                c(x(5, 4, 2), (Ellipsis, -1)),
                c(x(5, 4, 2), (1, s(None), None, 0)),
                c(x(5, 4), None),
                c(x(5, 4), i(5, 7)),
                c(x(5, 4), (s(None), i(4, 3, 2))),
                c(x(5, 4, 3), (s(None), i(4, 2), s(0, 2))),
                c(x(5, 4, 3), (0, s(None), i(3, 2))),
                c(x(5, 4, 3), (i(5, 2), i(4, 2))),
                c(x(5, 4, 3), (i(5, 2), s(None), i(3, 2))),
                c(x(5, 4), b(5, 4)),
                c(x(5, 4), b(5)),
                c(x(5, 4), (s(None), b(4))),
                c(x(5, 4), Ellipsis),
            ],
        ),
        (
            torch.index_put,
            [
                c(x(5, 4), (torch.tensor([3, 1]),), x(2, 4)),
                c(x(5, 4), (i(5, 7),), x(7, 4), True),
                c(x(5, 4), (i(5, 7),), x(4), True),
                c(x(5, 4), (b(5),), x(4)),
                c(x(5, 4), (i(5, 3), i(4, 3)), x(3), True),
                c(x(5, 4, 3), (torch.tensor([3, 1]), torch.tensor([0, 2])), x()),
            ],
        ),
        (torch.roll, [c(x(5, 4), 2), c(x(5, 4), 1, 0)]),
        (torch.flip, [c(x(5, 4), (0,)), c(x(2, 5, 4), (0, 2))]),
        ((torch.fliplr, torch.flipud), [c(x(5, 4))]),
        (torch.rot90, [c(x(5, 4)), c(x(2, 5, 4), 2, (1, 2))]),
        (
            F.pad,
            [
                c(x(5, 4), (1, 2)),
                c(x(5, 4), (0, 0, 1, 1), value=2.0),
                c(x(4, 2, 5), (1, 1), mode="reflect"),
                c(x(4, 2, 5), (1, 1), mode="circular"),
            ],
        ),
        (torch.constant_pad_nd, [c(x(5, 4), (1, 2))]),
        ((torch.tril, torch.triu), [c(x(5, 4)), c(x(2, 5, 4), 1), c(x(5, 7), -2)]),
        (torch.diagonal, [c(x(5, 4)), c(x(2, 5, 4), 1, 2, 0)]),
        (torch.linalg.diagonal, [c(x(2, 5, 4), offset=-1)]),
        (torch.diag_embed, [c(x(5, 4)), c(x(5, 4), 1, 0, 2)]),
        (torch.diag, [c(x(5)), c(x(5, 4)), c(x(4), -1)]),
        (torch.Tensor.unfold, [c(x(5, 4), 0, 2, 1), c(x(5, 6), 1, 3, 2)]),
        (torch.searchsorted, [c(u(4).sort().values, u(5, 2)), c(u(5, 4).sort().values, u(5, 3))]),
        (torch.bucketize, [c(x(5, 4), u(3).sort().values)]),
        (torch.isin, [c(i(9, 5, 4), i(9, 3))]),
    ]


def _ours() -> Part:
    """The small ops that others are written with."""

    def heads(
        q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, grouped: bool = False
    ) -> Sample:
        return c(q, k, v, mask, causal, None, grouped)

    q, kv, one = x(2, 4, 5, 3), x(2, 4, 7, 3), x(2, 1, 5, 3)
    mask = b(2, 1, 1, 7) | (torch.arange(7) == 0)
    numbers = i(99, 5, 4)
    return [
        (
            attention,
            [
                heads(q, kv, x(2, 4, 7, 2)),
                heads(q, x(2, 4, 5, 3), x(2, 4, 5, 3), None, True),
                heads(x(3, 4, 5, 3), x(3, 2, 5, 3), x(3, 2, 5, 3), None, False, True),
                heads(x(2, 6, 5, 3), one, x(2, 1, 5, 3), None, True, True),
                heads(q, kv, x(2, 4, 7, 3), x(5, 7)),
                heads(q, kv, x(2, 4, 7, 3), mask),
                heads(q, x(2, 2, 7, 3), x(2, 2, 7, 3), x(2, 1, 5, 7), False, True),
                heads(x(4, 5, 3), x(4, 5, 3), x(4, 5, 3), x(4, 5, 5)),
            ],
        ),
        (
            exceptions.pending_max,
            [c(x(5, 4), None, False), c(x(5, 4), 0, True, -1), c(numbers, 1, False)],
        ),
        (
            exceptions.first_index,
            [
                c(numbers, numbers.amax(0, True), 0),
                c(i(3, 5, 4), torch.full((5, 1), 2), 1),
                c(numbers, numbers.amax().view(1, 1), None),
            ],
        ),
        (exceptions.stands_at, [c(x(5, 4), i(5, 1, 4), 0), c(numbers, i(4, 5, 1), -1)]),
        (exceptions.power_sum, [c(x(5, 4), 2, None, False), c(x(5, 4), 3.0, 0, True)]),
        (
            exceptions.target_weight,
            [c(i(4, 5, 2), u(4), 1), c(i(4, 5), None, -100)],
        ),
        (exceptions.settled, [c(x(5, 4))]),
        (exceptions.minus, [c(x(5, 4), x(5, 1))]),
        (
            resized,
            [
                c(x(4, 2, 4, 5), (7, 6), ((7, 6),), {}),
                c(x(4, 2, 4), (8,), (None, 2.0), {"mode": "linear"}),
            ],
        ),
        (
            picked,
            [
                c(x(5, 4), ("index",), i(5, 7)),
                c(x(5, 4), (slice(None), "index"), i(4, 3, 2)),
                c(x(5, 4, 3), (slice(None), "index", slice(0, 2)), i(4, 2)),
                c(x(5, 4, 3), (0, slice(None), "index"), i(3, 2)),
                c(x(5, 4, 3), ("index", "index"), i(5, 2), i(4, 2)),
                c(x(5, 4, 3), ("index", slice(None), "index"), i(5, 2), i(3, 2)),
                c(x(5, 4, 2), (Ellipsis, "index", None), torch.tensor(1)),
                c(x(5, 4, 3), ("index", "index"), i(5, 2), i(4, 1)),
            ],
        ),
    ]


def _losses() -> Part:
    def each(*tensors: torch.Tensor, **more: Any) -> list[Sample]:
        return [c(*tensors, **more, reduction=k) for k in (1, 2, 0)]

    signs = torch.where(b(5, 4), 1.0, -1.0).double()
    sign = signs[:, 0].clone()
    classes = []
    for reduction in (0, 1, 2):
        target = i(4, 5)
        target[3] = -100
        classes += [
            c(x(5, 4), target, None, reduction, -100, 0.0),
            c(x(5, 4), i(4, 5), u(4), reduction, 1, 0.1),
            c(x(5, 4, 2), i(4, 5, 2), u(4), reduction, -100, 0.2),
            c(x(5, 4), u(5, 4), None, reduction, -100, 0.0),
            c(x(5, 4), u(5, 4), u(4), reduction, -100, 0.1),
        ]
    classes.append(c(x(4), i(4), None, 1, -100, 0.0))
    nll = [c(*args[:5]) for args, _ in classes if args[0].shape != args[1].shape]
    n = torch._C._nn
    return [
        (
            (n.mse_loss, n.l1_loss, n.smooth_l1_loss, n.huber_loss),
            each(x(5, 4), x(5, 4)),
        ),
        (n.soft_margin_loss, each(x(5, 4), signs)),
        (n.binary_cross_entropy, [*each(u(5, 4), u(5, 4)), *each(u(5, 4), u(5, 4), weight=u(4))]),
        (
            torch.binary_cross_entropy_with_logits,
            [*each(x(5, 4), u(5, 4)), *each(x(5, 4), u(5, 4), weight=u(4), pos_weight=u(4))],
        ),
        (torch.kl_div, each(x(5, 4), u(5, 4))),
        (torch.poisson_nll_loss, [c(x(5, 4), u(5, 4), True, False, 1e-8, k) for k in (0, 1, 2)]),
        (torch.margin_ranking_loss, each(x(5, 4), x(5, 4), signs)),
        (torch.hinge_embedding_loss, each(x(5, 4), signs)),
        (torch.cosine_embedding_loss, each(x(5, 4), x(5, 4), sign)),
        (torch.triplet_margin_loss, each(x(5, 4), x(5, 4), x(5, 4))),
        (n.multilabel_margin_loss, each(x(5, 4), i(4, 5, 4))),
        (n.multi_margin_loss, [*each(x(5, 4), i(4, 5)), *each(x(5, 4), i(4, 5), weight=u(4))]),
        (n.cross_entropy_loss, classes),
        (n.nll_loss_nd, nll),
    ]
