"""What an op allows: sentences, the table of them, and the prover."""

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
