"""Does a sentence say what its author meant?"""

import pytest

from partita.rules import NUMBER, Names, SentenceError, bind, parse


def rows(text, *operands):
    return [str(row) for row in bind(parse(text), operands).rows]


# -- what a sentence means -------------------------------------------------------------------------


def test_a_name_that_is_split_is_sharded_wherever_it_stands():
    assert rows("... -> ...", (4, 6)) == [
        "S(0) -> S(0)",
        "S(1) -> S(1)",
        "R -> R",
        "I -> I",
    ]


def test_a_contracted_name_leaves_shares():
    assert "S(1), S(0) -> P" in rows("m k * k n -> m n", (4, 5), (5, 6))


def test_a_bias_is_added_once():
    found = rows("... i * o i + o -> ... o", (4, 5), (6, 5), (6,))
    assert "S(1), S(1), P -> P" in found
    assert "S(1), S(1), R -> P" not in found


def test_an_absent_bias_needs_nothing():
    assert "S(1), S(1), - -> P" in rows("... i * o i + o -> ... o", (4, 5), (6, 5), None)


def test_a_sum_takes_shares_of_all_terms_or_of_none():
    found = rows("... + ... -> ...", (4,), (4,))
    assert "P, P -> P" in found
    assert "P, R -> P" not in found


def test_a_number_in_a_sum_would_be_counted_once_per_rank():
    assert not any("P" in row for row in rows("... + ... -> ...", (4,), NUMBER))


def test_a_number_in_a_product_may_scale_shares():
    assert "P, - -> P" in rows("... * ... -> ...", (4,), NUMBER)


def test_a_product_takes_one_factor_as_shares():
    found = rows("... * ... -> ...", (4,), (4,))
    assert {"P, R -> P", "R, P -> P"} <= set(found)
    assert "P, P -> P" not in found


def test_an_op_that_is_not_linear_takes_no_shares():
    assert not any("P" in row for row in rows("..., ... -> ...", (4,), (4,)))


def test_an_index_is_never_shares():
    found = rows("[...] * v d -> ... d", (3,), (4, 5))
    assert "R, P -> P" in found
    assert not any(row.startswith("P") for row in found)


def test_what_is_scattered_from_split_places_is_added_to_shares():
    found = rows("+ m n + [i] * i n -> m n", (3, 4), (5,), (5, 4))
    assert "P, S(0), S(0) -> P" in found
    assert "R, S(0), S(0) -> P" not in found


def test_sum_in_an_output_contracts_what_is_not_linear():
    found = rows("n c!, n -> sum", (4, 5), (4,))
    assert found == ["S(0), S(0) -> P", "R, R -> R", "I, I -> I"]


def test_a_maximum_of_pieces_is_pending():
    assert rows("a b -> max a", (4, 5)) == ["S(0) -> S(0)", "S(1) -> P(max)", "R -> R", "I -> I"]


def test_a_whole_dimension_is_not_split():
    assert rows("... d! -> ... d!", (4, 5)) == ["S(0) -> S(0)", "R -> R", "I -> I"]


def test_dimensions_are_broadcast_at_their_right_end():
    found = rows("... + ... -> ...", (4, 5), (5,))
    assert {"S(0), R -> S(0)", "S(1), S(0) -> S(1)"} <= set(found)


def test_a_stretched_dimension_stays_whole():
    assert "S(0), R -> S(0)" in rows("... + ... -> ...", (4, 5), (1, 5))


def test_a_tensor_of_no_dimensions_may_be_the_first_term():
    found = rows("+  + m k * k n -> m n", (), (4, 5), (5, 6))
    assert "P, S(1), S(0) -> P" in found
    assert "R, S(0), R -> S(0)" in found


# -- merged dimensions -----------------------------------------------------------------------------


def test_only_the_outermost_name_of_a_dimension_can_be_split():
    found = rows("(a=3 b) c -> a b c", (12, 4))
    assert {"S(0) -> S(0)", "S(1) -> S(2)"} <= set(found)
    assert "S(0) -> S(1)" not in found


def test_a_merged_name_is_cut_evenly():
    bound = bind(parse("(a=3 b) -> a b"), [(12,)])
    assert bound.can_split("a", 3)
    assert not bound.can_split("a", 2)


def test_an_outer_name_of_size_one_leaves_the_next_one_free():
    found = bind(parse("b (g r) d, b g d -> b (g r) d"), [(2, 6, 4), (2, 1, 4)])
    assert "S(1), R -> S(1)" in [str(row) for row in found.rows]
    assert not found.can_split("g", 2)
    assert found.can_split("r", 4)


def test_sizes_come_from_other_operands():
    bound = bind(parse("b (g r), b g -> b g r"), [(2, 12), (2, 4)])
    assert bound.sizes == {"b": 2, "g": 4, "r": 3}
    assert bound.output_shape(0, ()) == (2, 4, 3)


def test_a_size_that_no_name_tells_comes_from_the_result():
    assert bind(parse("n h! -> n y!"), [(4, 9)]).output_shape(0, (2, 7)) == (4, 7)


def test_even_names_are_cut_evenly():
    bound = bind(parse("n% c -> n% c"), [(5, 4)])
    assert not bound.can_split("n", 2)
    assert bound.can_split("c", 3)


def test_a_name_that_stands_twice_in_one_tensor_is_whole():
    assert rows("i i -> i", (4, 4)) == ["R -> R", "I -> I"]


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "operands", "reason"),
    [
        ("a b", [(2, 3)], "no"),
        ("a ) -> a", [(2,)], "cannot read"),
        ("a b -> a", [(2,)], "does not fit"),
        ("a, a -> a", [(2,), (3,)], "both 2 and 3"),
        ("... + ... -> ...", [(2,), (3,)], "do not broadcast"),
        ("(a b) -> a b", [(6,)], "is not 6"),
        ("(a=4 b) -> a b", [(6,)], "is not 6"),
        ("a=2 -> a=3", [(2,)], "both 2 and 3"),
        ("1 -> 1", [(2,)], "a 1 of size 2"),
        ("a -> a", [(2,), (2,)], "2 operands"),
        ("... a b -> a", [(2,)], "too few"),
    ],
)
def test_a_sentence_that_cannot_be_read_says_why(text, operands, reason):
    with pytest.raises(SentenceError, match=reason):
        bind(parse(text), operands)


# -- names -----------------------------------------------------------------------------------------


def test_names_are_put_whole_reduced_and_inserted():
    names = Names.of(3)
    assert str(names) == "a b c"
    assert str(names.whole((0, -1))) == "a! b c!"
    assert str(names.without(1)) == "a c"
    assert str(names.without(1, keepdim=True)) == "a 1 c"
    assert str(names.without()) == ""
    assert str(names.put(-1, "z")) == "a b z"
    assert str(names.insert(-1, "z")) == "a b c z"
    assert str(Names.of(28)[-2:]) == "('a1', 'b1')"


def test_a_dimension_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="out of range"):
        Names.of(2).whole(2)


def test_a_tensor_of_no_dimensions_may_be_reduced_over_dimension_zero():
    assert Names.of(0).dims(-1) == ()


def test_a_sentence_prints_as_it_was_written():
    text = "... i * o i + o -> ... o"
    assert str(parse(text)) == text
