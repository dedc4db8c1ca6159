"""Do all ranks find the same program where a tensor's memory format is another in each call?

A piece of one row, or of none, may be contiguous in both formats where another rank's is not.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import partita as pt

FORMATS = (torch.contiguous_format, torch.channels_last)


def a_model(channels):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, channels, 3), nn.ReLU(), nn.Conv2d(channels, 2, 3)).double()


def images(n):
    return torch.randn(n, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_module(model, how):
    model.to(memory_format=how)


def by_data(model, how):
    for p in model.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=how)


CHANGES = {"by_module": by_module, "by_data": by_data}


def losses(channels, change, kind, mesh=None, rows=12, calls=4):
    """What a step loses in each call, the number of programs, and the weights at the end."""
    model = a_model(channels)
    if mesh is not None:
        pt.zero(model, mesh, stage=3)
    optimizer = kind(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = step if mesh is None else pt.compile(step, backend="graph")
    seen = []
    for call in range(calls):
        x = images(rows)
        if change == "input":
            x = x.contiguous(memory_format=FORMATS[call % 2])
        else:
            change(model, FORMATS[call % 2])
        seen.append(run(x if mesh is None else pt.distribute_batch(x, mesh)).item())
    programs = 0 if mesh is None else len(run.programs)
    whole = [p.full_tensor() if mesh is not None else p for p in model.parameters()]
    return seen, programs, [p.detach().clone(memory_format=torch.contiguous_format) for p in whole]


def check(n, channels, change, kind, rows=12):
    wanted, _, weights = losses(channels, change, kind, rows=rows)
    with pt.ranks(dp=n) as world:
        found = world.run(lambda mesh: losses(channels, change, kind, mesh, rows))
    assert len({programs for _, programs, _ in found}) == 1
    for seen, _, whole in found:
        assert seen == pytest.approx(wanted, rel=1e-9)
        for p, q in zip(whole, weights, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_weight_of_three_rows_on_two_ranks_trains_in_both_formats():
    check(2, 3, by_data, torch.optim.SGD)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("change", ["by_module", "by_data", "input"])
def test_weights_of_short_and_of_no_pieces_train_in_both_formats(channels, change):
    check(3, channels, CHANGES.get(change, change), torch.optim.AdamW)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_batches_of_short_and_of_no_pieces_train_in_both_formats(rows):
    check(3, 3, "input", torch.optim.SGD, rows)


def signatures(mesh):
    """Of a weight of which the second rank has no row, whatever its format."""
    p = nn.Parameter(torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0)))
    model = nn.Module()
    model.p = p
    pt.zero(model, mesh, stage=3)
    run = pt.compile(lambda: (model.p * 2).sum(), backend="graph")
    seen = []
    for how in (*FORMATS, *FORMATS):
        model.p.data = model.p.data.contiguous(memory_format=how)
        seen.append(run().item())
    return seen, len(run.reasons)


def test_a_rank_without_rows_captures_as_often_as_the_others():
    with pt.ranks(dp=2) as world:
        one, other = world.run(signatures)
    assert one == other
    whole = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    assert one[0] == pytest.approx([2 * whole.sum().item()] * 4, rel=1e-5)
