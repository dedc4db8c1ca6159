"""What the integrations share: whole batches, a hook that keeps this rank's rows, whole results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

import partita as pt
from partita.integrations.sharded_run import JoinedBatchSampler, ShardedRun
from tests.programs.trainer_runs import Plain, Sentences


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 12])
def test_joined_batches_are_those_of_a_larger_batch_size(rows: int, drop_last: bool) -> None:
    joined = JoinedBatchSampler(BatchSampler(range(rows), 2, drop_last), 2)
    larger = BatchSampler(range(rows), 4, drop_last)
    assert [*joined] == [*larger]
    assert len(joined) == len(larger) and joined.batch_size == 4


class Counted(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(7))


def loaders(batch: int) -> list[DataLoader[Any]]:
    seeded = RandomSampler(range(7), generator=torch.Generator().manual_seed(3))
    return [
        DataLoader(range(7), batch),
        DataLoader(range(7), batch, sampler=seeded),
        DataLoader(Counted(), batch),
        DataLoader(range(7), batch_sampler=BatchSampler(range(7), batch, False)),
        DataLoader(torch.arange(7), batch_size=None, sampler=BatchSampler(range(7), batch, False)),
    ]


@pytest.mark.parametrize("i", range(5))
def test_each_kind_of_loader_gives_whole_batches(i: int) -> None:
    def read(mesh: Any) -> Any:
        given = loaders(2)[i]
        found = [batch.tolist() for batch in ShardedRun(mesh).join_batches(given)]
        assert [len(batch) for batch in given] == [2, 2, 2, 1], "the given one is unchanged"
        return found

    truth = [batch.tolist() for batch in loaders(4)[i]]
    with pt.ranks(dp=2) as world:
        assert world.run(read) == [truth] * 2


def train(model: Plain, batches: list[dict[str, torch.Tensor]], mesh: Any = None) -> Any:
    run = ShardedRun(mesh, stage=2)
    run.shard_model(run.shard_model(model))  # as an evaluation before training does
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for batch in batches:
        out = model(**batch)
        assert mesh is None or out["logits"].placements == (pt.Shard(0),)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(run.gather({**out, "labels": batch["labels"]}))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_keeps_its_rows_of_a_whole_batch(ranks: int) -> None:
    data = Sentences(8)
    batches = [
        {name: torch.stack([data[i][name] for i in rows]) for name in data[0]}
        for rows in (range(5), range(5, 8), [1])
    ]

    def on_mesh(mesh: Any) -> Any:
        return train(make(), batches, mesh)

    def make() -> Plain:
        torch.manual_seed(0)
        return Plain().double()

    truth = train(make(), batches)
    with pt.ranks(dp=ranks) as world:
        for found in world.run(on_mesh):
            torch.testing.assert_close(found, truth, rtol=0, atol=1e-9)


def test_a_plain_tensor_that_differs_between_ranks_is_not_whole() -> None:
    def gather(mesh: Any) -> str:
        with pytest.raises(pt.LayoutError) as raised:
            ShardedRun(mesh).gather([torch.tensor([mesh.get_rank()])])
        return str(raised.value)

    with pt.ranks(dp=2) as world:
        ours, theirs = world.run(gather)
    assert ours == theirs


def test_one_process_needs_no_mesh() -> None:
    run = ShardedRun.start(None, 3, "cpu")
    loader = loaders(2)[0]
    assert run.mesh is None and run.join_batches(loader) is loader
    model = torch.nn.Linear(2, 2)
    assert run.shard_model(model) is model and not isinstance(model.weight, pt.DTensor)
    run.wait_for_all("nobody")
