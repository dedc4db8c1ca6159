"""Does a gathered parameter outlive its last use in a compiled graph?

Elsewhere compiled code kept aliases of padded buffers alive, and autograd saved what was gathered:
ZeRO-3 silently held what ZeRO-2 holds. Here a step's schedule says when every buffer is there: at
any place of it the weights of the block in use and of the next one may be gathered, and no others.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import partita as pt
from partita.graph.graph_nodes import note_of
from partita.graph.memory import storages_of

BLOCKS = 4
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
TOKENS = torch.arange(24).view(6, 4) % 11
EVEN, UNEVEN = 12, 7
GATHERED = ("gather", "regather")


def blocks(width):
    """Blocks of two weights and a bias, of `width` rows and of 5."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 5, bias=False))
            for _ in range(BLOCKS)
        )
    )


class Tied(nn.Module):
    """The embedding is the head too; between them are blocks."""

    def __init__(self, width):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 5)
        self.blocks = blocks(width)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


class Rooted(nn.Module):
    """Parameters of its own, read before and behind blocks that it holds."""

    def __init__(self, width):
        super().__init__()
        self.blocks = blocks(width)
        self.first = nn.Parameter(torch.randn(width, 5))
        self.last = nn.Parameter(torch.randn(width, 5))

    def forward(self, x):
        return self.blocks(x @ self.first.t() @ self.first) @ self.last.t()


def alone(width):
    """Each weight is a block of its own, which is seen through views of what was gathered."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(BLOCKS)))


def remade(width):
    model = blocks(width)
    for block in model:
        pt.remat(block)
    return model


def once(model, x):
    (model(x).float() ** 2).mean().backward()


def under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    (out.float() ** 2).mean().backward()


def in_two_micro_batches(model, x):
    for factor in (1, 2):
        (model(x * factor) ** 2).mean().backward()


def twice_through(model, x):
    once(lambda x: model(model(x)), x)


WAYS = {
    "once": (blocks, X, once),
    "autocast": (blocks, X, under_autocast),
    "each weight alone": (alone, X, once),
    "remat": (remade, X, once),
    "micro-batches": (blocks, X, in_two_micro_batches),
    "each block twice": (blocks, X, twice_through),
    "tied": (Tied, TOKENS, once),
    "parameters of the root": (Rooted, X, once),
}


def trained(mesh, way, width, without=(), steps=3, **zero):
    """Parameters after some steps, the step where that is compiled, and its blocks' bytes."""
    make, x, through = WAYS[way]
    model = make(width)
    sizes = dict(model.named_parameters())
    if mesh is not None:
        pt.zero(model, mesh, **zero)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        through(model, x)
        optimizer.step()

    if mesh is not None:
        step = pt.compile(step, backend="graph", without=without)
    for _ in range(steps):
        step(x)
    if mesh is None:
        return [p.detach() for p in model.parameters()]
    return [p.full_tensor().detach() for p in model.parameters()], step, sizes


@cache
def compiled(way, width, ranks, without=()):
    with pt.ranks(dp=ranks) as world:
        return world.run(trained, way, width, without)[0]


def largest(sizes, ranks, itemsize):
    """Bytes of the block with the most, padded to as many rows as all ranks hold."""
    found = {}
    for name, p in sizes.items():
        parts = name.split(".")  # a block's module and its name, or only one of the two
        block = ".".join(parts[:-2] or parts[:-1])
        rows = math.ceil(p.shape[0] / ranks) * ranks
        found[block] = found.get(block, 0) + rows * p[0].numel() * itemsize
    return max(found.values())


def gathered(step):
    """For each place of the schedule: of each block, the bytes of its weights that are there."""
    nodes = {n.name: n for n in step.graph.nodes}
    packed = {n.args[0].name for n in step.graph.moves}  # shards, on their way
    memory = step.memory
    found = [{} for _ in memory.places]
    for buffer in memory.buffers:
        if buffer.reason in GATHERED and buffer.name not in packed and not buffer.passing:
            block = note_of(nodes[buffer.name]).op
            for held in found[buffer.birth : buffer.death]:
                held[block] = held.get(block, 0) + buffer.nbytes
    return found


CASES = [("once", EVEN, 2), ("once", UNEVEN, 2), *((way, UNEVEN, 3) for way in WAYS)]
cases = pytest.mark.parametrize(("way", "width", "ranks"), CASES)


@pytest.mark.slow
@cases
def test_only_the_block_in_use_and_the_next_one_are_gathered_at_any_place(way, width, ranks):
    found, step, sizes = compiled(way, width, ranks)
    at = gathered(step)
    assert max(map(len, at)) <= 2, max(at, key=len)
    room = 2 * largest(sizes, ranks, 2 if way == "autocast" else 4)
    most = max(at, key=lambda held: sum(held.values()))
    assert 0 < sum(most.values()) <= room, most
    rtol = 0.05 if way == "autocast" else 1e-5
    for mine, one in zip(found, trained(None, way, width), strict=True):
        torch.testing.assert_close(mine, one, rtol=rtol, atol=rtol)


@pytest.mark.slow
@cases
def test_backward_reads_nothing_that_was_gathered_for_forward(way, width, ranks):
    _, step, _ = compiled(way, width, ranks)
    storages = storages_of(step.program)
    again = 0
    for node in step.graph.nodes:
        if note_of(node).phase in ("backward", "update") and node.op == "call_function":
            for read in node.all_input_nodes:
                makers = [note_of(storages.maker[s]) for s in storages.of[read]]
                again += sum(m.reason == "regather" for m in makers)
                assert not [m for m in makers if m.reason == "gather"], f"{node} reads {read}"
    assert again


@pytest.mark.slow
def test_a_graph_without_the_pass_holds_every_gathered_weight():
    _, step, _ = compiled("once", UNEVEN, 3, ("regather",))
    assert max(map(len, gathered(step))) == BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize(("way", "turns"), [("once", 1), ("micro-batches", 2), ("tied", 1)])
def test_each_weight_is_gathered_once_for_each_backward_that_reads_it(way, turns):
    _, step, _ = compiled(way, UNEVEN, 3, ("bucket",))
    again = [n for n in step.graph.moves if note_of(n).reason == "regather"]
    read = {"once": 2 * BLOCKS - 1, "micro-batches": 2 * BLOCKS - 1, "tied": 2 * BLOCKS + 1}[way]
    assert len(again) == turns * read  # but for the first of all, whose input has no gradient
    _, together, _ = compiled(way, UNEVEN, 3)
    again = [note_of(n).op for n in together.graph.moves if note_of(n).reason == "regather"]
    assert len(again) == turns * len(set(again))  # each block's, in one collective


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_padded_base_is_gone_after_the_last_use_of_its_true_shape(ranks):
    _, step, _ = compiled("each weight alone", UNEVEN, ranks)
    memory = step.memory
    bases = [b for b in memory.buffers if b.reason in GATHERED]
    assert len(bases) == 2 * BLOCKS - 1  # and no copy of one
    padded = math.ceil(5 / ranks) * ranks * 5 * 4
    for base in bases:
        assert base.nbytes == padded and base.views
        last = memory.places[base.death - 1]
        assert last.split()[1] in ("mm", "addmm"), f"{base.name} lives until {last}"


def memory(t):
    """Of this rank's piece."""
    return (t.to_local() if isinstance(t, pt.DTensor) else t).untyped_storage()


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_a_regions_forward_saves_no_weight_that_was_gathered_in_it(mixed):
    def run(mesh):
        model = pt.compile(pt.zero(blocks(UNEVEN), mesh), backend="graph")
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
        shards = {memory(p).data_ptr() for p in model.parameters()}
        held = []
        with (
            saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=mixed),
        ):
            out = model(x)
        (out.float() ** 2).mean().backward()
        storages = {memory(t).data_ptr(): memory(t).nbytes() for t in held}
        return sum(nbytes for start, nbytes in storages.items() if start not in shards)

    with pt.ranks(dp=3) as world:
        (saved, *_) = world.run(run)
    rows = len(X) // 3  # of each block what goes into both layers and comes out of the activation
    assert 0 < saved <= BLOCKS * rows * (5 + 2 * UNEVEN) * 4


@pytest.mark.slow
def test_what_is_persistent_is_gathered_once_in_a_step():
    with pt.ranks(dp=3) as world:
        found, step, _ = world.run(lambda mesh: trained(mesh, "once", UNEVEN, persistent=True))[0]
    moves = [note_of(n) for n in step.graph.moves if note_of(n).kind == "all_gather"]
    assert sorted(m.op for m in moves) == [str(i) for i in range(BLOCKS)]
    for mine, one in zip(found, trained(None, "once", UNEVEN), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)
