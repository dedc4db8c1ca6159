"""What an op allows: sentences, the table of them, and the prover."""

from .bind import NUMBER, Bound, Operand, bind
from .names import Names
from .rows import Row
from .rule import RULES, Arg, Call, Kernel, Like, Rewrite, Rule, Said, rule
from .sentence import Sentence, SentenceError, parse
from .table import LOADED
from .views import resolve, views

__all__ = [
    "LOADED",
    "NUMBER",
    "RULES",
    "Arg",
    "Bound",
    "Call",
    "Kernel",
    "Like",
    "Names",
    "Operand",
    "Rewrite",
    "Row",
    "Rule",
    "Said",
    "Sentence",
    "SentenceError",
    "bind",
    "parse",
    "resolve",
    "rule",
    "views",
]
