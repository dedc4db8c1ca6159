"""Is a model of partita's refused by torch's wrappers, and a wrapped one by partita?"""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

import partita as pt
from partita import LayoutError
from tests.programs.gloo_ranks import run_ranks

DDP = DistributedDataParallel


def mesh_of(n=2):
    return pt.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


def a_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def told(fn):
    try:
        fn()
    except LayoutError as error:
        return str(error)


AFTER_ZERO = {
    "DDP": DDP,
    "DDP without a broadcast": lambda m: DDP(m, init_sync=False),
    "of a list": lambda m: fully_shard([*m]),
    "fully_shard": fully_shard,
    "FSDP": FullyShardedDataParallel,
    "DataParallel": DataParallel,
    "replicate": replicate,
}
BEFORE_ZERO = {
    "DDP": DDP,
    "within DDP": lambda m: (DDP(m), m),
    "a part in DDP": lambda m: nn.Sequential(m, DDP(nn.Linear(4, 4))),
    "fully_shard": lambda m: fully_shard(m, mesh=mesh_of()),
    "DataParallel": DataParallel,
    "replicate": replicate,
}


def wraps(rank):
    mesh, found = mesh_of(), {}
    for name, wrap in AFTER_ZERO.items():
        for stage in (0, 3):
            model = pt.zero(a_model(), mesh, stage=stage)
            before = [p.to_local().clone() for p in model.parameters()]
            found[f"{name}, zero {stage}"] = told(lambda wrap=wrap, model=model: wrap(model))
            for p, q in zip(model.parameters(), before, strict=True):
                assert torch.equal(p.to_local(), q)
    for name, wrap in BEFORE_ZERO.items():
        for of_ours in (pt.zero, lambda m, mesh: pt.parallelize(m, mesh, {})):
            made = wrap(a_model())
            model = made[-1] if isinstance(made, tuple) else made
            text = told(lambda of_ours=of_ours, model=model: of_ours(model, mesh))
            found[f"{name}, then {getattr(of_ours, '__name__', of_ours)}"] = text
    return found


@pytest.mark.slow
def test_two_that_exchange_a_models_parameters_are_one_error_before_anything_changes():
    one, other = run_ranks(wraps, 2)
    assert one == other and len(one) == 2 * len(AFTER_ZERO) + 2 * len(BEFORE_ZERO)
    for name, text in one.items():
        assert text is not None, name
        assert "test_wrappers_of_torch.py:" in text and "either" in text, (name, text)


def trains_beside_ddp(rank):
    """DDP of an unrelated model, and one that was wrapped once, train as ever."""
    mesh = mesh_of()
    plain = DDP(a_model())
    plain(torch.ones(2, 4) * (rank + 1)).square().mean().backward()
    once = a_model()
    DDP(once)
    model = pt.zero(once, mesh, stage=3)
    x = pt.distribute_batch(torch.tensor([[1.0], [2.0]]).expand(2, 4).contiguous(), mesh)
    model(x).square().mean().backward()
    return [p.grad for p in plain.parameters()], [p.grad.full_tensor() for p in model.parameters()]


def splits_over_another_axis(rank):
    """DDP over the ranks of dp, of a model whose pieces those of tp have."""
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = pt.parallelize(a_model(), mesh["tp"], {"0.weight": {"tp": pt.Shard(0)}})
    return told(lambda: DDP(model, process_group=mesh["dp"].get_group())), told(lambda: DDP(model))


@pytest.mark.slow
def test_models_that_share_nothing_with_partita_are_wrapped_as_ever():
    for theirs, ours in run_ranks(trains_beside_ddp, 2):
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_ddp_over_ranks_that_hold_the_same_pieces_is_torchs_own():
    for over_dp, over_all in run_ranks(splits_over_another_axis, 4):
        assert over_dp is None or "DTensor of partita" not in over_dp
        assert "DistributedDataParallel: 0.weight is a DTensor of partita" in over_all


def keeps_a_wrapper_on_one_rank(rank):
    mesh, found = mesh_of(), {}
    for name, of_ours in {
        "zero": pt.zero,
        "parallelize": lambda m, mesh: pt.parallelize(m, mesh, {}),
    }.items():
        model = a_model()
        wrapped = DDP(model)
        if rank:
            del wrapped
            gc.collect()
        found[name] = told(lambda model=model, of_ours=of_ours: of_ours(model, mesh))
        assert not any(isinstance(p, pt.DTensor) for p in model.parameters())
    return found


@pytest.mark.slow
def test_a_model_that_is_still_wrapped_on_one_rank_is_refused_on_all():
    one, other = run_ranks(keeps_a_wrapper_on_one_rank, 2)
    assert one == other
    for text in one.values():
        assert text is not None and "wrapped by DistributedDataParallel" in text
        assert "test_wrappers_of_torch.py:" in text and "not wrapped" in text
