"""Which form of a step does a budget take?"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import partita as pt
from partita.graph import step_forms
from partita.graph.step_forms import FormSearch

FORMS = [(100, (0, 0)), (80, (10, 10)), (60, (5, 5)), (50, (20, 5)), (40, (20, 20)), (90, (9, 9))]


def taken(forms, budget):
    """The peak and the cost of what a budget takes of forms with these."""

    def program(form):
        peak, cost = forms[form.level]
        level = SimpleNamespace(is_last=form.level == len(forms) - 1)
        return SimpleNamespace(peak=peak, graph=SimpleNamespace(graph=cost), recompute=level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_forms, "run_passes", lambda program: None)
        patch.setattr(step_forms, "peak_of", lambda program: program.peak)
        patch.setattr(step_forms, "cost_of_recompute", lambda cost: cost)
        found = FormSearch(SimpleNamespace(has_blocks=False, program=program)).first_within(budget)
    return found.peak, found.graph.graph


def test_a_form_that_makes_less_again_is_left_out_after_one_that_makes_more():
    assert taken(FORMS, 85) == (80, (10, 10))
    assert taken(FORMS, 65) == (40, (20, 20))  # not 60: the larger budget makes more again
    assert taken(FORMS, None) == (100, (0, 0))
    with pytest.raises(pt.CaptureError, match="the step needs 40"):
        taken(FORMS, 39)


COSTS = st.tuples(st.integers(0, 9), st.integers(0, 9))


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 99), COSTS), max_size=9), st.integers(1, 99))
def test_a_larger_budget_never_makes_more_again(forms, less):
    forms = [(100, (0, 0)), *forms]
    try:
        peak, cost = taken(forms, less)
    except pt.CaptureError:
        return
    assert peak <= less
    for budget in range(less, 101):
        larger, its_cost = taken(forms, budget)
        assert larger <= budget
        assert all(a <= b for a, b in zip(its_cost, cost, strict=True))
