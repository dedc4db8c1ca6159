"""Products of groups of rows, each by a matrix of its own: a mixture of experts.

`offs` says where each group of rows ends. A rank that has some of the matrices multiplies the rows
of these: it turns them to the front, and gives zeros for all other rows. One that has some of the
rows multiplies them by all matrices.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rule import Arg, Kernel, KernelCall, KernelRule, narrow_piece
from ..rule import table_rule as rule

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
    """A dimension of rows that have to stay aligned: not cut, unless it is in aligned pieces."""
    size, parts = x.shape[dim], x.split[dim] if x.split else 1
    cut = parts > 1 and size % parts == 0 and size // parts % _ALIGNED == 0
    return f"{name}%" if cut else f"{name}!"


def _make_kernel_factory(ours: int | None, theirs: int | None, result: int | None) -> Any:
    """The kernel; `ours`, `theirs` and `result` are the dimensions of grouped rows of both factors
    and of what comes out, None where it has none."""

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
            turned = _Turned(offs, groups, count)
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
    """Zeros from a rank that has no matrix; on both factors, whose gradients are zeros."""
    zeros = torch.zeros(shape, dtype=dtype or a.dtype, device=a.device)
    return zeros + (a.flatten()[:0].sum() + b.flatten()[:0].sum()).to(zeros.dtype)


class _Turned:
    """The rows of some groups at the front, the others after them.

    Attributes:
        ends: where these groups end there.
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
        """`x` with zeros in the rows of other groups, and so in their gradients: torch's kernels
        write neither, and what is there need not be a number."""
        shape = [-1] + [1] * (x.ndim - dim - 1)
        return x.masked_fill((at >= self.ends[-1]).view(shape), 0)
