"""Are ranks that bring different things told so, all of them, at the first place where they do?"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import partita as pt
from partita import LayoutError, Partial, Replicate, Shard

T = torch.arange(32.0).view(8, 4)


def each_rank(fn, **axes):
    """What each rank returns, or the error that it is told."""

    def body(mesh):
        try:
            return fn(mesh)
        except LayoutError as error:
            return error

    with pt.ranks(**axes) as world:
        return world.run(body)


def refused(fn, *said, **axes):
    results = each_rank(fn, **axes)
    assert all(isinstance(r, LayoutError) for r in results), results
    assert len({str(r) for r in results}) == 1
    for text in said:
        assert text in str(results[0])
    return results[0]


# -- shapes ----------------------------------------------------------------------------------------


def test_uneven_rows_without_a_shape_are_refused_with_the_shape_that_they_make():
    rows = [3, 3, 3, 1]

    def body(mesh, **shape):
        mine = torch.full((rows[mesh.get_rank()], 2), float(mesh.get_rank()))
        return pt.DTensor.from_local(mine, mesh, [Shard(0)], **shape).mean().item()

    error = refused(body, "rank 0  [12@dp, 2]", "rank 3  [4@dp, 2]", dp=4)
    shape = eval(error.fixes[0].write.removeprefix("shape="))
    expected = torch.cat([torch.full((n, 2), float(r)) for r, n in enumerate(rows)]).mean()
    assert each_rank(lambda mesh: body(mesh, shape=shape), dp=4) == [expected] * 4


@pytest.mark.parametrize("placement", [Replicate(), Partial()], ids=str)
def test_whole_values_and_shares_of_other_shapes_are_refused(placement):
    def body(mesh):
        return pt.DTensor.from_local(torch.ones(2 + mesh.get_rank()), mesh, [placement])

    refused(body, "rank 0", "rank 1", dp=2)


def test_a_later_piece_of_another_shape_at_the_same_line_is_found():
    def body(mesh):
        for step in range(3):
            last = step == 2 and mesh.get_rank() == 1
            x = pt.DTensor.from_local(torch.ones(1 if last else 3, 2), mesh, [Shard(0)])
        return x.sum().item()

    refused(body, "gather_ints", "all_reduce", dp=2)


def test_one_rank_that_wants_a_gradient_is_refused():
    def body(mesh):
        t = torch.ones(2, 2, requires_grad=mesh.get_rank() == 0)
        return pt.DTensor.from_local(t, mesh, [Shard(0)])

    refused(body, "with a gradient", dp=2)


# -- batches ---------------------------------------------------------------------------------------


def test_each_ranks_own_batch_is_not_taken_for_the_whole_one():
    def body(mesh):
        return pt.distribute_batch({"x": T + mesh.get_rank()}, mesh)

    error = refused(body, "have not read the same batch", dp=2)
    assert error.fixes[0].write == 'each_rank_has="piece"'


def test_batches_of_other_sizes_are_refused_in_a_later_step_too():
    def body(mesh):
        for step in range(2):
            x = pt.distribute_batch(T[: 8 - 2 * step * mesh.get_rank()], mesh)
        return x.sum().item()

    refused(body, "compares distribute_batch", "all_reduce", dp=2)


def test_ranks_that_share_a_piece_must_have_read_the_same_rows():
    def body(mesh, ranks):
        return pt.distribute_batch(T[ranks(mesh) :: 4][:2], mesh, each_rank_has="piece").shape

    refused(
        lambda mesh: body(mesh, lambda mesh: mesh.get_rank()),
        "ranks 0 and 1 have not read the same rows",
        "DistributedSampler",
        dp=2,
        tp=2,
    )
    good = each_rank(lambda mesh: body(mesh, lambda mesh: mesh.get_local_rank("dp")), dp=2, tp=2)
    assert good == [(4, 4)] * 4


# -- random numbers --------------------------------------------------------------------------------

DRAWS = {
    "dropout of a replicated value": (lambda x: F.dropout(x), [Replicate()]),
    "dropout of a split value": (lambda x: F.dropout(x), [Shard(0)]),
    "init": (lambda x: torch.nn.init.xavier_uniform_(x), [Replicate()]),
    "rand_like": (torch.rand_like, [Replicate()]),
    "bernoulli": (torch.bernoulli, [Shard(0)]),
    "multinomial": (lambda x: torch.multinomial(x, 1), [Replicate()]),
    "randn": (lambda x: pt.randn(4, 4, device_mesh=x.device_mesh), [Replicate()]),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
        [Replicate()],
    ),
}


@pytest.mark.parametrize("what", DRAWS)
def test_generators_that_differ_are_refused_where_they_are_drawn_from(what):
    draw, placements = DRAWS[what]

    def body(mesh, seed):
        torch.manual_seed(seed(mesh.get_rank()))
        draw(pt.distribute_tensor(T[:4] / 32, mesh, placements))
        return True

    refused(lambda mesh: body(mesh, lambda r: 5 + r), "of seed 5", "of seed 6", dp=2)
    assert each_rank(lambda mesh: body(mesh, lambda r: 5), dp=2) == [True, True]


def test_generators_that_nobody_draws_from_may_differ():
    def body(mesh):
        torch.manual_seed(mesh.get_rank())
        x = pt.distribute_tensor(T, mesh, [Shard(0)])
        return F.dropout(x, 0.5, training=False).sum().item()

    assert each_rank(body, dp=2) == [T.sum()] * 2


def test_a_generator_that_parts_later_is_found_at_the_next_place_that_draws():
    def body(mesh):
        x = pt.distribute_tensor(T, mesh, [Replicate()])
        F.dropout(x)
        if mesh.get_rank() == 1:
            torch.rand(1)
        F.dropout(x)

    refused(body, "not in the same state", dp=2)


def test_a_rank_without_rows_draws_as_many_numbers_as_the_others():
    def body(mesh):
        x = pt.distribute_tensor(T[:1], mesh, [Shard(0)])
        with pt.random_mode("pieces"):
            F.dropout(x)
        return torch.rand(1).item()

    one, other = each_rank(body, dp=2)
    assert one == other
