"""What an op allows: sentences, the table of them, and the prover."""

from .rule import RULES, Arg, Call, Kernel, Like, Rewrite, Rule, Said, rule
from .sentence import NUMBER, Bound, Names, Operand, Row, Sentence, SentenceError, parse
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
    "parse",
    "resolve",
    "rule",
    "views",
]
