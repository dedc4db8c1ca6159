"""Does a model on a mesh train as on one device, wherever its plan puts it?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita as pt
from partita.app.models import GPT, Llama

ROWS, LENGTH = 8, 8


def make(kind: str) -> nn.Module:
    """The same model each time, in float32."""
    torch.manual_seed(1)
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": LENGTH}
    if kind == "gpt":
        return GPT(**sizes)
    return Llama(**sizes, groups=2, tied=kind == "tied llama")


def plan(kind: str, sequence: bool = False) -> dict[str, Any]:
    return (pt.plans.gpt if kind == "gpt" else pt.plans.llama)(sequence=sequence)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A text of which each byte says something about the next, for the loss to fall."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 40, (ROWS, 1), generator=generator)
    text = (start + 3 * torch.arange(LENGTH + 1)) % 97
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), **options)


def train(model: nn.Module, put: Callable[[Any], Any], steps: int, parts: int = 1) -> list[float]:
    """The loss of each step; `put` brings a batch to the model, in `parts` micro-batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for rows in zip(*(half.chunk(parts) for half in batch(step)), strict=True):
            loss = loss_of(model, *put(rows)) / parts
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


MESHES: dict[str, tuple[dict[str, int], bool, dict[str, pt.Placement], float]] = {
    "dp": ({"dp": 2}, False, {"dp": pt.Shard(0)}, 1e-6),
    "tp": ({"tp": 2}, False, {}, 1e-5),
    "sp": ({"tp": 2}, True, {}, 1e-5),
    "dp x tp": ({"dp": 2, "tp": 2}, False, {"dp": pt.Shard(0)}, 1e-5),
    "dp x tp with sp": ({"dp": 2, "tp": 2}, True, {"dp": pt.Shard(0)}, 1e-5),
    "dp x sp x tp": (
        {"dp": 2, "sp": 2, "tp": 2},
        False,
        {"dp": pt.Shard(0), "sp": pt.Shard(1)},
        1e-5,
    ),
    "three ranks of tp, which do not divide the heads": ({"tp": 3}, True, {}, 1e-5),
    "five ranks of dp, one without a row": ({"dp": 5}, False, {"dp": pt.Shard(0)}, 1e-6),
}
"""By name: the mesh, sequence parallelism on tp, where the batch lies, and the tolerance."""


def on_mesh(mesh: Any, kind: str, sequence: bool, places: Any, steps: int, parts: int) -> Any:
    tp = "tp" in mesh.mesh_dim_names
    model = pt.parallelize(make(kind), mesh, plan(kind, sequence) if tp else None)
    return train(model, lambda rows: pt.distribute_batch(rows, mesh, places), steps, parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("kind", ["gpt", "llama", "tied llama"])
def test_losses_are_those_of_one_process(kind: str, name: str) -> None:
    sizes, sequence, places, tolerance = MESHES[name]
    steps = 12
    one = train(make(kind), lambda rows: rows, steps)
    with pt.ranks(**sizes) as world:
        all_ranks = world.run(on_mesh, kind, sequence, places, steps, 1)
    assert one[-1] < one[0] - 1
    for losses in all_ranks:
        assert losses == all_ranks[0]
    worst = max(abs(a - b) / abs(b) for a, b in zip(all_ranks[0], one, strict=True))
    assert worst <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp", "sp", "dp x tp with sp"])
def test_micro_batches_that_accumulate_are_one_batch(name: str) -> None:
    sizes, sequence, places, tolerance = MESHES[name]
    one = train(make("gpt"), lambda rows: rows, 6, parts=4)
    with pt.ranks(**sizes) as world:
        losses = world.run(on_mesh, "gpt", sequence, places, 6, 4)[0]
    assert max(abs(a - b) / abs(b) for a, b in zip(losses, one, strict=True)) <= tolerance


# -- a loss of which ranks see unequal parts -------------------------------------------------------


def some_ignored(targets: Tensor) -> Tensor:
    """Of the rows that the last of two ranks has, none counts; of the others, some do."""
    targets = targets.clone()
    targets[ROWS // 2 :] = -100
    targets[0, :5] = -100
    return targets


LOSSES = {
    "ignored": {},
    "class weights": {"weight": torch.linspace(0.1, 2.0, 256)},
    "label smoothing": {"label_smoothing": 0.1},
    "all of these": {"weight": torch.linspace(0.1, 2.0, 256), "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "label_smoothing": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("name", ["dp", "dp x tp", "dp x tp with sp"])
def test_a_masked_loss_counts_each_target_once(name: str, options: str) -> None:
    sizes, sequence, places, _ = MESHES[name]
    inputs, targets = batch(0)
    targets = some_ignored(targets)
    one = make("gpt")
    truth = loss_of(one, inputs, targets, **LOSSES[options])
    truth.backward()

    def ranks(mesh: Any) -> None:
        model = pt.parallelize(make("gpt"), mesh, plan("gpt", sequence) if "tp" in sizes else None)
        rows = pt.distribute_batch((inputs, targets), mesh, places)
        loss = loss_of(model, *rows, **LOSSES[options])
        loss.backward()
        assert loss.item() == pytest.approx(truth.item(), rel=1e-6)
        for name, p in one.named_parameters():
            mine = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=2e-6 * truth.item())

    with pt.ranks(**sizes) as world:
        world.run(ranks)


def test_a_batch_without_a_single_target_is_nan_on_every_rank_as_on_one_device() -> None:
    inputs, targets = batch(0)
    targets = torch.full_like(targets, -100)

    def ranks(mesh: Any) -> float:
        model = pt.parallelize(make("gpt"), mesh, plan("gpt"))
        return loss_of(model, *pt.distribute_batch((inputs, targets), mesh)).item()

    assert torch.isnan(loss_of(make("gpt"), inputs, targets))
    with pt.ranks(dp=2, tp=2) as world:
        assert all(loss != loss for loss in world.run(ranks))


# -- what is carried -------------------------------------------------------------------------------


def carried(log: Any, about: str) -> list[tuple[str, tuple[str, ...], str]]:
    """What was sent for the ops of this name."""
    sends = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return [(m.kind, m.axes, m.op) for m in log.moves if m.kind in sends and about in m.op]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_sequence_parallel_block_gathers_and_scatters_twice_and_reduces_nothing(kind: str):
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(make(kind), mesh, plan(kind, sequence=True))
        inputs, targets = pt.distribute_batch(batch(0), mesh)
        with pt.ledger() as forward, pt.strict():  # the model asks for all that it sends
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        with pt.ledger() as backward:
            loss.backward()
        tp = ("tp",)
        for block in ("blocks.0.", "blocks.1."):
            assert [(k, a) for k, a, _ in carried(forward, block)] == [
                ("all_gather", tp),
                ("reduce_scatter", tp),
            ] * 2
            assert [(k, a) for k, a, _ in carried(backward, block)] == [
                ("all_gather", tp),
                ("reduce_scatter", tp),
            ] * 2
        assert forward.count("all_reduce") == backward.count("all_reduce") == 0
        assert logits.placements == (pt.Shard(0), pt.Shard(2))

    with pt.ranks(dp=2, tp=2) as world:
        world.run(ranks)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_tensor_parallel_block_reduces_twice_each_way(kind: str) -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(make(kind), mesh, plan(kind))
        inputs, targets = pt.distribute_batch(batch(0), mesh)
        with pt.ledger() as forward, pt.strict():
            logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        with pt.ledger() as backward:
            loss.backward()
        for block in ("blocks.0.", "blocks.1."):
            for log in (forward, backward):
                assert [k for k, _, _ in carried(log, block)] == ["all_reduce"] * 2

    with pt.ranks(dp=2, tp=2) as world:
        world.run(ranks)


def test_data_parallel_alone_sends_nothing_until_gradients_are_settled() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(make("gpt"), mesh)
        for step in range(2):  # two micro-batches
            inputs, targets = pt.distribute_batch(batch(step), mesh)
            logits = model(inputs)
            with pt.ledger() as log:
                F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            assert log.bytes <= 8  # of targets, how many count
        assert all(p.grad.placements == (pt.Partial(),) for p in model.parameters())

    with pt.ranks(dp=2) as world:
        world.run(ranks)


# -- what a plan may say ---------------------------------------------------------------------------


class Small(nn.Module):
    """Two layers that share a weight, one that does not, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 6)
        self.last.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def forward(self, x: Tensor, gain: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        x = self.second(self.first(x)) * self.scale * self.hidden * gain
        return self.last(x if shift is None else x + shift)


def ranks_run(fn: Callable[[Any], Any], **sizes: int) -> list[Any]:
    with pt.ranks(**(sizes or {"dp": 2, "tp": 2})) as world:
        return world.run(fn)


def test_what_no_pattern_names_and_every_buffer_is_whole_everywhere() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(Small(), mesh, {"*last.w*": {"tp": pt.Shard(0)}})
        assert model.last.weight.placements == (pt.Replicate(), pt.Shard(0))
        for t in (model.first.weight, model.last.bias, model.scale, model.hidden):
            assert t.placements == (pt.Replicate(), pt.Replicate())
        assert isinstance(model.last.weight, nn.Parameter)
        assert not isinstance(model.scale, nn.Parameter)

    ranks_run(ranks)


def test_names_and_what_is_saved_are_as_before() -> None:
    def ranks(mesh: Any) -> None:
        plain, model = Small(), pt.parallelize(Small(), mesh, {"*first*": {"tp": pt.Shard(0)}})
        for names in ("named_parameters", "named_buffers", "named_modules"):
            assert [n for n, _ in getattr(plain, names)()] == [
                n for n, _ in getattr(model, names)()
            ]
        assert list(plain.state_dict()) == list(model.state_dict())  # without what is not saved
        assert [p.requires_grad for p in plain.parameters()] == [
            p.requires_grad for p in model.parameters()
        ]

    ranks_run(ranks)


def test_a_plan_fits_a_model_that_torch_has_wrapped() -> None:
    def ranks(mesh: Any) -> None:
        inner = Small()
        model = nn.Sequential(torch.compile(inner, backend="eager"))
        pt.parallelize(model, mesh, {"0.last.weight": {"tp": pt.Shard(1)}})
        assert inner.last.weight.placements[1] == pt.Shard(1)

    ranks_run(ranks)


def test_a_tied_weight_stays_one_whichever_of_its_names_a_pattern_has() -> None:
    def ranks(mesh: Any) -> None:
        for pattern in ("first.weight", "second.weight", "*.weight"):
            model = pt.parallelize(Small(), mesh, {pattern: {"tp": pt.Shard(0)}})
            assert model.first.weight is model.second.weight
            assert model.first.weight.placements == (pt.Replicate(), pt.Shard(0))
            assert len(list(model.parameters())) == 4

    ranks_run(ranks)


def test_what_a_user_hung_on_a_parameter_stays() -> None:
    def ranks(mesh: Any) -> None:
        model = Small()
        model.last.weight.decay = False  # type: ignore[assignment]
        pt.parallelize(model, mesh, {"last.weight": {"tp": pt.Shard(0)}})
        assert model.last.weight.decay is False
        assert copy.deepcopy(model).last.weight.decay is False

    ranks_run(ranks)


def test_axes_split_one_dimension_in_the_order_in_which_a_plan_names_them() -> None:
    def ranks(mesh: Any) -> Any:
        weight = torch.arange(8.0).view(8, 1)
        model = nn.Linear(1, 8, bias=False)
        model.weight = nn.Parameter(weight)
        pt.parallelize(model, mesh, {"weight": {"tp": pt.Shard(0), "dp": pt.Shard(0)}})
        assert torch.equal(model.weight.full_tensor(), weight)
        return model.weight.to_local().flatten().tolist()

    assert ranks_run(ranks) == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_the_values_are_those_of_one_rank_unless_none_is_named() -> None:
    def ranks(mesh: Any, src: int | None) -> Any:
        model = nn.Linear(2, 2, bias=False)
        nn.init.constant_(model.weight, mesh.get_rank())
        pt.parallelize(model, mesh, src_data_rank=src)
        return model.weight.to_local()[0, 0].item()

    with pt.ranks(dp=3) as world:
        assert world.run(ranks, 0) == [0, 0, 0]
        assert world.run(ranks, 2) == [2, 2, 2]
        assert world.run(ranks, None) == [0, 1, 2]


def test_plans_can_be_applied_one_after_the_other() -> None:
    def ranks(mesh: Any) -> None:
        model = Small()
        pt.parallelize(model, mesh, {"last.weight": {"tp": pt.Shard(0)}})
        kept = model.first.weight
        pt.parallelize(model, mesh, {"last.weight": {"dp": pt.Shard(1)}})
        assert model.last.weight.placements == (pt.Shard(1), pt.Shard(0))
        assert model.first.weight is kept
        pt.parallelize(model, mesh)
        assert model.last.weight.placements == (pt.Shard(1), pt.Shard(0))

    ranks_run(ranks)


def test_a_module_takes_and_returns_what_the_plan_says_however_it_is_called() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(
            Small(),
            mesh,
            {
                "": [
                    pt.Inputs({"dp": pt.Shard(0)}, shift={"tp": pt.Shard(-1)}),
                    pt.Outputs({"tp": pt.Shard(1)}),
                ]
            },
        )
        seen = {}
        model.register_forward_pre_hook(
            lambda m, args, kwargs: seen.update(args=args, **kwargs), with_kwargs=True
        )
        x, shift = torch.randn(4, 4), torch.randn(4, 4)
        truth = Small()
        truth.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
        out = model(x, 3.0, shift=shift)
        assert seen["args"][0].placements == (pt.Shard(0), pt.Replicate())
        assert seen["args"][1] == 3.0
        assert seen["shift"].placements == (pt.Replicate(), pt.Shard(1))
        assert out.placements[1] == pt.Shard(1)
        torch.testing.assert_close(out.full_tensor(), truth(x, 3.0, shift=shift))
        out = model(x=x)  # and shift has its default
        assert seen["x"].placements == (pt.Shard(0), pt.Replicate())
        torch.testing.assert_close(out.full_tensor(), truth(x))

    ranks_run(ranks)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x * 2


def test_several_results_are_laid_out_each_as_it_should() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(Pair(), mesh, {"": pt.Outputs(None, {"tp": pt.Shard(1)})})
        one, two = model(pt.distribute_tensor(torch.ones(4, 4), mesh))
        assert one.placements[1] == pt.Replicate() and two.placements[1] == pt.Shard(1)
        wrong = pt.parallelize(Pair(), mesh, {"": pt.Outputs({"tp": pt.Shard(1)})})
        with pytest.raises(pt.LayoutError, match="returned 2 values; its plan has 1"):
            wrong(pt.distribute_tensor(torch.ones(4, 4), mesh))

    ranks_run(ranks)


def test_the_transpose_of_a_door_runs_in_backward() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(nn.Linear(4, 4), mesh, {"": pt.Inputs({"tp": pt.Replicate()})})
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Replicate(), pt.Shard(0)])
        x.requires_grad_()
        with pt.ledger() as log:
            model(x).square().sum().backward()
        assert [(m.kind, m.op, m.reason) for m in log.moves if "Linear" in m.op] == [
            ("all_gather", "Linear(input)", "explicit"),
            ("reduce_scatter", "Linear(input)", "gradient"),
        ]
        assert x.grad.placements == (pt.Partial(), pt.Shard(0))

    ranks_run(ranks)


def test_a_model_with_doors_can_be_copied_and_pickled() -> None:
    import pickle

    def ranks(mesh: Any) -> None:
        model = pt.parallelize(make("gpt"), mesh, plan("gpt"))
        inputs, _ = pt.distribute_batch(batch(0), mesh)
        truth = model(inputs).full_tensor()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(inputs).full_tensor(), truth)

    ranks_run(ranks)


# -- what does not fit -----------------------------------------------------------------------------


def refused(mesh: Any, plan: Any, model: nn.Module | None = None) -> str:
    """What `parallelize` says; the model must be as it was."""
    model = Small() if model is None else model
    before = dict(model.named_parameters())
    with pytest.raises(pt.LayoutError) as error:
        pt.parallelize(model, mesh, plan)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert not model._forward_pre_hooks and not model._forward_hooks
    return str(error.value)


WRONG = {
    "a pattern that matches nothing": (
        {"*.frist.weight": {"tp": pt.Shard(0)}},
        ["'*.frist.weight' matches no parameter; near: ", "first.weight"],
    ),
    "a module of that name": (
        {"frist": pt.Inputs({"tp": pt.Shard(0)})},
        ["'frist' matches no module; near: first"],
    ),
    "buffers": ({"scale": {"tp": pt.Shard(0)}}, ["'scale' matches buffers only"]),
    "two that disagree": (
        {"first.*": {"tp": pt.Shard(0)}, "second.weight": {"tp": pt.Shard(1)}},
        ["first.weight: 'first.*'", "and 'second.weight'", "disagree"],
    ),
    "modules of which two patterns disagree": (
        {"first": pt.Inputs({"tp": pt.Shard(0)}), "f*t": pt.Inputs({"tp": pt.Shard(1)})},
        ["first: 'first' Inputs", "and 'f*t' Inputs", "disagree"],
    ),
    "no such axis": (
        {"last.weight": {"pp": pt.Shard(0)}},
        ["'last.weight': the mesh (dp=2 tp=2) has no axis 'pp'"],
    ),
    "no such dimension": (
        {"last.*": {"tp": pt.Shard(1)}},
        ["'last.*': last.bias: Shard(1) on axis tp is out of range for shape (6,)"],
    ),
    "shares": ({"last.bias": {"tp": pt.Partial()}}, ["last.bias cannot be Partial"]),
    "no placement": ({"last.bias": {"tp": 0}}, ["0 on 'tp' is not a placement"]),
    "nothing of the kind": ({"last.bias": pt.Shard(0)}, ["is neither placements by axis"]),
    "no such argument": (
        {"": pt.Inputs(y={"tp": pt.Shard(0)})},
        ["forward of Small has no argument y; it has x, gain, shift"],
    ),
    "too many arguments": (
        {"last": pt.Inputs(None, {"tp": pt.Shard(0)})},
        ["forward of last takes 1 positional arguments: input"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_said_on_every_rank_before_anything_changes(case: str) -> None:
    plan, said = WRONG[case]
    errors = ranks_run(lambda mesh: refused(mesh, plan))
    assert all(error == errors[0] for error in errors)
    for words in said:
        assert words in errors[0]


def test_all_that_does_not_fit_is_said_at_once() -> None:
    every = {k: v for plan, _ in list(WRONG.values())[:7] for k, v in plan.items()}
    error = ranks_run(lambda mesh: refused(mesh, every))[0]
    assert "these 6 do not fit" in error or "these 7 do not fit" in error
    for words in ("frist.weight", "'frist'", "buffers only", "disagree", "'pp'", "Shard(1)"):
        assert words in error


def test_patterns_that_agree_may_overlap() -> None:
    def ranks(mesh: Any) -> None:
        both = {"first.*": {"tp": pt.Shard(0)}, "*t.weight": {"tp": pt.Shard(-2)}}
        model = pt.parallelize(Small(), mesh, both)
        assert model.first.weight.placements[1] == pt.Shard(0)

    ranks_run(ranks)


def test_a_parameter_of_another_mesh_is_refused() -> None:
    def ranks(mesh: Any) -> str:
        model = Small()
        model.last.weight = nn.Parameter(pt.distribute_tensor(torch.ones(6, 4), mesh["tp"]))
        return refused(mesh, {}, model)

    assert "last.weight is a DTensor on another mesh: 6 4 on tp=2" in ranks_run(ranks)[0]


def test_what_would_be_lost_with_a_parameter_is_refused() -> None:
    def ranks(mesh: Any) -> str:
        model = Small()
        model(torch.ones(2, 4)).sum().backward()
        model.last.weight.grad = None
        model.last.weight.register_hook(lambda grad: None)
        model.last.bias.requires_grad_().register_post_accumulate_grad_hook(lambda p: None)
        return refused(mesh, {}, model)

    error = ranks_run(ranks)[0]
    assert "first.weight has a gradient" in error and "second.bias has a gradient" in error
    assert "last.weight has hooks" in error and "last.bias has hooks" in error
    assert "last.weight has a gradient" not in error


def test_a_parameter_without_a_shape_is_refused() -> None:
    def ranks(mesh: Any) -> str:
        return refused(mesh, {}, nn.Sequential(nn.LazyLinear(3)))

    assert "0.weight has no shape yet" in ranks_run(ranks)[0]


@pytest.mark.parametrize("twice", [False, True])
def test_an_optimizer_that_was_made_before_goes_on(twice: bool) -> None:
    def train(mesh: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Small()
        if twice and mesh is not None:
            pt.parallelize(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for i in range(3):
            if i == 1 and mesh is not None:
                optimizer.zero_grad()
                pt.parallelize(model, mesh, {"*.weight": {"tp": pt.Shard(0)}})
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        found = [p.detach() for p in model.parameters()]
        return [p.full_tensor() if isinstance(p, pt.DTensor) else p for p in found]

    for found in ranks_run(train):
        torch.testing.assert_close(found, train(None))


def test_an_optimizer_that_was_made_before_materialize_says_so_when_it_steps() -> None:
    def ranks(mesh: Any) -> None:
        with torch.device("meta"):
            model = Small()
        optimizer = torch.optim.AdamW(model.parameters())
        pt.parallelize(model, mesh, {"*.weight": {"tp": pt.Shard(0)}})

        def fill(model: Any) -> None:
            for t in (*model.parameters(), *model.buffers()):
                nn.init.ones_(t)

        pt.materialize(model, init_fn=fill)
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(pt.LayoutError, match="optimizer was made before materialize") as error:
            optimizer.step()
        assert "no longer has its first.weight" in str(error.value)
        assert "optimizer = ...(model.parameters()) after materialize" in str(error.value)
        torch.optim.AdamW(model.parameters()).step()

    ranks_run(ranks)


def test_what_arrives_at_a_door_must_be_a_tensor_that_fits() -> None:
    def ranks(mesh: Any) -> None:
        model = pt.parallelize(Small(), mesh, {"": pt.Inputs({"tp": pt.Shard(2)})})
        with pytest.raises(pt.LayoutError, match=r"Small\(x\): Shard\(2\) on axis tp is out of"):
            model(torch.ones(4, 4))
        with pytest.raises(pt.LayoutError, match=r"Small\(x\) is a list"):
            model([1.0])
        with pytest.raises(pt.LayoutError, match=r"Small\(x\) is on the mesh tp=2"):
            model(pt.distribute_tensor(torch.ones(4, 4), mesh["tp"]))

    ranks_run(ranks)


# -- batches ---------------------------------------------------------------------------------------


def test_a_batch_that_every_rank_has_is_cut_and_nothing_is_sent() -> None:
    def ranks(mesh: Any) -> None:
        data = {"x": torch.arange(10).view(5, 2), "more": [torch.ones(5), "text", None]}
        with pt.ledger() as log:
            out = pt.distribute_batch(data, mesh)
        assert not log.moves
        assert out["x"].placements == (pt.Shard(0), pt.Replicate())
        assert torch.equal(out["x"].full_tensor(), data["x"])
        assert out["more"][0].shape == (5,) and out["more"][1:] == ["text", None]

    ranks_run(ranks)


def test_pieces_that_the_ranks_have_read_are_one_batch() -> None:
    def ranks(mesh: Any) -> None:
        whole = torch.arange(10.0).view(5, 2)
        mine = whole.chunk(2)[mesh.get_local_rank("dp")]
        out = pt.distribute_batch((mine,), mesh, each_rank_has="piece")[0]
        assert out.shape == (5, 2)
        assert torch.equal(out.full_tensor(), whole)

    ranks_run(ranks)


def test_pieces_that_do_not_go_together_are_refused_on_every_rank() -> None:
    def ranks(mesh: Any) -> str:
        mine = torch.ones(2 + mesh.get_local_rank("dp"), 2)  # the second rank has more
        with pytest.raises(pt.LayoutError) as error:
            pt.distribute_batch(mine, mesh, each_rank_has="piece")
        return str(error.value)

    errors = ranks_run(ranks)
    assert all(error == errors[0] for error in errors)
    assert "rank 0's piece does not go with the others" in errors[0]
