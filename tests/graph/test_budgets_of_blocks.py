"""Is a budget kept where blocks stay calls, by few variants of a structure, on all ranks alike?"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import partita as pt
from partita.graph.graph_nodes import call_subgraph, note_of, subgraphs_in
from partita.graph.memory import memory_of, peak_of
from partita.graph.passes.remat import cost_of_recompute
from partita.testing.allocated_bytes import counted
from tests.programs import stacks
from tests.programs.steps import squares

WIDTH, ROWS = 8, 64


class Block(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def stack(blocks, drop=0.0):
    torch.manual_seed(0)
    return stacks.Stack((Block(drop) for _ in range(blocks)), WIDTH)


def compiled(step, budget=None, sections=True):
    return pt.compile(step, backend="graph", blocks=True, sections=sections, budget=budget)


class Thin(nn.Module):
    """Makes little beside what it gives."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.two(torch.tanh(self.one(x))))


# -- on two ranks ----------------------------------------------------------------------------------


def trained(mesh, budget=None, blocks=6, drop=0.0):
    """Losses and parameters after some steps, and the step."""
    model = pt.zero(stack(blocks, drop), mesh, stage=3)
    x = pt.distribute_tensor(
        torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, -1), mesh, [pt.Shard(0)]
    )
    step = compiled(squares(model, optim.AdamW(model.parameters(), 1e-2)), budget)
    found = [step(x).detach() for _ in range(3)]
    found += [p.detach() for p in model.parameters()]
    return [v.full_tensor() if isinstance(v, pt.DTensor) else v for v in found], step


def made_again(graph):
    """The calls of a graph that are made again, but for parameters that are gathered again."""
    notes = (note_of(n) for n in graph.nodes if n.target is not call_subgraph)
    return [note for note in notes if note.again and note.reason != "regather"]


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_a_sharded_step_of_blocks_keeps_a_budget_with_the_same_losses_and_parameters(drop):
    def body(mesh):
        torch.manual_seed(mesh.get_rank())
        wanted, without = trained(mesh, drop=drop)
        peak, found = without.memory.peak, []
        assert not made_again(without.program.flat().graph.graph)
        for share in (0.9, 0.75, 0.6):
            torch.manual_seed(mesh.get_rank())
            values, step = trained(mesh, int(share * peak), drop=drop)
            assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))
            sections = subgraphs_in(step.program.graph.graph)
            assert any(made_again(s.graph.graph) for s in sections)
            assert peak_of(step.program) == memory_of(step.program).peak <= share * peak
            found.append((step.key, step.memory.peak, step.program.level))
        return found

    with pt.ranks(dp=2) as world:
        one, other = world.run(body)
    assert one == other
    assert one[0][1] >= one[-1][1] and one[0][2] < one[-1][2]


@pytest.mark.slow
def test_more_blocks_of_a_structure_have_no_more_variants():
    def body(mesh):
        found = []
        for blocks in (4, 9):
            _, without = trained(mesh, blocks=blocks)
            _, step = trained(mesh, without.memory.peak * 2 // 3, blocks=blocks)
            graph = step.program.graph.graph
            found.append((step.program.level, sorted(s.key for s in subgraphs_in(graph))))
            calls = [n for n in graph.nodes if n.target is call_subgraph]
            assert len(calls) >= 3 * blocks > len(subgraphs_in(graph))
        return found

    with pt.ranks(dp=2) as world:
        (few, many), _ = world.run(body)
    assert few == many


@pytest.mark.slow
def test_what_is_made_again_is_said_and_each_section_is_printed_once():
    def body(mesh):
        _, without = trained(mesh)
        budget = without.memory.peak * 2 // 3
        _, step = trained(mesh, budget)
        return step, without, budget

    with pt.ranks(dp=2) as world:
        (step, without, _), _ = world.run(body)
        said, printed = step.explain(), str(step.graph)
    sections = subgraphs_in(step.program.graph.graph)
    for section in sections:
        assert printed.count(f"\n{section.name}:") == 1
    again = {s.name: len(made_again(s.graph.graph)) for s in sections}
    told = dict(re.findall(r"(section_\w+): (\d+) calls made again, each of 6 times", said))
    assert told and told == {name: str(count) for name, count in again.items() if count}
    assert f"at level {step.program.level} of recomputation" in said
    assert "made again" not in without.explain().split("dedupe")[0]


# -- in one process --------------------------------------------------------------------------------


def gradients_of(model, rows=ROWS):
    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)

    def gradients():
        return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    return gradients


def least_of(step, **options):
    with pytest.raises(pt.CaptureError, match="cannot be kept") as caught:
        compiled(step, 1, **options)()
    return int(caught.value.fixes[0].write.removeprefix("budget="))


@pytest.mark.slow
def test_blocks_are_inlined_where_no_variant_of_them_is_enough():
    """Then recomputes go back through several of them; a larger budget never costs more."""
    step = gradients_of(stacks.Stack((Thin() for _ in range(16)), WIDTH), rows=256)
    least = least_of(step)
    wanted = step()
    small, large = compiled(step, least), compiled(step, 3 * least // 2)
    for one, budget in ((small, least), (large, 3 * least // 2)):
        assert all(torch.equal(a, b) for a, b in zip(one(), wanted, strict=True))
        assert counted(one) == one.memory.peak <= budget
    assert not subgraphs_in(small.program.graph.graph)
    assert subgraphs_in(large.program.graph.graph)
    costs = [cost_of_recompute(one.program.graph.graph) for one in (small, large)]
    assert all(a >= b for a, b in zip(*costs, strict=True))


@pytest.mark.slow
def test_a_small_step_has_its_blocks_inlined_under_a_budget_too():
    step = gradients_of(stack(4))
    without = compiled(step, sections=None)
    without()
    small = compiled(step, without.memory.peak * 3 // 4, sections=None)
    small()
    assert not subgraphs_in(small.program.graph.graph)
    assert small.memory.peak <= without.memory.peak * 3 // 4


@pytest.mark.slow
def test_items_of_one_call_are_made_again_together():
    """An item of what is there still would keep all of its items."""
    step = gradients_of(stack(4))
    without = compiled(step)
    without()
    seen = 0
    for share in (0.9, 0.8, 0.7):
        small = compiled(step, int(share * without.memory.peak), sections=False)
        small()
        for node in small.graph.nodes:
            if note_of(node).again and node.target.__name__ == "getitem":
                assert note_of(node.args[0]).again
                seen += 1
    assert seen
