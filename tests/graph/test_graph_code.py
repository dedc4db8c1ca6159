"""A graph runs as code that is written from its nodes."""

import gc
import weakref

import pytest
import torch
from torch import fx

import partita as pt
from partita.graph.backend.executor import make_graph_function
from partita.graph.errors import CaptureError
from partita.graph.graph_nodes import lazy_graph_module
from partita.graph.passes import PASSES
from partita.graph.verify import IllegalGraph


def test_a_value_is_dropped_behind_the_last_line_that_reads_it():
    made = []

    def make(x):
        made.append(weakref.ref(y := x + 1))
        return y

    def there(*read):
        return [ref() is not None for ref in made]

    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(make, (x,))  # nobody reads it
    y = graph.call_function(make, (x,))
    first = graph.call_function(there, (y,))
    then = graph.call_function(there, (x,))
    graph.output([first, then, y_kept := graph.call_function(make, (x,))])
    assert y_kept.users
    run = make_graph_function(lazy_graph_module(torch.nn.Module(), graph), {})
    assert run(torch.ones(2))[:2] == [[False, True], [False, False]]


def test_numbers_lists_and_constants_of_a_graph_are_what_they_were():
    root = torch.nn.Module()
    root.constant = torch.arange(3.0)
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("constant")
    aten = torch.ops.aten
    filled = graph.call_function(aten.full_like.default, (x, float("-inf")))
    sums = graph.call_function(aten.sum.dim_IntList, (c, [0], True), {"dtype": torch.float64})
    both = graph.call_function(aten.cat.default, ([x, c],))
    graph.output([filled, sums, both, None, 0.1])
    found = make_graph_function(lazy_graph_module(root, graph), {})(torch.ones(2))
    assert found[0].tolist() == [float("-inf")] * 2
    assert found[1].dtype is torch.float64 and found[1].tolist() == [3.0]
    assert found[2].tolist() == [1, 1, 0, 1, 2] and found[3:] == [None, 0.1]


def test_an_error_of_a_call_says_the_users_line_and_holds_no_value():
    def captured(x, i):
        return (x * 2)[i]

    line = captured.__code__.co_firstlineno + 1
    f = pt.compile(captured, backend="graph")
    f(torch.ones(4), torch.tensor([1]))
    with pytest.raises(IndexError) as raised:
        f(torch.ones(4), torch.tensor([9]))
    assert any(f"test_graph_code.py:{line}" in note for note in raised.value.__notes__)
    at = raised.value.__traceback__
    while at.tb_frame.f_code.co_filename != "<captured step>":
        at = at.tb_next
    assert at.tb_frame.f_locals == {}


@pytest.mark.parametrize("each", ("0", "1"))
def test_a_pass_of_ours_that_breaks_the_grammar_is_found(monkeypatch, each):
    def broken(program):
        (end,) = program.graph.graph.find_nodes(op="output")
        end.args = ([*end.args[0], end.args[0][0]],)

    monkeypatch.setenv("PARTITA_VERIFY", each)
    monkeypatch.setitem(PASSES, "cancel", broken)
    step = pt.compile(lambda x: x.sin(), backend="graph")
    said = "after cancel" if each == "1" else "after the passes"
    with pytest.raises(IllegalGraph, match=said):
        step(torch.ones(2))


def test_no_code_of_a_graph_module_is_made_until_somebody_asks(monkeypatch):
    made = []
    inner = fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *a, **k: made.append(1) or inner(*a, **k))
    step = pt.compile(lambda x: x.sin() * 2, backend="graph")
    assert torch.equal(step(torch.ones(2)), torch.ones(2).sin() * 2)
    assert not made
    assert "sin" in step.program.graph.code and made


def test_the_collector_is_on_again_after_a_capture_that_fails_too():
    assert gc.isenabled()

    def branches(x):
        return x + float(x.sum())

    with pytest.raises(CaptureError):
        pt.compile(branches, backend="graph")(torch.ones(2))
    assert gc.isenabled()
    pt.compile(lambda x: x + 1, backend="graph")(torch.ones(2))
    assert gc.isenabled()
    gc.disable()
    try:
        pt.compile(lambda x: x + 2, backend="graph")(torch.ones(2))
        assert not gc.isenabled()
    finally:
        gc.enable()
