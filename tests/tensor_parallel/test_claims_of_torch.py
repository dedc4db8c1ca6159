"""Claims of torch's own tests of tensor parallel styles. Each holds here, or is documented.

Each function with `@claim` states one claim and names the tests of torch (of the folder
`test/distributed/tensor/parallel`) that make it. The programs are our own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import partita as pt
from partita import Partial, Replicate, Shard
from partita.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from tests.programs.claims import Claims, raises
from tests.programs.gloo_ranks import run_ranks
from tests.programs.styled_transformer import apply_plan, make_model, make_tokens

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "coming_from_torch.md", DOCS / "dtensor_from_torch.md"]
CLAIMS = Claims({"tp": 4})
claim = CLAIMS.add

DP_TP = {"dp": 2, "tp": 2}
RESULTS = "results are DTensors of the global shape"


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, pt.DTensor) else tensor


def check_equal(found: Any, wanted: Any, what: str = "result") -> None:
    torch.testing.assert_close(
        full(found.detach()), wanted.detach(), rtol=1e-9, atol=1e-9, msg=lambda t: f"{what}: {t}"
    )


def make_rows(number: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(module: type[nn.Module], *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Returns two equal modules in float64."""
    torch.manual_seed(0)
    made = module(*args, **options).double()
    return made, copy.deepcopy(made)


def check_same_step(plain: nn.Module, model: nn.Module, *inputs: torch.Tensor) -> None:
    """Compare results, gradients and a step of SGD with one device's. Inputs are whole."""
    wanted, out = plain(*inputs), model(*inputs)
    check_equal(out, wanted, "output")
    for m, result in ((plain, wanted), (model, out)):
        result.square().sum().backward()
        torch.optim.SGD(m.parameters(), lr=0.25).step()
    theirs = dict(plain.named_parameters())
    for name, p in model.named_parameters():
        if theirs[name].grad is None:
            assert p.grad is None, name
        else:
            check_equal(p.grad, theirs[name].grad, f"gradient of {name}")
        check_equal(p, theirs[name], name)


def count(log: Any) -> dict[str, int]:
    """The number of collectives by kind."""
    kinds = [m.kind for m in log.moves if m.nbytes]
    return {kind: kinds.count(kind) for kind in kinds}


def run_counted(model: nn.Module, x: Any) -> tuple[Any, dict[str, int], dict[str, int]]:
    """The result, and the collectives of forward and of backward."""
    with pt.ledger() as forward:
        out = model(x)
    with pt.ledger() as backward:
        out.sum().backward()
    return out, count(forward), count(backward)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 12)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


def gathered() -> ColwiseParallel:
    return ColwiseParallel(output_layouts=Replicate(), use_local_output=False)


# -- styles ----------------------------------------------------------------------------------------


@claim("test_colwise_parallel_style", differs="the gradient is `Partial`")
def colwise_splits_the_output(mesh):
    plain, model = make(nn.Linear, 16, 16)
    parallelize_module(model, mesh, ColwiseParallel())
    x = make_rows(0, 8, 16)
    leaf = x.clone().requires_grad_()
    with raises(pt.LayoutError, "requires grad", "distribute_tensor"):
        model(leaf)
    ours = pt.distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    out, forward, backward = run_counted(model, ours)
    assert out.shape == (8, 16)
    assert out.to_local().shape == (8, 4)
    check_equal(out, plain(x))
    assert forward == {}
    assert backward == {}  # the gradient of the input stays Partial until it is read
    plain(leaf).sum().backward()
    check_equal(ours.grad, leaf.grad)
    ours = pt.distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    _, model = make(nn.Linear, 16, 16)
    parallelize_module(model, mesh, ColwiseParallel(input_layouts=Shard(0)))
    out, forward, backward = run_counted(model, ours)
    check_equal(out, plain(x))
    assert forward == {"all_gather": 1}
    assert backward == {"reduce_scatter": 1}
    check_equal(ours.grad, leaf.grad)


@claim("test_colwise_parallel_embedding", differs=RESULTS)
def colwise_splits_the_columns_of_an_embedding(mesh):
    plain, model = make(nn.Embedding, 16, 16)
    parallelize_module(model, mesh, ColwiseParallel())
    x = torch.arange(8).reshape(4, 2)
    out, forward, backward = run_counted(model, x)
    assert out.to_local().shape == (4, 2, 4)
    assert forward == backward == {}
    plain(x).sum().backward()
    check_equal(model.weight.grad, plain.weight.grad)


@claim(
    "test_colwise_parallel_preserves_requires_grad", "test_rowwise_parallel_preserves_requires_grad"
)
def styles_keep_requires_grad(mesh):
    for style in (ColwiseParallel(), RowwiseParallel()):
        _, model = make(nn.Linear, 16, 16)
        model.weight.requires_grad_(False)
        parallelize_module(model, mesh, style)
        assert not model.weight.requires_grad
        assert model.bias.requires_grad


@claim(
    "test_rowwise_parallel_style",
    "test_linear_row_wise_parallel",
    differs="the gradient is `Partial`",  # reduced here, and not at the input of a colwise layer
)
def rowwise_splits_the_input(mesh):
    for layout, moves in (
        (None, ("all_reduce", "all_reduce")),
        (Shard(0), ("reduce_scatter", "all_gather")),
    ):
        plain, model = make(nn.Linear, 16, 16)
        parallelize_module(model, mesh, RowwiseParallel(output_layouts=layout))
        x = make_rows(0, 8, 16)
        ours = pt.distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        out, forward, backward = run_counted(model, ours)
        check_equal(out, plain(x))
        assert forward == {moves[0]: 1}, forward
        assert backward == {moves[1]: 1}, backward
        plain(x).sum().backward()
        for name in ("weight", "bias"):
            check_equal(getattr(model, name).grad, getattr(plain, name).grad, name)


@claim("test_rowwise_parallel_style", "test_linear_row_wise_parallel", differs="a rank's own piece")
def a_piece_of_the_input_of_rowwise_is_refused(mesh):
    _, model = make(nn.Linear, 16, 16)
    parallelize_module(model, mesh, RowwiseParallel())
    with raises(Exception, "16"):
        model(make_rows(0, 8, 4))


@claim("test_rowwise_parallel_embedding", differs=RESULTS)
def rowwise_splits_the_rows_of_an_embedding(mesh):
    plain, model = make(nn.Embedding, 16, 16)
    parallelize_module(model, mesh, RowwiseParallel(input_layouts=Replicate()))
    x = torch.arange(8).reshape(4, 2)
    out, forward, backward = run_counted(model, x)
    check_equal(out, plain(x))
    assert forward == {"all_reduce": 1}, forward
    assert backward == {"all_reduce": 1}, backward
    _, model = make(nn.Embedding, 16, 16)
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, style)
    out, forward, backward = run_counted(model, torch.arange(8))
    assert out.to_local().shape == (8, 4)
    assert forward == {"reduce_scatter": 1}
    assert backward == {"all_gather": 1}
    plain(torch.arange(8)).sum().backward()
    check_equal(model.weight.grad, plain.weight.grad)


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.linear(x) + y


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, *, x, y=2, z=None):
        return self.linear(x) + y + z


@claim("test_prepare_module_input", differs="a rank's own piece")
def pieces_for_input_layouts_are_refused_and_dtensors_are_redistributed(mesh):
    x = torch.ones(8, 16)
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    model = parallelize_module(nn.Identity(), mesh, style)
    # Equal on all ranks: torch takes it as one piece of four, so that nothing may be guessed.
    with raises(pt.LayoutError, "Shard(dim=0)", "plain tensor", "from_local"):
        model(x)
    with pt.ledger() as log:
        out = model(pt.DTensor.from_local(x, mesh, [Shard(0)]))
    assert count(log) == {"all_gather": 1}
    check_equal(out, torch.ones(32, 16))


@claim("test_prepare_module_input", "test_mlp_training", differs="a rank's own piece")
def pieces_are_refused_by_all_styles_that_say_so(mesh):
    x = torch.ones(8, 16)
    for style in (
        ColwiseParallel(input_layouts=Shard(0)),
        RowwiseParallel(input_layouts=Shard(-1)),
    ):
        _, model = make(nn.Linear, 16, 16)
        parallelize_module(model.float(), mesh, style)
        with raises(pt.LayoutError, "plain tensor", "from_local"):
            model(x)
    model = parallelize_module(nn.LayerNorm(16), mesh, SequenceParallel())
    with raises(pt.LayoutError, "plain tensor", "from_local"):
        model(torch.ones(2, 4, 16))
    style = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
    model = parallelize_module(nn.Identity(), mesh, style)
    with raises(pt.LayoutError, "plain tensor", "from_local"):
        model(x)


@claim("test_prepare_module_input_multiple_inputs")
def inputs_and_their_layouts_must_be_as_many(mesh):
    with raises(ValueError, "1 layouts and 2 desired ones"):
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=(Replicate(), None))
    plain, model = make(Second)
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None)
    )
    parallelize_module(model, mesh, {"": style, "linear": ColwiseParallel()})
    x, y = make_rows(0, 8, 8), make_rows(1, 8, 8)
    out = model(pt.distribute_tensor(x, mesh, [Shard(0)]), y)
    check_equal(out, plain(x, y))
    assert out.to_local().shape == (8, 2)


@claim("test_prepare_module_kwargs_input")
def inputs_by_keyword_are_redistributed(mesh):
    plain, model = make(Keywords)
    style = PrepareModuleInput(
        input_kwarg_layouts={"x": Shard(0), "z": Shard(0)},
        desired_input_kwarg_layouts={"x": Replicate(), "z": Replicate()},
    )
    parallelize_module(model, mesh, {"linear": ColwiseParallel(), "": style})
    x, z = make_rows(0, 8, 8), make_rows(1, 8, 8)
    ours = {k: pt.distribute_tensor(v, mesh, [Shard(0)]) for k, v in (("x", x), ("z", z))}
    with pt.ledger() as log:
        out = model(**ours)
    assert count(log) == {"all_gather": 2}
    check_equal(out, plain(x=x, z=z))


@claim("test_prepare_module_output")
def outputs_are_redistributed(mesh):
    style = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    model = parallelize_module(nn.Identity(), mesh, style)
    x = make_rows(0, 8, 16)
    for given in (x, pt.distribute_tensor(x, mesh, [Replicate()])):
        out = model(given)
        assert out.to_local().shape == (2, 16)
        check_equal(out, x)


@claim("test_prepare_module_input_output")
def inputs_and_outputs_are_redistributed(mesh):
    style = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    )
    model = parallelize_module(nn.Identity(), mesh, style)
    x = make_rows(0, 20, 7)
    out = model(pt.distribute_tensor(x, mesh, [Shard(0)]))
    assert [*out.placements] == [Shard(1)]
    check_equal(out, x)


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


@claim("test_sequence_parallel_style")
def sequence_parallel_computes_on_pieces_of_the_sequence(mesh):
    x = make_rows(0, 4, 8, 12)
    for make_norm in (
        lambda: nn.LayerNorm(12),
        lambda: nn.LayerNorm(12, elementwise_affine=False),
        RMSNorm,
    ):
        plain, model = make(make_norm)
        parallelize_module(model, mesh, SequenceParallel())
        ours = pt.distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
        out, forward, backward = run_counted(model, ours)
        assert [*out.placements] == [Shard(1)]
        assert forward == backward == {}
        wanted = plain(x)
        check_equal(out, wanted)
        if [*model.parameters()]:
            wanted.sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            check_equal(p.grad, q.grad, name)
    _, model = make(RMSNorm)
    parallelize_module(model, mesh, SequenceParallel())
    by_rows = pt.distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    out, forward, backward = run_counted(model, by_rows)
    assert [*out.placements] == [Shard(1)]
    assert forward == backward == {"all_to_all": 1}
    dropout = parallelize_module(nn.Dropout(0.5), mesh, SequenceParallel())
    torch.manual_seed(0)
    ours = pt.distribute_tensor(torch.ones(4, 8, 12), mesh, [Shard(1)])
    with pt.ledger() as log:
        out = dropout(ours)
    assert count(log) == {}
    torch.manual_seed(0)
    assert torch.equal(out.full_tensor(), nn.Dropout(0.5)(torch.ones(4, 8, 12)))


# -- parallelize_module ----------------------------------------------------------------------------


def check_plan(mesh: Any, plan: Any, module: type[nn.Module] = MLP, **options: Any) -> nn.Module:
    plain, model = make(module)
    parallelize_module(model, mesh, plan, **options)
    check_same_step(plain, model, make_rows(0, 12, 10))
    return model


@claim(
    "test_parallelize_mlp_with_module_api",
    "test_parallelize_module_with_star",
    "test_parallelize_module_with_question",
    "test_parallelize_module_with_digit",
    "test_linear_col_wise_parallel",
)
def names_and_patterns_find_modules(mesh):
    for plan in ({"net1": gathered(), "net2": gathered()}, *({n: gathered()} for n in PATTERNS)):
        model = check_plan(mesh, plan)
        assert [*model.net1.weight.placements] == [*model.net2.weight.placements] == [Shard(0)]


PATTERNS = ("net*", "net?", "net[1-2]")


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = MLP()

    def forward(self, x):
        return self.encoder(x)


@claim("test_parallelize_mlp_with_module_api_nested", "test_parallelize_module_multi_wildcard")
def names_of_nested_modules_have_parts(mesh):
    check_plan(mesh, {"encoder.net1": gathered(), "encoder.net2": gathered()}, Nested)
    plan: Mapping[str, Any] = {
        "layers.*.net[1]": ColwiseParallel(),
        "layers.*.net[2]": RowwiseParallel(),
    }
    model = check_plan(mesh, plan, Stacked)
    assert [*model.layers[1].net2.weight.placements] == [Shard(1)]


@claim("test_parallelize_module_with_root_module")
def an_empty_name_is_the_module_itself(mesh):
    own = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        output_layouts=Shard(0),
        desired_output_layouts=Replicate(),
    )
    plan = {
        "": own,
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    }
    check_plan(mesh, plan)


@claim("test_parallelize_module_with_no_match", differs="a name that finds no module")
def a_name_that_finds_nothing_is_refused(mesh):
    for name in ("net0.hello.world", "net3"):
        with raises(pt.LayoutError, repr(name)):
            parallelize_module(MLP(), mesh, {name: ColwiseParallel(), "net1": ColwiseParallel()})


@claim("test_empty_plan", differs="without a plan")
def without_a_plan_all_parameters_are_whole(mesh):
    model = check_plan(mesh, None)
    assert all([*p.placements] == [Replicate()] for p in model.parameters())


@claim("test_parallelize_module_src_data_rank")
def weights_come_from_the_given_rank(mesh):
    models = []
    for rank in range(4):
        torch.manual_seed(rank)
        models.append(MLP())
    model = models[mesh.get_rank()]
    parallelize_module(model, mesh, {"net*": ColwiseParallel()}, src_data_rank=1)
    torch.manual_seed(1)
    for p, q in zip(model.parameters(), MLP().parameters(), strict=True):
        check_equal(p, q)
    _, model = make(MLP)
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    with pt.ledger() as log:
        parallelize_module(model, mesh, plan, src_data_rank=None)
    assert count(log) == {}


@claim("test_under_devicemesh_context")
def the_mesh_of_a_context_is_used(_):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain, model = make(nn.Linear, 10, 16)
    with mesh["tp"]:
        parallelize_module(model, parallelize_plan=gathered())
    check_same_step(plain, model, make_rows(0, 12, 10))
    assert model.weight.to_local().shape == (8, 10)


# -- examples --------------------------------------------------------------------------------------


@claim("test_mlp_training", "test_mlp_inference")
def an_mlp_trains_as_on_one_device(mesh):
    model = check_plan(mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    with torch.inference_mode():
        assert model(make_rows(0, 8, 10)).shape == (8, 12)
    plain, model = make(MLP)
    plan = {
        "net1": ColwiseParallel(input_layouts=Shard(0)),
        "net2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(model, mesh, plan)
    x = make_rows(0, 8, 10)
    with pt.ledger() as log:
        out = model(pt.distribute_tensor(x, mesh, [Shard(0)]))
    assert count(log) == {"all_gather": 1, "reduce_scatter": 1}
    check_equal(out, plain(x))


FROZEN = (
    lambda name: False,
    lambda name: name not in ("head.weight", "norm.weight", "norm.bias"),
    lambda name: name not in ("words.weight", "head.weight"),
    lambda name: (
        name
        not in (
            "words.weight",
            "layers.0.attention.v.weight",
            "layers.0.mlp.up.bias",
            "layers.1.norm2.bias",
            "layers.1.mlp.down.weight",
        )
    ),
)


@claim("test_transformer_training", "test_transformer_req_grad", differs=RESULTS)
def a_transformer_trains_as_on_one_device_whatever_is_frozen(mesh):
    from partita import tensor_parallel as names

    for sequence in (True, False):
        for frozen in FROZEN if sequence else FROZEN[:1]:
            plain, model = make_model(), make_model()
            apply_plan(model, mesh, names, pt, sequence)
            for m in (plain, model):
                for name, p in m.named_parameters():
                    p.requires_grad_(not frozen(name))
            check_same_step(plain, model, make_tokens()[0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, x):
        return self.fc(self.embedding(x))


@claim("test_weight_tying")
def weights_may_be_tied_after_they_are_split(mesh):
    plain, model = make(Tied)
    parallelize_module(model, mesh, {"embedding": ColwiseParallel(), "fc": RowwiseParallel()})
    for m in (plain, model):
        m.fc.weight = m.embedding.weight
    check_same_step(plain, model, torch.tensor([3, 1, 4, 1, 5]))
    assert model.fc.weight.grad is model.embedding.weight.grad


def check_cross_entropy(mesh: Any, places: Any, target_places: Any, *shape: int) -> None:
    """For each reduction, with and without weights of classes: loss and gradient are equal."""
    x = make_rows(0, *shape)
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(16, (shape[0], *shape[2:]), generator=generator)
    weight = make_rows(2, 16).abs()
    for reduction in ("none", "mean", "sum"):
        for weights in (None, weight):
            leaf = x.clone().requires_grad_()
            ours = pt.distribute_tensor(x, mesh, places).requires_grad_()
            theirs = pt.distribute_tensor(target, mesh, target_places) if target_places else target
            wanted = F.cross_entropy(leaf, target, weights, reduction=reduction)
            with loss_parallel():
                loss = F.cross_entropy(ours, theirs, weights, reduction=reduction)
                check_equal(loss, wanted, reduction)
                wanted.square().sum().backward()
                loss.square().sum().backward()
            check_equal(ours.grad, leaf.grad, f"gradient, {reduction}")


@claim("test_loss_parallel", differs="not needed: `F.cross_entropy` accepts logits")
def cross_entropy_takes_logits_that_are_split(mesh):
    for dim in (0, 1):
        check_cross_entropy(mesh, [Shard(dim)], None, 8, 16)
    for dim in (0, 1, 2):
        check_cross_entropy(mesh, [Shard(dim)], None, 8, 16, 12)


@claim(
    "test_loss_parallel_multi_dim_mesh",
    "test_loss_parallel_replicate_non_tp_dim",
    "test_loss_parallel_tp_not_last_dim",
    "test_loss_parallel_3d_input_non_batch_shard",
    "test_loss_parallel_plain_tensor_target_rejected_on_multi_dim",
    sizes=DP_TP,
    differs="not needed: `F.cross_entropy` accepts logits",
)
def cross_entropy_takes_logits_that_are_split_on_two_axes(mesh):
    rows, classes, whole = Shard(0), Shard(1), Replicate()
    check_cross_entropy(mesh, [rows, classes], [rows, whole], 8, 16)
    check_cross_entropy(mesh, [whole, classes], [whole, whole], 8, 16)
    check_cross_entropy(mesh, [classes, rows], [whole, rows], 8, 16)
    check_cross_entropy(mesh, [Shard(2), classes], [Shard(1), whole], 4, 16, 6)
    check_cross_entropy(mesh, [rows, classes], None, 8, 16)  # a plain target is the whole one


@claim("test_loss_parallel_invalid_non_tp_placement", sizes=DP_TP)
def cross_entropy_of_partial_logits_is_that_of_their_sum(mesh):
    x, target = make_rows(0, 8, 16), torch.arange(8)
    part = pt.distribute_tensor(x / 2, mesh, [Replicate(), Shard(1)])
    part = pt.DTensor.from_local(part.to_local(), mesh, [Partial(), Shard(1)])
    for reduction in ("none", "mean", "sum"):
        wanted = F.cross_entropy(x, target, reduction=reduction)
        check_equal(F.cross_entropy(part, target, reduction=reduction), wanted)


@claim("test_model_init", sizes=DP_TP, differs="draw the same numbers as on one device")
def a_model_on_the_meta_device_is_initialized_as_on_one_device(mesh):
    with torch.device("meta"):
        model = MLP()
    parallelize_module(model, mesh["tp"], {"net1": gathered(), "net2": gathered()})
    assert model.net1.weight.is_meta
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for m in (model.net1, model.net2):
        m.reset_parameters()
    torch.manual_seed(0)
    for p, q in zip(model.parameters(), MLP().parameters(), strict=True):
        check_equal(p, q)


def run_on_gloo(rank: int) -> dict[str, str]:
    return CLAIMS.run_on_gloo()


@pytest.mark.slow
def test_claims_hold_on_gloo():
    assert run_ranks(run_on_gloo, 4) == [{}] * 4


@pytest.mark.filterwarnings("ignore:parallelize_module")
def test_pieces_that_torch_guesses_are_refused():
    guessed = (
        pieces_for_input_layouts_are_refused_and_dtensors_are_redistributed,
        pieces_are_refused_by_all_styles_that_say_so,
    )
    assert CLAIMS.run_on_threads(*guessed) == {}


def test_differences_are_stated_on_the_page():
    assert CLAIMS.list_unwritten("\n".join(page.read_text() for page in PAGES)) == set()
