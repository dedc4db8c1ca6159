"""What hangs on tensors and modules beside parameters, and what a step does that nobody reads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import partita as pt
from partita.guards.inputs import find_state

X = torch.arange(12.0).view(4, 3) + 1


def compiled(step):
    return pt.compile(step, backend="graph")


def descend(model):
    """A step that asks each parameter how fast it learns."""

    def step(x):
        model(x).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.001 * getattr(p, "lr_mult", 1.0))
                p.grad = None

    return step


def train_by_attributes(mesh, stage):
    torch.manual_seed(0)
    truth = nn.Linear(3, 3)
    model = copy.deepcopy(truth)
    x = X
    if mesh is not None:
        model = pt.zero(model, mesh, stage=stage) if stage else pt.parallelize(model, mesh)
        x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
    fast, slow = compiled(descend(model)), descend(truth)
    for k in range(4):
        if k:
            model.weight.lr_mult = truth.weight.lr_mult = float(k // 2)
        fast(x)
        slow(X)
    found = model.weight if mesh is None else model.weight.full_tensor()
    torch.testing.assert_close(found, truth.weight)
    return fast.reasons


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_attributes_of_parameters_are_read_and_guarded(stage):
    with pt.ranks(dp=2) as world:
        reasons = world.run(train_by_attributes, stage)[0]
    assert len(reasons) == 3 and "lr_mult: 0.0 became 1.0" in reasons[-1]
    assert train_by_attributes(None, 0) == reasons


@pytest.mark.parametrize("name", ["seen", "_seen"])
def test_an_attribute_that_a_step_gives_a_parameter_is_refused(name):
    model = nn.Linear(3, 3)

    def step(x):
        setattr(model.weight, name, True)
        return model(x)

    with pytest.raises(pt.CaptureError, match=rf"the step sets model\.weight\.{name}"):
        compiled(step)(X)
    assert not hasattr(model.weight, name)


def test_an_attribute_of_any_name_is_read_and_one_that_comes_to_be_there_is_seen():
    model = nn.Linear(3, 3, bias=False)
    model.weight._no_weight_decay = True
    step = compiled(lambda x: x * 2 if getattr(model.weight, "_no_weight_decay", False) else x)
    assert torch.equal(step(X), X * 2)
    del model.weight._no_weight_decay
    assert torch.equal(step(X), X)
    model.weight._no_weight_decay = True
    assert torch.equal(step(X), X * 2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3))
        self.w.scale = 3.0

    def forward(self, x):
        assert isinstance(self.w, nn.Parameter) and self.get_parameter("w") is self.w
        self.w.calls = getattr(self.w, "calls", 0) + 1
        return x @ self.w.T * self.w.scale


def scaled(mesh, stage):
    model = pt.zero(nn.Sequential(Scaled()), mesh, stage=stage)
    x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
    shard = model[0].w
    hook = model[0].register_forward_hook(lambda *_: setattr(shard, "heard", True))
    out = [model(x).full_tensor() for _ in range(2)]
    hook.remove()
    assert model[0].w.calls == 2 and model[0].w.heard
    return out[0]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gathered_parameter_has_the_attributes_of_its_shard(stage):
    with pt.ranks(dp=3) as world:
        for found in world.run(scaled, stage):
            assert torch.equal(found, Scaled()(X))


HOW = {
    "data": lambda w: w.data.mul_(0.9),
    "no_grad": lambda w: torch.no_grad()(w.mul_)(0.9),
    "detach": lambda w: w.detach().mul_(0.9),
    "set data": lambda w: setattr(w, "data", w.data * 0.9),
}


class Shrinking(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.w, self.how = nn.Parameter(torch.ones(3, 3)), HOW[how]

    def forward(self, x):
        self.how(self.w)
        return (x @ self.w).sum()


def shrink(mesh, how):
    model = pt.zero(nn.Sequential(Shrinking(how)), mesh, stage=3)
    x = pt.distribute_tensor(X, mesh, [pt.Shard(0)])
    step = compiled(lambda x: model(x))
    return torch.stack([step(x).full_tensor() for _ in range(3)])


@pytest.mark.parametrize("how", HOW)
def test_what_a_forward_writes_into_a_gathered_parameter_goes_into_its_shards(how):
    alone = Shrinking(how)
    truth = torch.stack([alone(X) for _ in range(3)])
    with pt.ranks(dp=3) as world:
        for found in world.run(shrink, how):
            torch.testing.assert_close(found, truth)


class Holding(nn.Module):
    cache = None

    def __init__(self):
        super().__init__()
        self.mask, self.more, self.last = torch.ones(3), [torch.zeros(3)], None

    def forward(self, x):
        if self.cache is None:
            self.cache = x * 2
        if self.last is not None:
            x = x + self.last
        self.last = x.detach()
        return x * self.mask + self.more[0] + self.cache


def test_tensors_in_attributes_of_modules_are_inputs():
    alone = Holding()
    model = copy.deepcopy(alone)
    step = compiled(lambda x: model(x))
    for k in range(5):
        if k == 3:
            for m in (alone, model):
                m.mask, m.more[0] = torch.full((3,), 2.0), torch.ones(3)
        assert torch.equal(step(X + k), alone(X + k))


def unread(x):
    torch.rand(4), torch.randperm(5), torch.multinomial(x, 2)
    return x + torch.rand(4, 1)


def unread_dropout(x):
    nn.functional.dropout(x, 0.5)
    return unread(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "backend"), [(unread, "inductor"), (unread, "graph"), (unread_dropout, "graph")]
)
def test_numbers_that_nobody_reads_are_drawn(step, backend):
    torch.manual_seed(0)
    truth = step(X), torch.rand(2)
    torch.manual_seed(0)
    found = pt.compile(step, backend=backend)(X), torch.rand(2)
    assert all(map(torch.equal, found, truth))


@pytest.mark.slow
def test_inductor_says_that_it_does_not_draw_a_dropout_that_nobody_reads():
    with pytest.warns(UserWarning, match="skips the random numbers of an unused dropout"):
        pt.compile(unread_dropout)(X)


def test_running_statistics_are_counted_though_nobody_reads_what_was_normalized():
    alone = nn.BatchNorm1d(3)
    model = copy.deepcopy(alone)

    def step_of(m):
        def step(x):
            m.train()
            m(x)
            m.eval()
            return m(x)

        return step

    assert torch.equal(compiled(step_of(model))(X), step_of(alone)(X))
    assert torch.equal(model.running_var, alone.running_var)


def test_a_class_that_its_own_method_names_is_guarded():
    class Weighted:
        k = 1

        def of(self, x):
            return x * Weighted.k

    weighted = Weighted()
    step = compiled(lambda x: weighted.of(x))
    step(X)
    Weighted.k = 4
    assert torch.equal(step(X), X * 4)


def test_where_a_tensor_lies_is_part_of_a_program():
    class Held:
        t = None

    held = Held()
    held.t = torch.arange(6.0).view(2, 3)
    step = compiled(lambda x: x * held.t.flatten())
    step(torch.ones(6))
    held.t = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(step(torch.ones(6)), held.t.flatten())

    model = nn.Linear(3, 3, bias=False)
    asked = compiled(lambda x: x * model.weight.is_contiguous())
    asked(X)
    model.weight.data = model.weight.data.t()
    assert torch.equal(asked(X), X * 0)


def test_what_tensors_do_not_reckon_is_refused():
    with pytest.raises(pt.CaptureError, match=r"round\(x\) of a value that \.item\(\) returned"):
        compiled(lambda x: round(x.sum().item(), 1))(X)


class Lazy(nn.Module):
    def forward(self, x):
        self.register_buffer("last", x * 2)
        return x + self.last


class Known(Lazy):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))


@pytest.mark.parametrize("make", [Known, lambda: called(Lazy())])
def test_a_buffer_is_registered_in_a_step_by_each_way_that_the_refusal_of_a_new_one_names(make):
    with pytest.raises(pt.CaptureError, match=r"registers lazy.last, a buffer .*(?s:.*)__init__"):
        compiled(Lazy())(X)
    model = make()
    step = compiled(model)
    for x in (X, X + 1):
        assert torch.equal(step(x), x * 3) and torch.equal(model.last, x * 2)


def called(model):
    model(X)
    return model


def test_what_is_left_in_a_list_is_said_at_the_line_of_the_call():
    kept = []

    def step(x):
        kept.append(x.sum())
        return x

    with pytest.raises(pt.CaptureError, match=r"leaves a tensor in .* \(at .*attributes\.py:\d+\)"):
        compiled(step)(X)


def test_each_tensor_of_a_module_stands_at_one_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    slots = find_state(lambda x: model(x), (), (), {}).slots
    assert len(slots) == len(model.state_dict())
