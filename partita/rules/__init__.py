"""Rules: which ways an op allows its operands to be laid out.

In reading order: `sentence` (the notation, names of dimensions, sentences of reshapes; what a
sentence means for shapes: rows for one mesh axis, and work), `rule` (a sentence and its functions;
kernels over a rank's piece), `table/` (all of them), `decompositions` (ops as other ops).
`table/reduction_identity` says what padding is filled with.

A new op is a line in a file of `table/`. If it reduces and is not linear,
`table/reduction_identity` says what padding is; that it gives a view or draws numbers,
`tensor/op_facts`. A sample of its calls in `testing/samples/` is what
`python -m partita.testing.prove` holds its rule against.
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
