"""Is every row of every rule right, and does the prover notice one that is not?"""

import inspect

import pytest
import torch
from torch.nn import functional as F

from partita.rules import RULES, Arg, Decomposition, KernelRule, LikeRule, Rule, SentenceError, rule
from partita.testing.prove import main, prove
from partita.testing.samples import samples

# torch warns of slow paths and of casts that the samples take on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SAMPLES = samples()
MISSED = {
    "the samples' values happen to allow it: tests that shares and pieces pass too": (
        "isfinite isinf isnan isneginf isposinf isreal logical_not nan_to_num bool eq heaviside"
        " isclose logical_and logical_or logical_xor ne nextafter nansum nanmean any all"
        " first_index"
    ),
    "a number, which no rule reads, makes it linear or constant": (
        "fill where linalg_vector_norm norm"
    ),
    "linear but for zeros, of which 0 * log(0) = 0 makes an exception": (
        "xlogy special_xlog1py special_xlogy"
    ),
    "linear in weights, statistics or probabilities, which nobody has as shares": (
        "batch_norm binary_cross_entropy binary_cross_entropy_with_logits multi_margin_loss"
        " cross_entropy_loss nll_loss_nd target_weight"
    ),
    "steps that do not cross the cut, for these sizes only": "__getitem__",
    "places that are written once each, or pieces whose sizes a mask's values tell": "index_put",
    "a tensor that torch skips because it is empty": "cat",
    "torch returns a wrong shape for an empty piece, so the case is kept whole": "addmv",
    "reducing what is pending first is what they are for": "reduced subtract_reduced",
    "linear, but not of bools, and a rule knows no dtypes": "diff",
    "it reads where x lies, not what it holds: x comes as it is": "is_at_place",
}
"""Right rows that no sentence derives, and why that is well so."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("op", SAMPLES, ids=lambda op: RULES[op].name)
def test_each_row_agrees_with_one_device(op):
    proof = prove(op, SAMPLES[op], missed=False)
    assert not proof.wrong, str(proof)
    assert proof.rows


@pytest.mark.slow
def test_every_row_that_is_missed_has_a_reason():
    excused = {name for names in MISSED.values() for name in names.split()}
    missed = {}
    for op, cases in SAMPLES.items():
        proof = prove(op, cases)
        if proof.missed:
            missed[proof.name] = str(proof)
    unknown = {name: text for name, text in missed.items() if name not in excused}
    assert not unknown, "\n".join(unknown.values())
    assert excused <= set(missed), "these are missed no longer"


UNPROVED = set(
    """cfloat chalf cuda dropout empty_like full_like ones_like zeros_like new_empty new_zeros
    new_ones new_full new_empty_strided""".split()
)
"""Rules of creation, whose values depend on no operand, and of chance, and what has a twin."""


def test_every_rule_of_the_table_has_a_sample_or_shares_its_text_with_one_that_has():
    def said(rule):
        return rule.text or rule.derive.__code__

    def here(rule):  # other rooms add rules of their own when they are imported
        return not rule.must_fit and (
            rule.derive is None or rule.derive.__module__.startswith("partita.rules")
        )

    ours = {f: r for f, r in RULES.items() if here(r)}
    proved = {said(RULES[op]) for op in SAMPLES}
    alone = {r.name for f, r in ours.items() if f not in SAMPLES and said(r) not in proved}
    assert alone <= UNPROVED


# -- wrong rules are caught ------------------------------------------------------------------------


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def planted(function, said):
    """The proof of a rule that is not in the table."""

    def register(*cases):
        before = RULES.get(function)
        if isinstance(said, str):
            RULES[function] = Rule("planted", said)
        else:
            params = tuple(inspect.signature(said).parameters.values())
            RULES[function] = Rule("planted", derive=said, params=params)
        try:
            return prove(function, cases, missed=False)
        finally:
            if before is None:
                del RULES[function]
            else:
                RULES[function] = before

    return register


def whole_mean(input, dim=None, keepdim=False):
    return f"+ {input.names} -> {input.names.without(dim, keepdim)}"


def local_mean_of_the_local_count(input, dim=None):
    def local(call):
        return (lambda x, dim=None: x.sum(dim) / x.shape[0]) if call.pieces else None

    return KernelRule(f"+ {input.names} -> {input.names.without(dim)}", local)


def unshifted_triangle(input):
    return f"+ {input.names} -> {input.names}"


def softmax_as_exponentials(input, dim):
    return Decomposition(lambda x, dim: x.exp())


def size_that_is_not_declared(input):
    return f"{input.names.whole()} -> z!"


WRONG = {
    "a bias that each rank adds": (F.linear, "... i * o i, o -> ... o", ((4, 5), (3, 5), (3,))),
    "a softmax over a split dimension": (
        torch.softmax,
        lambda input, dim: "a b -> a b",
        ((4, 5), 0),
    ),
    "a sum that is not one": (torch.prod, "a b -> sum", ((4, 5),)),
    "an op that is not linear": (torch.relu, "+ ... -> ...", ((4, 5),)),
    "a quotient by shares": (torch.div, "... * ... -> ...", ((4, 5), (4, 5))),
    "a sum of a whole and shares": (torch.add, "..., + ... -> ...", ((4, 5), (4, 5))),
    "a product whose factors are both shares": (torch.mul, "... + ... -> ...", ((4, 5), (4, 5))),
    "a contraction of the wrong dimension": (torch.mm, "m k * k n -> m m", ((4, 5), (5, 4))),
    "a normalised dimension that is split": (
        F.layer_norm,
        lambda input, shape: "... d -> ... d",
        ((4, 5), [5]),
    ),
    "rows and columns exchanged": (torch.t, "+ a b -> a b", ((4, 4),)),
    "a mean without the global count": (torch.mean, whole_mean, ((4, 5),)),
    "a mean of the local count": (torch.mean, local_mean_of_the_local_count, ((5,), 0)),
    "a triangle of each piece by itself": (torch.tril, unshifted_triangle, ((5, 4),)),
    "a maximum with a gradient": (torch.amax, "a b -> sum", ((4, 5),)),
    "a running sum over a split dimension": (
        torch.cumsum,
        lambda input, dim: "+ a b -> a b",
        ((4, 5), 0),
    ),
    "other ops with another value": (torch.softmax, softmax_as_exponentials, ((4, 5), 1)),
    "too few outputs": (torch.frexp, "... -> ...", ((4, 5),)),
    "a size that an undeclared argument decides": (
        torch.topk,
        size_that_is_not_declared,
        ((5,), 2),
    ),
    "a name joined in the wrong order": (
        torch.flatten,
        lambda input: "+ a b -> (b a)",
        ((4, 6),),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_caught(what):
    function, said, given = WRONG[what]
    args = tuple(values(*s) if isinstance(s, tuple) else s for s in given)
    proof = planted(function, said)((args, {}))
    assert proof.wrong
    assert "wrong" in str(proof)


def test_a_right_row_that_a_rule_lacks_is_listed():
    before = RULES[torch.mm]
    RULES[torch.mm] = Rule("mm", "m k! * k! n -> m n")
    try:
        proof = prove(torch.mm, [((values(4, 6), values(6, 2)), {})])
    finally:
        RULES[torch.mm] = before
    assert not proof.wrong
    assert proof.missed == ["S(1), S(0) -> P"]


# -- what rules say where no row can be proved -----------------------------------------------------


def test_a_new_tensor_does_not_inherit_shares_unless_it_is_overwritten():
    x = Arg((4, 5), (1, 1), pending=True)
    for function in (torch.zeros_like, torch.ones_like, torch.full_like):
        assert RULES[function].derive(x) == LikeRule((4, 5))
    # By names: once there is a mesh, other functions stand there that clear memory.
    by_name = {function.__name__: rule for function, rule in RULES.items()}
    assert by_name["empty_like"].derive(x).pending
    assert by_name["new_empty_strided"].derive(x, (4, 5)).pending
    assert RULES[torch.Tensor.new_zeros].derive(x, 2, 3).shape == (2, 3)


def test_statistics_that_are_written_in_place_are_never_moved():
    x, s = Arg((4, 5), (1, 1)), Arg((5,), (1,))
    text = RULES[F.batch_norm].derive(x, s, s, None, None, True)
    assert text == "a! b!, b!, b! -> a! b!"
    assert isinstance(
        RULES[F.batch_norm].derive(Arg((4, 5), (2, 1)), s, s, None, None, True), Decomposition
    )


@pytest.fixture(scope="module")
def operator():
    """An operator of torch.library, with gradients of its own.

    It is defined once: torch forgets the name of an operator when one that it replaced is freed.
    """

    @torch.library.custom_op("partita_proved::weigh", mutates_args=())
    def weigh(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * w).sum(-1) * scale

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        g = g.unsqueeze(-1) * ctx.scale
        return g * w, (g * x).flatten(0, -2).sum(0), None

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    weigh.register_autograd(backward, setup_context=keep)
    return weigh


@pytest.fixture
def weigh(operator):
    yield operator
    RULES.pop(operator, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [7, 400])
def test_a_right_rule_is_right_in_every_dtype_and_a_wrong_one_wrong(weigh, dtype, rows):
    x, w = torch.randn(rows, 5, 9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    samples = [((x.to(dtype), w.to(dtype), 0.5), {})]
    rule("... h * h -> ...", weigh)
    for name in (weigh, torch.ops.partita_proved.weigh, torch.ops.partita_proved.weigh.default):
        proof = prove(name, samples, missed=False)
        assert proof.rows > 5 and not proof.wrong, str(proof)
    rule("... h + h -> ...", weigh)  # in a sum both may be shares
    (wrong, *_) = prove(weigh, samples, missed=False).wrong
    assert "differs most at (" in wrong and "would be rounding" in wrong and "tensor(" not in wrong


def test_an_op_without_a_rule_is_not_proved(weigh):
    with pytest.raises(KeyError, match=r"has no rule: give it one with pt\.rule"):
        prove(weigh, [])


def test_a_sentence_that_does_not_fit_a_sample_is_not_proved(weigh):
    rule("h h, h -> h", weigh)
    with pytest.raises(SentenceError, match=r"shape .* in the rule .h h, h -> h."):
        prove(weigh, [((torch.ones(2, 3, 4), torch.ones(4), 0.5), {})])


def test_the_command_knows_its_names(capsys):
    assert main(["minimum"]) == 0
    assert "minimum: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["minimun"])
    assert ended.value.code == 2
    assert "no rule with samples is named 'minimun'; there is minimum" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "NAME" in capsys.readouterr().out
