"""Rules: which ways an op allows its operands to be laid out.

In reading order: `sentence` (the notation, and names of dimensions), `rows` (what follows for one
mesh axis), `bind` (a sentence and shapes), `rule` (a sentence and its functions), `table/` (all of
them), `views` (sentences of reshapes), `pieces` (kernels over a rank's piece), `decompositions/`
(ops as other ops), `work` (operations), `reduction_identity` (what padding is filled with).
"""

from .bind import NUMBER, Bound, Operand, bind
from .reduction_identity import EXTREME, Fill, fills
from .rows import Row
from .rule import RULES, Arg, Kernel, KernelCall, Like, Rewrite, Rule, Said, rule
from .sentence import Names, Sentence, SentenceError, parse
from .table import LOADED
from .views import resolve, views
from .work import Work, work_of

__all__ = [
    "EXTREME",
    "LOADED",
    "NUMBER",
    "RULES",
    "Arg",
    "Bound",
    "Fill",
    "Kernel",
    "KernelCall",
    "Like",
    "Names",
    "Operand",
    "Rewrite",
    "Row",
    "Rule",
    "Said",
    "Sentence",
    "SentenceError",
    "Work",
    "bind",
    "fills",
    "parse",
    "resolve",
    "rule",
    "views",
    "work_of",
]
