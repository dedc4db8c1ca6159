"""A script of `torch.distributed.fsdp` changes its imports and its batch, and trains as before."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita import fsdp
from partita.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, get_mesh
from tests.programs.errors import check_errors, collect_errors
from tests.programs.gloo_ranks import run_ranks

STEPS, ROWS, WIDTH, CLASSES = 3, 12, 8, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def features(self, x):
        return self.blocks[0](x)


def make_net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def make_batches(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 2, ROWS, WIDTH, generator=generator, dtype=dtype)
    return x, torch.randint(0, CLASSES, (STEPS, 2, ROWS), generator=generator)


def train(model, batch_of=lambda batch: batch, synchronize=None):
    """The losses of a loop with two micro-batches a step and a clip."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in zip(*make_batches(next(model.parameters()).dtype), strict=True):
        total = 0.0
        for micro in range(2):
            if synchronize is not None:
                synchronize(model, micro == 1)
            inputs, targets = batch_of((x[micro], y[micro]))
            loss = F.cross_entropy(model(inputs), targets) / 2
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def shard(model, mesh=None, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def on_a_mesh(mesh, axis=None, **options):
    part = None if axis == "none" else mesh if axis is None else mesh[axis]
    model = shard(make_net(), part, **options)
    whole = get_mesh(model)
    losses = train(
        model,
        lambda batch: pt.distribute_batch(batch, whole),
        lambda model, last: model.set_requires_gradient_sync(last),
    )
    return losses, str(model.head.weight.placements)


@pytest.mark.parametrize(
    ("sizes", "axis", "options", "placements"),
    [
        ({"dp": 1}, None, {}, "(Shard(dim=0),)"),
        ({"dp": 2}, None, {}, "(Shard(dim=0),)"),
        ({"dp": 2}, "none", {}, "(Shard(dim=0),)"),
        ({"dp": 5}, None, {"reshard_after_forward": True}, "(Shard(dim=0),)"),
        ({"anything": 3}, None, {"reshard_after_forward": False}, "(Shard(dim=0),)"),
        ({"replicate": 2, "shard": 3}, None, {}, "(Replicate(), Shard(dim=0))"),
        ({"dp": 2, "tp": 2}, "dp", {}, "(Shard(dim=0), Replicate())"),
    ],
)
def test_a_loop_trains_as_on_one_device(sizes, axis, options, placements):
    wanted = train(make_net())
    with pt.ranks(**sizes) as world:
        for losses, placed in world.run(on_a_mesh, axis, **options):
            assert losses == pytest.approx(wanted, abs=1e-9)
            assert placed == placements


def under_compile(mesh):
    model = shard(make_net(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @pt.compile(backend="graph")
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    x, y = make_batches()
    batches = [pt.distribute_batch((a[0], b[0]), mesh) for a, b in zip(x, y, strict=True)]
    return [step(*batch).item() for batch in batches]


@pytest.mark.slow
def test_a_compiled_step_trains_as_on_one_device():
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = []
    for x, y in zip(*make_batches(), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[0]), y[0])
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    with pt.ranks(dp=2) as world:
        for losses in world.run(under_compile):
            assert losses == pytest.approx(wanted, abs=1e-9)


def count_gathers(model, mesh):
    """Of a second forward: none if parameters stay gathered."""
    batch, _ = pt.distribute_batch((make_batches()[0][0, 0], make_batches()[1][0, 0]), mesh)
    model(batch)
    with pt.ledger() as log:
        model(batch)
    return log.count("all_gather")


def options_of_a_block(mesh):
    model = shard(make_net(), mesh)
    gathers = [count_gathers(model, mesh)]
    for method in ("set_reshard_after_forward", "set_reshard_after_backward"):
        for module, reshards in ((model.blocks[0], False), (model, False), (model, True)):
            getattr(module, method)(reshards)
            gathers.append(count_gathers(model, mesh))
    block = fully_shard(Block().double(), mesh=mesh)
    block.set_reshard_after_forward(False)  # it is no part of a model yet
    outer = fully_shard(nn.Sequential(block), mesh=mesh, reshard_after_forward=False)
    gathers.append(count_gathers(outer, mesh))
    return gathers, train(model, lambda batch: pt.distribute_batch(batch, mesh))


def test_resharding_is_an_option_of_the_model_and_changes_no_number():
    wanted = train(make_net())
    with pt.ranks(dp=2) as world:
        for gathers, losses in world.run(options_of_a_block):
            assert gathers == [4, *[4, 0, 4] * 2, 0]
            assert losses == pytest.approx(wanted, abs=1e-9)


def synchronized_under_compile(mesh, synchronizes):
    model = shard(make_net(), mesh)

    @pt.compile(backend="graph")
    def step(x, y):
        for module in (model, *model.blocks):
            module.set_requires_gradient_sync(synchronizes)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    x, y = make_batches()
    loss = step(*pt.distribute_batch((x[0, 0], y[0, 0]), mesh))
    return loss.item(), [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.slow
def test_a_compiled_step_may_ask_for_what_it_does_anyway():
    model, (x, y) = make_net(), make_batches()
    loss = F.cross_entropy(model(x[0, 0]), y[0, 0])
    loss.backward()
    with pt.ranks(dp=2) as world:
        for found, grads in world.run(synchronized_under_compile, True):
            assert found == pytest.approx(loss.item(), abs=1e-9)
            torch.testing.assert_close(grads, [p.grad for p in model.parameters()])
        with pytest.raises(pt.CaptureError, match="no_sync"):
            world.run(synchronized_under_compile, False)


# -- beside FSDP2 ----------------------------------------------------------------------------------


def script(rank, package, mesh_of, precision):
    """A script of FSDP2. Between the packages it differs in its import and in its batch."""
    ours = package == "partita.fsdp"
    names = importlib.import_module(package)
    mesh = {
        "none": lambda: None,
        "unnamed": lambda: init_device_mesh("cpu", (2,)),
        "part": lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["dp"],
    }[mesh_of]()
    model = make_net(torch.float32)
    policy = names.MixedPrecisionPolicy(**precision)
    for block in model.blocks:
        within = dataclasses.replace(policy, output_dtype=None)  # the next block is in bfloat16
        names.fully_shard(block, mesh=mesh, mp_policy=within)
    names.fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, names.FSDPModule)
    modules = [m for m in model.modules() if isinstance(m, names.FSDPModule)]
    assert len(modules) == 4
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.set_is_last_backward(True)

    def synchronize(_, last):
        for module in modules:
            module.set_requires_gradient_sync(last)

    def batch_of(batch):
        rows = tuple(t.chunk(2)[rank] for t in batch)
        return pt.distribute_batch(rows, get_mesh(model), each_rank_has="piece") if ours else rows

    losses = torch.tensor(train(model, batch_of, synchronize))
    if not ours:  # of this rank's rows
        dist.all_reduce(losses)
        losses /= 2
    norm = sum(p.full_tensor().double().square().sum() for p in model.parameters())
    return losses.tolist(), norm.item()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["none", "unnamed", "part"])
def test_losses_are_those_of_fsdp2(mesh):
    theirs, ours = (
        run_ranks(script, 2, package, mesh, {})
        for package in ("torch.distributed.fsdp", "partita.fsdp")
    )
    for (losses, norm), (their_losses, their_norm) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(their_losses, abs=1e-6)
        assert norm == pytest.approx(their_norm, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
        {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    ],
)
def test_mixed_precision_is_that_of_fsdp2(precision):
    theirs, ours = (
        run_ranks(script, 2, package, "none", precision)
        for package in ("torch.distributed.fsdp", "partita.fsdp")
    )
    for (losses, norm), (their_losses, their_norm) in zip(ours, theirs, strict=True):
        assert losses == pytest.approx(their_losses, rel=1e-2)  # bfloat16 has eight bits
        assert norm == pytest.approx(their_norm, rel=1e-3)


# -- what differs raises ---------------------------------------------------------------------------


def refusals(mesh):
    model = shard(make_net(), mesh)
    calls = {
        "rows of one rank": lambda: model(torch.ones(1, WIDTH, dtype=torch.float64)),
        "three dimensions": lambda: fully_shard(Block(), mesh=pt.dry_mesh(a=2, b=2, c=2)),
        "partial resharding": lambda: fully_shard(Block(), mesh=mesh, reshard_after_forward=2),
        "offload": lambda: fully_shard(Block(), mesh=mesh, offload_policy=fsdp.CPUOffloadPolicy()),
        "ignored": lambda: fully_shard(Block(), mesh=mesh, ignored_params={nn.Parameter()}),
        "placement": lambda: fully_shard(
            Block(), mesh=mesh, shard_placement_fn=lambda p: pt.Shard(1)
        ),
        "policy": lambda: fully_shard(Block(), mesh=mesh, mp_policy=torch.bfloat16),
        "factor": lambda: model.set_gradient_divide_factor(2.0),
        "other block": lambda: model.blocks[0].set_requires_gradient_sync(False),
        "prefetch": lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
        "method": lambda: fsdp.register_fsdp_forward_method(model, "generate"),
    }
    return collect_errors(calls)


EXPECTED = {
    "rows of one rank": ("LayoutError", 'each_rank_has="piece"'),
    "three dimensions": ("LayoutError", "mesh=mesh['a']"),
    "partial resharding": ("ValueError", "give True or False"),
    "offload": ("ValueError", "offload_policy=OffloadPolicy()"),
    "ignored": ("ValueError", "apply fully_shard to modules without them"),
    "placement": ("ValueError", "shards dimension 0"),
    "policy": ("TypeError", "from partita.fsdp import MixedPrecisionPolicy"),
    "factor": ("NotImplementedError", "(loss * factor).backward()"),
    "other block": ("ValueError", "call it on the model"),
    "prefetch": ("ValueError", "apply fully_shard to these modules first"),
    "method": ("ValueError", "has no method 'generate'"),
}


def test_what_partita_does_not_have_raises_with_the_line_to_write():
    with pt.ranks(dp=2) as world:
        for found in world.run(refusals):
            check_errors(found, EXPECTED)


def test_without_a_job_there_is_no_mesh():
    with pytest.raises(pt.LayoutError, match=r"mesh=pt.init_device_mesh"):
        fully_shard(Block())


def copies(mesh):
    model = shard(make_net(), mesh)
    x, _ = make_batches()
    batch = pt.distribute_batch(x[0, 0], mesh)
    wanted = model(batch).full_tensor()
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert model.features(batch).full_tensor().shape == (ROWS, WIDTH)
    fsdp.register_fsdp_forward_method(model, "features")
    for other in (copied, loaded):
        assert isinstance(other, FSDPModule)
        assert isinstance(other, Net)
        assert isinstance(other.blocks[1], FSDPModule)
        assert torch.equal(other(batch).full_tensor(), wanted)
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    return model.head.weight.shape


def test_models_are_copied_and_pickled_and_keep_their_methods():
    with pt.ranks(dp=2) as world:
        assert world.run(copies) == [torch.Size([CLASSES, WIDTH])] * 2


def test_every_name_of_fsdp2_is_here_or_differs_knowingly():
    """Fails with the names that a new torch adds."""
    import torch.distributed.fsdp as theirs
    from torch.distributed.fsdp._fully_shard import __all__ as names

    lacking = {"DataParallelMeshDims"}
    assert {n for n in names if not hasattr(fsdp, n)} <= lacking
    methods = {n for n in vars(theirs.FSDPModule) if not n.startswith("_")}
    assert {n for n in methods if not hasattr(FSDPModule, n)} == set()
    assert MixedPrecisionPolicy(torch.bfloat16) == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
