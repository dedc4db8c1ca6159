"""Does each pass keep its promise, and may each be left out?"""

from __future__ import annotations

import pytest
import torch

import partita as pt
from partita.compile.notes import note_of
from partita.compile.verify import IllegalGraph, verify
from tests.ranks.test_capture import adamw, data_parallel, losses, plain_step, rows, tiny, zero3
from tests.ranks.test_zero import TOKENS

R, S = pt.Replicate(), pt.Shard


def compiled(step, *args, **options):
    fast = pt.compile(step, backend="graph", **options)
    return fast, fast(*args)


def sends(step, kind=None):
    return [n for n in step.graph.moves if kind in (None, note_of(n).kind)]


def trained(mesh, spread_out, without):
    model = spread_out(tiny(), mesh)
    step = plain_step(model, adamw(model.parameters()))
    step = pt.compile(step, backend="graph", without=without)
    return losses(step, [rows(mesh)(t) for t in TOKENS], 3), step


# -- dedupe ----------------------------------------------------------------------------------------


def gathers_twice(x):
    a, b = (x.redistribute(placements=[R]) for _ in range(2))
    return a + b


@pytest.mark.parametrize(("without", "count"), [((), 1), (("dedupe",), 2)])
def test_what_is_gathered_twice_is_carried_once(without, count):
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [S(0)])
        step, found = compiled(gathers_twice, x, without=without)
        assert torch.equal(found.full_tensor(), 2 * torch.arange(8.0))
        assert len(sends(step)) == count

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- cancel ----------------------------------------------------------------------------------------


def there_and_back(x):
    return x.redistribute(placements=[R]).redistribute(placements=[S(0)]) * 2


@pytest.mark.parametrize(("without", "count"), [((), 0), (("cancel",), 1)])
def test_a_move_and_its_inverse_are_not_made(without, count):
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [S(0)])
        step, found = compiled(there_and_back, x, without=without)
        assert torch.equal(found.full_tensor(), 2 * torch.arange(8.0).view(4, 2))
        assert len(sends(step)) == count

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- regather and bucket ---------------------------------------------------------------------------


def test_no_gathered_weight_waits_for_backward():
    with pt.ranks(dp=2) as world:
        (found, step), _ = world.run(trained, zero3, ())
        (wanted, saving), _ = world.run(trained, zero3, ("regather",))
    assert found == wanted
    change = next(c for c in step.program.changes if c.name == "regather")
    assert change.saved[0] > 0 and change.saved[1] == 0
    weights = {"attention.qkv", "attention.out", "mlp.up", "mlp.down", "head"}
    assert change.collectives[1] - change.collectives[0] >= len(weights)
    assert not [n for n in saving.graph.moves if note_of(n).reason == "regather"]


def test_the_gathers_of_a_block_travel_together():
    with pt.ranks(dp=2) as world:
        (found, step), _ = world.run(trained, zero3, ())
        (wanted, apart), _ = world.run(trained, zero3, ("bucket",))
    assert found == wanted
    blocks = 4  # the embedding, one block, the last norm, the head
    gathers = [n for n in step.graph.moves if note_of(n).reason == "gather"]
    assert len(gathers) == blocks
    assert len(sends(step, "reduce_scatter")) == blocks
    assert len(sends(apart)) > 2 * len(sends(step))
    total = [sum(note_of(n).nbytes for n in s.graph.moves) for s in (step, apart)]
    assert total[0] == total[1]


def half(model, mesh):
    return pt.zero(model, mesh, precision=torch.bfloat16)


def test_in_mixed_precision_the_cast_shards_travel_together():
    with pt.ranks(dp=2) as world:
        (found, step), _ = world.run(trained, half, ())
        (wanted, _), _ = world.run(trained, half, ("bucket", "regather"))
    assert found == wanted
    gathers = [n for n in step.graph.moves if note_of(n).reason == "gather"]
    assert len(gathers) == 4
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in gathers)


def test_data_parallel_gradients_are_settled_by_one_all_reduce():
    with pt.ranks(dp=2) as world:
        (_, step), _ = world.run(trained, data_parallel, ())
    reasons = [note_of(n).reason for n in sends(step, "all_reduce")]
    assert reasons.count("settle") == 1


def test_every_pass_says_what_it_changed():
    with pt.ranks(dp=2) as world:
        (_, step), _ = world.run(trained, zero3, ())
    text = step.explain()
    for name in ("dedupe", "cancel", "regather", "bucket"):
        assert f"{name}: " in text
    assert "collectives became" in text and "saved" in text


def test_a_pass_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="the passes are dedupe"):
        compiled(lambda x: x * 2, torch.ones(2), without=("tidy",))


# -- the graph a person reads ----------------------------------------------------------------------


def test_a_printed_graph_shows_layout_bytes_reason_and_the_users_line():
    def run(mesh):
        x = pt.distribute_tensor(torch.ones(8, 4), mesh, [S(0)])
        step, _ = compiled(there_and_back, x, without=("cancel",))
        return str(step.graph)

    with pt.ranks(dp=2) as world:
        text, other = world.run(run)
    assert text == other
    (gather,) = [line for line in text.splitlines() if "all_gather_into_tensor.default" in line]
    assert "128 B" in gather and "all_gather over dp: 8@dp 4 -> 8 4, explicit" in gather
    assert "test_compile_passes.py:" in gather and "(forward)" in gather
    (mul,) = [line for line in text.splitlines() if "aten.mul.Tensor" in line]
    assert "f32[8@dp, 4]" in mul
    assert "argument argument[0]" in text and "1 collectives" in text


# -- the grammar -----------------------------------------------------------------------------------


def broken(change):
    x = torch.ones(4)
    w = torch.ones(4)

    def step(x):
        y = (x * 2).sum()
        with torch.no_grad():
            w.add_(y)
        return y

    step, _ = compiled(step, x)
    program = step.program
    change(program.graph.graph)
    with pytest.raises(IllegalGraph) as caught:
        verify(program, "a pass")
    return str(caught.value)


def node(graph, name):
    return next(n for n in graph.nodes if name in str(n.target))


def writes(graph):
    mul = node(graph, "mul")
    mul.target = torch.ops.aten.mul_.Tensor


def forgets(graph):
    del node(graph, "mul").meta["val"]


def reads_late(graph):
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        w = node(graph, "copy_").args[0]
        late = graph.call_function(torch.ops.aten.neg.default, (w,))
        late.meta["val"] = w.meta["val"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(writes, "writes"), (forgets, "nothing says what it makes"), (reads_late, "is read after")],
)
def test_a_graph_that_breaks_the_grammar_is_refused(change, said):
    text = broken(change)
    assert "after a pass" in text and said in text
