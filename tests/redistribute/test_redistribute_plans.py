"""Is each plan the cheapest, in as few collectives as will do, and is its cost told right?"""

from __future__ import annotations

import heapq
from itertools import permutations, product

import pytest

from partita.layout import Layout, LayoutError, Mesh
from partita.redistribute import Move, Plan, estimate_price, plan
from partita.redistribute.move import find_changed_axes, find_single_move, price_of_move

M22 = Mesh(("a", "b"), (2, 2))
M23 = Mesh(("a", "b"), (2, 3))
M4 = Mesh(("a",), (4,))
M222 = Mesh(("a", "b", "c"), (2, 2, 2))


def path(before: str, after: str, mesh: Mesh = M22, itemsize: int = 4) -> Plan:
    return plan(Layout.parse(before), Layout.parse(after), mesh, itemsize)


def words(p: Plan) -> list[str]:
    return [f"{m.kind} {' '.join(m.axes)}" for m in p.moves]


def collectives(p: Plan) -> int:
    return sum(m.sends for m in p.moves)


def layouts(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Every layout of `shape` without maxima, each order of shards included."""
    found: dict[Layout, None] = {}
    for chosen in product(["R", "I", "P", *range(len(shape))], repeat=mesh.ndim):
        for order in permutations(zip(mesh.names, chosen, strict=True)):
            shards = tuple(tuple(a for a, c in order if c == dim) for dim in range(len(shape)))
            partial = tuple((a, "sum") for a, c in order if c == "P")
            found[Layout(shape, shards, partial, tuple(a for a, c in order if c == "I"))] = None
    return list(found)


# -- one collective where one will do -------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("[8, 6] {sum a, sum b}", "[8, 6]", "all_reduce a b"),
        ("[8, 6] {max a, max b}", "[8, 6]", "all_reduce a b"),
        ("[8, 6] {sum a, sum b}", "[8, 6] {inv a, inv b}", "all_reduce a b"),
        ("[8@(a b), 6]", "[8, 6]", "all_gather a b"),
        ("[8@(b a), 6]", "[8, 6]", "all_gather b a"),
        ("[8@(a b), 6]", "[8, 6] {inv a, inv b}", "all_gather a b"),
        ("[8@(a b), 6]", "[8@a, 6]", "all_gather b"),
        ("[8, 6] {sum a, sum b}", "[8@(a b), 6]", "reduce_scatter a b"),
        ("[8, 6] {sum a, sum b}", "[8, 6@(b a)]", "reduce_scatter b a"),
        ("[8@a, 6] {sum b}", "[8@(a b), 6]", "reduce_scatter b"),
        ("[8@(a b), 6]", "[8, 6@(a b)]", "all_to_all a b"),
        ("[8@(a b), 6]", "[8@(b a), 6]", "all_to_all a b"),
        ("[8@a, 6@b]", "[8@b, 6@a]", "all_to_all a b"),
        ("[8, 6]", "[8@a, 6@b]", "slice a b"),
        ("[8@a, 6@b]", "[8, 6] {sum a, sum b}", "place a b"),
        ("[8, 6]", "[8, 6] {sum a, sum b}", "mask a b"),
        ("[8, 6]", "[8, 6] {inv a, inv b}", "retype a b"),
    ],
)
def test_what_one_move_can_do_is_one_move(before, after, expected):
    assert words(path(before, after)) == [expected]


@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
def test_no_plan_takes_more_collectives_than_axes(mesh):
    for before, after in product(layouts((5, 7), mesh), repeat=2):
        assert collectives(plan(before, after, mesh)) <= len(find_changed_axes(before, after))


def test_the_same_layout_needs_no_move():
    assert path("[8@a, 6] {sum b}", "[8@a, 6] {sum b}").moves == ()
    assert estimate_price(Layout.parse("[8@a]"), Layout.parse("[8@a]"), M22) == 0


@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize(
    "way",
    [
        ("[12@a, 36@b]", "[12@a, 36]", "[12, 36]"),
        ("[12, 36@(b a)]", "[12, 36@b]", "[12, 36]"),
        ("[12@a, 36@b]", "[12@a, 36] {inv b}", "[12, 36] {inv a, inv b}"),
        ("[12, 36] {sum a, sum b}", "[12, 36@b] {sum a}", "[12@a, 36@b]"),
        ("[12, 36] {sum a, sum b}", "[12, 36] {sum a}", "[12, 36]"),
        ("[12@a, 36@b]", "[12@a, 36] {sum b}", "[12, 36] {sum a, sum b}"),
    ],
    ids=str,
)
def test_joined_axes_send_no_more_than_one_after_the_other(way, mesh):
    before, between, after = way
    joined = path(before, after, mesh)
    assert len(joined.moves) == 1
    apart = [path(before, between, mesh), path(between, after, mesh)]
    for ours, one, other in [
        (joined, *apart),
        (joined.transpose(mesh), *(p.transpose(mesh) for p in apart)),
    ]:
        assert ours.nbytes(mesh, 4) <= one.nbytes(mesh, 4) + other.nbytes(mesh, 4)


def test_uneven_pieces_are_joined_until_their_padding_costs_more_than_a_collective():
    small = path("[5, 6] {sum a, sum b}", "[5@a, 6@b]", M23)
    assert words(small) == ["reduce_scatter a b"]
    # The uneven split comes last, where its padding is smaller.
    p = path("[1, 6000000] {sum a, sum b}", "[1@a, 6000000@b]", M23)
    assert words(p) == ["reduce_scatter b", "reduce_scatter a"]
    p = path("[3@b, 6000000@a]", "[3, 6000000]", M22)
    assert words(p) == ["all_gather b", "all_gather a"]


def test_shares_are_scattered_before_shards_are_gathered():
    assert words(path("[8, 6@b] {sum a}", "[8@a, 6]")) == ["reduce_scatter a", "all_gather b"]


def test_replicas_are_sliced_before_anything_is_sent():
    assert words(path("[8, 6] {sum a}", "[8, 6@b]")) == ["slice b", "all_reduce a"]


def test_a_maximum_is_reduced_before_a_sum_becomes_pending():
    p = path("[8, 6] {max a}", "[8, 6] {sum a, sum b}")
    assert words(p) == ["all_reduce a", "mask a b"]
    assert [m.op for m in p.moves] == ["max", "sum"]


def test_an_inner_shard_makes_way_for_an_outer_one():
    p = path("[8@(a b), 6]", "[8@b, 6]")
    assert collectives(p) <= 2
    assert p.moves[-1].after == Layout.parse("[8@b, 6]")


# -- no path is cheaper ---------------------------------------------------------------------------


def within_the_rules(move: Move, goal: Layout) -> bool:
    """The rules that `plan`'s file states of paths to `goal`."""
    goals = {str(goal.placement(a))[0] for a in move.axes}
    moved = find_changed_axes(move.before, goal)
    start, end = move.way
    if not all(a in moved for a in move.axes):
        return False
    if (end == "P" or (end == "S" and start != "S")) and goals != {end}:
        return False
    if end in "RI" and start in "PI" and "S" in goals:
        return False
    if end == "I" and "I" not in goals:
        return start == "P" and any(goal.placement(a).is_replicate() for a in move.before.invariant)
    return move.way != "RI" or goals == {"I"}


def cheapest(goal: int, edges: dict[int, list[tuple[int, float]]]) -> dict[int, float]:
    """Dijkstra from the goal back, over edges by their end."""
    found: dict[int, float] = {}
    heap = [(0.0, goal)]
    while heap:
        cost, here = heapq.heappop(heap)
        if here not in found:
            found[here] = cost
            for start, step in edges.get(here, []):
                heapq.heappush(heap, (cost + step, start))
    return found


@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (400, 700), (5000, 7000)], ids=str)
def test_no_path_of_legal_moves_is_cheaper(shape, mesh):
    every = layouts(shape, mesh)
    number = {layout: i for i, layout in enumerate(every)}
    moves = [
        m for pair in permutations(every, 2) if (m := find_single_move(*pair, mesh)) is not None
    ]
    priced = [(m, price_of_move(m, mesh, 4)) for m in moves]
    for goal in every:
        edges: dict[int, list[tuple[int, float]]] = {}
        for m, cost in priced:
            if within_the_rules(m, goal):
                edges.setdefault(number[m.after], []).append((number[m.before], cost))
        best = cheapest(number[goal], edges)
        for before in every:
            p = plan(before, goal, mesh)
            assert all(within_the_rules(m, goal) for m in p.moves)
            assert p.price(mesh, 4) == pytest.approx(best[number[before]], rel=1e-9), str(p)


def test_three_axes_do_not_explode():
    before, after = Layout.parse("[8@(a b), 16, 5] {sum c}"), Layout.parse("[8@c, 16, 5@b] {inv a}")
    p = plan(before, after, M222)
    assert p.moves[0].before == before and p.moves[-1].after == after
    assert collectives(p) <= 3


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "moves"),
    [
        (8, 9, 1 << 20, ["all_to_all a", "all_gather a"]),
        (1024, 128, 8192, ["all_gather a"]),
        (1024, 3584, 8192, ["all_gather a"]),
    ],
)
def test_uneven_rows_are_exchanged_before_they_are_gathered_where_that_is_worth_its_messages(
    ranks, rows, columns, moves
):
    """Pieces of two sizes travel as the larger. To exchange rows for columns, which all divide,
    sends less, in a message to each other rank."""
    mesh = Mesh(("a",), (ranks,))
    assert words(path(f"[{rows}@a, {columns}]", f"[{rows}, {columns}]", mesh, 2)) == moves


def test_a_plan_is_cached_and_so_is_its_transpose():
    before, after = Layout.parse("[8@a, 6]"), Layout.parse("[8, 6@b]")
    assert plan(before, after, M22, 4) is plan(before, after, M22, 4)
    p = plan(before, after, M22, 4)
    assert p.transpose(M22) is p.transpose(M22)


# -- transposes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kind", "transposed"),
    [
        ("[8@a]", "[8]", "all_gather", "reduce_scatter"),
        ("[8@a]", "[8] {inv a}", "all_gather", "slice"),
        ("[8] {sum a}", "[8@a]", "reduce_scatter", "all_gather"),
        ("[8] {sum a}", "[8]", "all_reduce", "all_reduce"),
        ("[8] {sum a}", "[8] {inv a}", "all_reduce", "retype"),
        ("[8@a, 4]", "[8, 4@a]", "all_to_all", "all_to_all"),
        ("[8]", "[8@a]", "slice", "place"),
        ("[8] {inv a}", "[8@a]", "slice", "all_gather"),
        ("[8@a]", "[8] {sum a}", "place", "slice"),
        ("[8]", "[8] {sum a}", "mask", "mask"),
        ("[8] {inv a}", "[8] {sum a}", "mask", "retype"),
        ("[8]", "[8] {inv a}", "retype", "mask"),
        ("[8] {inv a}", "[8]", "retype", "all_reduce"),
    ],
)
def test_each_move_has_its_transpose(before, after, kind, transposed):
    (move,) = path(before, after, M4).moves
    back = move.transpose(M4)
    assert (move.kind, back.kind) == (kind, transposed)
    assert back.before == move.after.gradient(M4)
    assert back.after == move.before.gradient(M4)
    assert back.transpose(M4) == move


def test_the_transpose_of_a_path_is_the_path_of_transposes_backward():
    p = path("[8, 6@b] {sum a}", "[8@a, 6]")
    assert words(p.transpose(M22)) == ["reduce_scatter b", "all_gather a"]
    assert p.transpose(M22).transpose(M22) == p


def test_a_pending_maximum_has_no_transpose():
    with pytest.raises(LayoutError, match=r"a pending max \(on axis a\) has no gradient"):
        path("[8] {max a}", "[8]").transpose(M22)
    with pytest.raises(LayoutError, match="has no gradient"):  # nor where it stays pending
        path("[8@b] {max a}", "[8] {max a}").transpose(M22)


# -- bytes and seconds ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "elements"),
    [
        ("[16@a]", "[16]", 3 * 4),
        ("[16] {sum a}", "[16@a]", 12),
        ("[16] {sum a}", "[16]", 24),
        ("[16@a, 4]", "[16, 4@a]", 12),
        ("[16]", "[16@a]", 0),
        ("[16@a]", "[16] {sum a}", 0),
        ("[16]", "[16] {sum a}", 0),
        ("[16] {inv a}", "[16]", 0),
        ("[5@a]", "[5]", 3 * 2),  # the first rank holds 2 of 5
        ("[0@a]", "[0]", 0),
    ],
)
def test_bytes_are_those_that_one_rank_sends_around_a_ring(before, after, elements):
    assert path(before, after, M4).nbytes(M4, 2) == 2 * elements
    assert path(before, after, M4).nbytes(M4, 8) == 8 * elements


def test_an_axis_of_one_rank_sends_nothing():
    lone = Mesh(("a",), (1,))
    assert path("[8] {sum a}", "[8]", lone).nbytes(lone, 4) == 0


@pytest.mark.parametrize("mesh", [M22, M23], ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (400, 700)], ids=str)
def test_a_price_is_exact_for_one_move_and_near_for_a_path(shape, mesh):
    for before, after in permutations(layouts(shape, mesh), 2):
        p = plan(before, after, mesh)
        estimate, exact = estimate_price(before, after, mesh, 4), p.price(mesh, 4)
        if len(p.moves) == 1:
            assert estimate == pytest.approx(exact, rel=1e-12)
        else:
            assert exact / 3 < estimate < exact * 2, str(p)


def test_a_plan_says_what_it_does():
    assert str(path("[8@(a b), 6]", "[8, 6]")) == "all_gather over a b: 8@(a b) 6 -> 8 6"
    assert str(path("[8] {max a}", "[8]")) == "all_reduce (max) over a: 8 {max a} -> 8"
    assert str(path("[8]", "[8]")) == "nothing moves"


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "fact"),
    [
        ("[8]", "[9]", "keeps the shape"),
        ("f32[8]", "f16[8]", "keeps the dtype"),
        ("[8]", "[8@z]", "no axis 'z' on mesh a=2 b=2"),
        ("[8]", "[8] {max a}", "no move makes a pending max on axis a"),
        ("[8] {sum a}", "[8] {min a}", "no move makes a pending min on axis a"),
        ("[8@a] {max b}", "[8] {sum a, max b}", "two reduce ops"),
        ("[8] {sum a, max b}", "[8]", "two reduce ops"),
    ],
)
def test_what_no_move_can_do_is_refused(before, after, fact):
    with pytest.raises(LayoutError, match=fact):
        path(before, after)


def test_a_target_without_a_dtype_takes_the_dtype_of_the_value():
    assert path("f32[8@a]", "[8]").moves[-1].after == Layout.parse("f32[8]")
    assert path("f32[8@a]", "[8@a]").moves == ()
