"""Fault 2: a compile key held addresses, group names and rank offsets.

Elsewhere each of four ranks compiled the same program under a key of its own, and programs that
differ in the shape of a rank's shard had one. Here a key says what the program is.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from tests.programs.captured_steps import adamw, plain_step, rows, split_words, tiny
from tests.programs.gloo_ranks import run_ranks
from tests.programs.uneven_steps import train

pytestmark = pytest.mark.slow

TOKENS = torch.randint(0, 256, (2, 12, 8), generator=torch.Generator().manual_seed(1))


def mesh_of(dp, tp):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def key_of_training(rank, threads):
    torch.set_num_threads(threads)
    mesh = mesh_of(2, 2)
    model = split_words(tiny(), mesh)
    step = pt.compile(plain_step(model, adamw(model.parameters())), backend="graph")
    step(*[rows(mesh)(t) for t in TOKENS])
    return step.key


def test_four_ranks_and_two_runs_with_other_thread_counts_have_one_key():
    keys = run_ranks(key_of_training, 4, 1)
    keys += run_ranks(key_of_training, 4, 2)
    assert len(set(keys)) == 1


def key_of_slices(rank):
    """Every rank cuts another piece, masks by another place and draws other numbers."""
    mesh = mesh_of(2, 2)
    x = pt.distribute_tensor(torch.arange(64.0).view(8, 8), mesh)
    w = pt.distribute_tensor(torch.ones(8, 8), mesh, [pt.Shard(0), pt.Shard(1)])

    def step(x):
        cut = x.redistribute(placements=[pt.Shard(0), pt.Shard(1)])
        share = x.redistribute(placements=[pt.Partial(), pt.Replicate()])
        both = (cut * w).redistribute(placements=[pt.Replicate()] * 2)
        noise = torch.rand_like(cut).redistribute(placements=[pt.Replicate()] * 2)
        return both + share.redistribute(placements=[pt.Replicate()] * 2), noise

    fast = pt.compile(step, backend="graph")
    torch.manual_seed(3)
    sums, noise = fast(x)
    torch.manual_seed(3)
    assert torch.equal(noise.to_local(), torch.rand(8, 8))
    assert torch.equal(sums.to_local(), 2 * torch.arange(64.0).view(8, 8))
    return fast.key


def test_slices_masks_and_random_numbers_know_the_rank_only_by_its_coordinates():
    assert len(set(run_ranks(key_of_slices, 4))) == 1


def key_of_uneven_pieces(rank):
    """As above, of sizes that do not divide: each rank's padding begins elsewhere."""
    mesh = mesh_of(2, 2)
    value = torch.arange(35.0).view(7, 5)
    x = pt.distribute_tensor(value, mesh)
    w = pt.distribute_tensor(torch.ones(7, 5), mesh, [pt.Shard(0), pt.Shard(1)])
    rows = pt.distribute_tensor(torch.ones(5, 3), mesh, [pt.Shard(0), pt.Shard(0)])
    hidden = pt.distribute_tensor(value > 17, mesh, [pt.Shard(0), pt.Shard(1)])

    def step(x, w, rows, hidden):
        cut = x.redistribute(placements=[pt.Shard(0), pt.Shard(1)])
        share = x.redistribute(placements=[pt.Partial(), pt.Shard(0)])
        seen = (cut * w).masked_fill(hidden, 0.0)
        other = seen.redistribute(placements=[pt.Shard(1), pt.Replicate()])
        noise = torch.rand_like(cut)
        sums = other.sum(), share.amax(0), rows.sum(0), rows.exp()
        return [t.redistribute(placements=[pt.Replicate()] * 2) for t in (*sums, noise)]

    fast = pt.compile(step, backend="graph")
    torch.manual_seed(3)
    found = [t.to_local() for t in fast(x, w, rows, hidden)]
    torch.manual_seed(3)
    drawn = torch.rand(7, 5)
    wanted = [value[value <= 17].sum(), value.amax(0), torch.full((3,), 5.0)]
    wanted += [torch.ones(5, 3).exp(), drawn]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    return fast.key


def key_of_uneven_training(rank):
    mesh = mesh_of(2, 2)
    _, key, _ = train(mesh, lambda m, mesh: pt.zero(m, mesh, ("dp", "tp")), 5, True)
    return key


@pytest.mark.parametrize("body", [key_of_uneven_pieces, key_of_uneven_training])
def test_four_ranks_and_two_runs_of_uneven_shapes_have_one_key(body):
    keys = run_ranks(body, 4) + run_ranks(body, 4)
    assert len(set(keys)) == 1


def keys_of_local_shapes(rank):
    """Every rank's padded piece of 7 and of 8 rows is as large."""
    mesh = mesh_of(2, 1)
    found = []
    for n in (7, 8):
        x = pt.distribute_tensor(torch.ones(n, 2), mesh, [pt.Shard(0), pt.Replicate()])
        for step in (
            lambda x: x * 2,
            lambda x: x.sum().redistribute(placements=[pt.Replicate()] * 2),
        ):
            fast = pt.compile(step, backend="graph")
            assert fast(x).full_tensor().sum() == n * (4 if step(x).ndim else 2)
            found.append(fast.key)
    return found


def test_shapes_that_differ_only_in_their_padding_have_different_keys():
    first, second = run_ranks(keys_of_local_shapes, 2)
    assert first == second and len(set(first)) == 4


def keys_of_programs(rank):
    mesh = mesh_of(2, 1)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()])
    y = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(1), pt.Replicate()])
    z = pt.distribute_tensor(torch.ones(8, 2), mesh, [pt.Shard(0), pt.Replicate()])

    def key(step, *args, **options):
        fast = pt.compile(step, **{"backend": "graph", **options})
        fast(*args)
        return fast.key

    return [
        key(lambda x: x * 2, x),
        key(lambda x: x * 2, x),
        key(lambda x: x * 3, x),
        key(lambda x: x + 2, x),
        key(lambda x: x * 2, y),
        key(lambda x: x * 2, z),
        key(lambda x: x * 2, x.double()),
        key(lambda x: (x * 2).redistribute(placements=[pt.Replicate()] * 2), x),
        key(lambda x: x * 2, x, without=("dedupe",)),
    ]


def test_programs_that_differ_have_different_keys_and_equal_ones_have_one():
    per_rank = run_ranks(keys_of_programs, 2)
    assert per_rank[0] == per_rank[1]
    first, again, *others = per_rank[0]
    assert first == again
    assert len({first, *others}) == 1 + len(others)


def goes_apart(rank):
    mesh = mesh_of(4, 1)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()])
    scale = 2 if rank < 3 else 3  # a float would be an input, and told as one

    def step(x):
        y = (x + 1) * scale
        return y.sum().redistribute(placements=[pt.Replicate()] * 2)

    with pytest.raises(pt.LayoutError) as caught:
        pt.compile(step, backend="graph")(x)
    return str(caught.value)


def test_a_rank_with_another_program_is_told_on_every_rank_with_the_first_line_that_differs():
    told = run_ranks(goes_apart, 4)
    assert len(set(told)) == 1
    assert "aten.mul.Tensor(%1, 2)" in told[0] and "aten.mul.Tensor(%1, 3)" in told[0]
    assert "rank 3" in told[0] and "test_fault2_compile_keys.py" in told[0]


def fails_alone(rank):
    mesh = mesh_of(2, 1)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()])

    def step(x):
        if rank == 1:
            x.to_local().data_ptr()
        return x * 2

    with pytest.raises(pt.LayoutError, match="different programs") as caught:
        pt.compile(step, backend="graph")(x)
    return str(caught.value)


def test_a_capture_that_fails_on_one_rank_is_told_on_every_rank():
    told = run_ranks(fails_alone, 2)
    assert told[0] == told[1] and "data_ptr" in told[0]


def reads_alone(rank):
    mesh = mesh_of(2, 1)
    x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0), pt.Replicate()])

    def step(x):
        if rank == 1:
            bool(x.sum() > 0)
        return x * 2

    with pytest.raises(pt.LayoutError, match="ranks wait for one another") as caught:
        pt.compile(step, backend="graph")(x)
    return str(caught.value)


def test_a_capture_that_reads_a_value_on_one_rank_is_told_on_every_rank():
    told = run_ranks(reads_alone, 2)
    assert told[0] == told[1]
    assert "compares captured programs" in told[0] and "waits in all_gather" in told[0]
