"""Rules: in which layouts an op can take its operands, and the layouts of its results.

In reading order: `sentence` (the notation, and what it means for shapes: rows for one mesh axis,
and work), `rule` (a sentence and its functions; kernels for a rank's piece), `table/` (all rules),
`decompositions` (ops written as other ops).

To add an op, add a line to a file of `table/`. If it reduces and is not linear, also say in
`table/reduction_identity` which values padding gets. If it returns a view or draws random numbers,
say so in `tensor/op_facts`. Add samples of its calls to `testing/samples/`: the prover
(`python -m partita.testing.prove`) checks the rule with them.
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
