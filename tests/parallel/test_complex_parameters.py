"""Complex parameters beside real ones of any count train as one device trains them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt


class Mixed(nn.Module):
    """Real and complex parameters by turns; their sizes are odd and even."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(2, dtype=torch.complex128))
        self.c = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.d = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x):
        real = x.mean() * self.a.sum() * self.c.square().sum() * self.b.sum()
        # The conjugate is a lazy view, which backward reads.
        return real.abs() + (self.d * self.d.conj()).real.sum() + (self.b * self.b).real.sum()


def losses(model, x, compiled):
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = pt.compile(step, backend="graph") if compiled else step
    return [run(x).item() for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "compiled"), [(3, False), (0, True), (1, True), (2, True), (3, True)]
)
def test_a_model_with_complex_parameters_trains_as_on_one_device(stage, compiled):
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(4, 3)

    def run(mesh):
        model = Mixed()
        pt.zero(model, mesh, stage=stage)
        return losses(model, pt.distribute_tensor(x, mesh, [pt.Shard(0)]), compiled)

    with pt.ranks(dp=2) as world:
        assert world.run(run)[1] == pytest.approx(losses(Mixed(), x, False), abs=1e-9)
