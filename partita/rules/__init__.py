"""What an op allows: sentences, and the table of them.

In reading order: `sentence` (the notation), `names` (of dimensions), `bind` (a sentence and
shapes), `rows` (what follows for one mesh axis), `rule` (a sentence and its functions), `table/`
(all of them), `views` (sentences of reshapes), `decompositions/` (ops as other ops), `work`
(operations), `pieces` and `reduction_identity` (kernels over a piece, or padding), `own_op` (ops of
our own), `split` (simulated ranks, for the prover).
"""

from .bind import NUMBER, Bound, Operand, bind
from .names import Names
from .reduction_identity import EXTREME, Fill, fills
from .rows import Row
from .rule import RULES, Arg, Kernel, KernelCall, Like, Rewrite, Rule, Said, rule
from .sentence import Sentence, SentenceError, parse
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
