"""What leaves a sharded model for other programs is whole; what comes from them is cut right."""

from __future__ import annotations

import copy
import json
import os
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import partita as pt
from partita.comm import wire_of
from partita.layout import Layout
from partita.tensor.dtensor import as_dtensor, redistribute_to
from partita.tensor.tensor_state import spec_of
from tests.programs.gloo_ranks import run_ranks

MODES = ("tp", "zero1", "zero3")


class Net(nn.Module):
    """Two blocks of odd sizes, a weight that has two names, and a buffer."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh() * self.scale
        return self.head(x)


TOKENS = torch.arange(12).reshape(4, 3) % 7


def made(tied=True):
    torch.manual_seed(3)
    return Net(tied)


def placed(model, mesh, mode):
    if mode == "tp":
        plan = {"blocks.*.weight": {"dp": pt.Shard(1)}, "embed.weight": {"dp": pt.Shard(0)}}
        return pt.parallelize(model, mesh, plan)
    return pt.zero(model, mesh, stage=int(mode[-1]))


def one_step(model, optimizer, tokens=TOKENS):
    optimizer.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()


def trained(mesh, mode, tied=True):
    model = placed(made(tied), mesh, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer, pt.distribute_tensor(TOKENS, mesh))
    return model, optimizer


def expected(tied=True):
    """One process of plain torch: the state dicts of the model and of its optimizer."""
    model = made(tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    return get_state_dict(model, optimizer)


def assert_same(ours, theirs):
    if isinstance(theirs, torch.Tensor):
        assert type(ours) is torch.Tensor
        torch.testing.assert_close(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs) or set(ours) == set(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value)
    elif isinstance(theirs, (list, tuple)):  # torch makes a list of AdamW's betas
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


def ranks_of(rank):
    warnings.simplefilter("ignore")
    return pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


def full_state_dicts(rank, mode):
    mesh = ranks_of(rank)
    model, optimizer = trained(mesh, mode)
    state = pt.full_state_dict(model, optimizer)
    assert state[0]["head.weight"] is state[0]["embed.weight"]
    one_only = pt.full_state_dict(model, optimizer, rank0_only=True)
    assert one_only[0].keys() == (state[0].keys() if rank == 0 else set())
    torchs = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    separate = (
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)),
    )
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    offloaded = get_model_state_dict(model, options=options)
    assert bool(offloaded) == (rank == 0)
    return state, torchs, separate, offloaded


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_full_state_dicts_are_those_of_one_process(mode):
    model, optimizer = expected()
    for rank, (*states, offloaded) in enumerate(run_ranks(full_state_dicts, 2, mode)):
        for ours in states:
            assert_same(ours[0], model)
            assert_same(ours[1], optimizer)
        if rank == 0:
            assert_same(offloaded, model)


def meta(tied=True):
    with torch.device("meta"):
        return Net(tied)


def test_torch_gives_no_tensor_on_the_meta_device_memory_without_values():
    state = made().state_dict()
    del state["blocks.0.bias"]
    options = StateDictOptions(full_state_dict=True, strict=False)
    mesh = pt.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    try:
        model = pt.parallelize(meta(), mesh)
        with pytest.raises(pt.LayoutError, match=r"without values .*\n  blocks\.0\.bias\n"):
            set_model_state_dict(model, state, options=options)
        assert model.blocks[0].weight.is_meta
    finally:
        torch.distributed.destroy_process_group()


def loaded_each_way(rank, mode, states):
    return [loaded(ranks_of(rank), mode, way, states) for way in WAYS]


def loaded(mesh, mode, way, states):
    """The values of a sharded model and optimizer with one device's, and a step later."""
    rank = mesh.get_rank()
    model = placed(meta() if way.startswith("meta") else made(), mesh, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    states = copy.deepcopy(
        states
    )  # which the ranks would share: torch takes its scalars as they are
    mine = states if rank == 0 or "rank 0" not in way else ({}, {})
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0="rank 0" in way)
    if way.startswith("meta, then"):
        pt.load_full_state_dict(model, mine[0], rank0_only="rank 0" in way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        pt.load_full_state_dict(model, mine, optimizer, rank0_only="rank 0" in way)
    elif way.startswith(("partita", "meta")):
        pt.load_full_state_dict(model, mine, optimizer, rank0_only="rank 0" in way)
    elif way.startswith("together"):
        set_state_dict(
            model,
            optimizer,
            model_state_dict=mine[0],
            optim_state_dict=mine[1],
            options=full,
        )
    else:
        set_model_state_dict(model, mine[0], options=full)
        set_optimizer_state_dict(model, optimizer, mine[1], options=full)
    for p in model.parameters():
        assert isinstance(p, pt.DTensor)
        for x in optimizer.state[p].values():
            assert x.dim() == 0 or isinstance(x, pt.DTensor)
    before = pt.full_state_dict(model, optimizer)
    one_step(model, optimizer, pt.distribute_tensor(TOKENS, mesh))
    return before, pt.full_state_dict(model, optimizer)


WAYS = (
    *("partita", "partita, rank 0", "meta", "meta, rank 0"),
    *("meta, then the optimizer", "meta, then the optimizer, rank 0"),
    *("torch", "torch, rank 0", "together"),
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tp", "zero3"])
def test_full_state_dicts_are_loaded_as_by_one_process(mode):
    before = expected()
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    one_step(model, optimizer)
    one_step(model, optimizer)
    after = get_state_dict(model, optimizer)
    for each in run_ranks(loaded_each_way, 2, mode, before):
        for ours in each:
            assert_same(ours[0], before)
            assert_same(ours[1], after)


def written(rank, mode, folder, whole):
    """What safetensors' own `save_file` makes of a state dict of DTensors, or of whole values."""
    mesh = ranks_of(rank)
    model, _ = trained(mesh, mode, tied=False)
    path = os.path.join(folder, "model.safetensors")
    state = pt.full_state_dict(model, rank0_only=True) if whole else model.state_dict()
    if whole:
        if rank == 0:
            save_file(state, path)
        return None
    with pytest.raises(pt.LayoutError) as caught:
        save_file(state, path)
    assert not os.path.exists(path)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["tp", "zero3"])
def test_safetensors_writes_whole_values_or_nothing(mode, tmp_path):
    for error in run_ranks(written, 2, mode, str(tmp_path), False):
        assert "pt.full_state_dict(model)" in error
    run_ranks(written, 2, mode, str(tmp_path), True)
    assert_same(load_file(tmp_path / "model.safetensors"), dict(expected(tied=False)[0]))


# -- torch's own DTensor and placements ------------------------------------------------------------

T = torch.arange(48.0).view(8, 6) / 7
LAYOUTS = {
    "[8@(dp tp), 6]": (theirs.Shard(0), theirs.Shard(0)),
    "[8@(tp dp), 6]": (
        theirs.placement_types._StridedShard(0, split_factor=2),
        theirs.Shard(0),
    ),
    "[8@tp, 6@dp]": (theirs.Shard(1), theirs.Shard(0)),
    "[8@dp, 6]": (theirs.Shard(0), theirs.Replicate()),
    "[8, 6]": (theirs.Replicate(), theirs.Replicate()),
    "[8, 6@tp] {sum dp}": (theirs.Partial(), theirs.Shard(1)),
    "[8, 6] {max tp}": (theirs.Replicate(), theirs.Partial("max")),
    "[8, 6] {inv tp}": (theirs.Replicate(), theirs.Replicate()),
}


def to_torch_and_back(rank):
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, wire = pt.distribute_tensor(T, mesh), wire_of(mesh)
    for text, placements in LAYOUTS.items():
        wanted = spec_of(Layout.parse(text), wire)
        if "max" in text:
            x = pt.DTensor.from_local(T, mesh, [pt.Replicate(), pt.Partial("max")])
        else:
            x = redistribute_to(whole, wanted, "test")
        y = pt.to_torch(x)
        assert type(y) is theirs.DTensor and y.placements == placements, text
        assert y.shape == T.shape and y.stride() == T.stride() == x.stride()
        assert y.to_local().data_ptr() == x.to_local().data_ptr()
        torch.testing.assert_close(y.full_tensor(), T)
        back = pt.from_torch(y)
        assert back.to_local().data_ptr() == x.to_local().data_ptr()
        assert str(back.layout_over_mesh) == "f32" + text.replace(" {inv tp}", "")
        torch.testing.assert_close(back.full_tensor(), T)
        ours = pt.distribute_tensor(T, mesh, placements) if "max" not in text else x
        torch.testing.assert_close(ours.full_tensor(), T)
        assert "max" in text or "inv" in text or ours.layout_over_mesh == x.layout_over_mesh
    average = theirs.DTensor.from_local(
        T * (1 + rank // 2), mesh, (theirs.Partial("avg"), theirs.Replicate())
    )
    torch.testing.assert_close(pt.from_torch(average).full_tensor(), T * 1.5)
    product = theirs.DTensor.from_local(T, mesh, (theirs.Partial("product"), theirs.Replicate()))
    with pytest.raises(pt.LayoutError, match="is not a placement"):
        pt.from_torch(product)
    uneven = spec_of(Layout.parse("[7@(tp dp)]"), wire)
    with pytest.raises(pt.LayoutError, match="uneven"):
        pt.to_torch(as_dtensor(torch.zeros(uneven.local_shape), uneven))


def gradients_through_doors(rank):
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for mine in ([pt.Shard(0), pt.Shard(1)], [pt.Replicate(), pt.Shard(0)], [pt.Invariant()] * 2):
        x = pt.distribute_tensor(T, mesh, mine).requires_grad_()
        y = pt.to_torch(x)
        rows = theirs.distribute_tensor(T, mesh, (theirs.Shard(0), theirs.Replicate()))
        (pt.from_torch(y * rows) * T).sum().backward()
        found.append(x.grad.full_tensor())
        z = theirs.distribute_tensor(T, mesh, [theirs.Shard(1), theirs.Replicate()])
        z.requires_grad_()
        (pt.from_torch(z).square() * T).sum().backward()
        found.append(z.grad.full_tensor() / 2)
        w = theirs.distribute_tensor(T, mesh, [theirs.Replicate(), theirs.Partial()])
        w.requires_grad_()
        (pt.from_torch(w) * pt.distribute_tensor(T * T, mesh, mine)).sum().backward()
        found.append(w.grad.full_tensor())
    return found


@pytest.mark.slow
def test_a_tensor_becomes_one_of_torchs_and_comes_back_without_a_copy():
    run_ranks(to_torch_and_back, 4)


@pytest.mark.slow
def test_gradients_cross_the_doors_to_torchs_dtensor():
    for grads in run_ranks(gradients_through_doors, 4):
        for grad in grads:
            torch.testing.assert_close(grad, T * T)


# -- files of others -------------------------------------------------------------------------------


class Rotary(nn.Module):
    """A buffer that no file has, and that a model of transformers' kind gives its value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(3.0) + 1, persistent=False)


class Pretrained(Net):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary()

    def _init_weights(self, module):
        if isinstance(module, Rotary):
            with torch.no_grad():
                module.inv_freq.copy_(torch.arange(3.0) + 1)


def write_pretrained(folder):
    """As transformers writes them: in several files, and of a tied weight one name."""
    torch.manual_seed(3)
    state = Pretrained().state_dict()
    state.pop("head.weight")
    names = sorted(state)
    files = {
        "model-00001-of-00002.safetensors": names[:3],
        "model-00002-of-00002.safetensors": names[3:],
    }
    for file, mine in files.items():
        save_file({name: state[name].clone() for name in mine}, os.path.join(folder, file))
    placed_in = {name: file for file, mine in files.items() for name in mine}
    index = os.path.join(folder, "model.safetensors.index.json")
    with open(index, "w") as out:
        json.dump({"metadata": {}, "weight_map": placed_in}, out)
    return index


def pretrained(rank, folder, index):
    mesh = ranks_of(rank)
    found = []
    for mode, path in (("tp", folder), ("zero3", index), ("zero1", folder)):
        with torch.device("meta"):
            model = Pretrained()
        placed(model, mesh, mode)
        assert pt.load_safetensors(model, path).missing_keys == ()
        assert model.head.weight is model.embed.weight
        whole = getattr(model.rotary.inv_freq, "full_tensor", lambda b=model.rotary.inv_freq: b)()
        assert whole.tolist() == [1, 2, 3]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        one_step(model, optimizer, pt.distribute_tensor(TOKENS, mesh))
        found.append(pt.full_state_dict(model))
    with torch.device("meta"):
        model = placed(Pretrained(), mesh, "zero3")
    model.extra = nn.Linear(2, 2)
    with pytest.raises(pt.LayoutError, match=r"extra\.weight: in the state, not in the checkpoint"):
        pt.load_safetensors(model, folder)
    assert model.embed.weight.is_meta  # nothing has changed
    del model.extra
    Pretrained._init_weights = lambda self, module: None
    with pytest.raises(pt.LayoutError, match=r"rotary\.inv_freq"):
        pt.load_safetensors(model, folder)
    return found


@pytest.mark.slow
def test_pretrained_files_load_into_a_meta_model_piece_by_piece(tmp_path):
    index = write_pretrained(str(tmp_path))
    torch.manual_seed(3)
    one = Pretrained()
    one_step(one, torch.optim.AdamW(one.parameters(), lr=0.1))
    for states in run_ranks(pretrained, 2, str(tmp_path), index):
        for state in states:
            assert_same(state, dict(one.state_dict()))


def saved_aside(rank, folder):
    mesh = ranks_of(rank)
    x = pt.distribute_tensor(T, mesh, [pt.Shard(0)])
    saving = dcp.async_save({"x": x}, checkpoint_id=folder)
    saving.result()
    state = {"x": pt.zeros(8, 6, device_mesh=mesh, placements=[pt.Shard(1)])}
    dcp.load(state, checkpoint_id=folder)
    return state["x"].full_tensor()


def test_torchs_own_async_save_takes_our_tensors(tmp_path):
    for value in run_ranks(saved_aside, 2, str(tmp_path / "c")):
        assert torch.equal(value, T)
