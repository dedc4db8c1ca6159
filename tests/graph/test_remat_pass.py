"""Is what a policy does not keep made again in a captured step, and does a budget hold?"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import partita as pt
from partita.graph.graph_nodes import note_of
from partita.remat.counters import count_memory
from tests.programs.steps import squares

pytestmark = pytest.mark.slow

X = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self, width, drop=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        hidden = pt.checkpoint_name(F.gelu(self.up(x)), "hidden")
        return x + self.drop(self.down(torch.tanh(hidden)))


def trained(mesh, policy=None, regions=True, drop=0.0, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32, drop) for _ in range(4)))
    if regions:
        pt.remat(model, policy, blocks=list(model))
    pt.zero(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])

    step = pt.compile(squares(model, optimizer), backend="graph", **options)
    losses = [step(x).item() for _ in range(2)]
    with count_memory() as memory:
        step(x)
    return losses, step, memory.peak


def calls(step, name):
    return sum(name == getattr(n.target, "_opname", "") for n in step.graph.nodes)


def on_two(*args, **options):
    with pt.ranks(dp=2) as world:
        return world.run(lambda mesh: trained(mesh, *args, **options))[0]


def test_regions_are_made_again_in_backward_with_the_same_losses():
    wanted, without, whole = on_two(regions=False)
    losses, step, peak = on_two(None)
    assert losses == wanted
    assert peak < 0.6 * whole
    assert calls(without, "gelu") == 4 and calls(step, "gelu") == 8
    again = [n for n in step.graph.nodes if note_of(n).region and note_of(n).phase == "backward"]
    assert again


@pytest.mark.parametrize(
    ("policy", "gelu", "linear"),
    [
        ([F.linear], 8, 8),
        (["hidden"], 4, 12),
        (lambda call: call.op == "gelu", 4, 12),
        ([F.gelu, F.linear, torch.tanh], 4, 8),
    ],
)
def test_what_a_policy_keeps_is_not_made_again(policy, gelu, linear):
    wanted, _, _ = on_two(regions=False)
    losses, step, _ = on_two(policy)
    assert losses == wanted
    assert (calls(step, "gelu"), calls(step, "addmm")) == (gelu, linear)


def test_random_numbers_are_drawn_once():
    wanted, without, _ = on_two(regions=False, drop=0.5)
    losses, step, _ = on_two(None, drop=0.5)
    assert losses == wanted
    random = [n for n in step.graph.nodes if torch.Tag.nondeterministic_seeded in _tags(n)]
    assert len(random) == sum(
        torch.Tag.nondeterministic_seeded in _tags(n) for n in without.graph.nodes
    )
    assert random


def _tags(node):
    return getattr(node.target, "tags", ())


def alone(budget=None):
    """Of one process: its gradients, its step, and the counted peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16) for _ in range(4)))

    def step(x):
        loss = model(x).square().mean()
        return torch.autograd.grad(loss, list(model.parameters()))

    step = pt.compile(step, backend="graph", budget=budget)
    found = step(X[:, :16])
    with count_memory() as memory:
        step(X[:, :16])
    return found, step, memory.peak


def test_each_of_ten_budgets_holds_and_a_smaller_one_takes_no_more():
    wanted, step, _ = alone()
    most = step.memory.peak
    with pytest.raises(pt.CaptureError, match="cannot be kept") as caught:
        alone(1)
    least = int(str(caught.value).split("the step needs ")[1].split(" ")[0])
    assert least < 0.75 * most
    before = 0
    for i in range(10):
        budget = least + (most - least) * i // 9
        found, step, counted = alone(budget)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert counted <= budget and step.memory.peak <= budget
        assert step.memory.peak >= before
        before = step.memory.peak


def test_a_budget_of_a_models_own_is_refused_and_the_fixes_work():
    def step_of(remat, **options):
        torch.manual_seed(0)
        model = remat(nn.Sequential(*(Block(16) for _ in range(4))))

        def step(x):
            return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

        return pt.compile(step, backend="graph", **options)

    wanted, without, _ = alone()
    with pytest.raises(pt.CaptureError, match=r"65536 bytes .*test_remat_pass"):
        step_of(lambda model: pt.remat(model, 1 << 16))(X[:, :16])
    budget = without.memory.peak * 9 // 10
    for step in (
        step_of(lambda model: model, budget=budget),
        step_of(lambda model: pt.remat(model, blocks=list(model))),
    ):
        found = step(X[:, :16])
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert step.memory.peak <= budget


def of_tall_blocks(how, compile=lambda step: step):
    """The counted peak of a model whose blocks are `how` checkpointed."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(32) for _ in range(4))), torch.cat([X] * 4)
    how(model)

    def step(x):
        return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])

    step = compile(step)
    step(x)
    with count_memory() as memory:
        step(x)
    return memory.peak


def by_torch(model):
    """Selective checkpointing as torch has it, which keeps what F.linear's kernels give."""
    kept = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    for block in model:
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, context_fn=contexts
        )


def test_a_kept_call_does_not_keep_what_it_is_given_and_is_let_go_when_backward_has_it():
    def by_policy(model):
        pt.remat(model, [F.linear], blocks=[*model])

    torchs = of_tall_blocks(by_torch)
    assert of_tall_blocks(lambda model: None) > 1.2 * torchs
    assert of_tall_blocks(by_policy) <= torchs
    assert of_tall_blocks(by_policy, lambda f: pt.compile(f, backend="graph")) <= torchs
