"""Do ranks that read different values get an error, however alike the values look?"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist

import partita as pt
from partita import LayoutError, Partial, Replicate, Shard
from tests.programs.gloo_ranks import run_ranks

WHOLE = torch.arange(8.0)


def read(t):
    return t.item()


def log(t):
    return t.detach().item()


def on_one_line(d, r):
    return d.sum().item() if r == 0 else (d * 2).sum().item()


def through_one_helper(d, r):
    s, t = d.sum(), (d * 2).sum()
    return read(s) if r == 0 else read(t)


def by_one_call(d, r):
    s, t = d.sum(), (d * 2).sum()
    x = s if r == 0 else t
    return x.item()


def on_two_lines(d, r):
    if r == 0:
        return d.sum().item()
    return (d * 2).sum().item()


def in_another_order(d, r):
    sums = [(d * k).sum() for k in range(3)]
    return [log(x) for x in (sums if r == 0 else sums[::-1])]


def as_a_list(d, r):
    return (d * 3 if r == 0 else d * 2).tolist()


def as_an_array(d, r):
    return (d * 3 if r == 0 else d * 2).numpy().tolist()


def as_text(d, r):
    return str((d * 3).sum() if r == 0 else (d * 2).sum())


def as_a_float(d, r):
    return float((d * 3).sum() if r == 0 else (d * 2).sum())


def by_in(d, r):
    return 3.0 in (d if r == 0 else d * 2)


def by_a_comparison(d, r):
    return bool(((d * 3).sum() if r == 0 else (d * 2).sum()) > 60)


def as_a_whole(d, r):
    return (d * 3 if r == 0 else d * 2).full_tensor().tolist()


def as_a_reduced_sum(d, r):
    x = (d * 3).sum() if r == 0 else (d * 2).sum()
    return x.redistribute(placements=[Replicate()]).to_local().item()


def of_two_local_tensors(d, r):
    both = [pt.DTensor.from_local(torch.ones(99), d.device_mesh, [Partial()]) for _ in range(2)]
    return both[min(r, 1)].tolist()


def of_two_spread_tensors(d, r):
    both = [pt.distribute_tensor(WHOLE.repeat(99), d.device_mesh, [Shard(0)]) for _ in range(2)]
    return both[min(r, 1)].tolist()


def of_two_results_of_a_compiled_step(d, r):
    step = pt.compile(lambda x: (x.sum(), (x * 2).sum()), backend="graph")
    for _ in range(2):
        sums = step(d)
    return sums[min(r, 1)].item()


def by_one_call_in_a_loop(d, r):
    sums = [(d * k).sum() for k in range(2)]
    return sums[min(r, 1)].item()


def of_two_stacks(d, r):
    stacks = [torch.stack([(d * k).sum(), d.sum()]).sum() for k in range(2)]
    return stacks[min(r, 1)].item()


def of_two_gradients(d, r):
    both = [pt.distribute_tensor(WHOLE, d.device_mesh, [Shard(0)]).requires_grad_() for _ in "ab"]
    (both[0] * both[1]).sum().backward()
    return both[min(r, 1)].grad.tolist()


def of_two_gradients_in_hooks(d, r):
    seen = []
    both = [pt.distribute_tensor(WHOLE, d.device_mesh, [Shard(0)]).requires_grad_() for _ in "ab"]
    for x in both:
        x.register_hook(lambda g: seen.append(g.sum().item()))
    (both[min(r, 1)] * d).sum().backward()
    return seen


DIFFERENT = {
    f.__name__: f
    for f in (
        on_one_line,
        through_one_helper,
        by_one_call,
        on_two_lines,
        in_another_order,
        as_a_list,
        as_an_array,
        as_text,
        as_a_float,
        by_in,
        by_a_comparison,
        as_a_whole,
        as_a_reduced_sum,
        of_two_local_tensors,
        of_two_spread_tensors,
        of_two_results_of_a_compiled_step,
        by_one_call_in_a_loop,
        of_two_stacks,
        of_two_gradients,
        of_two_gradients_in_hooks,
    )
}


def told(fn, mesh, rank):
    try:
        return fn(pt.distribute_tensor(WHOLE, mesh, [Shard(0)]), rank)
    except LayoutError as error:
        return str(error)


def told_on_gloo(rank, name):
    mesh = pt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return told(DIFFERENT[name], mesh, rank)


def check(texts):
    for text in texts:
        assert isinstance(text, str) and "ranks ask for different things" in text, texts
        assert "a value" in text and "test_what_ranks_read.py:" in text
        assert "rank 0" in text and "rank 1" in text


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_values_on_other_ranks_are_an_error_on_all(name):
    with pt.ranks(dp=2) as world:
        check(world.run(lambda mesh: told(DIFFERENT[name], mesh, mesh.get_rank())))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["through_one_helper", "by_one_call", "as_a_whole"])
def test_other_values_on_other_processes_are_an_error_on_all(name):
    check(run_ranks(told_on_gloo, 2, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_other_values_on_three_processes_are_an_error_on_all(name):
    texts = run_ranks(told_on_gloo, 3, name)
    assert all("ranks ask for different things" in text for text in texts), texts


def test_the_error_says_which_call_made_each_value():
    with pt.ranks(dp=2) as world:
        text, _ = world.run(lambda mesh: told(by_one_call, mesh, mesh.get_rank()))
    lines = [line for line in text.splitlines() if line.strip().startswith("rank ")]
    assert len(lines) == 2 and lines[0].replace("rank 0", "rank 1") != lines[1]
    assert all("made at test_what_ranks_read.py:" in line for line in lines)


@pytest.mark.parametrize("name", ["in_another_order", "of_two_stacks"])
def test_the_error_tells_values_of_one_call_apart(name):
    with pt.ranks(dp=2) as world:
        texts = world.run(lambda mesh: told(DIFFERENT[name], mesh, mesh.get_rank()))
    for text in [*texts, *run_ranks(told_on_gloo, 2, name)]:
        one, other = (line for line in text.splitlines() if line.strip().startswith("rank "))
        assert " ".join(one.split()).replace("rank 0", "rank 1") != " ".join(other.split())


# -- what is right stays right ---------------------------------------------------------------------


def local_sums_on_one_rank(d, r):
    """What a rank computes by itself counts for nothing."""
    if r == 0:
        d.sum().detach().to_local()
        (d * 5).sum()
    s = (d * 2).sum().detach()
    return [s.item(), log(s), float(s), bool(s > 3)]


def one_helper_more_often_on_one_rank(d, r):
    """Of noted operands, and of larger ones, which are not."""

    def total(x):
        return x.sum()

    big = pt.distribute_tensor(WHOLE.repeat(5), d.device_mesh, [Shard(0)]) * 2
    for _ in range(3 if r == 0 else 1):
        sums = [total(d), total(d * 2), total(big), (d + 1).mean()]
    return [x.item() for x in sums]


def a_gradient_whose_tensor_one_rank_has_dropped(d, r):
    w = pt.distribute_tensor(torch.ones(8), d.device_mesh, [Replicate()]).requires_grad_()
    (d * w).sum().backward()
    grad, kept = w.grad, w if r == 0 else None
    del w
    gc.collect()
    return [grad.full_tensor().tolist(), kept is None or kept.grad is grad]


def called_from_two_lines(d, r):
    def evaluate():
        return d.sum().item()

    value = evaluate() if r == 0 else None
    return value if r == 0 else evaluate()


def a_running_sum(d, r):
    total = torch.zeros(())
    for k in range(20):
        total = total + (d * k).sum().detach()
    return total.item()


def in_a_mesh_of_two_axes(d, r):
    x = pt.distribute_tensor(WHOLE, d.device_mesh, [Replicate(), Shard(0)])
    if d.device_mesh.get_local_rank("dp") == 0:
        return x.full_tensor().tolist()  # the ranks of dp have equal copies
    return WHOLE.tolist()


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (local_sums_on_one_rank, [56.0, 56.0, 56.0, True]),
        (one_helper_more_often_on_one_rank, [28.0, 56.0, 280.0, 4.5]),
        (a_gradient_whose_tensor_one_rank_has_dropped, [WHOLE.tolist(), True]),
        (called_from_two_lines, 28.0),
        (a_running_sum, 28.0 * 190),
    ],
)
def test_one_value_on_all_ranks_is_one_devices(fn, expected):
    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh: told(fn, mesh, mesh.get_rank())) == [expected] * 2


def whole_on_some(rank):
    mesh = pt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    d = pt.distribute_tensor(WHOLE, mesh, [Shard(0), Replicate()])
    return in_a_mesh_of_two_axes(d, rank)


def test_ranks_that_have_no_part_in_a_move_need_not_make_it():
    assert run_ranks(whole_on_some, 4) == [WHOLE.tolist()] * 4


# -- other moves before the read -------------------------------------------------------------------


def moves_in_another_order(rank):
    """Of equal moves each rank would take another's values, and none would wait."""
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rows, columns = (pt.distribute_tensor(torch.ones(4, 4), mesh, [Shard(i)]) for i in (0, 1))
    for x in (rows, columns) if rank == 0 else (columns, rows):
        x.redistribute(placements=[Replicate()])
    try:
        return rows.sum().item()
    except LayoutError as error:
        return str(error)


def runs_equal_blocks_in_another_order(rank):
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = pt.zero(torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)]), mesh, stage=3)
    x = pt.distribute_batch(torch.ones(6, 4), mesh)
    try:
        for block in (0, 1, 2, 3) if rank == 0 else (0, 2, 1, 3):
            x = model[block](x)
    except LayoutError as error:
        return str(error)


def test_ranks_that_made_other_moves_before_a_read_get_an_error_that_names_the_first():
    for text in run_ranks(moves_in_another_order, 2):
        assert "ranks ask for different things" in text
        assert text.count("its move ") == 2


def test_ranks_that_run_equal_blocks_in_another_order_get_an_error_at_the_first():
    for text in run_ranks(runs_equal_blocks_in_another_order, 2):
        assert "the ranks are at different blocks" in text
        assert "at block '1'" in text and "at block '2'" in text


def moves_in_a_thread(rank):
    """A thread beside the program's may make its moves when it likes."""
    group = dist.new_group([0, 1])
    mesh = pt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    beside = pt.DeviceMesh.from_group(group, "cpu")
    x = pt.DTensor.from_local(torch.ones(40), beside, [Partial()])
    d = pt.distribute_tensor(WHOLE, mesh, [Shard(0)])
    thread = threading.Thread(target=x.redistribute, kwargs={"placements": [Replicate()]})
    if rank == 0:
        thread.start()
    first = d.sum().item()
    if rank == 1:
        thread.start()
    thread.join()
    return first, (d * 2).sum().item()


def test_moves_of_another_thread_are_no_part_of_the_comparison():
    assert run_ranks(moves_in_a_thread, 2) == [(28.0, 56.0)] * 2


def test_lambdas_in_one_line_are_different_calls():
    with pt.ranks(dp=2) as world:

        def body(mesh):
            x = pt.distribute_tensor(torch.arange(8.0), mesh, [pt.Shard(0)])
            sums = [lambda t: (t * 2).sum(), lambda t: (t * 3).sum()]
            return sums[mesh.get_rank()](x).item()

        with pytest.raises(pt.LayoutError, match="ask for different things"):
            world.run(body)
