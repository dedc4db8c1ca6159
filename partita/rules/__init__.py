"""Rules: in which layouts an op can take its operands, and which layouts its results then have.

A rule is a *sentence* in a notation like einsum's, such as `"... i * o i -> ... o"`. From it follow
the *rows*: each is a legal combination of placements on one mesh axis, such as `S(1), S(0) -> P`.

In reading order: `sentence` (the notation, its rows, and the flops of an op), `rule` (registers
rules; local kernels), `table/` (all rules), `decompositions` (ops written as other ops).

To add an op, add a line to a file of `table/`. If it reduces and is not linear, add the values for
padding to `table/reduction_identity`. If it returns a view or draws random numbers, add that to
`tensor/op_facts`. Add samples of its calls to `testing/samples/`: the prover (`python -m
partita.testing.prove`) checks the rule with them.
"""

from .rule import RULES, Arg, Decomposition, Kernel, KernelCall, KernelRule, LikeRule, Rule, rule
from .sentence import (
    NUMBER,
    Bound,
    Names,
    Operand,
    Row,
    SentenceError,
    Work,
    bind,
    parse,
    resolve_shape,
    view_sentence,
    work_of,
)
from .table.reduction_identity import EXTREME, PaddingFill, find_padding_fills

__all__ = [
    "EXTREME",
    "NUMBER",
    "RULES",
    "Arg",
    "Bound",
    "Decomposition",
    "Kernel",
    "KernelCall",
    "KernelRule",
    "LikeRule",
    "Names",
    "Operand",
    "PaddingFill",
    "Row",
    "Rule",
    "SentenceError",
    "Work",
    "bind",
    "find_padding_fills",
    "parse",
    "resolve_shape",
    "rule",
    "view_sentence",
    "work_of",
]
