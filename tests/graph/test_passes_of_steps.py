"""Does each pass keep its promise, and may each be left out?"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import partita as pt
from partita.comm.ledger import human
from partita.graph.graph_nodes import note_of
from partita.graph.passes import PASSES, find, put, replace
from partita.graph.verify import IllegalGraph, verify
from tests.programs.captured_steps import (
    adamw,
    data_parallel,
    losses,
    plain_step,
    rows,
    tiny,
    zero3,
)
from tests.programs.zero_training import TOKENS

R, S = pt.Replicate(), pt.Shard
aten, functional = torch.ops.aten, torch.ops._c10d_functional


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_in_mixed_precision_the_cast_shards_travel_together():
    with pt.ranks(dp=2) as world:
        (found, step), _ = world.run(trained, half, ())
        (wanted, _), _ = world.run(trained, half, ("bucket", "regather"))
    assert found == wanted
    gathers = [n for n in step.graph.moves if note_of(n).reason == "gather"]
    assert len(gathers) == 4
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in gathers)


@pytest.mark.slow
def test_data_parallel_gradients_are_settled_by_one_all_reduce():
    with pt.ranks(dp=2) as world:
        (_, step), _ = world.run(trained, data_parallel, ())
    reasons = [note_of(n).reason for n in sends(step, "all_reduce")]
    assert reasons.count("settle") == 1


@pytest.mark.slow
def test_every_pass_says_what_it_changed():
    with pt.ranks(dp=2) as world:
        (_, step), _ = world.run(trained, zero3, ())
    text = step.explain()
    for name in ("dedupe", "cancel", "cast", "regather", "bucket"):
        assert f"{name}: " in text
    assert "collectives became" in text and "saved" in text
    assert re.search(r"regather: .*predicted peak: \S+ KiB -> \S+ KiB.*\nbucket: ", text, re.S)
    assert re.search(r"bucket: .*predicted time of collectives: \S+ us -> \S+ us", text, re.S)
    assert "    + 2 x _c10d_functional.all_gather_into_tensor.default" in text
    last = step.memory.peak
    assert text.splitlines()[-1].endswith(f"-> {human(last)} predicted peak above the inputs")


def test_the_page_on_passes_names_every_pass():
    page = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()
    rows = re.findall(r"^\| (\w+) \| .* \|$", page.partition("run in this order")[2], re.M)
    assert rows[1:] == list(PASSES)


def test_a_pass_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="the passes are dedupe"):
        compiled(lambda x: x * 2, torch.ones(2), without=("tidy",))


# -- cast ------------------------------------------------------------------------------------------


def two_linears(mesh):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)]
    return pt.zero(torch.nn.Sequential(*layers), mesh)


def autocast_losses(mesh, without):
    model = two_linears(mesh)
    optimizer = adamw(model.parameters())
    x = pt.distribute_tensor(torch.linspace(-1, 1, 32).view(4, 8), mesh, [S(0)])

    def step(x):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = pt.compile(step, backend="graph", without=without) if without is not None else step
    found = [step(x).item() for _ in range(4)]
    return found, [p.full_tensor().detach() for p in model.parameters()], step


def bytes_of(step, *reasons):
    return sum(note_of(n).nbytes for n in step.graph.moves if note_of(n).reason in reasons)


# -- overlap ---------------------------------------------------------------------------------------


def test_what_is_carried_is_not_joined_with_a_buffer_that_was_written_meanwhile():
    """The step joins a gathered value with a buffer, and then writes the buffer."""

    def run(mesh):
        weight = pt.distribute_tensor(torch.arange(16.0).reshape(4, 4) / 7, mesh, [R])

        def results(compile):
            holder = torch.nn.Module()
            holder.register_buffer("seen", pt.distribute_tensor(torch.ones(1, 4), mesh, [R]))

            def step(x, z):
                whole = x.redistribute(placements=[R])
                joined = torch.cat([whole, holder.seen])
                holder.seen.copy_(z + 1)
                for _ in range(4):
                    z = z @ weight / 3
                return (joined @ weight).sum() + z.sum()

            step = compile(step)
            found = []
            for i in range(3):
                x = pt.distribute_tensor(torch.arange(16.0).reshape(4, 4) + i, mesh, [S(0)])
                z = pt.distribute_tensor(torch.full((1, 4), 100.0 * i), mesh, [R])
                found.append(step(x, z).item())
            return found, holder.seen.full_tensor().tolist()

        eager = results(lambda step: step)
        assert results(lambda step: pt.compile(step, backend="graph")) == eager

    with pt.ranks(dp=2) as world:
        world.run(run)


@pytest.mark.slow
def test_under_autocast_half_the_bytes_are_gathered_and_every_bit_is_the_same():
    with pt.ranks(dp=2) as world:
        (found, weights, step), _ = world.run(autocast_losses, ())
        (wanted, others, apart), _ = world.run(autocast_losses, ("cast",))
        (eager, _, _), _ = world.run(autocast_losses, None)
    assert found == wanted and all(map(torch.equal, weights, others))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(eager), rtol=1e-6, atol=0)
    for reason in ("gather", "regather"):
        assert bytes_of(apart, reason) == 2 * bytes_of(step, reason) > 0
    assert bytes_of(apart, "gradient") == bytes_of(step, "gradient") > 0
    change = next(c for c in step.program.changes if c.name == "cast")
    assert change.sent[1] < change.sent[0] and change.seconds[1] < change.seconds[0]


@pytest.mark.slow
def test_a_cast_shard_does_not_wait_for_backward():
    with pt.ranks(dp=2) as world:
        (_, _, step), _ = world.run(autocast_losses, ())
    again = [n for n in step.graph.nodes if n.target is aten._to_copy.default]
    again = [n for n in again if note_of(n).reason == "regather"]
    assert again and all(note_of(n).phase == "backward" for n in again)


def cast_pieces(x):
    y = x.redistribute(placements=[R]).to_local()
    return y[:, 1:3].bfloat16(), y.t().bfloat16(), y.bfloat16()


def read_in_both(x):
    y = x.redistribute(placements=[R])
    return y.bfloat16(), y * 2


def read_in_two_narrow_ones(x):
    y = x.redistribute(placements=[R])
    return y.bfloat16(), y.half()


def widened(x):
    return x.redistribute(placements=[R]).double()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (cast_pieces, torch.bfloat16),
        (read_in_both, torch.float32),
        (read_in_two_narrow_ones, torch.float32),
        (widened, torch.float32),
    ],
)
def test_only_what_all_readers_cast_alike_is_cast_before_it_is_gathered(step, dtype, dim):
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(48.0).view(6, 8) / 7, mesh, [S(dim)])
        fast, found = compiled(step, x)
        (gather,) = fast.graph.moves
        assert gather.meta["val"].dtype == dtype
        wanted = step(x)
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (found, wanted)), strict=True):
            one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (one, other))
            assert torch.equal(one, other) and one.stride() == other.stride()

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- passes of the user's --------------------------------------------------------------------------


def fold_scales(program):
    """A value that is scaled twice is scaled once."""
    folded = 0
    for outer in find(program, aten.mul.Tensor):
        inner, factor = outer.args
        if inner.target is aten.mul.Tensor and isinstance(inner.args[1], float):
            x, first = inner.args
            replace(outer, put(aten.mul.Tensor, x, first * factor, before=outer))
            folded += 1
    return f"{folded} folded"


def scaled_twice(x):
    return (x * 2.0) * 4.0 + x.sum()


def test_a_users_pass_runs_says_what_it_changed_and_is_left_out_by_its_name():
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [S(0)])
        wanted = scaled_twice(x).full_tensor()
        steps = []
        for options in ({"passes": [fold_scales]}, {"passes": [fold_scales], "without": NAME}, {}):
            step, found = compiled(scaled_twice, x, **options)
            assert torch.equal(found.full_tensor(), wanted)
            steps.append(step)
        counts = [s.graph.to_string().count("aten.mul.Tensor") for s in steps]
        assert counts == [1, 2, 2]
        assert len({s.key for s in steps}) == 3
        assert [c.name for c in steps[0].program.changes][:2] == ["fold_scales", "dedupe"]
        return steps[0].explain(), steps[0].key

    NAME = ("fold_scales",)
    with pt.ranks(dp=2) as world:
        (text, key), (_, other) = world.run(run)
    assert key == other
    assert "fold_scales: A value that is scaled twice is scaled once.\n  1 folded" in text
    assert "- 1 x aten.mul.Tensor : f32[4] cpu" in text


def test_a_users_pass_may_say_before_which_it_runs():
    step, _ = compiled(scaled_twice, torch.ones(4), passes={"bucket": fold_scales})
    names = [c.name for c in step.program.changes]
    assert names[names.index("fold_scales") + 1] == "bucket"
    step, _ = compiled(scaled_twice, torch.ones(4), passes={"end": [fold_scales]})
    assert step.program.changes[-1].name == "fold_scales"


def test_what_a_users_pass_puts_in_by_fx_alone_is_noted_and_counted():
    def sums_over_ranks(program):
        """What a rank returns is summed over the ranks."""
        graph = program.graph.graph
        (end,) = graph.find_nodes(op="output")
        (name,) = program.groups
        with graph.inserting_before(end):
            total = graph.call_function(
                functional.all_reduce.default, (end.args[0][0], "sum", name)
            )
            waited = graph.call_function(functional.wait_tensor.default, (total,))
        end.args = ([waited],)

    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [S(0)])

        def gathered(x):
            return x.redistribute(placements=[R])

        step, found = compiled(gathered, x, passes=[sums_over_ranks])
        assert torch.equal(found.to_local(), 2 * torch.arange(8.0))
        gather, reduce = (note_of(n) for n in step.graph.moves)
        assert (reduce.kind, reduce.axes, reduce.nbytes) == ("all_reduce", ("dp",), 32)
        assert reduce.op == "sums_over_ranks" and "test_passes_of_steps.py" in reduce.source
        change = step.program.changes[0]
        assert change.sent == (gather.nbytes, gather.nbytes + 32)
        assert change.seconds[1] > change.seconds[0]

    with pt.ranks(dp=2) as world:
        world.run(run)


def puts_a_write(program):
    (mul, *_) = find(program, aten.mul.Tensor)
    mul.target = aten.mul_.Tensor


def changes_a_dtype(program):
    (end,) = program.graph.graph.find_nodes(op="output")
    value = put(aten._to_copy.default, end.args[0][0], before=end, dtype=torch.float64)
    end.args = ([value],)


def changes_a_shape(program):
    (end,) = program.graph.graph.find_nodes(op="output")
    end.args = ([put(aten.unsqueeze.default, end.args[0][0], 0, before=end)],)


def changes_a_layout(program):
    program.outputs[0] = dataclasses.replace(program.outputs[0], spec=None, kind="other")


def forgets_a_write(program):
    for copy in find(program, aten.copy_.default):
        program.graph.graph.erase_node(copy)


def gives_more(program):
    (end,) = program.graph.graph.find_nodes(op="output")
    end.args = (end.args[0] * 2,)


def cannot_be(program):
    (mul, *_) = find(program, aten.mul.Tensor)
    mul.args = (mul.args[0], put(aten.new_empty.default, mul.args[0], [3, 7], before=mul))


def raises(program):
    raise KeyError("weight")


def is_another_on_each_rank(program):
    (mul, *_) = find(program, aten.mul.Tensor)
    mul.args = (mul.args[0], float(len(RANKS_SEEN)))
    RANKS_SEEN.append(mul)


RANKS_SEEN: list = []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (puts_a_write, "aten.mul_.Tensor writes"),
        (changes_a_dtype, "is float64 [4] on cpu, it was float32 [4] on cpu"),
        (changes_a_shape, "is float32 [1, 4] on cpu, it was float32 [4] on cpu"),
        (changes_a_layout, "gives other outputs, or in other layouts"),
        (forgets_a_write, "w is not written any more"),
        (gives_more, "the number of results differs"),
        (cannot_be, "mul cannot be computed: "),
        (raises, "raised KeyError: 'weight'"),
        (is_another_on_each_rank, "made different programs on different ranks"),
    ],
)
def test_a_users_pass_that_breaks_its_contract_is_refused_by_name_on_all_ranks(wrong, said):
    RANKS_SEEN.clear()

    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [S(0)])
        w = pt.distribute_tensor(torch.zeros(8), mesh, [S(0)])

        def step(x):
            with torch.no_grad():
                w.add_(x * 3.0)
            return x * 2.0

        with pytest.raises(pt.LayoutError) as caught:
            compiled(step, x, passes=[wrong])
        assert torch.equal(w.full_tensor(), torch.zeros(8))
        return str(caught.value)

    with pt.ranks(dp=2) as world:
        one, other = world.run(run)
    assert one == other
    assert wrong.__name__ in one and said in one


def test_two_passes_have_two_names_and_a_place_is_a_passs():
    def bucket(program): ...

    for passes in ([bucket], [fold_scales, fold_scales]):
        with pytest.raises(ValueError, match="already"):
            compiled(scaled_twice, torch.ones(4), passes=passes)
    with pytest.raises(ValueError, match="a place is dedupe"):
        compiled(scaled_twice, torch.ones(4), passes={"nowhere": fold_scales})


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
    assert "test_passes_of_steps.py:" in gather and "(forward)" in gather
    (mul,) = [line for line in text.splitlines() if "aten.mul.Tensor" in line]
    assert "f32[8@dp, 4]" in mul
    assert "argument argument[0]" in text and "1 collectives" in text


def test_a_replacement_of_another_shape_names_the_pass_that_made_it():
    def double_rows(program):
        (mul,) = find(program, torch.ops.aten.mul)
        replace(mul, put(torch.ops.aten.cat.default, [mul, mul], before=mul.next))

    step = pt.compile(lambda x: (x * 2).sum(), passes=[double_rows], backend="graph")
    with pytest.raises(IllegalGraph, match=r"pass double_rows: cat.* cannot stand for mul"):
        step(torch.ones(4))


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
    [(writes, "writes"), (forgets, "it has no fake value"), (reads_late, "is read after")],
)
def test_a_graph_that_breaks_the_grammar_is_refused(change, said):
    text = broken(change)
    assert "after a pass" in text and said in text
