"""Is a step captured whose shapes follow from the whole numbers of a batch, as masks and grids?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import partita as pt
from tests.programs.refused import each_rank

X = torch.arange(12, dtype=torch.float64).view(4, 3) + 1
MASKS = [
    torch.tensor(mask, dtype=torch.bool) for mask in ([1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 1, 0])
]


def gradient(read: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def run(x: Any, mask: Any) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad((read(x, mask) ** 2).sum(), x)[0]

    return run


def written(x: Any, mask: Any) -> Any:
    y = x * 1
    y[mask] = y[mask] * 3
    return y


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "rows of a mask": lambda x, mask: x[mask].sum(0) * 2,
    "their gradient": gradient(lambda x, mask: x[mask]),
    "nonzero": lambda x, mask: x[mask.nonzero()[:, 0]] * 2,
    "nonzero as a tuple": lambda x, mask: x[torch.nonzero(mask, as_tuple=True)] * 2,
    "where": lambda x, mask: torch.where(mask)[0],
    "masked_select": lambda x, mask: x.masked_select(mask[:, None]) * 2,
    "its gradient": gradient(lambda x, mask: x.masked_select(mask[:, None])),
    "repeat_interleave": lambda x, mask: torch.repeat_interleave(x, mask.long() + 1, dim=0),
    "repeats alone": lambda x, mask: torch.repeat_interleave(mask.long() * 2),
    "unique_consecutive": lambda x, mask: torch.unique_consecutive(mask.long().cumsum(0)),
    "a write": written,
}


def run(name: str, mesh: Any) -> tuple[list[Any], int]:
    step = pt.compile(PROGRAMS[name], backend="graph")
    found = []
    for x, mask in ((X.clone(), mask) for mask in MASKS):
        if mesh is not None:
            x, mask = (pt.distribute_tensor(t, mesh, [pt.Shard(0)]) for t in (x, mask))
        out = step(x, mask)
        found.append((out.full_tensor() if isinstance(out, pt.DTensor) else out).detach())
    return found, len(step.reasons)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_each_count_is_a_program(name: str, ranks: int) -> None:
    truth = [PROGRAMS[name](X.clone(), mask).detach() for mask in MASKS]
    sizes = len({t.shape for t in truth}) if name == "nonzero" else None
    for found, captures in (
        each_rank(lambda m: run(name, m), dp=ranks) if ranks else [run(name, None)]
    ):
        torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-12)
        assert captures == (sizes or captures) <= len(MASKS)


def test_a_mask_of_computed_values_is_refused() -> None:
    with pytest.raises(pt.CaptureError, match="depends on data"):
        pt.compile(lambda x: x[x.sin() > 0], backend="graph")(X)
