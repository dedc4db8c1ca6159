"""Does a layout print what it parses, and do its local regions tile the tensor?"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.layout import (
    Fix,
    Invariant,
    Layout,
    LayoutError,
    Mesh,
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk,
)

M23 = Mesh(("dp", "tp"), (2, 3))
NAMES = ("dp", "tp", "pp", "cp_2")


@st.composite
def meshes(draw) -> Mesh:
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 3))]
    return Mesh(tuple(names), tuple(draw(st.integers(1, 4)) for _ in names))


@st.composite
def layouts(draw, mesh: Mesh | None = None, pending: tuple[str, ...] = ("sum", "max", "min")):
    mesh = mesh or draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    choices: list[Placement] = [Replicate(), Invariant(), *map(Partial, pending)]
    choices += [Shard(d) for d in range(len(shape))]
    placements = [draw(st.sampled_from(choices)) for _ in mesh.names]
    order = draw(st.permutations(mesh.names))
    dtype = draw(st.sampled_from(["", "f32", "bf16", "i64", "bool"]))
    return Layout.of(mesh, shape, placements, order, dtype)


@st.composite
def laid_out(draw, pending: tuple[str, ...] = ("sum", "max", "min")):
    mesh = draw(meshes())
    return mesh, draw(layouts(mesh, pending))


# -- text -----------------------------------------------------------------------------------------


@pytest.mark.slow
@given(layouts())
def test_what_prints_also_parses(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.slow
@given(layouts())
def test_what_parses_prints_the_same_again(layout):
    assert str(Layout.parse(str(layout))) == str(layout)


@pytest.mark.parametrize("name", ["data-parallel", "fsdp.0", "dp/0", "<b>"])
def test_an_axis_of_any_name_without_blanks_and_brackets_parses(name):
    for shards in (((name,), ()), ((name, "tp"), ())):
        layout = Layout((8, 4), shards, (("cp", "sum"),), (), "f32")
        assert Layout.parse(str(layout)) == layout


def test_a_layout_reads_as_in_the_documents():
    layout = Layout((8, 16, 64), (("dp",), (), ()), (("tp", "sum"),), (), "f32")
    assert str(layout) == "f32[8@dp, 16, 64] {sum tp}"
    assert layout.brief() == "8@dp 16 64 {sum tp}"
    assert str(Layout((8, 4), (("tp", "dp"), ()))) == "[8@(tp dp), 4]"
    assert str(Layout((), (), (), ("tp",))) == "[] {inv tp}"
    assert Layout(()).brief() == "scalar"


@pytest.mark.parametrize(
    "text", ["8@dp", "[8@]", "[8@dp", "[8] {avg tp}", "[8@(dp tp]", "[x]", "[8@dp] {sum dp}"]
)
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


# -- placements -----------------------------------------------------------------------------------


@pytest.mark.slow
@given(laid_out())
def test_placements_and_layouts_say_the_same(laid):
    mesh, layout = laid
    order = tuple(a for stack in layout.shards for a in stack)
    order += tuple(a for a in mesh.names if a not in order)
    again = Layout.of(mesh, layout.shape, layout.placements(mesh), order, layout.dtype)
    assert again == layout


@pytest.mark.slow
@given(laid_out(pending=("sum",)))
def test_the_gradient_of_the_gradient_is_laid_out_like_the_value(laid):
    mesh, layout = laid
    gradient = layout.gradient(mesh)
    assert gradient.gradient(mesh) == layout
    assert gradient.placements(mesh) == tuple(p.dual() for p in layout.placements(mesh))


def test_duality_exchanges_whole_and_shares_and_keeps_the_rest():
    assert Replicate().dual() == Partial()
    assert Partial().dual() == Replicate()
    assert Shard(1).dual() == Shard(1)
    assert Invariant().dual() == Invariant()


def test_a_pending_maximum_has_no_dual():
    with pytest.raises(ValueError, match="no gradient until it is reduced"):
        Partial("max").dual()


def test_a_mean_is_no_placement():
    with pytest.raises(ValueError, match="divided by the global count"):
        Partial("avg")


def test_a_shard_put_on_a_split_dimension_goes_innermost():
    layout = Layout.parse("[8@dp, 4]").put("tp", Shard(0))
    assert layout == Layout.parse("[8@(dp tp), 4]")
    assert layout.put("dp", Replicate()) == Layout.parse("[8@tp, 4]")


def test_axes_that_the_order_does_not_name_follow_in_mesh_order():
    both = [Shard(0), Shard(0)]
    assert Layout.of(M23, (4, 5), both, ["tp"]) == Layout.parse("[4@(tp dp), 5]")
    with pytest.raises(LayoutError, match="no axis 'pp' on mesh dp=2 tp=3"):
        Layout.of(M23, (4, 5), both, ["pp"])


def test_a_negative_shard_dimension_counts_from_the_end():
    assert Layout.of(M23, (4, 5), [Shard(-1), Replicate()]) == Layout.parse("[4, 5@dp]")


@pytest.mark.parametrize(
    ("shape", "placements", "fact"),
    [
        ((4,), [Shard(0)], "1 placement for mesh dp=2 tp=3, which has 2 axes"),
        ((4,), [Shard(1), Replicate()], r"Shard\(1\) on axis dp is out of range"),
        ((4,), [Shard(-2), Replicate()], r"Shard\(-2\) on axis dp is out of range"),
        ((), [Shard(0), Replicate()], "out of range"),
        ((4,), ["S(0)", Replicate()], "is not a placement"),
    ],
)
def test_placements_that_do_not_fit_are_refused(shape, placements, fact):
    with pytest.raises(LayoutError, match=fact):
        Layout.of(M23, shape, placements)


def test_an_axis_does_one_thing_to_a_tensor():
    with pytest.raises(LayoutError, match="one mesh axis has two roles"):
        Layout((4, 4), (("dp",), ("dp",)))


# -- what one rank holds --------------------------------------------------------------------------


@given(laid_out())
def test_local_regions_tile_the_tensor_exactly(laid):
    mesh, layout = laid
    split = [a for stack in layout.shards for a in stack]
    held = np.zeros(layout.shape, int)
    # One rank of each group that holds copies or shares of the same elements.
    for at in mesh.coordinates():
        if any(i for a, i in zip(mesh.names, at, strict=True) if a not in split):
            continue
        region = layout.local_region(mesh, at)
        assert all(
            s >= 0 and s + n <= size for (s, n), size in zip(region, layout.shape, strict=True)
        )
        held[tuple(slice(s, s + n) for s, n in region)] += 1
        assert layout.local_shape(mesh, at) == tuple(n for _, n in region)
    assert (held == 1).all()


@pytest.mark.slow
@given(laid_out())
def test_what_does_not_split_does_not_change_what_a_rank_holds(laid):
    mesh, layout = laid
    bare = Layout(layout.shape, layout.shards)
    for at in mesh.coordinates():
        assert layout.local_region(mesh, at) == bare.local_region(mesh, at)


@given(st.integers(0, 40), st.integers(1, 9))
def test_pieces_are_full_then_one_short_then_empty(size, parts):
    pieces = [chunk(size, parts, i) for i in range(parts)]
    lengths = [n for _, n in pieces]
    step = -(-size // parts)
    assert sum(lengths) == size
    assert lengths == sorted(lengths, reverse=True)
    assert sum(0 < n < step for n in lengths) <= 1


@pytest.mark.parametrize(
    ("size", "parts", "lengths"),
    [
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 2, 1, 0]),
        (7, 3, [3, 3, 1]),
        (1, 3, [1, 0, 0]),
        (0, 2, [0, 0]),
    ],
)
def test_pieces_are_those_of_torch_chunk(size, parts, lengths):
    assert [chunk(size, parts, i)[1] for i in range(parts)] == lengths


def test_the_outer_axis_cuts_first():
    outer = Layout.parse("[6@(dp tp)]")
    inner = Layout.parse("[6@(tp dp)]")
    assert outer.local_region(M23, (1, 0)) == ((3, 1),)
    assert inner.local_region(M23, (1, 0)) == ((1, 1),)


# -- mesh -----------------------------------------------------------------------------------------


def test_ranks_are_numbered_with_the_last_axis_fastest():
    assert M23.coordinates() == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert M23.size() == 6 and M23.size("tp") == 3 and M23.index("tp") == 1


def test_a_group_varies_its_axes_and_keeps_the_others():
    assert M23.group(("tp",), (1, 2)) == ((1, 0), (1, 1), (1, 2))
    assert M23.group(("tp", "dp"), (1, 2))[:3] == ((0, 0), (1, 0), (0, 1))


@pytest.mark.parametrize(
    ("names", "sizes", "fact"),
    [
        (("a",), (2, 2), "a name for each axis"),
        (("a", "a"), (2, 2), "different names"),
        (("a", "b"), (2, 0), "at least one rank"),
        (("a",), (2.5,), "is an integer"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(names, sizes, fact):
    with pytest.raises(LayoutError, match=fact):
        Mesh(names, sizes)


def test_an_unknown_axis_is_named():
    with pytest.raises(LayoutError, match="no axis 'pp' on mesh dp=2 tp=3"):
        M23.size("pp")


# -- errors ---------------------------------------------------------------------------------------


def test_an_error_is_a_fact_a_place_a_reason_and_fixes():
    error = LayoutError(
        "add cannot take these",
        place="model.py:41",
        operands=("x  8 16", "y  8 16 {sum tp}"),
        reason="x would be counted twice",
        fixes=(Fix("y.full_tensor()", "all_reduce 1 KiB"), Fix("x * 0.5")),
    )
    assert str(error).splitlines() == [
        "add cannot take these (at model.py:41)",
        "  x  8 16",
        "  y  8 16 {sum tp}",
        "  x would be counted twice",
        "  either  y.full_tensor()                              all_reduce 1 KiB",
        "  or      x * 0.5",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.fixes == error.fixes
