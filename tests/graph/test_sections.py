"""Does a graph do the same when it is cut into sections, of which equal ones are one?

The sections run as graphs here, so that what is compared is the cutting, bit for bit.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import partita as pt
from partita.graph.backend import executor as run
from partita.graph.backend import inductor
from partita.graph.backend.section_cutter import sections_of
from partita.graph.graph_text import repeats_of
from tests.programs.steps import squares

WIDTH = 8


@pytest.fixture
def cut():
    """Compiles a step to run in sections, a short one too; `cut.found` is what each is cut into."""

    def cut(step):
        def make_callable(program, wires):
            sections = sections_of(program, always=True)
            cut.found.append(sections)
            if sections is None:
                return run.make_graph_function(program.graph, program.groups)
            calls = {
                one: cut.runs(run.make_graph_function(one.graph, {})) for one in sections.different
            }
            return run.make_graph_function(sections.outer, program.groups, calls)

        compiled = whole(step)
        compiled.make_callable = make_callable
        return compiled

    cut.found, cut.runs = [], emptying
    return cut


def whole(step):
    return pt.compile(step, backend="graph", blocks=True, sections=True)


def emptying(function):
    def call(taken):
        inputs = [*taken]
        taken.clear()
        return function(*inputs)

    return call


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a, b = self.linear(self.norm(x)).chunk(2, -1)
        return x + torch.cat([a.sigmoid() * b, b.tanh()], -1)


class Counting(Layer):
    def __init__(self):
        super().__init__()
        self.batch, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.batch(super().forward(x)))


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def trained(kind, mesh=None, how=lambda step: step, optimizer=adam, stage=3, layers=5):
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(layers)))
    x = torch.randn(4, WIDTH)
    if mesh is not None:
        pt.zero(model, mesh, stage=stage)
        x = pt.distribute_tensor(x, mesh, [pt.Shard(0)])
    step = how(squares(model, optimizer(model)))
    losses = [step(x) for _ in range(3)]
    values = [*losses, *model.state_dict().values()]
    return [v.full_tensor() if isinstance(v, pt.DTensor) else v for v in values]


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [adam, momentum])
@pytest.mark.parametrize("kind", [Layer, Counting])
def test_a_step_of_equal_layers_is_the_graph_s_and_a_few_sections(kind, optimizer, cut):
    wanted = trained(kind, how=whole, optimizer=optimizer)
    assert_equal(trained(kind, how=cut, optimizer=optimizer), wanted)
    (sections,) = cut.found
    assert sections.calls > len(sections.different)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharded_step_is_the_graph_s(stage, cut):
    def body(mesh):
        wanted = trained(Layer, mesh, whole, stage=stage)
        assert_equal(trained(Layer, mesh, cut, stage=stage), wanted)

    with pt.ranks(dp=2) as world:
        world.run(body)
    assert len(cut.found) == 2 and None not in cut.found


@pytest.mark.slow
def test_more_layers_are_more_calls_of_the_same_sections(cut):
    for layers in (6, 12):
        trained(Layer, how=cut, layers=layers)
    few, many = cut.found
    assert many.calls > few.calls + 6
    keys = {one.key for one in few.different}
    assert len({one.key for one in many.different} - keys) <= 3  # where the ends are
    assert many.nodes < 1.1 * few.nodes


# -- what is written, and what only shows memory ---------------------------------------------------


def exchange(x, y):
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return x + y


def swap_through_views(x, y):
    a, b = x.view(-1) * 1, y.t()
    x.copy_(b)
    y.view(-1).copy_(a)
    return x.sum(0), y.sum(1)


def read_then_written(x, y):
    z = x * 2
    for _ in range(6):
        z = (z + x).sin() * y
    x.add_(z)
    return z, x.view(-1)[2:5]


def pieces(x, y):
    a, b = x.split([1, 2])
    for _ in range(6):
        a, b = torch.max(torch.cat([a, b * y[0]]).cos(), 0).values[None], b.sin()
    return a, b, x.t()


def drawn(x, y):
    for _ in range(6):
        x = torch.nn.functional.dropout(x + torch.rand_like(y), 0.4)
    return x


def constants(x, y):
    for _ in range(6):
        x = (x * torch.tensor([1.0, 2.0, 3.0])).tanh()
    return x + torch.tensor(2.5)


def looks_only(x, y):
    return x.t(), y[1:]


STEPS = (exchange, swap_through_views, read_then_written, pieces, drawn, constants, looks_only)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_that_writes_shows_or_draws_is_the_graph_s(step, cut):
    def ran(step):
        x, y = torch.arange(9.0).view(3, 3) / 7, torch.arange(9.0).view(3, 3).cos()
        torch.manual_seed(0)
        outs = [step(x, y), step(x, y)]
        flat = [t for out in outs for t in (out if isinstance(out, tuple) else (out,))]
        return [*flat, x, y, torch.rand(1)]

    assert_equal(ran(cut(step)), ran(whole(step)))
    assert len(cut.found) == 1


@pytest.mark.slow
def test_what_a_section_reads_last_nobody_else_holds(cut):
    held = []

    def counting(function):
        def call(taken):
            inputs = [*taken]
            taken.clear()
            held.append([sys.getrefcount(inputs[i]) for i in range(len(inputs))])
            return function(*inputs)

        return call

    cut.runs = counting
    trained(Layer, how=cut)
    assert min(map(min, filter(None, held))) == 2  # the list here, and what counts


# -- repeats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "least", "found"),
    [
        ("abcabcabc", 1, (range(9), 3)),
        ("xyabcabcabcz", 1, (range(2, 11), 3)),
        ("aaaaaaaa", 3, (range(8), 3)),
        ("abababcdcdcdcdcd", 2, (range(6, 16), 2)),
        ("aabaabaab", 3, (range(9), 3)),
        ("abcdef", 1, None),
        ("abcabd", 1, None),
        ("", 1, None),
    ],
)
def test_the_longest_part_that_repeats_itself_is_found(calls, least, found):
    assert repeats_of(calls, least) == found


def test_all_sections_that_are_not_stored_are_lowered_before_one_waits_for_its_kernels():
    events = []

    class Section:
        error = None

        def __init__(self, is_stored):
            self.built, self.is_stored = None, is_stored

        @property
        def is_missing(self):
            return self.built is None

        def attempt(self, do):
            if self.is_missing:
                do()

        def load(self):
            self.built = "loaded" if self.is_stored else None

        def lower(self, kernels):
            events.append("lower")

        def finish(self):
            events.append("wait")
            self.built = "compiled"

    sections = [Section(is_stored) for is_stored in (False, True, False)]
    found = inductor.build_together(sections, [], lambda *numbers: events.append(numbers))
    assert found == ["compiled", "loaded", "compiled"]
    assert events == [(1, 3), "lower", (3, 3), "lower", "wait", "wait"]
