"""Do batches and ZeRO agree on the data axis, and is a batch that nobody has split told?"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import partita as pt
from partita import LayoutError, Replicate, Shard

T = torch.arange(24.0).view(6, 4)


def on_ranks(fn, **axes):
    with pt.ranks(**axes) as world:
        return world.run(fn)


@pytest.mark.parametrize("name", ["dp", "data", "fsdp", "x"])
@pytest.mark.parametrize("zero_first", [True, False])
def test_the_only_axis_of_a_mesh_splits_batches_and_models_alike(name, zero_first):
    def body(mesh):
        model = nn.Linear(4, 2)
        if zero_first:
            pt.zero(model, mesh)
        x = pt.distribute_batch(T, mesh)
        if not zero_first:
            pt.zero(model, mesh)
        return x.placements, model.weight.placements

    assert on_ranks(body, **{name: 2}) == [((Shard(0),), (Shard(0),))] * 2


@pytest.mark.parametrize("first", ["shard", "tp"])
def test_a_batch_is_split_over_the_axis_that_zero_was_given(first):
    def body(mesh):
        pt.zero(nn.Linear(4, 2), mesh, "shard")
        x = pt.distribute_batch(T, mesh)
        return dict(zip(mesh.mesh_dim_names, x.placements, strict=True))

    axes = {"shard": 2, "tp": 2} if first == "shard" else {"tp": 2, "shard": 2}
    assert on_ranks(body, **axes) == [{"shard": Shard(0), "tp": Replicate()}] * 4


def test_a_batch_is_split_over_dp_and_over_the_axis_of_a_hybrid_shard():
    def body(mesh):
        pt.zero(nn.Linear(4, 2), mesh, "shard")
        return pt.distribute_batch(torch.ones(8, 4), mesh).placements

    assert on_ranks(body, dp=2, shard=2) == [(Shard(0), Shard(0))] * 4


@pytest.mark.parametrize("axes", [("dp", "cp"), "cp"])
def test_ranks_that_work_on_the_same_rows_all_get_them_though_zero_shards_over_them(axes):
    def body(mesh):
        pt.zero(nn.Linear(4, 2), mesh, axes)
        return pt.distribute_batch(T, mesh).placements

    assert on_ranks(body, dp=2, cp=2) == [(Shard(0), Replicate())] * 4


@pytest.mark.parametrize("name", ["tp", "cp"])
def test_ranks_that_work_on_the_same_rows_all_get_them(name):
    placements = on_ranks(lambda mesh: pt.distribute_batch(T, mesh).placements, **{name: 2})
    assert placements == [(Replicate(),)] * 2


def test_a_step_trains_as_one_device_does_whatever_the_axis_is_called():
    def losses(mesh=None):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if mesh is not None:
            pt.zero(model, mesh)
        seen = []
        for _ in range(3):
            x = T.double() if mesh is None else pt.distribute_batch(T.double(), mesh)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    for found in on_ranks(losses, batch=2):
        assert found == pytest.approx(losses(), rel=1e-9)


# -- a batch that is whole on every rank -----------------------------------------------------------


def forward_twice(mesh, stage, x, ready=lambda model: None):
    model = pt.zero(nn.Linear(4, 2), mesh, stage=stage)
    ready(model)
    for _ in range(2):
        model(x(mesh))


def warned(fn, **axes):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        on_ranks(fn, **axes)
    return [str(w.message) for w in seen]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "x",
    [lambda mesh: T, lambda mesh: pt.distribute_tensor(T, mesh, [Replicate()])],
    ids=["plain", "DTensor"],
)
def test_a_whole_batch_under_zero_is_warned_of_once(stage, x):
    seen = warned(lambda mesh: forward_twice(mesh, stage, x), dp=2)
    assert len(seen) == 2  # by each rank
    for text in seen:
        assert "every rank of dp computes the whole batch" in text
        assert "test_data_axis.py:" in text and "pt.distribute_batch" in text


def test_nothing_is_warned_of_where_a_batch_is_split_has_one_row_or_is_not_trained_on():
    def body(mesh):
        forward_twice(mesh, 3, lambda mesh: pt.distribute_batch(T, mesh))
        forward_twice(mesh, 3, lambda mesh: T[:1])
        forward_twice(mesh, 3, lambda mesh: T, lambda model: model.eval())
        with torch.no_grad():
            forward_twice(mesh, 3, lambda mesh: T)

    assert warned(body, dp=2) == []
    assert warned(lambda mesh: forward_twice(mesh, 3, lambda mesh: T), dp=1) == []


# -- pieces of other lengths -----------------------------------------------------------------------


def test_pieces_that_were_padded_to_other_lengths_are_refused_with_both_lengths():
    def body(mesh):
        batch = {
            "input_ids": torch.ones(4, (16, 13, 16)[mesh.get_rank()], dtype=torch.long),
            "labels": torch.ones(4),
        }
        try:
            pt.distribute_batch(batch, mesh, each_rank_has="piece")
        except LayoutError as error:
            return str(error)

    texts = on_ranks(body, dp=3)
    assert len(set(texts)) == 1
    assert "the ranks' pieces are 16 and 13 long in dimension 1" in texts[0]
    assert "rank 0 has (4, 16)" in texts[0] and "rank 1 has (4, 13)" in texts[0]
    assert "pad to one length" in texts[0] and "test_data_axis.py:" in texts[0]
    assert "chunk" not in texts[0]
