"""Does the picture of a layout say of each element who holds it?"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.layout import Layout, LayoutError, Mesh
from partita.report.picture import draw, html_of

MESH = Mesh(("dp", "tp", "pp"), (2, 2, 3))


def cells(text, mesh=MESH):
    picture = draw(Layout.parse(text), mesh)
    return [[cell.ranks for cell in row] for panel in picture.panels for row in panel.cells]


def test_a_cell_says_who_holds_a_piece_and_how():
    two = Mesh(("dp", "tp"), (2, 2))
    assert cells("[7@dp, 16@tp]", two) == [["0", "1"], ["2", "3"]]
    assert cells("[8, 16@(tp dp)]", two) == [["0", "2", "1", "3"]]
    assert cells("[8@dp]", two) == [["0, 1", "2, 3"]]
    assert cells("[8@dp] {inv tp}", two) == [["0 = 1", "2 = 3"]]
    assert cells("[8@dp] {sum tp}", two) == [["0 + 1", "2 + 3"]]
    assert cells("[8] {max tp}", two) == [["max(0 1), max(2 3)"]]
    assert cells("[]", two) == [["0, 1, 2, 3"]]


def test_pieces_are_as_large_as_they_are_and_named_as_slices():
    picture = draw(Layout.parse("[7@dp, 5@pp]"), MESH)
    (panel,) = picture.panels
    assert [str(p) for p in panel.rows] == ["0:4", "4:7"]
    assert [str(p) for p in panel.columns] == ["0:2", "2:4", "4:5"]
    assert (picture.down, picture.across) == (0, 1)


def test_a_third_split_dimension_makes_panels():
    picture = draw(Layout.parse("bf16[4@dp, 3, 6@pp, 8@tp]"), MESH)
    assert [panel.where for panel in picture.panels] == ["dim 0 0:2", "dim 0 2:4"]
    assert (picture.down, picture.across) == (2, 3)


def test_whoever_holds_nothing_is_named():
    picture = draw(Layout.parse("[1@dp, 4@tp]"), Mesh(("dp", "tp"), (2, 2)))
    assert picture.notes == ("nothing of it: ranks 2, 3",)


@pytest.mark.parametrize(
    ("layout", "sizes", "note"),
    [
        ("[100@dp, 100@tp]", (64, 16), "274 of 1,024 ranks, where dp=50…63 or tp=15"),
        ("[15@tp]", (2, 16), "ranks 15, 31"),
        ("[15@tp]", (8, 16), "8 of 128 ranks, where tp=15"),
        (
            "[20@(dp tp)]",
            (4, 8),
            "12 of 32 ranks, where dp=0 tp=5, dp=0 tp=6, …, dp=3 tp=7 (12 of 32 places)",
        ),
    ],
)
def test_many_that_hold_nothing_are_named_by_their_places(layout, sizes, note):
    mesh = Mesh(("dp", "tp"), sizes)
    layout = Layout.parse(layout)
    *_, said = draw(layout, mesh).notes
    assert said == f"nothing of it: {note}"
    empty = sum(0 in layout.local_shape(mesh, at) for at in mesh.coordinates())
    assert str(empty) in note or note.count(",") == empty - 1


def test_of_a_tensor_without_elements_every_rank_holds_nothing():
    two = Mesh(("dp", "tp"), (2, 2))
    picture = draw(Layout.parse("[0@dp, 4@tp]"), two)
    assert cells("[0@dp, 4@tp]", two) == [["0, 2", "1, 3"]]
    assert picture.notes[-1] == "it has no element: every rank holds nothing of it"
    assert cells("[0@(dp tp)]", two) == [["0, 1, 2, 3"]]
    assert cells("[0]", two) == [["0, 1, 2, 3"]]


def test_who_holds_nothing_on_a_large_mesh_is_found_without_asking_each_rank(monkeypatch):
    monkeypatch.setattr(Mesh, "coordinates", None)
    mesh = Mesh(("dp", "tp", "pp"), (1000, 1000, 1000))
    *_, said = draw(Layout.parse("[999@dp, 4]"), mesh).notes
    assert said == "nothing of it: 1,000,000 of 1,000,000,000 ranks, where dp=999"


def test_a_picture_of_many_ranks_stays_small():
    picture = draw(
        Layout.parse("[8192@dp, 64@tp, 4] {sum pp}"), Mesh(("dp", "tp", "pp"), (1024, 2, 64))
    )
    (panel,) = picture.panels
    assert len(panel.rows) == 8 and str(panel.rows[-1]) == "1017 more"
    assert panel.cells[0][0].ranks == "0 + 1 + … + 63" and panel.cells[-1][0].ranks == ""


def test_an_axis_that_is_not_there_is_an_error():
    with pytest.raises(LayoutError, match="no axis 'xp' on mesh dp=2"):
        draw(Layout.parse("[8@xp]"), Mesh(("dp",), (2,)))


@st.composite
def layouts(draw_):
    shape = draw_(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    shards = [[] for _ in shape]
    partial, invariant = [], []
    for axis in draw_(st.permutations(MESH.names)):
        place = draw_(st.integers(-3, len(shape) - 1))
        if place >= 0:
            shards[place].append(axis)
        elif place == -1:
            partial.append((axis, "sum"))
        elif place == -2:
            invariant.append(axis)
    return Layout(tuple(shape), tuple(map(tuple, shards)), tuple(partial), tuple(invariant))


@pytest.mark.slow
@given(layouts())
def test_each_rank_stands_in_the_cell_of_its_piece_and_in_no_other(layout):
    picture = draw(layout, MESH)
    found: dict[int, tuple] = {}
    for panel in picture.panels:
        fixed = {int(d): text for d, text in re.findall(r"dim (\d+) (\S+?)(?:,|$)", panel.where)}
        for row, line in zip(panel.rows, panel.cells, strict=True):
            for column, cell in zip(panel.columns, line, strict=True):
                place = dict(fixed)
                place |= {picture.down: str(row)} if picture.down is not None else {}
                place |= {picture.across: str(column)} if picture.across is not None else {}
                for rank in map(int, re.findall(r"\d+", cell.ranks)):
                    assert rank not in found
                    found[rank] = place
    for rank, at in enumerate(MESH.coordinates()):
        region = layout.local_region(MESH, at)
        if any(length == 0 for _, length in region):
            assert rank not in found
            continue
        for dim, text in found[rank].items():
            offset, length = region[dim]
            assert text == f"{offset}:{offset + length}"


def test_html_is_escaped_and_asks_nothing_of_the_network():
    layout = Layout((8,), ((),), (), (), "<script>")
    text = html_of(draw(layout, Mesh(("dp",), (2,))))
    assert "<script>" not in text and "&lt;script&gt;[8]" in text
    assert "http" not in text and "src=" not in text
