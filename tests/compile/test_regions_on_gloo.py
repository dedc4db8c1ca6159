"""Are compiled parts of an eager model those parts, on real process groups and by Inductor?"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.programs.gloo_ranks import run_ranks
from tests.programs.region_models import BATCH, ROWS, Block, close, gpt_like, one_device, train

pytestmark = pytest.mark.slow


def trains(rank, backend, stage, remat):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = gpt_like()
    model = pt.zero(model, mesh, stage=stage) if stage else pt.parallelize(model, mesh)
    for block in model:
        pt.compile(block, backend=backend)
        if remat:
            pt.remat(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = pt.distribute_tensor(BATCH, mesh, ROWS)
    losses = train(model, optimizer, x)
    regions = [block.forward.__wrapped__ if remat else block.forward for block in model]
    halves = regions[0].program.halves
    for half in (halves.forward, *halves.backwards.values()):
        assert (half.built is not None) == (backend == "inductor")
    return losses, [region.key for region in regions], [len(region.reasons) for region in regions]


@pytest.mark.parametrize(
    ("backend", "stage", "remat"),
    [("graph", 0, True), ("inductor", 3, True)],
)
def test_compiled_blocks_train_as_one_device(backend, stage, remat):
    per_rank = run_ranks(trains, 2, backend, stage, remat)
    assert per_rank[0] == per_rank[1]
    losses, keys, captures = per_rank[0]
    close(torch.tensor(losses), torch.tensor(one_device()))
    # The first takes what wants no gradient; the others are one program.
    assert keys[0] != keys[1] == keys[2] and captures == [1, 1, 1]


def left_out(rank):
    """Regions of equal shapes within remat, with integers beside floats; one is remembered."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    from tests.programs.checkpointed_regions import ranked, spread_program

    torch.manual_seed(0)
    plain = torch.randn(6, 4), torch.randn(4, 4), torch.randn(4, 4)
    leaves = [t.clone().requires_grad_() for t in plain]
    spread_program(ranked, ranked, {})(*leaves).sum().backward()
    regions = pt.compile(ranked), pt.compile(lambda x, w: ranked(x, w))
    placements = ROWS, [pt.Replicate()], [pt.Replicate()]
    ours = [
        pt.distribute_tensor(t, mesh, p).requires_grad_()
        for t, p in zip(plain, placements, strict=True)
    ]
    for keep in (None, [regions[0]], [regions[1]]):
        pt.remat(spread_program(*regions, {}), keep)(*ours).sum().backward()
        for one, wanted in zip(ours, leaves, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), wanted.grad)
            one.grad = None
    return True


def test_a_region_that_a_recompute_leaves_out_does_not_shift_the_others():
    assert run_ranks(left_out, 2) == [True, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_block_of_one_process_is_compiled_by_inductor():
    def use(wrap):
        torch.manual_seed(0)
        block = wrap(Block().double())
        x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(3)
        y = block(block(x.sin()).cos())
        y.square().sum().backward()
        return [y.detach(), x.grad, *[p.grad for p in block.parameters()], *block.buffers()]

    for found, wanted in zip(use(pt.compile), use(lambda m: m), strict=True):
        close(found, wanted)
