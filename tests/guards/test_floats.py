"""Which Python numbers may change between the calls of a compiled step without another capture?"""

from __future__ import annotations

import copy
import math
from inspect import signature

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

import partita as pt
from partita.capture.code_origin import is_recorded_file
from partita.tensor.plan import declared_key, operand_key

S = pt.Shard
x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def graph_of(step, **options):
    return pt.compile(step, backend="graph", **options)


def whole(value):
    return value.full_tensor() if isinstance(value, pt.DTensor) else value


# -- optimizers ------------------------------------------------------------------------------------


def decaying(optimizer, call):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 * (call + 1)


def ending(optimizer, call):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 if call < 2 else 0.0


def by(make):
    """A schedule, which is made before the first step."""

    def begin(optimizer):
        scheduler = make(optimizer)
        return lambda optimizer, call: scheduler.step()

    return begin


Of, T = lr_scheduler, torch.optim
SCHEDULES = {  # optimizer, what changes after each step, captures
    "one cycle": (T.AdamW, {}, by(lambda o: Of.OneCycleLR(o, 0.1, total_steps=60)), 1),
    "cyclic": (T.SGD, {"momentum": 0.9}, by(lambda o: Of.CyclicLR(o, 0.01, 0.1, 5)), 1),
    "weight decay": (T.AdamW, {}, decaying, 1),
    "decay that ends": (T.Adam, {"weight_decay": 0.1}, ending, 2),
    "momentum": (T.SGD, {"momentum": 0.9, "nesterov": True}, None, 1),
    "dampening": (T.SGD, {"momentum": 0.9, "dampening": 0.5}, None, 2),
    "averaging": (T.ASGD, {}, None, 1),
    "orthogonal": (T.Muon, {}, by(lambda o: Of.LinearLR(o, total_iters=9)), 1),
}


SCHEDULERS = ("one cycle", "cyclic", "orthogonal")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_any_number_of_an_optimizer_needs_one_graph(name):
    make, options, change, captures = SCHEDULES[name]

    def run(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        model = model.double() if mesh is None else pt.parallelize(model.double(), mesh)
        optimizer = make(model.parameters(), lr=0.01, **options)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        changed = change(optimizer) if name in SCHEDULERS else change
        fast = step if mesh is None else graph_of(step)
        batch = x.double() if mesh is None else pt.distribute_tensor(x.double(), mesh, [S(0)])
        for call in range(6):
            fast(batch)
            if changed is not None:
                changed(optimizer, call)
        return [whole(p).detach() for p in model.parameters()], getattr(fast, "reasons", [])

    want, _ = run(None)
    with pt.ranks(dp=2) as world:
        (found, reasons), (_, others) = world.run(run)
    assert reasons == others and len(reasons) == captures, reasons
    for p, q in zip(found, want, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_a_step_that_clears_gradients_is_captured_once_though_it_finds_some():
    def run(mesh):
        model = pt.parallelize(nn.Linear(6, 2), mesh)
        optimizer = T.SGD(model.parameters(), lr=0.1)
        batch = pt.distribute_tensor(x, mesh, [S(0)])
        model(batch).sum().backward()

        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        fast = graph_of(step)
        for _ in range(3):
            fast(batch)
        return fast.reasons

    with pt.ranks(dp=2) as world:
        assert world.run(run) == [["the first call"]] * 2


def test_gradients_that_a_step_adds_to_are_part_of_its_program():
    def run(mesh):
        model = nn.Linear(6, 2) if mesh is None else pt.parallelize(nn.Linear(6, 2), mesh)
        nn.init.ones_(model.weight)
        batch = x if mesh is None else pt.distribute_tensor(x, mesh, [S(0)])

        def step(x):
            model(x).square().sum().backward()

        fast = step if mesh is None else graph_of(step)
        for call in range(4):
            fast(batch)
            if call == 2:
                model.zero_grad()
        return whole(model.weight.grad), getattr(fast, "reasons", [])

    torch.manual_seed(0)
    want, _ = run(None)
    with pt.ranks(dp=2) as world:
        for found, reasons in world.run(lambda mesh: (torch.manual_seed(0), run(mesh))[1]):
            torch.testing.assert_close(found, want)
            assert len(reasons) == 2 and "gradient none became there" in reasons[1]


# -- numbers of the step ---------------------------------------------------------------------------


def ema(x, decay):
    slow = torch.ones_like(x)
    slow.mul_(decay).add_(x, alpha=1 - decay)
    return slow.lerp_(x, decay), torch.addcmul(x, x, x, value=decay)


def places(x, value):
    y = x.clone()
    y[:, 0] = value
    return y.masked_fill(y > value, value), torch.where(y > value, y, value)


INPUTS = {
    "arithmetic": lambda x, a: (x * a + a - x / a + a / x, a**2 * x, (a - x) ** a),
    "rounding": lambda x, a: (x // a, x % a, torch.div(x, a, rounding_mode="trunc")),
    "comparison": lambda x, a: (x > a, x.long() >= a, x.clamp(-a, a), x.clamp_min(a)),
    "integers": lambda x, a: (x.argmax(1) * a, x.long() + a),
    "few bits": lambda x, a: (x.bfloat16() * a, x.half() + a, torch.add(x.half(), x, alpha=a)),
    "no dimensions": lambda x, a: (x.sum() * a, x.sum() > a, x.double().sum() - a),
    "moving average": ema,
    "filling": lambda x, a: (torch.full((3,), a), torch.full_like(x, a), x.clone().fill_(a)),
    "places": places,
    "result": lambda x, a: (x * a, a * 2, a),
    "type": lambda x, a: x * (a if isinstance(a, float) else 100.0),
    "choice": lambda x, a: x * max(a, 0.05) * min(a, 10.0) * abs(a),
    "base": lambda x, a: a**x,
}


def check(step, numbers, captures):
    def run(mesh):
        fast = graph_of(step)
        batch = pt.distribute_tensor(x, mesh, [S(0)])
        found = [[whole(t) for t in listed(fast(batch, a))] for a in numbers]
        return found, fast.reasons

    want = [listed(step(x, a)) for a in numbers]
    with pt.ranks(dp=2) as world:
        (found, reasons), (_, others) = world.run(run)
    assert reasons == others and len(reasons) == captures, reasons
    for one, other in zip(found, want, strict=True):
        for a, b in zip(one, other, strict=True):
            assert type(a) is type(b)
            if isinstance(b, str):
                assert a == b
            else:
                torch.testing.assert_close(a, b, equal_nan=True)
    return reasons


def listed(value):
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", INPUTS)
def test_a_float_is_an_input_of_the_graph(name):
    check(INPUTS[name], [0.1, 0.2, 0.7], 1)


def test_a_float_that_is_no_number_or_has_a_sign_is_another_value_of_the_input():
    check(lambda x, a: torch.full((6,), a).copysign(torch.full((6,), a)), [0.0, -0.0, 2.0], 1)
    check(lambda x, a: x * a, [0.5, math.inf, math.nan], 1)


BRANCHES = {
    "a > b": (lambda x, a: x * a if a > 0.25 else x / a, "0.1 became 0.3, and the program checks"),
    "an eps": (lambda x, a: F.layer_norm(x, (6,), eps=a), "is read as a number"),
    "math": (lambda x, a: x * math.sqrt(a), "is read as a number"),
    "text": (lambda x, a: (x, f"{a:.2f}"), "is read as a number"),
    "text as it is": (lambda x, a: (x, f"{a} {a * 2!r}"), "is read as a number"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_a_number_that_is_branched_on_or_read_is_another_capture_that_names_it(name):
    step, reason = BRANCHES[name]
    reasons = check(step, [0.1, 0.3, 0.1], 2)
    assert "argument[1]: 0.1 became 0.3" in reasons[1] and reason in reasons[1]
    assert "test_floats.py:" in reasons[1]


def test_an_int_is_no_float():
    check(lambda x, a: x.argmax(1) * a, [2, 2.0, 2], 2)


def test_floats_in_a_closure_and_in_containers_of_arguments_are_inputs():
    decay = 0.5

    def step(x, more):
        return x * decay + more["k"][0]

    def run(mesh):
        nonlocal decay
        fast = graph_of(step)
        batch = pt.distribute_tensor(x, mesh, [S(0)])
        found = []
        for i in range(3):
            decay = 0.1 * i
            found.append(whole(fast(batch, {"k": [0.5 * i]})))
        return found, fast.reasons

    with pt.ranks(dp=1) as world:
        ((found, reasons),) = world.run(run)
    assert reasons == ["the first call"]
    for i, value in enumerate(found):
        torch.testing.assert_close(value, x * (0.1 * i) + 0.5 * i)


# -- values read out of tensors --------------------------------------------------------------------


def metrics(x, _):
    loss = x.square().mean()
    return loss, {"loss": loss.item() * 2, "at": x.argmax().item()}, (x > 0).any().item()


def test_what_item_gives_is_delivered_as_a_number():
    def run(mesh):
        fast = graph_of(metrics)
        batch = pt.distribute_tensor(x, mesh, [S(0)])
        return [fast(batch * k, 0)[1:] for k in (1, 2)], fast.reasons

    want = [metrics(x * k, 0)[1:] for k in (1, 2)]
    with pt.ranks(dp=2) as world:
        for found, reasons in world.run(run):
            assert len(reasons) == 1
            for (one, some), (other, any_) in zip(found, want, strict=True):
                assert some is any_ and type(one["at"]) is int and one["at"] == other["at"]
                assert type(one["loss"]) is float
                assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)


def test_what_item_gives_may_be_reckoned_with():
    check(lambda x, a: x / x.norm().item() * a + x.argmax().item(), [1.0, 2.0], 1)


READERS = {
    "float": lambda x: float(x.sum()),
    "text": lambda x: f"{x.sum().item():.3f}",
}


@pytest.mark.parametrize("name", READERS)
def test_a_value_that_python_must_know_is_refused_with_its_line(name):
    def run(mesh):
        graph_of(READERS[name])(pt.distribute_tensor(x, mesh, [S(0)]))

    match = "reads a value.*test_floats"
    with pt.ranks(dp=2) as world, pytest.raises(pt.CaptureError, match=match):
        world.run(run)


@pytest.mark.slow
def test_compiled_code_takes_the_numbers_too():
    def steps(compiled):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = T.AdamW(model.parameters(), lr=0.01)

        def step(x, scale):
            optimizer.zero_grad()
            loss = model(x).square().mean() * scale
            loss.backward()
            optimizer.step()
            return loss.item()

        fast = pt.compile(step) if compiled else step
        losses = []
        for call in range(3):
            losses.append(fast(x, 0.5 + call))
            decaying(optimizer, call)
        return losses, getattr(fast, "reasons", None)

    (want, _), (found, reasons) = steps(False), steps(True)
    assert reasons == ["the first call"] and found == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_compiled_code_takes_the_tensors_that_a_step_makes_of_numbers():
    """As it is compiled, and as it comes out of the store."""
    table = torch.ones(4)

    def step(x):
        table[1] = 7.0
        y = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        y[torch.tensor([0, 2])] = torch.tensor(5.0)
        return y

    for _ in range(2):
        fast = pt.compile(step, backend="inductor")
        for k in (1.0, 2.0):
            table.fill_(k)
            assert fast(torch.full((4,), k)).tolist() == [5.0, 2 * k, 5.0, 4 * k]
            assert table.tolist() == [k, 7.0, k, k]
    assert fast.artifact.loaded and fast.memory.peak > 0


def test_ranks_that_bring_other_numbers_are_told_so():
    def run(mesh):
        number = 0.1 * (1 + mesh.get_local_rank("dp"))
        graph_of(lambda x, a: x * a)(pt.distribute_tensor(x, mesh, [S(0)]), number)

    match = "different numbers"
    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match=match) as caught:
        world.run(run)
    assert "argument[1] = 0.1" in str(caught.value) and "argument[1] = 0.2" in str(caught.value)


class MovingAverage:
    """As people write it: a plain object that holds tensors and a decay."""

    def __init__(self, model, decay):
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p, alpha=1 - self.decay)


def test_the_tensors_and_floats_of_a_plain_object_are_inputs():
    def run(mesh):
        torch.manual_seed(0)
        model = nn.Linear(6, 3) if mesh is None else pt.parallelize(nn.Linear(6, 3), mesh)
        average = MovingAverage(model, 0.5)
        optimizer = T.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.update(model)

        fast = step if mesh is None else graph_of(step)
        for call in range(5):
            fast(x if mesh is None else pt.distribute_tensor(x, mesh, [S(0)]))
            average.decay = 0.5 + 0.05 * call
        return [whole(t) for t in average.shadow.values()], getattr(fast, "reasons", [])

    want, _ = run(None)
    with pt.ranks(dp=2) as world:
        for found, reasons in world.run(run):
            assert reasons == ["the first call"]
            for p, q in zip(found, want, strict=True):
                torch.testing.assert_close(p, q)


def test_code_that_the_library_makes_is_no_part_of_a_user_s_program():
    for make in (
        operand_key,
        lambda names: declared_key([*signature(torch.nn.Linear).parameters.values()]),
    ):
        code = getattr(make(["x", "other"]), "__code__", None)  # in C it has none
        assert code is None or not is_recorded_file(code.co_filename)


@pytest.mark.slow
def test_the_sign_of_a_zero_that_is_read_as_a_number_makes_another_program():
    fast = graph_of(lambda x, s: x * math.copysign(1.0, s))
    for s in (0.0, -0.0, 0.0):
        assert torch.equal(fast(x, s), x * math.copysign(1.0, s))
    assert len(fast.reasons) == 2


def test_a_float_that_the_step_sets_to_a_constant_is_what_the_next_call_reads():
    class Warm:
        factor = None

    def step(x, warm):
        y = x * warm.factor
        warm.factor = 0.25
        return y

    one, other = Warm(), Warm()
    one.factor = other.factor = 0.5
    fast = graph_of(lambda x: step(x, one))
    for _ in range(3):
        assert torch.equal(fast(x), step(x, other)) and one.factor == other.factor


def typed(x, a):
    known = {float: 2.0, int: 3.0}.get(type(a), 5.0)
    made = type("Made", (), {"at": 7})  # in all else it is what Python has
    assert type(type(a)) is type and isinstance(made, type) and type(made()) is made
    return x * a * known if type(a) in (float, int) else x / a


def test_type_of_a_float_is_float():
    check(typed, [0.5, 1, 0.25, 2, np.float64(0.5), np.float64(0.75), 0.5], 4)
    assert "type" not in globals()


def asked(value):
    """What a program may ask of a number beside its value."""
    known = {float: 2.0, int: 3.0, bool: 5.0}[type(value)]
    return known * (7.0 if isinstance(value, float) else 11.0 if isinstance(value, int) else 13.0)


KINDS = {
    "reckoned": lambda x, a: x * asked(a * 2) * asked(1 - a) * asked(a**2) * asked(-a),
    "read": lambda x, a: x * a * asked(x.sum().item()) * asked(x.sum().item() / 2),
    "read, an int": lambda x, a: x * a * asked(x.argmax().item()) * asked(x.argmax().item() + 1),
    "read, a bool": lambda x, a: x * a * asked((x > 0).any().item()),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_reckoned_with_numbers_or_read_is_of_the_class_that_it_has_in_eager(name):
    check(KINDS[name], [0.1, 0.3], 1)


@pytest.mark.slow
def test_a_comparison_is_true_or_false_itself():
    step = lambda x, a: (x * (2.0 if (a > 0.5) is True else 3.0), a > 0.5)  # noqa: E731
    check(step, [0.1, 0.3, 0.7, 0.4], 2)


@pytest.mark.slow
def test_a_copy_of_a_float_is_that_float():
    step = lambda x, a: x if copy.deepcopy({"a": a})["a"] > 0.5 else -x  # noqa: E731
    check(step, [0.1, 0.7, 0.1], 2)


class Said:
    text = ""


TEXTS = {
    "of a tensor": lambda x: (x, f"loss {x.sum()}"),
    "as it is": lambda x: {"x": x, "text": repr(x)},
    "of what was read": lambda x: (x, str(x.sum().item())),
    "that is left": lambda x: (setattr(Said, "text", str(x)), x)[1],
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_what_has_no_value_yet_does_not_leave_the_step(name):
    with pytest.raises(
        pt.CaptureError, match=r"formatted from a tensor|a str that .* in Said.text|reads a value"
    ):
        graph_of(TEXTS[name])(x)
    assert Said.text == ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, y, a: torch.add(x, y, alpha=a),
        lambda x, y, a: torch.rsub(x, y, alpha=a),
        lambda x, y, a: x.clone().sub_(y, alpha=a),
        lambda x, y, a: torch._foreach_add([x], [y], alpha=a)[0],
        lambda x, y, a: torch.addcdiv(x, x, y, value=a),
        lambda x, y, a: x.lerp(y, a),
    ],
)
def test_what_is_scaled_and_added_in_few_bits_is_rounded_as_in_eager(call, dtype):
    x, y = torch.randn(2, 4096).to(dtype).unbind()  # a multiple of what vectors of any kernel hold
    step = pt.compile(call, backend="graph")
    for number in (0.3, 0.7):
        assert torch.equal(step(x, y, number), call(x, y, number))


# -- one number in several places ------------------------------------------------------------------


SUM = object()


def grouped(settings):
    """A step that reads an optimizer's groups, which share the settings of `settings(value)`."""
    layer = nn.Linear(6, 2)
    groups = [{"params": [p]} for p in layer.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)

    def step(x, mode):
        layer(x).square().sum().backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return x.sum() if mode is SUM else x.mean()

    def arguments(value):
        shared = settings(value)
        for group in optimizer.param_groups:
            group.update(shared)
        return (SUM,)

    return step, arguments


def given(take):
    """A step of arguments that `take(value)` returns."""

    def step(x, one, other):
        some = one if isinstance(one, float) else one["a"] + one["b"]
        return x * some + (0 if other is SUM else 1)

    return step, take


SHARED = {
    "rates": lambda: grouped(lambda value: {"lr": value}),
    "betas": lambda: grouped(lambda value: {"betas": (value, 0.999)}),
    "arguments": lambda: given(lambda value: (value, value)),
    "items": lambda: given(lambda value: ({"a": value, "b": value}, None)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_one_float_in_several_places_is_an_input_though_the_step_compares_objects(name):
    step, arguments = SHARED[name]()
    compiled = graph_of(step)
    for call in range(5):
        compiled(x, *arguments(0.5 / (call + 1)))
    assert compiled.reasons == ["the first call"]


def test_equal_numbers_and_texts_need_not_be_one_object_on_all_ranks():
    def train(mesh):
        layer = pt.zero(nn.Linear(6, 2), mesh)
        compiled = graph_of(lambda x, one, other: layer(x).sum() * (one is not layer))
        for call in range(4):
            first, again = int("1000"), int("1000")
            text = "".join(["a", "b"])
            is_one = (mesh.get_rank() == 0) == (call % 2 == 0)
            data = pt.distribute_tensor(x, mesh, [S(0)])
            compiled(data, [first, text], [first if is_one else again, text if is_one else "ab"])
        return compiled.reasons

    with pt.ranks(dp=2) as world:
        assert [*world.run(train)] == [["the first call"]] * 2


def test_a_number_that_differed_on_ranks_in_one_call_is_found_in_a_later_one():
    def body(mesh):
        x = pt.distribute_tensor(torch.ones(4), mesh, [pt.Shard(0)])
        step = pt.compile(lambda x, by: x * by, backend="graph")
        for call in range(70):
            step(x, 0.5 + (mesh.get_rank() if call == 20 else 1 / (call + 2)))

    with pt.ranks(a=2) as world, pytest.raises(pt.LayoutError, match="different numbers"):
        world.run(body)
