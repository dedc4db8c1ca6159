"""Sample calls for the prover: the grouped products of a mixture of experts.

torch's kernel supports no dtype that is exact enough for a proof. So partita's own kernel replaces
it, with the same rule, the same alignment, and the same unchanged rows.
"""

from __future__ import annotations

import itertools
import math

import torch

from partita.rules.rule import builtin_rule as rule
from partita.rules.table.matmul import grouped_mm

from .values import Part, c, x


def _grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: None = None,
) -> torch.Tensor:
    for factor in (self, mat2):
        if not factor.is_contiguous() or factor.shape[-1] % 8:
            raise RuntimeError("strides should be multiple of 16 bytes")
    if offs is None:
        return torch.bmm(self, mat2)
    ends = [0, *offs.tolist()]
    groups = list(enumerate(itertools.pairwise(ends)))
    if self.ndim == mat2.ndim:
        return torch.stack([self[:, a:b] @ mat2[a:b] for _, (a, b) in groups])
    if self.ndim == 2:
        left = self.new_full((len(self) - ends[-1], mat2.shape[-1]), math.nan)
        return torch.cat([*(self[a:b] @ mat2[g] for g, (a, b) in groups), left])
    left = self.new_full((self.shape[1], mat2.shape[1] - ends[-1]), math.nan)
    return torch.cat([*(self[g] @ mat2[:, a:b] for g, (a, b) in groups), left], 1)


rule(_grouped_mm)(grouped_mm)


def experts() -> Part:
    def ends(*places: int) -> torch.Tensor:
        return torch.tensor(places, dtype=torch.int32)

    return [
        (
            _grouped_mm,
            [
                c(x(7, 16), x(4, 16, 32), ends(2, 2, 3, 7)),
                c(x(7, 16), x(4, 16, 8), ends(0, 0, 7, 7)),
                c(x(5, 16), x(3, 16, 8), ends(0, 5, 5)),
                c(x(6, 32), x(32, 16), ends(8, 24, 32)),
                c(x(4, 6, 16), x(16, 32), ends(8, 8, 16, 32)),
                c(x(4, 6, 16), x(4, 16, 32)),
            ],
        )
    ]
