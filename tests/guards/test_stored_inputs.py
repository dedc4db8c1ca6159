"""A captured step stores the same objects as eager code, in the same places."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import partita as pt


def graph_of(step):
    return pt.compile(step, backend="graph")


def both_ways(make):
    """Runs a program eagerly and captured; returns both results."""
    return make(lambda step: step), make(graph_of)


# -- attributes of classes -------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["D", "E", "Base"])
def test_an_inherited_attribute_that_a_step_sets_becomes_one_of_the_class_itself(reads):
    def run(compiled):
        class Base:
            h = torch.zeros(3)

        class D(Base):
            pass

        class E(Base):
            pass

        where = {"D": D, "E": E, "Base": Base}[reads]

        def step(x):
            D.h = D.h + x.sum()
            return D.h * 2 + where.h

        step = compiled(step)
        found = [step(torch.ones(3)).tolist() for _ in range(3)]
        Base.h = torch.full((3,), 7.0)
        found += [step(torch.ones(3)).tolist() for _ in range(2)]
        del D.h
        found += [step(torch.ones(3)).tolist() for _ in range(2)]
        assert all(type(k.h) is torch.Tensor for k in (Base, D, E))
        return found, Base.h.tolist(), D.h.tolist(), "h" in vars(D), "h" in vars(E)

    eager, captured = both_ways(run)
    assert captured == eager


def test_an_attribute_that_hides_an_inherited_one_later_is_seen():
    class Base:
        h = torch.ones(2)
        scale = 2.0

    class D(Base):
        pass

    step = graph_of(lambda x: x * D.h * D.scale)
    x = torch.ones(2)
    assert step(x).tolist() == [2, 2]
    D.h = torch.full((2,), 3.0)
    assert step(x).tolist() == [6, 6]
    D.scale = 5.0
    assert step(x).tolist() == [15, 15]
    del D.h, D.scale
    assert step(x).tolist() == [2, 2]


# -- tensors of the call that are stored -----------------------------------------------------------


def test_a_weight_that_a_step_ties_is_the_parameter_itself():
    def run(compiled):
        torch.manual_seed(0)
        m = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        x = torch.arange(6.0, dtype=torch.float64).view(2, 3)

        def tie(x):
            m[1].weight = m[0].weight
            return x * 1

        def step(x):
            optimizer.zero_grad()
            loss = m[1](m[0](x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        compiled(tie)(x)
        step = compiled(step)
        losses = [step(x).item() for _ in range(3)]
        return losses, m[1].weight is m[0].weight, len([*m.parameters()]), type(m[1].weight)

    eager, captured = both_ways(run)
    assert captured[1:] == eager[1:]
    assert captured[0] == pytest.approx(eager[0])


def test_parameters_and_arguments_that_change_places_stay_the_same_objects():
    def run(compiled):
        m, held = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), SimpleNamespace(x=None)
        one, other = m[0].weight, m[1].weight

        def step(x):
            m[0].weight, m[1].weight = m[1].weight, m[0].weight
            held.x = x
            return (m[0].weight * 2).sum() + x.sum() * 0

        step, found = compiled(step), []
        for _ in range(3):
            x = torch.ones(2)
            step(x)
            found.append((m[0].weight is other, m[1].weight is one, held.x is x))
        return found

    eager, captured = both_ways(run)
    assert captured == eager == [(True, True, True), (False, False, True), (True, True, True)]


def test_a_parameter_that_is_kept_under_another_name_gets_gradients_there():
    m, kept = nn.Linear(2, 2), SimpleNamespace(w=None)

    def step(x):
        kept.w = m.weight
        return m(x).sum()

    graph_of(step)(torch.ones(1, 2))
    assert kept.w is m.weight
    kept.w.square().sum().backward()
    assert torch.equal(m.weight.grad, 2 * m.weight.detach())


# -- keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    name: str
    scale: float = field(compare=False, default=1.0)


class Text(str):
    scale = 1.0


def text(scale):
    made = Text("a")
    made.scale = scale
    return made


@pytest.mark.parametrize("make", [lambda s: Named("a", s), text], ids=["dataclass", "str"])
@pytest.mark.parametrize("hold", [lambda k: {k: 1}, lambda k: {k}, lambda k: frozenset([k])])
def test_a_key_that_equals_another_is_not_taken_for_it(make, hold):
    state = SimpleNamespace(held=hold(make(2.0)))
    held = graph_of(lambda x: x * next(iter(state.held)).scale)
    given = graph_of(lambda x, d: x * next(iter(d)).scale)
    x = torch.ones(2)
    for scale in (2.0, 5.0, 5.0):
        state.held = hold(make(scale))
        assert held(x).tolist() == given(x, state.held).tolist() == [scale, scale]


def test_keys_of_arguments_that_are_equal_but_of_another_type_are_seen():
    step = graph_of(lambda x, d: x * (2 if True in [k is True for k in d] else 3))
    x = torch.ones(1)
    assert [step(x, d).item() for d in ({1: 0}, {True: 0}, {1: 0}, {1.0: 0})] == [3, 2, 3, 3]


# -- classes that are dropped ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_class_that_a_step_has_used_is_freed_with_what_its_functions_hold():
    def use():
        m = nn.Linear(2, 2)

        class Settings:
            scale = 2.0

            def model(self):
                return m

        one = Settings()
        step = graph_of(lambda x: one.model()(x) * one.scale)
        step(torch.ones(1, 2))
        return weakref.ref(m), weakref.ref(Settings)

    found = use()
    gc.collect()
    assert [ref() for ref in found] == [None, None]


# -- data and shapes -------------------------------------------------------------------------------


def test_data_that_are_replaced_between_forward_and_backward_are_refused_under_zero_3():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.g = (nn.Parameter(torch.full((4,), 0.5)) for _ in range(2))

        def forward(self, x):
            return x * self.w * self.g

    def program(mesh, when):
        model = pt.zero(Scaled(), mesh)

        def step(x):
            model.zero_grad()
            loss = model(x).sum()
            if when == "before":
                model.g.data = model.g.data * 3
            loss.backward()
            if when == "after":
                model.g.data = model.g.data * 3
            return loss

        x = pt.distribute_tensor(torch.ones(2, 4), mesh, [pt.Shard(0)])
        step = graph_of(step)
        return [step(x).item() for _ in range(2)], model.w.grad.full_tensor().tolist()

    with pt.ranks(dp=2) as world:
        assert world.run(lambda mesh: program(mesh, "after"))[0] == ([2, 6], [3] * 4)
        with pytest.raises(pt.CaptureError, match="other memory between its forward and its"):
            world.run(lambda mesh: program(mesh, "before"))


def view_and_change(change, views=True, of_view=False):
    def program(x):
        t = x + x
        v = t[1:] if views else t.detach()
        changed = v if of_view else t
        change(changed)
        weights = torch.arange(float(t.numel()))
        return t * weights.view(t.shape), v * weights[: v.numel()].view(v.shape)

    return program


@pytest.mark.parametrize("change", [lambda t: t.t_(), lambda t: t.unsqueeze_(0)], ids=["t", "un"])
def test_a_shape_that_changes_in_place_below_views_is_refused(change):
    x = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(pt.CaptureError, match="changes the shape of a tensor in place"):
        graph_of(view_and_change(change))(x)
    for program in (view_and_change(change, views=False), view_and_change(change, of_view=True)):
        found = []
        for step in (program, graph_of(program)):
            sum(t.sum() for t in step(x)).backward()
            found.append(x.grad)
            x.grad = None
        assert torch.equal(*found)


def test_views_that_are_not_read_after_their_base_has_changed_shape_are_no_reason_to_refuse():
    def program(x):
        t = (x * 2)[:, :1] * 1
        seen = t.detach().view(-1).mean() + t[:1].sum()
        rows = t.view(-1).shape[0]
        t[0] = 0
        t.squeeze_(-1)
        return t * rows + seen

    x, found = torch.randn(3, 3, requires_grad=True), []
    for step in (program, graph_of(program)):
        step(x).sum().backward()
        found.append(x.grad)
        x.grad = None
    assert torch.equal(*found)


class Keyed:
    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return self.name == other.name


def test_keys_made_anew_for_each_call_are_compared_by_what_they_hold():
    step = graph_of(lambda x, d: x * next(iter(d)).scale)
    x = torch.ones(1)
    scales = [2.0, 2.0, 5.0, 5.0, 2.0]
    assert [step(x, {Keyed("a", s): 0}).item() for s in scales] == scales
    assert len(step.reasons) == 2


# -- gradients -------------------------------------------------------------------------------------


def set_argument(m, x, y):
    m.w.grad = y
    (m.w * x).sum().backward()


def set_buffer(m, x, y):
    m.w.grad = m.b


def exchange_gradients(m, x, y):
    (m.w * x + m.v * y).sum().backward()
    m.w.grad, m.v.grad = m.v.grad, m.w.grad


def set_gradient_of_another(m, x, y):
    (m.w * x).sum().backward()
    m.v.grad = m.w.grad


@pytest.mark.parametrize("on_a_mesh", [False, True])
@pytest.mark.parametrize(
    "change", [set_argument, set_buffer, exchange_gradients, set_gradient_of_another]
)
def test_a_gradient_that_is_set_to_an_input_is_left(change, on_a_mesh):
    def program(mesh, compiled):
        def place(t):
            return t if mesh is None else pt.distribute_tensor(t, mesh, [pt.Shard(0)])

        m = nn.Module()
        m.w, m.v = (nn.Parameter(place(torch.arange(4.0) + i)) for i in range(2))
        m.register_buffer("b", place(torch.arange(4.0)))
        step = compiled(lambda x, y: change(m, x, y))
        seen = []
        for i in range(3):
            x, y = place(torch.arange(4.0) * (i + 1)), place(torch.arange(4.0) + i)
            step(x, y)
            seen += [m.w.grad, m.v.grad, y, m.b]
            seen = [t if t is None else t.clone() for t in seen]
        return [t.full_tensor().tolist() if mesh and t is not None else t for t in seen]

    right = [t if t is None else t.tolist() for t in program(None, lambda step: step)]
    if on_a_mesh:
        with pt.ranks(a=2) as world:
            assert world.run(program, graph_of) == [right] * 2
    else:
        found = program(None, graph_of)
        assert [t if t is None else t.tolist() for t in found] == right


@pytest.mark.parametrize("how", ["class method", "class as state"])
def test_the_attributes_of_a_class_are_inputs(how):
    class Scale:
        by = torch.ones(2)
        times = 2.0

        @classmethod
        def apply(cls, x):
            return x * cls.by * cls.times

    if how == "class method":
        step = pt.compile(Scale.apply, backend="graph")
    else:
        step = pt.compile(lambda x: Scale.apply(x), state=[Scale], backend="graph")
    x = torch.arange(2.0)
    assert torch.equal(step(x), Scale.apply(x))
    Scale.by = torch.full((2,), 3.0)
    assert torch.equal(step(x), Scale.apply(x))
    Scale.times = 5.0
    assert torch.equal(step(x), Scale.apply(x))
    Scale.by.mul_(2)
    assert step(x).tolist() == [0, 30]
