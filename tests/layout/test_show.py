"""Is what `pt.show` draws seen on terminals, in files and in notebooks?"""

from __future__ import annotations

import io
import sys
import types
from html import escape

import pytest
import torch
from torch import nn

import partita as pt
from partita.layout import Layout, LayoutError

WEIGHT = """\
f32[7@dp, 16@tp] on dp=2 tp=2
dim 0↓ 1→   0:8   8:16
          ┌─────┬──────┐
      0:4 │  0  │  1   │
          ├─────┼──────┤
      4:7 │  2  │  3   │
          └─────┴──────┘
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def weight(mesh):
    return pt.zeros(7, 16, device_mesh=mesh, placements=[pt.Shard(0), pt.Shard(1)])


def test_a_tensor_is_drawn_as_text_without_a_word_between_ranks():
    def program(mesh):
        x, out = weight(mesh), io.StringIO()
        with pt.ledger() as log:
            assert pt.show(x, out=out) is None
        return out.getvalue(), log.moves

    with pt.ranks(dp=2, tp=2) as world:
        assert world.run(program) == [(WEIGHT, [])] * 4


def test_a_terminal_has_colours_where_rich_is(monkeypatch):
    x = weight(pt.dry_mesh(dp=2, tp=2))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    pt.show(x, out=out)
    assert "\x1b[" in out.getvalue() and "dp=2 tp=2" in out.getvalue()
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    plain = Terminal()
    pt.show(x, out=plain)
    assert plain.getvalue() == WEIGHT


def test_a_stream_of_few_characters_gets_lines_that_it_can_write():
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "ascii", write_through=True)
    pt.show(weight(pt.dry_mesh(dp=2, tp=2)), out=out)
    assert b"+-----+------+" in raw.getvalue()


def test_a_model_shows_its_parameters_those_alike_once():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pt.parallelize(model, pt.dry_mesh(tp=2), {"*.weight": {"tp": pt.Shard(0)}})
    out = io.StringIO()
    pt.show(model, out=out)
    heads = [line for line in out.getvalue().splitlines() if " on tp=2" in line]
    assert heads == [
        "0.weight and 1 more  f32[8@tp, 8] on tp=2",
        "0.bias and 1 more  f32[8] on tp=2",
    ]


def test_a_layout_is_drawn_on_the_mesh_that_is_given():
    mesh, out = pt.dry_mesh(dp=2, tp=2), io.StringIO()
    pt.show(Layout.parse("f32[7@dp, 16@tp]"), mesh, out=out)
    assert out.getvalue() == WEIGHT


def test_a_notebook_shows_html_with_the_rank_s_piece():
    def program(mesh):
        x = pt.distribute_tensor(torch.arange(4.0), mesh, [pt.Shard(0)])
        pending = pt.DTensor.from_local(torch.ones(3), mesh, [pt.Partial()])
        with pt.ledger() as log:
            return x._repr_html_(), pending._repr_html_(), log.moves

    with pt.ranks(dp=2) as world:
        (_, _, _), (html, pending, moves) = world.run(program)
    assert moves == []
    assert "rank 1 holds tensor([2., 3.])" in html and "f32[4@dp] on dp=2" in html
    assert "0 + 1" in pending and "repeating-linear-gradient" in pending


class ZMQInteractiveShell:
    """What IPython's `get_ipython` gives in a notebook, by its name."""


NOTEBOOK = types.SimpleNamespace(get_ipython=ZMQInteractiveShell)


def test_in_a_notebook_show_gives_what_it_shows(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", NOTEBOOK)
    shown = pt.show(weight(pt.dry_mesh(dp=2, tp=2)))
    assert str(shown) + "\n" == WEIGHT
    assert shown._repr_html_().count('class="partita-layout"') == 1


EVIL = "layer\x1b[31m<b>\n\u202e\x00\x9b[red]"
SHOWN = r"layer\x1b[31m<b>\n\u202e\x00\x9b[red]"


def test_names_do_nothing_to_a_terminal_and_a_page(monkeypatch):
    model = nn.ModuleDict({EVIL: nn.Linear(8, 8, bias=False)})
    pt.parallelize(model, pt.dry_mesh(tp=2))
    plain, terminal = io.StringIO(), Terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    for out in (plain, terminal):
        pt.show(model, out=out)
        assert out.getvalue().startswith(f"{SHOWN}.weight  f32[8, 8] on tp=2\n")
        assert not {*EVIL} & {*out.getvalue()} - {*SHOWN} - {"\n"}
    monkeypatch.setitem(sys.modules, "IPython", NOTEBOOK)
    html = pt.show(model)._repr_html_()
    assert escape(SHOWN) in html and html.replace("\n", "").isprintable()


def test_names_of_axes_do_nothing_either():
    axis = "dp\x1b[2J"
    x = pt.zeros(7, 16, device_mesh=pt.dry_mesh(**{axis: 2}), placements=[pt.Replicate()])
    out = io.StringIO()
    pt.show(x, out=out)
    assert r"on dp\x1b[2J=2" in out.getvalue() and "\x1b" not in out.getvalue()
    assert r"on dp\x1b[2J=2" in x._repr_html_() and "\x1b" not in x._repr_html_()


def test_a_mesh_has_no_effect_on_what_has_one():
    mesh = pt.dry_mesh(dp=2, tp=2)
    for x in (weight(mesh), pt.parallelize(nn.Linear(2, 2), mesh)):
        with pytest.raises(LayoutError, match="mesh has no effect on a"):
            pt.show(x, mesh)


@pytest.mark.parametrize("out", ["layouts.txt", 3, io.BytesIO()])
def test_what_takes_no_text_is_refused(out):
    with pytest.raises(LayoutError, match=r"out is .*: a text stream"):
        pt.show(weight(pt.dry_mesh(dp=2, tp=2)), out=out)


def test_what_can_only_be_written_to_is_enough():
    class Log:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    out = Log()
    pt.show(weight(pt.dry_mesh(dp=2, tp=2)), out=out)
    assert out.text == WEIGHT


@pytest.mark.parametrize(
    "wrong", [torch.ones(3), nn.Linear(2, 2), "x"], ids=lambda w: type(w).__name__
)
def test_what_is_spread_nowhere_is_one_clear_error(wrong):
    with pytest.raises(LayoutError, match=f"not {type(wrong).__name__}"):
        pt.show(wrong)
    with pytest.raises(LayoutError, match="on no mesh"):
        pt.show(Layout.parse("[8@dp]"))
