"""Is any budget of a compiled step kept, and does more of it never cost more, or keep less?

Random models under random budgets, from the least that can be kept to what is taken without one.
"""

from __future__ import annotations

import importlib
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import partita as pt
from partita.graph.graph_nodes import nbytes_of, note_of
from partita.graph.passes.remat import flops_of
from partita.remat.kept_results import Candidate, choose_kept
from partita.testing.allocated_bytes import counted
from tests.programs import stacks

aten = torch.ops.aten
WIDTHS = st.sampled_from([4, 8, 32, 64])


class Around(nn.Module):
    """What a module makes is added to what it is given."""

    def __init__(self, width, hidden):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x):
        return x + self.inner(x)


KINDS = {
    "linear": nn.Linear,
    "around": Around,
    "norm": lambda width, hidden: nn.LayerNorm(width),
    "tanh": lambda width, hidden: nn.Tanh(),
    "softmax": lambda width, hidden: nn.Softmax(-1),
    "drop": lambda width, hidden: nn.Dropout(0.1),
}
ROWS = st.sampled_from([1, 7, 256])


@st.composite
def models(draw):
    """A model, and rows for it."""
    width = first = draw(WIDTHS)
    layers = [nn.Linear(width, width)]  # so that there is a gradient
    for kind in draw(st.lists(st.sampled_from([*KINDS]))):
        hidden = draw(WIDTHS)
        layers.append(KINDS[kind](width, hidden))
        width = hidden if kind == "linear" else width
    return nn.Sequential(*layers), torch.randn(draw(ROWS), first)


class Block(nn.Module):
    """What its layers make is added to what it is given."""

    def __init__(self, width, hidden, kinds):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.Sequential(
            *(KINDS[kind](width, width if kind == "linear" else hidden) for kind in kinds)
        )

    def forward(self, x):
        return x + self.layers(self.first(x))


@st.composite
def deep_models(draw):
    """A model of blocks that are alike, and rows for it."""
    width, hidden = draw(WIDTHS), draw(WIDTHS)
    kinds = draw(st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=4))
    blocks = (Block(width, hidden, kinds) for _ in range(draw(st.sampled_from([2, 3, 7]))))
    return stacks.Stack(blocks, width), torch.randn(draw(ROWS), width)


def compiled(model, x, budget, **options):
    """A compiled step, and the gradients that it gives."""

    def gradients():
        return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    step = pt.compile(gradients, backend="graph", budget=budget, **options)
    torch.manual_seed(0)
    return step, step()


def least_budget(model, x, **options):
    with pytest.raises(pt.CaptureError, match="cannot be kept") as caught:
        compiled(model, x, 1, **options)
    return int(caught.value.fixes[0].write.removeprefix("budget="))


def cost(step):
    """Operations and bytes that are made again, but for what kernels compute while they read."""
    notes = {n: note_of(n) for n in step.program.flat().graph.graph.nodes}
    again = [n for n, note in notes.items() if note.again and note.reason != "free"]
    return sum(map(flops_of, again)), sum(map(nbytes_of, again))


def kept_for_backward(step):
    """Bytes that are there when backward begins."""
    begin = min(b.birth for b in step.memory.buffers if b.phase == "backward")
    return sum(b.nbytes for b in step.memory.at(begin))


SHARES = st.lists(st.floats(0, 1), min_size=2, max_size=2)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(models(), SHARES)
def test_a_budget_is_kept_and_more_never_costs_more_or_keeps_less(case, shares):
    check_budgets(*case, shares)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(deep_models(), SHARES)
def test_a_budget_of_blocks_as_calls_is_kept_and_more_never_costs_more_or_keeps_less(case, shares):
    check_budgets(*case, shares, blocks=True, sections=True)


def check_budgets(model, x, shares, **options):
    """Budgets are kept, in order, from the least on to what is taken without one; the gradients
    are those without one."""
    without, wanted = compiled(model, x, None, **options)
    least, most = least_budget(model, x, **options), without.memory.peak
    budgets = sorted({least, most, *(least + int(s * (most - least)) for s in shares)})
    steps = []
    for budget in budgets:
        step, found = compiled(model, x, budget, **options)
        assert counted(step) == step.memory.peak <= budget
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        steps.append(step)
    for less, more in pairwise(steps):
        assert all(a >= b for a, b in zip(cost(less), cost(more), strict=True))
        assert kept_for_backward(less) <= kept_for_backward(more)
    assert cost(steps[-1]) == (0, 0)


@pytest.mark.slow
@example([(30, 0, 3), (11, 4, 1), (5, 4, 1), (4, 0, 4)], [10, 11])
@given(
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([0, 0, 1, 4, 9]), st.integers(1, 30))),
    st.lists(st.integers(0, 200), min_size=2),
)
def test_what_is_worth_keeping_fits_and_is_never_less_with_more_room(candidates, rooms):
    """Operations first and, of choices that save as many, bytes that need not be written again."""
    some = [Candidate(*one) for one in candidates]
    before = (0, 0)
    for room in sorted(rooms):
        kept = [some[i] for i in choose_kept(some, room)]
        assert sum(c.nbytes for c in kept) <= room
        worth = sum(c.flops for c in kept), sum(c.written for c in kept if not c.flops)
        assert worth >= before
        before = worth


# -- what kernels take for themselves --------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]


def operands():
    """Pairs for an operator of two: tensors, tensors without dimensions, numbers."""
    tensors = [torch.ones(8, 4, dtype=d) for d in DTYPES]
    scalars = [torch.ones((), dtype=d) for d in DTYPES]
    yield from ((x, n) for x in tensors for n in (2, 2.0, True))
    yield from ((x, y) for x in tensors for y in (*tensors, *scalars))


def taken(target, args):
    made = target(*args)
    return counted(lambda: target(*args)) - made.untyped_storage().nbytes()


@pytest.mark.parametrize("name", ["add", "mul", "div", "lt"])
def test_what_an_operator_of_two_casts_is_known(name):
    workspace = importlib.import_module("partita.graph.memory").workspace
    for x, y in operands():
        kind = "Tensor" if isinstance(y, torch.Tensor) else "Scalar"
        target, args = getattr(getattr(aten, name), kind), (x, y)
        assert workspace(target, args, target(*args)) == taken(target, args), args


def test_a_workspace_is_known_though_another_thread_lets_go_of_all_that_are_kept(monkeypatch):
    memory = importlib.import_module("partita.graph.memory")

    class Cleared(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            self.clear()  # as of another thread, at this moment

    x, out_mask = torch.ones(64, 16), [True, True, True]
    norm = torch.native_layer_norm(x, [16], x[0], x[0], 1e-5)
    args = (x, x, [16], *norm[1:], x[0], x[0], out_mask)
    target = aten.native_layer_norm_backward.default
    usual = memory.workspace(target, args, target(*args))
    monkeypatch.setattr(memory, "MEASURED", Cleared())
    assert memory.workspace(target, args, target(*args)) == usual > 0


def test_what_norms_take_for_their_gradients_is_known():
    torch.manual_seed(0)
    x = torch.randn(64, 8, 16)
    norms = [nn.LayerNorm(16), nn.GroupNorm(2, 8), nn.BatchNorm1d(8)]
    for norm in norms:

        def gradients(norm=norm):
            loss = torch.tanh(norm(x)).square().sum()
            return torch.autograd.grad(loss, list(norm.parameters()))

        step = pt.compile(gradients, backend="graph")
        step()
        assert counted(step) == step.memory.peak


@pytest.mark.slow
def test_a_budget_is_kept_by_programs_of_the_same_calls_whose_gathered_weights_stay_and_do_not():
    """Gathered weights that stay, and such that do not, are in the same graph until passes run."""

    def run(mesh, persistent, budget):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
        model = pt.zero(model, mesh, stage=3, persistent=persistent)

        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        step = pt.compile(step, backend="graph", budget=budget)
        step(pt.distribute_tensor(torch.ones(32, 32), mesh, [pt.Shard(0)]))
        return step.memory.peak

    with pt.ranks(dp=2) as world:
        (tight, _), (loose, _) = (world.run(run, stays, None) for stays in (False, True))
        assert tight < loose
        budget = (tight + loose) // 2
        for stays in (False, True):
            assert max(world.run(run, stays, budget)) <= budget
