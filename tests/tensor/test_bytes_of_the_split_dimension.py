"""Does an op that mixes the elements of the split dimension send no more than a gather would?"""

from __future__ import annotations

import pytest
import torch

import partita as pt

OPS = {
    "cat": lambda x: torch.cat([x, x * 2], 0),
    "roll": lambda x: torch.roll(x, 3, 0),
    "flip": lambda x: torch.flip(x, [0]),
    "cumsum": lambda x: x.cumsum(0),
}


def bytes_and_gradient(mesh, name, rows):
    value = torch.arange(4.0 * rows).view(rows, 4)
    x = pt.distribute_tensor(value, mesh, [pt.Shard(0)]).requires_grad_()
    alone = value.clone().requires_grad_()
    wanted = OPS[name](alone)
    weight = torch.arange(1.0, 1 + wanted.numel()).view(wanted.shape)
    with pt.ledger() as log:
        y = OPS[name](x)
        (y.square() * weight).sum().backward()
    (wanted.square() * weight).sum().backward()
    assert torch.equal(y.full_tensor(), wanted.detach())
    assert torch.equal(x.grad.full_tensor(), alone.grad)
    with pt.ledger() as one:
        x.detach().redistribute(placements=[pt.Replicate()])
    return log.bytes, one.bytes


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPS)
def test_it_sends_no_more_than_a_gather_of_each_operand(name, ranks, rows):
    operands = 2 if name == "cat" else 1
    with pt.ranks(dp=ranks) as world:
        for sent, gather in world.run(bytes_and_gradient, name, rows):
            assert sent <= operands * gather, (sent, gather)


def test_pieces_among_zeros_still_join_a_sum_that_is_pending():
    def run(mesh):
        x = pt.ones(8, 4, device_mesh=mesh, placements=[pt.Shard(0)])
        y = pt.ones(8, 4, device_mesh=mesh, placements=[pt.Partial()])
        with pt.ledger() as log:
            z = torch.cat([x, y], 0)
        return z.placements, log.bytes

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [((pt.Partial(),), 0)] * 2
