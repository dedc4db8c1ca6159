"""Is a value that is computed from constants alone what torch computes, a part at a time too?

Masks are made at random of places, comparisons and what models do with them. The truth is torch's
own computation of the whole.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from partita.capture import known_masks
from partita.capture.known_masks import KnownNode, NotKnown, computing_on_host, find_hidden
from partita.testing.allocated_bytes import counted

ORDER = [torch.ge, torch.gt, torch.le, torch.lt, torch.eq, torch.ne]


def truth_values(rows, columns):
    """Recipes of matrices of truth values."""
    row, column = rows, columns

    def compared(how, down, right, shift):
        return lambda: how(torch.arange(row)[:, None] * down, torch.arange(column) * right + shift)

    def near(width):
        return lambda: torch.arange(row)[:, None] - torch.arange(column) < width

    def grouped(width):
        return lambda: (
            (torch.arange(row)[:, None] % width).cumsum(0) == (torch.arange(column) % width)
        )

    leaves = st.one_of(
        st.builds(
            compared,
            st.sampled_from(ORDER),
            st.integers(0, 2),
            st.integers(0, 2),
            st.integers(-2, 2),
        ),
        st.builds(near, st.integers(-1, 5)),
        st.just(compared(torch.ge, 1, 1, 0)),
        st.builds(grouped, st.integers(1, 3)),
        st.builds(lambda value: lambda: torch.full((row, column), value), st.booleans()),
        st.builds(
            lambda how, k: lambda: getattr(torch.ones(row, column, dtype=torch.bool), how)(k),
            st.sampled_from(["triu", "tril", "triu_", "tril_"]),
            st.integers(-2, 2),
        ),
    )

    def grow(inner):
        def written(one, other):
            def run():
                x = one().clone()
                x &= other()
                return x

            return run

        def copied(one):
            return lambda: torch.zeros(row, column, dtype=torch.bool).copy_(one())

        return st.one_of(
            st.builds(lambda a, b: lambda: a() & b(), inner, inner),
            st.builds(lambda a, b: lambda: torch.logical_or(a(), b()), inner, inner),
            st.builds(lambda a: lambda: ~a(), inner),
            st.builds(lambda a, b, c: lambda: torch.where(a(), b(), c()), inner, inner, inner),
            st.builds(lambda a: lambda: torch.cat([a()] * 2, 0)[row : 2 * row], inner),
            st.builds(written, inner, inner),
            st.builds(copied, inner),
            st.builds(lambda a: lambda: a().t().clone().mT, inner),
            st.builds(lambda a: lambda: a()[None].permute(0, 2, 1).contiguous()[0].T, inner),
            st.builds(lambda a: lambda: a().clone().unsqueeze(0).squeeze(0), inner),
            st.builds(lambda a: lambda: (a() & True).view(1, row, column).view(row, column), inner),
            st.builds(
                lambda a, how, k: lambda: getattr(a().clone(), how)(k),
                inner,
                st.sampled_from(["triu", "tril", "triu_", "tril_"]),
                st.integers(-3, 3),
            ),
        )

    return st.recursive(leaves, grow, max_leaves=4)


FORMS = ["bool", "expanded", "swapped", "cut", "several", "different"]


def as_mask(made, kind):
    """A recipe of a mask, of a recipe of what it shows."""

    def numbers():
        hidden = ~made()
        if kind == "filled":
            return torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        return torch.where(hidden, torch.finfo(torch.float32).min, 0.0)

    forms = {
        "bool": made,
        "expanded": lambda: made()[None, None].expand(3, 1, -1, -1),
        "swapped": lambda: made().T[None].contiguous(),
        "cut": lambda: made()[None, :, : made().shape[-1]],
        "several": lambda: made()[None] & (torch.arange(2) < 2)[:, None, None],
        "different": lambda: made()[None] & (torch.arange(2) < 1)[:, None, None],
    }
    return forms.get(kind, numbers)


def known(recipe):
    with FakeTensorMode():
        graph = make_fx(recipe, tracing_mode="fake")().graph
    (end,) = graph.find_nodes(op="output")
    return KnownNode(end.args[0])


def value_of(recipe):
    """The value of what is not large."""
    node = known(recipe)
    with computing_on_host():
        node.compute()
        return node.compute_block(slice(0, 2**30), slice(0, 2**30))


def hides(whole):
    """What a mask hides, by its elements."""
    shown = whole if whole.dtype is torch.bool else whole == 0
    hidden = ~whole if whole.dtype is torch.bool else whole <= known_masks.HIDDEN
    later = torch.ones(whole.shape[-2:], dtype=torch.bool).triu(1)
    if bool(shown.all()):
        return "nothing"
    return "later keys" if bool(torch.where(later, hidden, shown).all()) else ""


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_a_known_value_is_what_torch_computes(data):
    rows, columns = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    kind = data.draw(st.sampled_from([*FORMS, "filled", "chosen"]))
    sizes = (columns, rows) if kind == "swapped" else (rows, columns)
    recipe = as_mask(data.draw(truth_values(*sizes)), kind)
    whole = recipe()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about expanded memory
        patch.setattr(known_masks, "LARGE", data.draw(st.sampled_from([7, 14, 2**20])))
        patch.setattr(known_masks, "ROWS", data.draw(st.integers(1, 4)))
        patch.setattr(known_masks, "AT_ONCE", data.draw(st.sampled_from([1, 8, 2**22])))
        node = known(recipe)
        try:
            with computing_on_host():
                node.compute()
                for _ in range(3):
                    at = []
                    for size in whole.shape[-2:]:
                        first = data.draw(st.integers(0, size - 1))
                        at.append(slice(first, data.draw(st.integers(first + 1, size))))
                    found, part = node.compute_block(*at), whole[..., *at]
                    assert found.dtype is whole.dtype
                    assert torch.equal(found.expand(part.shape), part)
            assert find_hidden(known(recipe), rows, columns) == hides(whole)
        except NotKnown:
            assert known_masks.LARGE < 64  # what is small is computed, whatever computes it


def test_what_nobody_reads_any_more_is_freed_while_a_value_is_computed():
    def recipe():
        places = torch.arange(2**16)
        for _ in range(20):
            places = torch.cumsum(places, 0) % 7  # cumsum is no view, and not elementwise
        return places

    assert torch.equal(value_of(recipe), recipe())
    node = known(recipe)
    with computing_on_host():
        assert counted(node.compute) < 8 * recipe().nbytes


def test_single_numbers_are_computed_as_all_else_is():
    made = value_of(lambda: torch.arange(4) < torch.full((), 3).mul_(2).sub(3))
    assert made.tolist() == [True, True, True, False]
    made = value_of(lambda: torch.arange(4) + torch.ones(4, dtype=torch.int64)[1] * 2)
    assert made.tolist() == [2, 3, 4, 5]


def causal(size):
    return torch.arange(size)[:, None] >= torch.arange(size)


LONG = {
    "the causal mask": (lambda n: causal(n), "later keys"),
    "with each batch": (lambda n: causal(n)[None, None].expand(512, 1, n, n), "later keys"),
    "of numbers": (lambda n: torch.full((n, n), -math.inf).triu(1), "later keys"),
    "nothing": (lambda n: torch.zeros(n, n), "nothing"),
    "a window": (lambda n: causal(n) & (torch.arange(n)[:, None] - torch.arange(n) < 4000), ""),
    "one key less": (
        lambda n: causal(n) & ((torch.arange(n)[:, None] != n - 1) | (torch.arange(n) != 5)),
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_long_mask_is_looked_at_block_by_block(name):
    made, wanted = LONG[name]
    size = 2**13  # 64 MiB of bools
    node, found = known(lambda: made(size)), set()
    assert counted(lambda: found.add(find_hidden(node, size, size))) < 48 << 20
    assert found == {wanted}


def test_a_mask_that_takes_too_long_to_look_at_is_not_known(monkeypatch):
    monkeypatch.setattr(known_masks, "MOST", 2**20)
    with pytest.raises(NotKnown):
        find_hidden(known(lambda: causal(2**11)), 2**11, 2**11)
    assert find_hidden(known(lambda: causal(2**5)), 2**5, 2**5) == "later keys"


def test_what_is_combined_with_itself_again_and_again_is_computed_once():
    def doubled(size):
        mask = causal(size)
        for _ in range(40):  # 2 ** 40 calls, if each computed its operands
            mask = mask & mask
        return mask

    assert find_hidden(known(lambda: doubled(2**11)), 2**11, 2**11) == "later keys"
    assert find_hidden(known(lambda: doubled(2**5)), 2**5, 2**5) == "later keys"
