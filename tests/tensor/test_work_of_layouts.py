"""Does a layout in which each rank does its share of the work win against one that repeats it?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import Invariant, Replicate, Shard
from partita.rules import bind, parse, work_of
from tests.programs.split_attention import Operations, double

CONV = "n i% h0! h1! * o% i% k0! k1! -> n o% y0! y1!"
TABLE = {
    "a product": ("m k * k n -> m n", [(4, 5), (5, 3)], (), [2 * 4 * 5 * 3]),
    "in batches": ("... m k * ... k n -> ... m n", [(2, 4, 5), (5, 3)], (), [2 * 2 * 4 * 5 * 3]),
    "with a bias": ("... i * o i + o -> ... o", [(4, 5), (3, 5), (3,)], (), [2 * 4 * 5 * 3]),
    "an outer product": ("m * n -> m n", [(4,), (3,)], (), []),
    "element by element": ("... * ... -> ...", [(4, 5), (4, 5)], (), []),
    "looked up": ("[b] * v d -> b d", [(4,), (9, 5)], (), []),
    "a sum": ("+ a b -> a", [(4, 5)], (), []),
    "as said": (CONV, [(2, 3, 8, 8), (5, 3, 3, 3)], ("n i o k0 k1 4 4",), [2 * 30 * 9 * 16]),
    "of nothing": ("m k * k n -> m n", [(0, 5), (5, 3)], (), []),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_work_of_an_op_is_that_of_its_products(name):
    text, shapes, said, wanted = TABLE[name]
    assert [w.operations for w in work_of(bind(parse(text), shapes), said)] == wanted


def lose_flattened(mesh, rows):
    """The loss of logits that are flattened, and the layouts of what was sent for it."""
    logits = torch.linspace(-1, 1, rows * 16 * 4096).sin().view(rows, 16, 4096)
    labels = torch.arange(rows * 16).view(rows, 16)
    if mesh is None:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), []
    logits, labels = pt.distribute_batch((logits, labels), mesh)
    with pt.ledger() as log:
        loss = F.cross_entropy(logits.requires_grad_().view(-1, 4096), labels.flatten())
        loss.backward()
    return loss.item(), [(move.kind, move.nbytes) for move in log.moves if move.nbytes > 1000]


def test_rows_that_do_not_divide_are_flattened_without_gathering_the_logits():
    wanted, _ = lose_flattened(None, 7)
    with pt.ranks(dp=4) as world:
        for loss, sent in world.run(lose_flattened, 7):
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert [kind for kind, _ in sent] == ["all_to_all"] * 2  # forward and backward
            assert all(nbytes < 7 * 16 * 4096 * 4 / 4 for _, nbytes in sent)


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def linear(x, w):
    return F.linear(x, w)


def linear_with_bias(x, w, b):
    return F.linear(x, w, b)


S0, S1, S2, R, WHOLE = Shard(0), Shard(1), Shard(2), Replicate(), Invariant()
LAYOUTS = {
    "rows by a weight split along what is summed": (linear, [(8, 6), (4, 6)], [S0, S1]),
    "columns by a weight split along its rows": (linear, [(8, 6), (4, 6)], [S1, S0]),
    "rows by the whole weight": (linear, [(8, 6), (4, 6)], [S0, WHOLE]),
    "columns by the whole weight": (linear, [(8, 6), (4, 6)], [S1, WHOLE]),
    "the whole input by a split weight": (linear, [(8, 6), (4, 6)], [WHOLE, S1]),
    "rows and a whole bias": (linear_with_bias, [(8, 6), (4, 6), (4,)], [S0, S1, WHOLE]),
    "rows and columns": (torch.matmul, [(8, 6), (6, 4)], [S0, S1]),
    "rows and rows": (torch.matmul, [(8, 6), (6, 4)], [S0, S0]),
    "in batches, all along the sequence": (torch.bmm, [(3, 8, 6), (3, 6, 8)], [S1, S2]),
    "weights and values along the sequence": (torch.bmm, [(3, 8, 8), (3, 8, 4)], [S1, S1]),
    "keys and values alone": (attention, [(2, 8, 4)] * 3, [WHOLE, S1, S1]),
    "channels of a convolution": (F.conv2d, [(4, 4, 6, 6), (4, 4, 3, 3)], [WHOLE, S0]),
    "rows of a picture": (F.conv2d, [(4, 4, 6, 6), (4, 4, 3, 3)], [S2, S0]),
}


def run_one(mesh, name):
    run, shapes, placements = LAYOUTS[name]
    torch.manual_seed(0)
    tensors = [double(*shape) for shape in shapes]
    alone = [t.clone().requires_grad_() for t in tensors]
    with Operations() as dense:
        wanted = run(*alone)
    spread = [
        pt.distribute_tensor(t, mesh, [R if p is WHOLE else p]).redistribute(placements=[p])
        for t, p in zip(tensors, placements, strict=True)
    ]
    spread = [t.detach().requires_grad_() for t in spread]
    with Operations() as own:
        out = run(*spread)
    (wanted**2).sum().backward()
    (out**2).sum().backward()
    pairs = [(out.full_tensor(), wanted)]
    pairs += [(x.grad.full_tensor(), y.grad) for x, y in zip(spread, alone, strict=True)]
    return own.count, dense.count, max((x - y).abs().max().item() for x, y in pairs)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_does_its_share(name):
    with pt.ranks(a=2) as world:
        for own, dense, error in world.run(run_one, name):
            assert own * 2 == dense
            assert error <= 1e-12


@pytest.mark.parametrize("placement", [R, WHOLE])
def test_what_is_whole_on_all_ranks_stays_so(placement):
    def run(mesh):
        x = pt.zeros(4096, 4096, device_mesh=mesh, placements=[placement])
        with pt.ledger() as log:
            return (x @ x).placements, len(log.moves)

    world = pt.dry_mesh(tp=4, device_type="meta")
    assert run(world) == ((placement,), 0)


def test_a_gather_of_little_wins_against_repeated_work():
    mesh = pt.dry_mesh(tp=4, device_type="meta")
    x = pt.zeros(8192, 4096, device_mesh=mesh, placements=[S0])
    w = pt.zeros(16384, 4096, device_mesh=mesh, placements=[WHOLE])
    with pt.ledger() as log:
        y = F.linear(x, w)
    assert y.placements == (S0,) and log.bytes == 0


def test_shares_that_an_exchange_of_pieces_leads_to_are_priced():
    def run(mesh):
        weights = pt.ones(6, 16, 16, device_mesh=mesh, placements=[S1])
        values = pt.ones(6, 16, 8, device_mesh=mesh, placements=[S1])
        return torch.bmm(weights, values).placements

    with pt.ranks(cp=2) as world:
        assert world.run(run) == [(S1,)] * 2
