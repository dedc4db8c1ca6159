"""Rules: which ways an op allows its operands to be laid out.

In reading order: `sentence` (the notation, and names of dimensions), `rows` (what follows for one
mesh axis), `bind` (a sentence and shapes), `rule` (a sentence and its functions), `table/` (all of
them), `views` (sentences of reshapes), `piece_kernels` (kernels over a rank's piece),
`decompositions/` (ops as other ops), `work` (operations). `table/reduction_identity` says what
padding is filled with.
"""

from .bind import NUMBER, Bound, Operand, bind
from .rows import Row
from .rule import RULES, Arg, Decomposition, Kernel, KernelCall, KernelRule, LikeRule, Rule, rule
from .sentence import Names, Sentence, SentenceError, parse
from .table import LOADED
from .table.reduction_identity import EXTREME, PaddingFill, find_padding_fills
from .views import resolve_shape, view_sentence
from .work import Work, work_of

__all__ = [
    "EXTREME",
    "LOADED",
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
    "Sentence",
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
