"""Does reading a tensor as another shape keep each rank's piece in one place?"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partita.layout import Shard, chunk
from partita.rules import bind, parse, resolve_shape, view_sentence


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ((12, 4), (3, 4, 4), "+ (a=3 b) c -> a b c"),
        ((3, 4, 4), (12, 4), "+ a b c -> (a b) c"),
        ((2, 3, 4), (2, 3, 4), "+ a b c -> a b c"),
        ((1, 5), (1, 5), "+ a b -> a b"),
        ((8, 6), (4, 12), "+ (a=4 b) c -> a (b c)"),
        ((2, 1, 3), (6,), "+ a 1 b -> (a b)"),
        ((1, 5), (5, 1), "+ 1 a -> a 1"),
        ((6, 4), (4, 6), "+ a! b! -> c=4! d=6!"),
        ((5, 6, 4), (5, 4, 6), "+ a b! c! -> a d=4! e=6!"),
        ((0, 3), (3, 0), "+ a! b! -> c=3! d=0!"),
        ((), (1, 1), "+  -> 1 1"),
    ],
)
def test_two_shapes_make_a_sentence(before, after, text):
    assert view_sentence(before, after) == text


def test_shapes_of_other_sizes_are_no_views():
    with pytest.raises(ValueError, match="cannot be viewed"):
        view_sentence((2, 3), (5,))


def test_one_size_may_be_left_to_work_out():
    assert resolve_shape(24, (4, -1, 2)) == (4, 3, 2)
    assert resolve_shape(0, (4, 0)) == (4, 0)


@pytest.mark.parametrize("shape", [(-1, -1), (5, -1), (3, 3), (-2, 12), (0, -1)])
def test_a_shape_that_cannot_be_worked_out_is_refused(shape):
    with pytest.raises(ValueError, match=r"invalid|inferred"):
        resolve_shape(24, shape)


@st.composite
def two_shapes(draw):
    """Two shapes of as many elements."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=5))

    def grouped():
        shape, k = [], 0
        while k < len(factors):
            n = draw(st.integers(1, 3))
            shape.append(math.prod(factors[k : k + n]))
            k += n
        return tuple(shape)

    before = grouped()
    if draw(st.booleans()):
        factors = draw(st.permutations(factors))
    return before, grouped()


def piece(shape, dim, parts, r):
    """The flat places that rank r holds when `dim` is cut, in the order in which it holds them."""
    start, length = chunk(shape[dim], parts, r)
    inner = math.prod(shape[dim + 1 :])
    outer = math.prod(shape[:dim])
    return [
        (o * shape[dim] + d) * inner + i
        for o in range(outer)
        for d in range(start, start + length)
        for i in range(inner)
    ]


@given(two_shapes(), st.sampled_from([2, 3]))
def test_each_rank_holds_the_same_elements_before_and_after(shapes, parts):
    before, after = shapes
    bound = bind(parse(view_sentence(before, after)), [before])
    assert bound.output_shape(0, ()) == after
    for row in bound.rows:
        source, target = row.inputs[0], row.outputs[0]
        if not isinstance(source, Shard) or not bound.can_split(row.split, parts):
            continue
        for r in range(parts):
            assert piece(before, source.dim, parts, r) == piece(after, target.dim, parts, r)


@given(two_shapes())
def test_a_view_of_shares_is_shares(shapes):
    before, after = shapes
    assert "P -> P" in [
        str(row) for row in bind(parse(view_sentence(before, after)), [before]).rows
    ]
