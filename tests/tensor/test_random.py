"""Are random numbers those of one device, in every layout?"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import partita as pt
from partita import Invariant, Partial, Replicate, Shard

LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
    [Invariant(), Shard(1)],
]
SHAPES = [(8, 6), (5, 7), (1, 3)]  # even, uneven, with ranks that hold nothing

FILLS = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.uniform_(-1, 1),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(),
    "log_normal_": lambda t: t.log_normal_(),
    "cauchy_": lambda t: t.cauchy_(),
    "geometric_": lambda t: t.geometric_(0.4),
    "random_": lambda t: t.random_(0, 100),
    "trunc_normal_": lambda t: nn.init.trunc_normal_(t),
    "kaiming_uniform_": lambda t: nn.init.kaiming_uniform_(t),
    "xavier_normal_": lambda t: nn.init.xavier_normal_(t),
}
MAKES = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 50),
    "bernoulli": lambda t: torch.bernoulli(t.sigmoid()),
    "dropout": lambda t: F.dropout(t, 0.4),
    "feature_alpha_dropout": lambda t: F.alpha_dropout(t, 0.4),
    "rrelu": lambda t: F.rrelu(t, training=True),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t, dim=-1),
    "multinomial": lambda t: torch.multinomial(t.softmax(-1), 2),
    "normal of means": lambda t: torch.normal(t, 0.5),
}


def values(shape):
    return torch.linspace(-1, 1, shape[0] * shape[1]).view(shape)


def on_ranks(body, *args):
    torch.manual_seed(7)
    with pt.ranks(a=2, b=2) as world:
        return world.run(body, *args)


def in_every_layout(draw, shape):
    """What `draw` makes of a tensor on one device, and on each rank of it in each layout."""
    torch.manual_seed(7)
    truth = [draw(values(shape)) for _ in LAYOUTS]

    def body(mesh):
        spread = [pt.distribute_tensor(values(shape), mesh, layout) for layout in LAYOUTS]
        return [draw(x).full_tensor() for x in spread]

    return truth, on_ranks(body)


@pytest.mark.parametrize("name", FILLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_filled_in_place_has_one_devices_values(name, shape):
    truth, ranks = in_every_layout(FILLS[name], shape)
    for mine in ranks:
        torch.testing.assert_close(mine, truth, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_drawn_has_one_devices_values(name, shape):
    truth, ranks = in_every_layout(MAKES[name], shape)
    for mine in ranks:
        torch.testing.assert_close(mine, truth)


LYING = {
    "transposed": lambda x: F.dropout(x.T),
    "a slice, transposed": lambda x: F.dropout(x[:, 1:4].T),
    "behind a new dimension": lambda x: F.dropout(torch.stack([x, x]).transpose(0, 1)),
    "filled in place": lambda x: (x * 1).T.uniform_(),
    "like another": lambda x: torch.rand_like(x.T),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (3, 4)], ids=str)
def test_numbers_lie_in_memory_as_one_devices_do(name, shape):
    truth, ranks = in_every_layout(LYING[name], shape)
    for mine in ranks:
        torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_makers_draw_what_torchs_draw(layout):
    torch.manual_seed(7)
    truth = torch.randn(5, 3), torch.rand(4, 4), torch.randn(2)  # the generator goes on alike

    def body(mesh):
        made = [
            pt.randn(5, 3, device_mesh=mesh, placements=layout),
            pt.rand(4, 4, device_mesh=mesh, placements=layout),
        ]
        return *(t.full_tensor() for t in made), torch.randn(2)

    for mine in on_ranks(body):
        torch.testing.assert_close(mine, truth, rtol=0, atol=0)


def test_a_pending_value_that_is_dropped_out_is_dropped_out_once():
    torch.manual_seed(7)
    x = values((4, 6))
    truth = F.dropout(x, 0.5)

    def body(mesh):
        shares = pt.distribute_tensor(x, mesh, [Partial(), Replicate()])
        return F.dropout(shares, 0.5).full_tensor()

    for mine in on_ranks(body):
        torch.testing.assert_close(mine, truth)


def test_a_generator_that_is_given_is_the_one_that_is_drawn_from():
    torch.manual_seed(7)
    truth = torch.empty(5, 3).normal_(generator=torch.Generator().manual_seed(3)), torch.rand(2)

    def body(mesh):
        x = pt.zeros(5, 3, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        x.normal_(generator=torch.Generator().manual_seed(3))
        return x.full_tensor(), torch.rand(2)

    for mine in on_ranks(body):
        torch.testing.assert_close(mine, truth, rtol=0, atol=0)


def test_the_gradient_of_dropout_passes_where_values_passed():
    def step(x):
        x.requires_grad_()
        F.dropout(x, 0.5).square().sum().backward()
        return x.grad

    torch.manual_seed(7)
    truth = step(values((5, 7)))

    def body(mesh):
        return step(pt.distribute_tensor(values((5, 7)), mesh, [Shard(0), Shard(1)])).full_tensor()

    for mine in on_ranks(body):
        torch.testing.assert_close(mine, truth)


# -- the cheaper mode ------------------------------------------------------------------------------


def test_in_pieces_each_piece_has_numbers_of_its_own_and_equal_pieces_equal_ones():
    def body(mesh):
        with pt.random_mode("pieces"):
            x = pt.randn(64, 64, device_mesh=mesh, placements=[Shard(0), Replicate()])
        return x.to_local().clone(), torch.rand(2)

    ranks = on_ranks(body)
    (first, after), (twin, _), (other, _), _ = ranks
    torch.testing.assert_close(first, twin, rtol=0, atol=0)
    assert not torch.equal(first, other)
    whole = torch.cat([first, other])
    assert abs(whole.mean()) < 0.1 and abs(whole.std() - 1) < 0.1
    for _, rank_after in ranks:  # the common generator is still common
        torch.testing.assert_close(rank_after, after, rtol=0, atol=0)


def test_in_pieces_a_run_can_be_repeated():
    def body(mesh):
        with pt.random_mode("pieces"):
            x = pt.zeros(8, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)])
            return F.dropout(x + 1, 0.5).full_tensor()

    torch.testing.assert_close(on_ranks(body), on_ranks(body), rtol=0, atol=0)


def test_a_mode_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="one_device"), pt.random_mode("fast"):
        pass
