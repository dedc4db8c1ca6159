"""What is said of a rule that a user gives, for an operator of `torch.library` or a function of
torch's, where it does not fit a call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import partita as pt
from partita.rules import RULES, SentenceError
from partita.rules.rule import ON_NEW_RULE


@torch.library.custom_op("rules_of_users::bias_gelu", mutates_args=())
def bias_gelu(
    x: torch.Tensor, bias: torch.Tensor, scale: float = 0.5, mask: torch.Tensor | None = None
) -> torch.Tensor:
    y = F.gelu(x + bias) * scale
    return y if mask is None else y * mask


@pytest.fixture(autouse=True)
def no_rule_is_left():
    before = dict(RULES)
    yield
    for function in [*RULES]:
        if function not in before:
            RULES.pop(function)
    RULES.update(before)
    for forget in ON_NEW_RULE:
        forget()


X, BIAS, MASK = torch.rand(4, 3, 6), torch.rand(6), torch.rand(6)


def run(*more, shape=(4, 3, 6), **named):
    def program(mesh):
        x = pt.distribute_tensor(X.reshape(shape), mesh, [pt.Shard(0)])
        with pt.ledger() as log:
            y = bias_gelu(x, *more, **named)
        return y.placements, y.full_tensor(), log.bytes

    with pt.ranks(dp=2) as world:
        return world.run(program)[0]


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("... h, h => ... h", 'no "->" in the rule'),
        ("... h, h -> ... h%)", "cannot read"),
        ("... h -> ... h", "has 1 term, and bias_gelu takes (Tensor x, Tensor bias, float scale"),
        ("a, b, c, d, e -> a", "has 5 terms, and bias_gelu takes"),
    ],
)
def test_a_sentence_that_fits_no_call_is_an_error_where_it_is_given(sentence, fault):
    for name in (bias_gelu, torch.ops.rules_of_users.bias_gelu.default):
        with pytest.raises(SentenceError) as raised:
            pt.rule(sentence, name)
        assert fault in str(raised.value)
        assert name not in RULES


def test_an_ordinary_function_is_refused_since_nobody_would_ask_for_its_rule():
    def plain(x):
        return x.sin()

    for give in (lambda: pt.rule("... -> ...", plain), lambda: pt.rule(plain)(lambda x: "a -> a")):
        with pytest.raises(pt.LayoutError, match="plain is an ordinary Python function"):
            give()


def test_a_parameter_of_a_rule_without_the_functions_default_is_named():
    @pt.rule(torch.trapezoid)
    def trapezoid(y, x, *, dim=-1):
        return f"+ {y.names.whole(dim)} -> {y.names.without(dim)}"

    def program(mesh):
        return torch.trapezoid(pt.ones(4, 6, device_mesh=mesh, placements=[pt.Shard(0)]))

    said = "trapezoid: its rule takes x, which this call does not pass"
    with pt.ranks(dp=2) as world, pytest.raises(pt.LayoutError, match=said):
        world.run(program)


def test_a_sentence_with_another_number_of_results_than_the_operator_is_an_error():
    with pytest.raises(SentenceError, match="has 2 results, and shift gives 1"):
        pt.rule("... h, h -> ... h, h", shift)


def test_shapes_that_the_sentence_does_not_fit_are_an_error_with_rule_shapes_and_place():
    pt.rule("n m h, h -> n m h", bias_gelu)
    placements, y, sent = run(BIAS)
    assert placements == (pt.Shard(0),) and sent == 0
    torch.testing.assert_close(y, bias_gelu(X, BIAS))
    with pytest.raises(pt.LayoutError) as raised:
        run(BIAS, shape=(12, 6))
    text = str(raised.value)
    assert text.startswith("bias_gelu: its rule does not fit this call (at ")
    assert "test_rules_of_users.py" in text
    assert "rule  'n m h, h -> n m h'" in text and "x  12@dp 6" in text
    assert "bias  (6,), plain" in text and "shape (12, 6) does not fit 'n m h'" in text


def test_a_tensor_of_which_the_sentence_says_nothing_is_named():
    pt.rule("... h, h -> ... h", bias_gelu)
    for more, named in (((BIAS, 0.5, MASK), {}), ((BIAS,), {"mask": MASK})):
        with pytest.raises(pt.LayoutError, match="it has no term for mask, a tensor"):
            run(*more, **named)
    assert run(BIAS, 0.5, None)[2] == 0


def test_an_operators_arguments_may_be_given_by_name():
    pt.rule("... h, h -> ... h", bias_gelu)
    placements, y, sent = run(scale=0.25, bias=BIAS)
    assert placements == (pt.Shard(0),) and sent == 0
    torch.testing.assert_close(y, bias_gelu(X, BIAS, 0.25))


def test_where_a_function_of_the_arguments_says_nothing_the_operands_are_gathered():
    @pt.rule(bias_gelu)
    def bias_gelu_rule(x, bias, scale=0.5, mask=None):
        return None if mask is not None else "... h, h -> ... h"

    assert run(BIAS)[2] == 0
    placements, y, sent = run(BIAS, 0.5, MASK)
    assert placements == (pt.Invariant(),) and sent > 0
    torch.testing.assert_close(y, bias_gelu(X, BIAS, 0.5, MASK))


def test_a_function_of_the_arguments_that_makes_a_sentence_that_cannot_be_read_is_told_of():
    pt.rule(bias_gelu)(lambda x, bias: "... h, h")
    with pytest.raises(pt.LayoutError, match='no "->" in the rule'):
        run(BIAS)


def test_a_rule_of_a_function_of_torch_is_held_to_its_calls_and_torchs_own_complaint_comes_first():
    pt.rule("... h k -> ... h k", torch.special.bessel_j0)

    def program(mesh):
        return torch.special.bessel_j0(pt.ones(4, device_mesh=mesh, placements=[pt.Shard(0)]))

    with (
        pt.ranks(dp=2) as world,
        pytest.raises(pt.LayoutError, match="bessel_j0: its rule does not fit this call"),
    ):
        world.run(program)
    pt.rule("a, b -> a", torch.dot)

    def bad_call(mesh):
        x = pt.ones(4, device_mesh=mesh, placements=[pt.Shard(0)])
        return torch.dot(x, torch.ones(4, 4))

    with pt.ranks(dp=2) as world, pytest.raises(RuntimeError, match="1D tensors expected"):
        world.run(bad_call)


@torch.library.custom_op("rules_of_users::shift", mutates_args=())
def shift(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x + by


shift.register_fake(lambda x, by: torch.empty_like(x))


def test_an_explanation_has_the_names_of_the_operator_and_of_its_arguments():
    pt.rule("... h, h -> ... h", shift)
    x = pt.zeros(4, 3, 6, device_mesh=pt.dry_mesh(tp=2), placements=[pt.Shard(2)])
    text = str(pt.explain(shift, x, BIAS))
    assert text.startswith("shift on tp=2") and "by slice" in text
