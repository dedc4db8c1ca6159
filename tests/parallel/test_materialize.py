"""Does a model that was made without memory get the values that one device would have given it?"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import partita as pt
from partita.app.models import GPT, Llama


def gpt() -> nn.Module:
    return GPT(layers=2, width=32, heads=4, context=16)


def llama() -> nn.Module:
    return Llama(layers=2, width=32, heads=4, groups=2, context=16)


def tied_llama() -> nn.Module:
    return Llama(layers=1, width=32, heads=4, groups=2, context=16, tied=True)


class Zoo(nn.Module):
    """Modules of torch that initialise themselves, each in its own way; no function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.embed = nn.Embedding(10, 6, padding_idx=2)
        self.attend = nn.MultiheadAttention(6, 2)
        self.lstm = nn.LSTM(6, 5, bidirectional=True)
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.sequence = nn.Sequential(nn.Linear(5, 7), nn.PReLU(), nn.GroupNorm(1, 7))


PLANS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt": (gpt, pt.plans.gpt()),
    "llama": (llama, pt.plans.llama(sequence=True)),
    "tied llama": (tied_llama, pt.plans.llama()),
    "zoo": (Zoo, {"*weight*": {"tp": pt.Shard(0)}, "conv.bias": {"dp": pt.Shard(0)}}),
    "every weight over both axes": (gpt, {"*.weight": {"tp": pt.Shard(0), "dp": pt.Shard(0)}}),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}], ids=["2x2", "1x3"])
def test_values_are_those_of_one_device_with_the_same_seed(name: str, sizes: dict[str, int]):
    make, plan = PLANS[name]
    torch.manual_seed(5)
    truth = make()
    after = torch.rand(())  # the generator goes on from the same place

    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = make()
        pt.parallelize(model, mesh, plan)
        assert all(p.is_meta for p in model.parameters())
        torch.manual_seed(5)
        assert pt.materialize(model) is model
        assert torch.equal(torch.rand(()), after)
        for kind in ("named_parameters", "named_buffers"):
            mine, theirs = (dict(getattr(m, kind)()) for m in (model, truth))
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert type(mine[key]) is pt.DTensor
                assert torch.equal(mine[key].full_tensor(), value), key
                assert mine[key].requires_grad == value.requires_grad

    with pt.ranks(**sizes) as world:
        world.run(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_that_zero_has_sharded_gets_its_values_too(stage: int) -> None:
    tokens = torch.randint(0, 256, (4, 16))

    def losses(model: nn.Module, tokens: torch.Tensor) -> tuple[list[float], Any]:
        """The loss of each step, and a moment that the optimizer keeps."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        out = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out, optimizer.state[model.get_parameter("blocks.0.mlp.up.weight")]["exp_avg"]

    torch.manual_seed(5)
    truth, moment = losses(gpt(), tokens)

    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = gpt()
        pt.zero(pt.parallelize(model, mesh, pt.plans.gpt()), mesh, stage=stage)
        torch.manual_seed(5)
        pt.materialize(model)
        found, mine = losses(model, pt.distribute_batch(tokens, mesh))
        assert found == pytest.approx(truth, rel=1e-5)
        assert mine.to_local().numel() == moment.numel() // (4 if stage else 2)

    with pt.ranks(dp=2, tp=2) as world:
        world.run(ranks)


def test_what_shares_a_weight_still_does() -> None:
    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = tied_llama()
        pt.materialize(pt.parallelize(model, mesh, pt.plans.llama()))
        assert model.embed.weight is model.head.weight
        assert model.embed.weight.placements == (pt.Shard(0),)

    with pt.ranks(tp=2) as world:
        world.run(ranks)


def test_it_trains_as_the_model_that_was_made_on_one_device() -> None:
    tokens = torch.randint(0, 256, (4, 16))
    torch.manual_seed(5)
    truth = gpt()(tokens)

    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = gpt()
        pt.parallelize(model, mesh, pt.plans.gpt(sequence=True))
        torch.manual_seed(5)
        pt.materialize(model)
        out = model(pt.distribute_batch(tokens, mesh))
        torch.testing.assert_close(out.full_tensor(), truth)
        out.sum().backward()

    with pt.ranks(dp=2, tp=2) as world:
        world.run(ranks)


class Alive(TorchDispatchMode):
    """Counts the bytes of the storages that are alive, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta:
                storage = t.untyped_storage()
                if storage._cdata not in self.known:
                    nbytes = storage.nbytes()
                    self.now += nbytes
                    self.known[storage._cdata] = weakref.finalize(
                        storage, self.gone, storage._cdata, nbytes
                    )
                    self.most = max(self.most, self.now)
        return out

    def gone(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        del self.known[key]


def test_no_rank_ever_holds_more_than_its_pieces_and_one_whole_parameter() -> None:
    def ranks(mesh: Any) -> tuple[int, int, int]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(32)))
        pt.parallelize(model, mesh, {"*": {"tp": pt.Shard(0)}})
        with Alive() as alive:
            pt.materialize(model)
        mine = sum(p.to_local().nbytes for p in model.parameters())
        return alive.most, mine, 64 * 64 * 4

    with pt.ranks(tp=4) as world:
        for most, mine, one in world.run(ranks):
            assert mine == 8 * one
            assert mine <= most <= mine + one  # and not the 32 of the whole model


def test_a_function_of_the_users_own_can_give_the_values() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.register_buffer("table", torch.arange(4.0))

    def values(model: nn.Module) -> None:
        nn.init.normal_(model.gain)
        model.table = torch.arange(4.0)  # assigned, not written into

    torch.manual_seed(3)
    truth = Scaled()
    values(truth)

    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = Scaled()
        pt.parallelize(model, mesh, {"gain": {"tp": pt.Shard(0)}})
        torch.manual_seed(3)
        pt.materialize(model, init_fn=values)
        assert torch.equal(model.gain.full_tensor(), truth.gain)
        assert model.table.placements == (pt.Replicate(),)
        assert torch.equal(model.table.full_tensor(), truth.table)

    with pt.ranks(tp=2) as world:
        world.run(ranks)


def test_what_nothing_gives_a_value_is_named_on_every_rank() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.gain = nn.Parameter(torch.ones(4))
            self.register_buffer("table", torch.ones(4))

    def ranks(mesh: Any) -> str:
        with torch.device("meta"):
            model = Own()
        pt.parallelize(model, mesh, {"gain": {"tp": pt.Shard(0)}})
        with pytest.raises(pt.LayoutError) as error:
            pt.materialize(model)
        return str(error.value)

    with pt.ranks(tp=2) as world:
        errors = world.run(ranks)
    assert errors[0] == errors[1]
    assert "nothing initialized these" in errors[0]
    assert "\n  gain\n" in errors[0] and "\n  table\n" in errors[0] and "linear" not in errors[0]


def test_what_has_memory_is_left_alone() -> None:
    def ranks(mesh: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.device("meta"):
            model.append(nn.Linear(2, 2))
        pt.parallelize(model, mesh)
        kept = model[0].weight
        value = kept.full_tensor().clone()
        pt.materialize(model)
        assert model[0].weight is kept and torch.equal(kept.full_tensor(), value)
        assert not model[2].weight.is_meta

    with pt.ranks(tp=2) as world:
        world.run(ranks)


def test_an_init_function_that_a_library_put_in_torchs_place_draws_what_torchs_draws(monkeypatch):
    own = nn.init.normal_

    def normal_(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
        return own(tensor, mean=mean, std=std)

    monkeypatch.setattr(nn.init, "normal_", normal_)

    def draw(mesh) -> torch.Tensor:
        x = pt.zeros(4, 3, device_mesh=mesh, placements=[pt.Shard(0)])
        torch.manual_seed(1)
        return nn.init.normal_(x, std=0.5).full_tensor()

    torch.manual_seed(1)
    truth = own(torch.zeros(4, 3), std=0.5)
    with pt.ranks(dp=2) as world:
        assert all(torch.equal(x, truth) for x in world.run(draw))
