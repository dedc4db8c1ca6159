"""What bounds captures, and what may a captured step not do unseen?"""

from __future__ import annotations

import copy
import gc
import logging
import math
import re
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import partita as pt
from tests.programs.steps import squares

R, S = pt.Replicate(), pt.Shard


def graph_of(step, **options):
    return pt.compile(step, backend="graph", **options)


# -- shapes that change ----------------------------------------------------------------------------


def tokens_of(length, batch=4):
    made = torch.Generator().manual_seed(length)
    return torch.randint(0, 16, (2, batch, length), generator=made)


class Causal(nn.Module):
    """Reads at each place the mean of what came so far."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens).cumsum(1) / (torch.arange(tokens.shape[1]) + 1).view(-1, 1)
        return self.head(x)


def training(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens, targets):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss

    return step


LENGTHS = [1 + (37 * i) % 100 for i in range(100)]  # each from 1 to 100, in no order


@pytest.mark.slow
def test_what_is_dropped_leaves_no_graph_behind():
    def run(mesh):
        fast = graph_of(training(pt.parallelize(Causal(), mesh)), keep=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for length in range(2, 8):
                fast(*[pt.distribute_tensor(t, mesh, [S(0)]) for t in tokens_of(length)])
        return fast

    with pt.ranks(dp=2) as world:  # the programs of single ops stay, as long as the process
        world.run(run)
    gc.collect()
    before = weakref.WeakSet(o for o in gc.get_objects() if type(o) is fx.Graph)
    with pt.ranks(dp=2) as world:
        kept = world.run(run)
    gc.collect()
    graphs = [o for o in gc.get_objects() if type(o) is fx.Graph and o not in before]
    # Of each of two ranks the one that runs, the one as captured, for explain(), and their like
    # for plain values that are compared.
    assert len(graphs) <= 3 * len(kept)


@pytest.mark.slow
def test_a_hundred_lengths_in_buckets_are_three_captures_and_the_losses_of_no_padding():
    def run(mesh):
        fast = graph_of(training(pt.parallelize(Causal(), mesh)))
        losses = []
        for tokens, targets in map(tokens_of, LENGTHS):
            padded = [
                pt.pad_to_bucket(t, (32, 64, 128), value=value)
                for t, value in ((tokens, 0), (targets, -100))
            ]
            losses.append(fast(*[pt.distribute_tensor(t, mesh, [S(0)]) for t in padded]).item())
        torch.testing.assert_close(losses, truth, rtol=1e-5, atol=0)
        return fast.reasons

    single = training(Causal())
    truth = [single(*tokens_of(n)).item() for n in LENGTHS]

    with pt.ranks(dp=2) as world:
        reasons, other = world.run(run)
    assert reasons == other and len(reasons) == 3
    assert reasons[0] == "the first call"
    assert reasons[1].startswith("argument[0]: shape (4, 32) became (4, 64); argument[1]: shape")


@pytest.mark.slow
def test_a_hundred_lengths_keep_few_programs_and_say_why_each_was_made():
    def step(x):
        return (x * 2).sum()

    fast = graph_of(step, keep=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 101):
            assert fast(torch.ones(n)).item() == 2 * n
    assert len(fast.programs) == 4 and len(fast.reasons) == 100
    assert fast.reasons[17] == "argument[0]: shape (17,) became (18,)"
    told = "step is captured again and again.*keep=4.*pad_to_bucket"
    with pytest.warns(UserWarning, match=told) as warned:
        fast(torch.ones(1))
    assert warned[0].filename == __file__
    assert fast.reasons[-1].endswith("became (1,) (captured before, and dropped)")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        fast(torch.ones(2))


def test_only_what_was_captured_before_and_dropped_is_said_to_have_been():
    settings = {"k": 0}

    def step(x):
        return x * settings["k"]

    fast = graph_of(step, keep=2)
    with pytest.warns(UserWarning, match="step is captured at each call: settings"):
        for k in range(5):
            settings["k"] = k
            assert fast(torch.ones(2)).tolist() == [k, k]
    assert fast.reasons[1:] == [f"settings['k']: {k} became {k + 1}" for k in range(4)]
    settings["k"] = 0
    with pytest.warns(UserWarning, match="captured again and again") as warned:
        fast(torch.ones(2))
    assert fast.reasons[-1].endswith("became 0 (captured before, and dropped)")
    assert str(warned[0].message).endswith("Raise keep=")  # and nothing of shapes


@pytest.mark.slow
def test_a_float_that_is_read_as_a_number_is_told_of_and_was_not_dropped_before():
    def step(x, t):
        return x * math.exp(-t)

    fast = graph_of(step, keep=2)
    told = r"is captured at each call.*Create a tensor from argument\[1\] outside of the step"
    with pytest.warns(UserWarning, match=told) as warned:
        for k in range(6):
            fast(torch.ones(2), 0.25 + k)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert not any("dropped" in reason for reason in fast.reasons)


@pytest.mark.slow
def test_a_zero_that_is_asked_about_is_said_where_it_is_asked_and_the_newest_program_tells():
    def step(x, t):
        if t > 0.5:
            return x * 2
        return x + t

    fast = graph_of(step)
    for t in (0.0, 0.1, 0.3, 0.7):
        fast(torch.ones(2), t)
    line = step.__code__.co_firstlineno + 1
    assert len(fast.reasons) == 3
    assert fast.reasons[1].startswith("argument[1]: 0.0 became 0.1, and argument[1] is read as a")
    assert fast.reasons[1].endswith(f"test_limits.py:{line}")
    assert "0.1 became 0.7, and the program checks whether argument[1] <= 0.5" in fast.reasons[2]


def test_an_int_that_is_another_in_each_call_is_told_of():
    def step(x, k):
        return x * k

    fast = graph_of(step)
    with pytest.warns(UserWarning, match=r"pass argument\[1\] as a float or a tensor") as warned:
        for k in range(6):
            fast(torch.ones(2), k)
    assert len(warned) == 1 and len(fast.reasons) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = graph_of(step)
        for k in range(6):
            fast(torch.ones(2), float(k))
    assert len(fast.reasons) == 1
    fast(torch.ones(2), 7)
    assert fast.reasons[1] == "argument[1]: a float became 7"  # and not which float


def test_a_container_of_another_length_is_named_as_one():
    seen = [0]
    fast = graph_of(lambda x: x * len(seen))
    fast(torch.ones(2))
    seen.append(0)
    fast(torch.ones(2))
    assert fast.reasons[1] == "seen: a list of 1 became a list of 2"


class Settings:
    factor = 2.0


@pytest.mark.slow
def test_a_reason_names_what_changed_in_words():
    model = nn.Linear(4, 4)
    settings = Settings()
    settings.factor = 2.0

    def step(x, *more):
        return model(x).sum() * settings.factor

    def run(mesh):
        plain = torch.ones(2, 4)
        fast = graph_of(step, keep=20, state=[settings])
        fast(plain)
        fast(plain.double().float().requires_grad_())
        fast(torch.ones(4, 2).t())
        with torch.no_grad():
            fast(plain)
        with torch.autocast("cpu", torch.bfloat16):
            fast(plain)
        model.eval()
        fast(plain)
        model.train()
        fast(plain, 3)
        settings.factor = 3  # a float would be an input
        fast(plain)
        settings.factor = 2.0
        double = graph_of(lambda x: x * 2)
        for x in (plain, plain.double(), pt.distribute_tensor(plain, mesh, [S(0)])):
            double(x)
        double(pt.distribute_tensor(plain, mesh, [S(1)]))
        return fast.reasons, double.reasons

    with pt.ranks(dp=2) as world:
        (reasons, others), again = world.run(run)
    assert (reasons, others) == again
    assert reasons == [
        "the first call",
        "argument[0]: requires_grad False became True",
        "argument[0]: strides contiguous became (1, 2)",
        "the mode: gradients on became off",
        "the mode: autocast off became bf16",
        "model.training: (True,) became (False,)",
        reasons[6],
        "settings.factor: 2.0 became 3" if "settings" in reasons[7] else reasons[7],
    ]
    assert reasons[6].startswith("argument[1] is new; the arguments: put together")
    assert "factor: 2.0 became 3" in reasons[7]
    assert others[1:] == [
        "argument[0]: dtype f32 became f64",
        "argument[0]: a plain tensor became a DTensor",
        "argument[0]: layout 2@dp 4 became 2 4@dp",
    ]


# -- padding ---------------------------------------------------------------------------------------


def test_a_batch_is_padded_to_the_smallest_length_that_it_fits():
    x = torch.arange(6.0).view(2, 3)
    assert pt.pad_to_bucket(x, (8, 3, 4), value=0) is x
    assert pt.pad_to_bucket(x, (8, 4), value=-1).tolist() == [[0, 1, 2, -1], [3, 4, 5, -1]]
    assert pt.pad_to_bucket(x, (4,), value=9, dim=0)[2:].tolist() == [[9] * 3] * 2
    mask = pt.pad_to_bucket(torch.ones(2, 3, dtype=torch.bool), (4,), value=False)
    assert mask.dtype == torch.bool and mask.sum() == 6
    with pytest.raises(ValueError, match="3 elements are more than the longest of"):
        pt.pad_to_bucket(x, (1, 2), value=0)
    with pytest.raises(ValueError, match="no dimension 2"):
        pt.pad_to_bucket(x, (8,), value=0, dim=2)


def test_a_batch_that_is_spread_out_already_is_padded_alike():
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [S(0)])
        padded = pt.pad_to_bucket(x, (4,), value=7)
        assert padded.placements == x.placements
        return padded.full_tensor()

    with pt.ranks(dp=2) as world:
        for found in world.run(run):
            assert torch.equal(found, F.pad(torch.arange(8.0).view(4, 2), (0, 2), value=7))


# -- plain tensors next to DTensors ----------------------------------------------------------------


def made_of_an_argument(x, mine):
    return x * (mine * 2 > 4)


def written_after_it_was_read(x, mine):
    mask = mine * 2
    y = x * mask
    mask.zero_()
    return y + mask


def drawn(x, mine):
    return x * (torch.rand(4) + mine * 2)


STEPS = [made_of_an_argument, written_after_it_was_read, drawn]


@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_a_plain_value_that_a_step_makes_and_that_differs_between_ranks_is_refused_on_all(step):
    def run(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [S(0)])
        mine = torch.arange(4.0) + mesh.get_rank()
        with pytest.raises(pt.LayoutError) as eager:
            step(x, mine)
        with pytest.raises(pt.LayoutError) as caught:
            graph_of(step)(x, mine)
        return str(eager.value), str(caught.value)

    with pt.ranks(dp=2) as world:
        (eager, told), other = world.run(run)
    assert (eager, told) == other
    assert "differs between ranks" in eager
    assert "a plain tensor that the step makes, next to DTensors, differs between ranks" in told
    assert "test_limits.py:" in told


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_a_plain_value_that_is_equal_on_all_ranks_is_taken_whole(step):
    def run(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [S(0)])
        mine = torch.arange(4.0)
        torch.manual_seed(3)
        wanted = [step(x, mine).full_tensor() for _ in range(2)]
        torch.manual_seed(3)
        fast = graph_of(step)
        found = [fast(x, mine).full_tensor() for _ in range(2)]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    with pt.ranks(dp=2) as world:
        world.run(run)


def test_only_what_is_read_next_to_dtensors_is_compared():
    def step(x, mine):
        shape_of_mine = torch.zeros_like(mine)
        return x + shape_of_mine, mine * 2

    def run(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [S(0)])
        mine = torch.arange(4.0) + mesh.get_rank()
        y, doubled = graph_of(step)(x, mine)
        assert torch.equal(y.full_tensor(), torch.ones(4)) and torch.equal(doubled, 2 * mine)

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- memory that two inputs share ------------------------------------------------------------------


def test_views_of_one_memory_may_be_given_unless_one_is_written_where_they_overlap():
    def doubles(x, y):
        x.mul_(2)
        return x + y

    def reads(x, y):
        return x + y

    base = torch.arange(8.0)
    assert torch.equal(graph_of(reads)(base[:4], base[1:5]), base[:4] + base[1:5])
    fast = graph_of(doubles)
    wanted = base.clone()
    assert torch.equal(fast(base[:4], base[4:]), doubles(wanted[:4], wanted[4:]))
    before = base.clone()
    for step in (fast, graph_of(doubles)):  # a later call, and a first one
        with pytest.raises(pt.CaptureError) as caught:
            step(base[:4], base[2:6])
        assert "argument[0] and argument[1] share memory" in str(caught.value)
        assert "the step writes argument[0]" in str(caught.value)
        assert "test_limits.py:" in str(caught.value)
        assert torch.equal(base, before)
    eager = graph_of(doubles, fallback="eager")
    eager(torch.ones(4), torch.ones(4))
    assert torch.equal(eager(base[:4], base[2:6]), doubles(before[:4], before[2:6]))


@pytest.mark.parametrize("other", ["argument", "parameter"])
def test_memory_that_is_exchanged_later_is_seen_to_be_shared(other):
    first, second = (nn.Parameter(torch.ones(2), requires_grad=False) for _ in range(2))

    def step(x):
        first.add_(1)
        return x * second

    fast, x = graph_of(step), torch.ones(2)
    for _ in range(2):
        fast(x)
    first.data = torch.full((2,), 5.0)
    if other == "parameter":
        second.data = first.data
    x = first.detach() if other == "argument" else x
    for _ in range(2):
        with pytest.raises(pt.CaptureError, match="share memory"):
            fast(x)
    assert first.tolist() == [5, 5]
    second.data = torch.full((2,), 2.0)
    assert fast(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("later", [False, True])
def test_a_gradient_that_is_a_part_of_a_buffer_that_the_step_reads_is_refused(later):
    torch.manual_seed(0)
    model, flat, x = nn.Linear(3, 2), torch.zeros(8), torch.ones(4, 3)

    def step(x):
        model(x).square().sum().backward()
        return flat.norm()

    fast = graph_of(step)
    if later:
        for _ in range(2):  # the second call adds to gradients
            fast(x)
    at = 0
    for p in model.parameters():
        p.grad = flat[at : (at := at + p.numel())].view_as(p)
    for _ in range(2):
        with pytest.raises(pt.CaptureError, match="share memory"):
            fast(x)
    assert flat.count_nonzero() == 0
    for p in model.parameters():
        p.grad = p.grad.clone()
    fast(x)


def test_an_argument_that_is_a_view_of_a_parameter_that_is_updated_is_refused():
    weight = nn.Parameter(torch.ones(4, 4))

    def step(row):
        loss = (weight * row).sum()
        (grad,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(grad)
        return loss

    fast = graph_of(step)
    fast(torch.ones(4))
    with pytest.raises(pt.CaptureError, match=r"weight and argument\[0\] share memory"):
        fast(weight.detach()[1])
    assert fast(torch.ones(4)).item() == 0.0

    def fills(row):
        row.fill_(1)
        return weight.sum()

    fast = graph_of(fills)
    fast(torch.ones(4))
    with pytest.raises(pt.CaptureError, match="the step writes argument"):
        fast(weight.detach()[1])


# -- what is told of a run -------------------------------------------------------------------------


def gathers_implicitly(x):
    return torch.linalg.svdvals(x)


def sums(x):
    return x.sum().redistribute(placements=[R])


@pytest.mark.parametrize(("step", "reason"), [(gathers_implicitly, "implicit"), (sums, "explicit")])
def test_a_ledger_is_told_of_each_collective_of_a_compiled_step_as_of_an_eager_one(step, reason):
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [S(0)])
        fast = graph_of(step)
        fast(x)
        with pt.ledger() as eager:
            step(x)
        with pt.ledger() as log:
            fast(x)
            fast(x)
        wanted = [m for m in eager.moves if m.nbytes]
        assert len(wanted) == 1 and wanted[0].reason == reason
        assert log.moves == wanted * 2
        with pt.ledger() as first:
            graph_of(step)(x)
        assert first.moves == wanted

    with pt.ranks(dp=2) as world:
        world.run(run)


def test_the_ledger_of_a_compiled_training_step_has_the_bytes_of_its_graph():
    def run(mesh):
        model = pt.zero(Causal(), mesh)
        fast = graph_of(training(model))
        batch = [pt.distribute_tensor(t, mesh, [S(0)]) for t in tokens_of(8)]
        fast(*batch)
        with pt.ledger() as log:
            fast(*batch)
        moves = fast.graph.moves
        assert log.count() == len(moves) > 0
        assert log.count("all_gather", reason="regather") > 0
        assert log.count("reduce_scatter", reason="gradient") > 0
        assert all("test_limits.py:" in m.source for m in log.moves)
        assert {m.rank for m in log.moves} == {mesh.get_rank()}
        return log.bytes, sum(c.sent[1] for c in fast.program.changes[-1:])

    with pt.ranks(dp=2) as world:
        for told, predicted in world.run(run):
            assert told == predicted > 0


def test_a_region_tells_what_its_forward_carries_and_later_what_its_backward_does():
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(8.0), mesh, [S(0)]).requires_grad_()
        region = graph_of(lambda x: x.redistribute(placements=[R]) * 2)
        (region(x) * x).sum().backward()
        with pt.ledger() as forward:
            y = region(x)
        with pt.ledger() as backward:
            y.backward(torch.ones_like(y).redistribute(placements=[pt.Partial()]))
        assert (forward.count(), forward.moves[0].kind) == (1, "all_gather")
        assert (backward.count("reduce_scatter"), backward.count("all_gather")) == (1, 0)
        assert forward.moves[0].nbytes == 16

    with pt.ranks(dp=2) as world:
        world.run(run)


def test_strict_refuses_an_implicit_move_at_capture_and_in_what_was_captured_before():
    def run(mesh):
        x = pt.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [S(0)])
        fast = graph_of(gathers_implicitly)
        fast(x)
        told = []
        for step in (graph_of(gathers_implicitly), fast):
            refused = pytest.raises(pt.LayoutError, match="implicit all_gather over dp")
            with refused as caught, pt.strict():
                step(x)
            told.append(str(caught.value))
        assert all("test_limits.py:" in text for text in told)
        with pt.strict():
            graph_of(sums)(x)
        fast(x)

    with pt.ranks(dp=2) as world:
        world.run(run)


# -- calls that are like earlier ones --------------------------------------------------------------


def test_another_model_in_the_place_of_the_first_is_noticed():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)

    @graph_of
    def evaluate(x):
        with torch.no_grad():
            return model(x)

    for _ in range(3):
        torch.testing.assert_close(evaluate(x), model(x))
    model = nn.Linear(4, 4)
    for _ in range(3):
        torch.testing.assert_close(evaluate(x), model(x))


@pytest.mark.parametrize("change", ["weight", "data", "swapped", "eval", "frozen"])
def test_what_changes_within_a_model_between_calls_is_noticed(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).train(change != "eval")
    x = torch.ones(2, 4)
    evaluate = graph_of(lambda x: model(x))

    def agree():
        for _ in range(3):
            torch.manual_seed(1)
            ours = evaluate(x)
            torch.manual_seed(1)
            theirs = model(x)
            torch.testing.assert_close(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad

    agree()
    other = nn.Linear(4, 4)
    if change == "weight":
        model[0].weight = other.weight
    elif change == "data":
        model[0].weight.data = other.weight.data
    elif change == "swapped":
        model[2] = other
    elif change == "eval":
        model.train()
    else:
        model.requires_grad_(False)
    agree()


@pytest.mark.slow
def test_an_optimizers_state_that_was_loaded_is_what_the_step_goes_on_from():
    def trained(compiled):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        step = squares(model, optimizer)
        step = graph_of(step) if compiled else step
        x = torch.ones(2, 4)
        for _ in range(3):
            step(x)
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(3):
            step(x)
        optimizer.load_state_dict(saved)
        return [step(x).item() for _ in range(3)]

    assert trained(True) == pytest.approx(trained(False), rel=1e-6)


def test_what_ran_last_is_told_whichever_way_it_was_found():
    model = nn.Linear(4, 4)
    evaluate = graph_of(lambda x: model(x))
    keys = []
    for rows in (2, 2, 2, 3, 2, 2, 2):
        evaluate(torch.ones(rows, 4))
        keys.append(evaluate.key)
    assert len(set(keys)) == 2 and {*keys[:3], *keys[4:]} == {keys[0]}


def test_a_step_holds_nothing_of_what_it_was_called_with():
    model = nn.Linear(4, 4)
    evaluate = graph_of(lambda x: model(x))
    for _ in range(3):
        x = torch.ones(2, 4)
        memory = weakref.ref(x.untyped_storage())
        evaluate(x)
        del x
        assert memory() is None


def test_a_batch_norm_that_reads_its_count_is_named_with_what_keeps_it_from_that():
    model = torch.nn.BatchNorm1d(3, momentum=None)
    with pytest.raises(pt.CaptureError) as raised:
        pt.compile(lambda x: model(x), backend="graph")(torch.ones(4, 3))
    text = str(raised.value)
    assert "reads a value, in torch/nn/modules/batchnorm.py (at " in text
    assert "BatchNorm(momentum=0.1)" in text and "the number of batches so far" in text


def test_an_error_of_a_shape_is_raised_and_not_logged_too(monkeypatch):
    logged = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = logged.append
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # it does not propagate
    monkeypatch.setattr(logger, "handlers", [handler])
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert logged, "torch logs the error"
    logged.clear()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        pt.compile(lambda x: x @ x, backend="graph")(torch.ones(2, 3))
    assert not logged


@pytest.mark.slow
def test_a_program_that_ranks_do_not_agree_on_leaves_no_trace():
    """Their numbers are compared when the step has been captured, and its optimizer has state."""

    def run(mesh):
        model = pt.zero(torch.nn.Linear(4, 4), mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        holder = SimpleNamespace(seen=False)

        def step(x, scale):
            optimizer.zero_grad()
            loss = model(x).square().mean() * scale
            loss.backward()
            optimizer.step()
            holder.seen = True
            return loss

        step = pt.compile(step, backend="graph")
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        with pytest.raises(pt.LayoutError, match="the ranks pass different numbers"):
            step(x, 1.0 + mesh.get_local_rank())
        assert not holder.seen and not optimizer.state
        assert not step.programs and not step.reasons
        step(x, 2.0)
        assert holder.seen and len(optimizer.state) == 2 and len(step.reasons) == 1

    with pt.ranks(dp=2) as world:
        world.run(run)


class _Kept(logging.Handler):
    """What is logged; a library holds the handler, so that a step does not reach it before."""

    def emit(self, record):
        self.kept.append(record.getMessage())
        super().flush()


@pytest.mark.filterwarnings("ignore:logging at")
def test_a_method_that_calls_super_is_captured_without_a_search_of_the_heap(monkeypatch):
    """The search for the function of a frame takes time for each object of the process."""
    searched, handler = [], _Kept()
    handler.kept = []
    find = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *of: (searched.append(of), find(*of))[1])
    logger = logging.getLogger("of a test")
    logger.addHandler(handler)
    try:
        fast = pt.compile(lambda x: (logger.error("hi"), x * 2)[1], backend="graph")
        fast(torch.ones(2))
    finally:
        logger.removeHandler(handler)
    assert handler.kept and not searched


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda x: x * None, "for *: 'Tensor' and 'NoneType'"),
        (lambda x: x.no_such_name, "'Tensor' object has no attribute 'no_such_name'"),
    ],
)
def test_an_error_of_the_steps_own_is_pythons_and_names_no_fake(program, text):
    with pytest.raises((TypeError, AttributeError), match=re.escape(text)):
        pt.compile(lambda x: program(x), backend="graph")(torch.ones(2))
