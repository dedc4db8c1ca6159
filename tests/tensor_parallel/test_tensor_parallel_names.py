"""A script of `torch.distributed.tensor.parallel` changes its imports, and trains as before."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita import tensor_parallel
from partita.fsdp import fully_shard
from partita.tensor_parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.programs.errors import check_errors, collect_errors
from tests.programs.gloo_ranks import run_ranks
from tests.programs.styled_transformer import (
    VOCABULARY,
    WIDTH,
    Model,
    apply_plan,
    make_model,
    make_tokens,
)


def train(model, prepare=lambda x: x):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # torch's cannot mix
    losses = []
    for tokens in map(prepare, make_tokens()):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def script(rank, package, placements, sequence):
    mesh = init_device_mesh("cpu", (2,))
    names = importlib.import_module(package)
    with warnings.catch_warnings(record=True):
        model = apply_plan(make_model(), mesh, names, importlib.import_module(placements), sequence)
    return train(model)


@pytest.mark.slow
@pytest.mark.parametrize("placements", ["torch.distributed.tensor", "partita"])
@pytest.mark.parametrize("sequence", [False, True])
def test_losses_are_those_of_torch_and_of_one_device(sequence, placements):
    wanted = train(make_model())
    theirs = run_ranks(
        script, 2, "torch.distributed.tensor.parallel", "torch.distributed.tensor", sequence
    )
    ours = run_ranks(script, 2, "partita.tensor_parallel", placements, sequence)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(wanted, abs=1e-9)
        assert one == pytest.approx(other, abs=1e-9)


def on_a_mesh(mesh, sequence):
    tp, dp = (mesh["tp"], mesh["dp"]) if mesh.ndim == 2 else (mesh, None)
    model = apply_plan(make_model(), tp, tensor_parallel, pt, sequence)
    if dp is None:
        return train(model)
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return train(model, lambda x: pt.distribute_batch(x, mesh))


@pytest.mark.parametrize(
    ("sizes", "sequence"),
    [({"tp": 1}, True), ({"tp": 2}, False), ({"tp": 3}, True), ({"dp": 2, "tp": 2}, True)],
)
def test_a_transformer_trains_as_on_one_device(sizes, sequence):
    wanted = train(make_model())
    tensor_parallel.warn_of_global_shapes.cache_clear()
    with pt.ranks(**sizes) as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for losses in world.run(on_a_mesh, sequence):
            assert losses == pytest.approx(wanted, abs=1e-9)
    texts = [w for w in said if "keep the global number of heads" in str(w.message)]
    assert len(texts) == 1
    assert texts[0].filename.endswith("styled_transformer.py")  # the line of the call


class Twice(ParallelStyle):
    """A user's own style."""

    def _apply(self, module, device_mesh):
        module.register_forward_hook(lambda m, args, out: 2 * out)
        return module


class Pair(nn.Module):
    def forward(self, x, *, y):
        return x, x + y


def boundaries(mesh):
    pair = parallelize_module(
        Pair(),
        mesh,
        PrepareModuleInputOutput(
            input_layouts=(pt.Replicate(),),
            desired_input_layouts=(pt.Shard(0),),
            input_kwarg_layouts={"y": pt.Replicate()},
            desired_input_kwarg_layouts={"y": pt.Shard(0)},
            output_layouts=(pt.Shard(0), pt.Shard(0)),
            desired_output_layouts=(None, pt.Replicate()),
            use_local_output=False,
        ),
    )
    x = torch.arange(6.0).view(3, 2)
    first, second = pair(x, y=x)
    assert torch.equal(second.full_tensor(), 2 * x)
    layer = parallelize_module(
        nn.Linear(2, 2, bias=False), mesh, ColwiseParallel(use_local_output=False)
    )
    own = parallelize_module(nn.Sequential(nn.Linear(2, 2)), mesh, {"*": Twice()})
    once = own[0].bias.detach() + x @ own[0].weight.detach().t()
    assert torch.equal(own(x).full_tensor(), 2 * once.full_tensor())
    return str(first.placements), str(second.placements), str(layer(x).placements)


def test_inputs_and_outputs_are_redistributed_and_own_styles_are_applied():
    with pt.ranks(tp=2) as world:
        for found in world.run(boundaries):
            assert found == ("(Shard(dim=0),)", "(Replicate(),)", "(Shard(dim=1),)")


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.second(x)


def styled_by_name(mesh):
    x = torch.arange(8.0).view(2, 4)
    found = []
    for names in (["first"], ["second"], ["first", "second"], ["*"]):
        for own in (Twice(), "colwise"):
            torch.manual_seed(0)
            model = TwoNames()
            wanted = model(x) * (2 if isinstance(own, Twice) else 1)
            parallelize_module(model, mesh, dict.fromkeys(names, own))
            torch.testing.assert_close(model(x).full_tensor(), wanted)
            found.append(str(model.first.weight.placements))
    return found


@pytest.mark.filterwarnings("ignore:parallelize_module")
def test_a_module_of_two_names_is_styled_once_by_either():
    with pt.ranks(tp=2) as world:
        for found in world.run(styled_by_name):
            assert found == ["(Replicate(),)", "(Shard(dim=0),)"] * 4


def refusals(mesh):
    calls = {
        "name": lambda: parallelize_module(Model(), mesh, {"layers.*.wq": ColwiseParallel()}),
        "mesh": lambda: parallelize_module(Model(), pt.dry_mesh(a=2, b=2), ColwiseParallel()),
        "module": lambda: parallelize_module(Model(), mesh, {"norm": ColwiseParallel()}),
        "string": lambda: parallelize_module(Model(), mesh, {"norm": "moe_tp_experts"}),
        "counts": lambda: PrepareModuleOutput(
            output_layouts=(pt.Shard(0), pt.Shard(0)), desired_output_layouts=pt.Shard(0)
        ),
        "rank's own": lambda: parallelize_module(nn.LayerNorm(2), mesh, SequenceParallel())(
            torch.full((1, 2, 2), float(mesh.get_rank()))
        ),
    }
    return collect_errors(calls)


EXPECTED = {
    "name": ("LayoutError", "'layers.*.wq'"),
    "mesh": ("LayoutError", "mesh['b']"),
    "module": ("NotImplementedError", "LayerNorm"),
    "string": ("ValueError", "colwise_gather_output"),
    "counts": ("ValueError", "2 layouts and 1 desired ones"),
    "rank's own": ("LayoutError", "rank"),
}


@pytest.mark.filterwarnings("ignore:parallelize_module")
def test_what_does_not_fit_is_an_error_with_a_reason():
    with pt.ranks(tp=2) as world:
        for found in world.run(refusals):
            check_errors(found, EXPECTED)


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).double()


def with_plan_of_transformers(mesh):
    model = llama()
    plan = {f"model.{k}": v for k, v in model.config.base_model_tp_plan.items()}
    parallelize_module(model, mesh, plan | model._tp_plan)
    with loss_parallel():
        return train_llama(model), str(model.model.layers[0].self_attn.q_proj.weight.placements)


def train_llama(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in make_tokens():
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_the_plan_of_a_model_of_transformers_is_read():
    wanted = train_llama(llama())
    with pt.ranks(tp=2) as world:
        for losses, placed in world.run(with_plan_of_transformers):
            assert losses == pytest.approx(wanted, abs=1e-9)
            assert placed == "(Shard(dim=0),)"


def test_every_name_of_torch_is_here():
    """Fails with the names that a new torch adds."""
    import torch.distributed.tensor.parallel as theirs

    assert [n for n in theirs.__all__ if not hasattr(tensor_parallel, n)] == []
    assert sorted(tensor_parallel.__all__) == sorted(theirs.__all__)
    assert PrepareModuleInput(desired_input_layouts=pt.Shard(0)).wanted == [pt.Shard(0)]
    assert RowwiseParallel().output_layouts is None
