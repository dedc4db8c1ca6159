"""Numbers and answers: what a captured step does when it branches on a float or on a tensor's
value.

A float that the step reads (a learning rate, an argument) becomes a symbolic float, an input of the
graph (`CapturedNumbers`). Branches on it become conditions: the program is used for other floats
that take the same branches.

A branch on a tensor's value, or a shape that depends on it, is a *question*; the value is its
*answer*. Capture continues with a guessed answer: that of an earlier run, or one computed from the
call's small inputs (`predicted_values`). Without a guess, the values read so far are computed
(`ValuesWanted`), and capture starts again with them.

The graph also returns the true answers. If one differs from the guess, the graph writes nothing
(`gate_writes`), and the call runs a program for the true answers (`OtherAnswers`).
"""

from __future__ import annotations

import math
import re
import struct
import sys
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree

from partita.capture.conditions import Condition
from partita.comm import user_line
from partita.graph.errors import file_of_torch, not_captured
from partita.graph.graph_nodes import has_effect, note_of
from partita.graph.passes.rewrite import NodeBuilder
from partita.graph.program import Input
from partita.graph.slots import ParamGroup
from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from .predicted_values import ValuesOfCall

if TYPE_CHECKING:
    from partita.capture.number_env import NumberEnv  # which imports sympy and Dynamo

# -- floats as inputs ------------------------------------------------------------------------------

NUMBER = torch.zeros((), dtype=torch.float64)
"""A tensor with the metadata of a number in a graph."""


@dataclass
class PlainNumbers:
    """The Python floats of a step that are constants of its program, because they cannot be inputs.

    Attributes:
        why: the reason if no float can be an input; "" otherwise.
        named: maps the name of each constant float to the user's line. The step reads or compares a
            float that is zero, or its code may compare the float by `is`.
    """

    why: str = ""
    named: dict[str, str] = field(default_factory=dict)


class CapturedNumbers:
    """The Python floats that a step reads in one run. They become graph inputs or constants.

    Args:
        env: the shape environment of the fake tensors.
        plain: the floats that are constants.

    Attributes:
        met: (input, value) of each float that the step has read.
        traced: maps the symbol of each float that is a graph input to its `Input`.
    """

    def __init__(self, env: NumberEnv, plain: PlainNumbers):
        self.env, self.plain = env, plain
        self.met: list[tuple[Input, float]] = []
        self.traced: dict[str, Input] = {}

    def stand_in(self, given: Input, value: float) -> Any:
        """Returns a symbolic float in place of `value`; `value` itself if it is a constant.

        Args:
            given: the graph input for the float.
        """
        self.met.append((given, value))
        if self.plain.why or not _is_traceable(value, given, self.plain.named):
            return value
        mode = get_proxy_mode()
        assert mode is not None
        found = self.env.symbolic(f"{given.name} {len(self.traced)}", float(value))
        found.kind = type(value)
        graph = mode.tracer.graph
        inputs = graph.find_nodes(op="placeholder")
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
            node = graph.placeholder(f"number_{len(self.traced)}")
        track_tensor_tree(found, fx.Proxy(node, mode.tracer), constant=None, tracer=mode.tracer)
        node.meta["val"] = found
        self.traced[str(found.node.expr)] = given
        return found

    def make_read_zeros_constant(self) -> bool:
        """Makes floats that are zero constants, if the step has read or compared them.

        Code often tests `if weight_decay != 0`. Returns True if there is such a float: the step
        must then run again, without these inputs.
        """
        lines = {id(given): line for given, line in self._list_asked()}
        found = {
            given.name: lines[id(given)]
            for given, value in self.met
            if value == 0 and id(given) in lines
        }
        self.plain.named.update(found)
        return bool(found)

    def make_constants(self, numbers: Sequence[Input]) -> bool:
        """Makes the floats of these inputs constants of the program, from the next run on.

        Returns True if one of them is a graph input in this run, so that another run is needed.
        """
        traced = [given for given in numbers if any(given is g for g in self.traced.values())]
        self.plain.named.update({given.name: user_line() for given in traced})
        return bool(traced)

    def _list_asked(self) -> list[tuple[Input, str]]:
        """Returns (input, user's line) of each traced float that was compared or read."""
        lines = dict(self.env.asked)
        for i, guard in enumerate(self.env.guards):
            if type(guard.expr).__name__ == "Equality":
                for s in map(str, guard.expr.free_symbols):
                    lines.setdefault(s, self.env.lines.get(i, ""))
        return [(given, lines[s]) for s, given in self.traced.items() if s in lines]

    def conditions(self) -> list[Condition]:
        """Returns the conditions on floats under which the program may run, such as `lr > 0.1`."""
        # Not at the top, because it imports sympy: see `capture.number_env`.
        from torch.utils._sympy.printers import PythonPrinter

        found = []
        values = {id(given): value for given, value in self.met}
        traced = set(map(id, self.traced.values()))
        for i, guard in enumerate(self.env.guards):
            names = sorted(map(str, guard.expr.free_symbols))
            if not names or any(name not in self.traced for name in names):
                continue  # it is about the `.item()` of a tensor, not a float of the step
            numbers = tuple(self.traced[name] for name in names)
            code = None  # a value that is read includes the sign of a zero
            if not _is_value(guard.expr):
                code = compile(PythonPrinter().doprint(guard.expr), "<condition>", "eval")
            said = _describe_condition(guard.expr, {n: g.name for n, g in self.traced.items()})
            found.append(
                Condition(
                    said,
                    self.env.lines.get(i, ""),
                    numbers,
                    tuple(values[id(g)] for g in numbers),
                    code,
                    tuple(names),
                )
            )
        asked = [given for given, _ in self._list_asked()]
        if asked:
            found.append(_make_finite_condition(asked, [values[id(given)] for given in asked]))
        for given, value in self.met:
            if id(given) not in traced:
                line = self.plain.named.get(given.name)
                why = f"it was {value} at the capture" if line else self.plain.why
                text = f"{given.name} is read as a number ({why or f'{value} cannot be traced'})"
                found.append(Condition(text, line or user_line(), (given,), (value,), None))
        return found


def _make_finite_condition(numbers: list[Input], values: list[float]) -> Condition:
    """Returns the condition that traced floats are finite: tracing assumes that `x == x`."""
    symbols = tuple(f"n{i}" for i in range(len(numbers)))
    total = " + ".join(f"{symbol} * 0" for symbol in symbols)  # NaN unless all are finite
    code = compile(f"{total} == 0", "<condition>", "eval")
    said = "the program is for finite numbers"
    return Condition(said, user_line(), tuple(numbers), tuple(values), code, symbols)


def _is_traceable(value: float, given: Input, plain: Container[str]) -> bool:
    """True if a float can be traced. Symbolic numbers have no NaN, infinity or -0.0.

    A zero among an optimizer's settings is not traced either, except a learning rate, because the
    optimizer branches on it.
    """
    if given.name in plain:
        return False
    if value != 0:
        return math.isfinite(value)
    asked = type(given.home) is ParamGroup and given.path[0] != "lr"
    return math.copysign(1, value) > 0 and not asked


def _is_value(expr: Any) -> bool:
    """True for a condition such as `lr == 0.1`, that a number has one fixed value."""
    return bool(type(expr).__name__ == "Equality" and expr.rhs.is_number and expr.lhs.is_symbol)


def _describe_condition(expr: Any, names: dict[str, str]) -> str:
    """Returns a condition as text."""
    kind = type(expr).__name__
    if _is_value(expr):
        return f"{_name_symbols(expr.lhs, names)} is read as a number"
    sign = {"Equality": "==", "Unequality": "!="}.get(kind, getattr(expr, "rel_op", ""))
    text = (
        f"{_name_symbols(expr.lhs, names)} {sign} {_name_symbols(expr.rhs, names)}"
        if sign
        else str(expr)
    )
    return f"the program checks whether {_name_symbols(text, names)}"


def _name_symbols(expr: Any, names: dict[str, str]) -> str:
    text = re.sub(r"\b\d+\.\d+(e[+-]?\d+)?", lambda found: repr(float(found[0])), str(expr))
    return re.sub(r"\bzf\d+\b", lambda found: names.get(found[0], found[0]), text)


# -- answers to questions about values -------------------------------------------------------------

_aten = torch.ops.aten
_MACHINERY = ("__init__.py", "_tensor.py", "overrides.py", "fx", "utils")
"""Files of torch that only forward a call."""
_CHECKS = "torch/distributions/"
_MOST_QUESTIONS = 4096  # in one step
_MOST_TRIES = 8  # captures with other guesses, if the step raises


Answer = bool | float
"""The answer to a question: whether a condition is true, or the number that a value is."""


def _encode_answer(answer: Answer) -> int:
    """Returns an answer as the integer that the graph computes: for a float its bits."""
    return (
        struct.unpack("<q", struct.pack("<d", answer))[0] if type(answer) is float else int(answer)
    )


def _decode_answer(found: int, like: Answer) -> Answer:
    """Returns the answer, of the type of `like`, for an integer that a graph has computed."""
    if type(like) is float:
        return float(struct.unpack("<d", struct.pack("<q", found))[0])
    return bool(found) if type(like) is bool else found


def as_symbol(question: Any) -> torch.SymBool | torch.SymInt | torch.SymFloat:
    """Converts a node of torch's shape environment to a `torch.SymBool`, `SymInt` or `SymFloat`."""
    kinds: Any = {bool: torch.SymBool, int: torch.SymInt, float: torch.SymFloat}
    return kinds[question.pytype](question)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Guesses:
    """Assumed results of branches on tensor values, in the order of the branches.

    A capture continues after a branch with the assumed result (answer). `PredictedValues` predicts
    the answers of later branches.

    Attributes:
        values: the assumed answers.
        certain: the number of answers at the beginning that are known to be true for the call.
        turned: the indices of the answers for which both results were tried.
        tried: the number of sequences of answers that were tried.
    """

    values: tuple[Answer, ...] = ()
    certain: int = 0
    turned: frozenset[int] = frozenset()
    tried: int = 1

    def try_other_way(self, answers: Sequence[Answer]) -> Guesses | None:
        """Returns guesses in which one of `answers` is changed; None if none is left to try.

        Use it if the step has raised an error during capture: a wrong guess may have led to a
        branch that the real call does not take. At most `_MOST_TRIES` sequences are tried.

        Args:
            answers: the answers that the failed run has assumed, in the order of the branches.
        """
        for i in reversed(range(self.certain, len(answers) if self.tried < _MOST_TRIES else 0)):
            if i not in self.turned and isinstance(answers[i], bool):
                before = {n for n in self.turned if n < i}
                values = (*answers[:i], not answers[i])
                return Guesses(values, self.certain, frozenset({*before, i}), self.tried + 1)
        return None


@dataclass(frozen=True)
class OtherAnswers:
    """The result of a run in which assumed answers (results of branches) were wrong.

    The run has changed nothing, so the call can run another program instead.

    Attributes:
        answers: the answers that the graph computed.
        certain: the number of answers that are true for the call: up to the first that differs.
            Later ones were computed on a branch that the call does not take.
        line: the user's line of the first difference.
        before: the answer that the program assumes there.
    """

    answers: tuple[Answer, ...]
    certain: int
    line: str
    before: Answer

    @property
    def reason(self) -> str:
        """A text that says why another program is needed: which value differs, at which line."""
        last = self.answers[self.certain - 1]
        return f"the value at {self.line} gave {last} in place of {self.before}"

    @property
    def guesses(self) -> Guesses:
        """The answers that the graph has computed, as assumptions for another capture."""
        return Guesses(self.answers, self.certain)

    def agrees_with(self, answers: Sequence[Answer]) -> bool:
        """True if `answers` are right for this call, as far as the true answers are known."""
        return tuple(answers[: self.certain]) == self.answers[: self.certain]


@dataclass(frozen=True)
class Answers:
    """The results of branches on tensor values that a program assumes.

    Attributes:
        values: the answers, in the order of the questions.
        lines: the user's line of each question.
    """

    values: tuple[Answer, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def numeric(self) -> tuple[int, ...]:
        """The indices of those answers that are numbers (a value, a size), not bools."""
        return tuple([i for i, v in enumerate(self.values) if not isinstance(v, bool)])

    def compare_numbers(self, found: Sequence[int]) -> OtherAnswers | None:
        """Compares the answers that are numbers with `found`, the computed ones.

        Returns None if they are equal, otherwise the computed answers. A small graph computes them
        before the program runs, because they decide shapes.
        """
        values = [*map(_encode_answer, self.values)]
        for i, value in zip(self.numeric, found, strict=True):
            values[i] = value
        return self.compare(values)

    def compare(self, found: Sequence[int]) -> OtherAnswers | None:
        """Returns None if the assumed answers are right for a call; otherwise an `OtherAnswers`.

        Args:
            found: the computed answers, encoded as integers.
        """
        if [*map(_encode_answer, self.values)] == [*found]:
            return None
        pairs = [*zip(self.values, found, strict=True)]
        first = next(i for i, (expected, n) in enumerate(pairs) if _encode_answer(expected) != n)
        answers = tuple([_decode_answer(n, expected) for expected, n in pairs])
        return OtherAnswers(answers, first + 1, self.lines[first], self.values[first])


class ValuesWanted(BaseException):
    """Raised during capture if the step branches on a value that must be computed first.

    The call then computes the value, and captures the step again. It is a BaseException, so that
    the step does not catch it.

    Attributes:
        compute: a function from the leaves (tensors and numbers) of the call to the numbers that
            the step has read so far, as a `ValuesOfCall`. All ranks must call it.
    """

    compute: Callable[[Sequence[Any]], ValuesOfCall]


class StepRaises(Exception):
    """Raised if the step raises an error of its own during capture.

    The call then runs eagerly, so that the step writes and raises as in eager code.

    Attributes:
        error: what the step raised while it was captured.
        guards: guards of what the step had read until then.
        signature: the signature of the call.
    """

    signature: Any

    def __init__(self, error: Exception, guards: Any):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error, self.guards = error, guards


class AskedQuestions:
    """The branches on tensor values in one capture run, each with its assumed result (answer).

    Args:
        guesses: answers of an earlier run.

    Attributes:
        values: the symbolic value of each branch, an output of the graph.
        reads: the numbers that the step has read from tensors (`.item()`), in order.
        last_line: the user's line of the last branch whose result could not be predicted.
    """

    def __init__(self, guesses: Guesses):
        self._guesses = guesses
        self.values: list[Any] = []
        self.reads: list[Any] = []
        self._answers: list[Answer] = []
        self._lines: list[str] = []
        self._known: dict[Any, Answer] = {}
        self.last_line = ""

    def answer(self, question: Any, predict: Callable[[Any], Answer | None]) -> Answer | None:
        """Returns the assumed answer to a branch on a tensor's value, with which capture continues.

        Args:
            question: the node of a symbolic number.
            predict: a function that returns the likely answer, or None; used if there is no guess.

        Raises:
            ValuesWanted: the values read so far must be computed first.
            CaptureError: the step has branched too often.
        """
        known = self._known.get(question.expr)
        if known is not None:
            return known
        number, kind = len(self._answers), question.pytype
        if number == _MOST_QUESTIONS:
            raise not_captured(
                f"the step branches on more than {_MOST_QUESTIONS} values",
                "each combination of branch results needs its own graph",
                Fix("pt.compile(forward)", "for a part without these branches"),
            )
        guesses = self._guesses.values
        value = as_symbol(question)
        found: Answer | None
        # Numbers after the first wrong answer belong to another branch.
        some = len(guesses) if kind is bool else self._guesses.certain
        if number < some and type(guesses[number]) is kind:
            found = guesses[number]
        elif (found := predict(value)) is None:
            stack = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
            file = file_of_torch(stack, _MACHINERY)
            if not (kind is bool and file):
                self.last_line = user_line()
                raise ValuesWanted
            # A distribution checks its arguments, which are most likely valid.
            found = file.startswith(_CHECKS)
        self._known[question.expr] = found
        self.values.append(value)
        self._answers.append(found)
        self._lines.append(user_line())
        return found

    def other_way(self) -> Guesses | None:
        """Returns guesses in which one answer of this run is changed; None if all were tried.

        Use them to capture again after the step has raised an error.
        """
        return self._guesses.try_other_way(self._answers)

    @property
    def answers(self) -> Answers:
        """The answers that this run has assumed so far, in the order of the branches."""
        return Answers(tuple(self._answers), tuple(self._lines))


def guess_by_kind(node: fx.Node) -> bool | None:
    """Guesses the result of a check, which `node` computes, from its op; None if unsure.

    Most checks pass: `isfinite(x).all()` is true, `isnan(x).any()` is false.
    """
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", ""))
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    if name in ("logical_not", "bitwise_not", "not_", "sym_not"):
        found = guess_by_kind(operands[0])
        return None if found is None else not found
    if name in ("_is_all_true", "_is_any_true"):
        name = name.split("_")[2]
    if name in ("all", "any") and (name == "all" or _finds_bad(operands[0])):
        return name == "all" and not _finds_bad(operands[0])
    if name in ("isfinite", "isnan", "isinf"):
        return name == "isfinite"
    if name in ("mul", "bitwise_and", "logical_and", "and_") and len(operands) == 2:
        both = [guess_by_kind(n) for n in operands]
        return None if None in both else all(both)
    if name in ("eq", "ne") and (_compares_with_bad(node) or node.args[0] is node.args[1]):
        return (name == "eq") is not _compares_with_bad(node)
    passes = name in ("_local_scalar_dense", "view", "clone", "detach", "alias", "_to_copy", "eq")
    if passes and operands and (name != "eq" or node.args[1] == 1):  # `eq`: a bool that is read
        return guess_by_kind(operands[0])
    return None


def _compares_with_bad(node: fx.Node) -> bool:
    return any(isinstance(a, float) and not math.isfinite(a) for a in node.args)


def _finds_bad(node: fx.Node) -> bool:
    """True for a node such as `isnan(x)`, which is normally False."""
    return guess_by_kind(node) is False


# -- gated writes ----------------------------------------------------------------------------------


def gate_writes(graph: fx.Graph, answers: Sequence[Answer]) -> None:
    """Makes a graph write its inputs only if the assumed results of branches are right.

    The graph's last outputs compute these results. If one of them differs from `answers`, each
    `copy_` writes the input's old value, so that the run changes nothing. The last outputs become
    one output, a tensor of integers.

    Args:
        graph: the graph, which is changed in place.
        answers: the assumed results.

    Raises:
        CaptureError: a custom operator in the graph writes, whatever the answers are.
    """
    (end,) = graph.find_nodes(op="output")
    values = list(end.args[0])
    results, found = values[: -len(answers)], values[-len(answers) :]
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    for node in graph.nodes:
        writes = node.op == "call_function" and has_effect(node) and node not in copies
        facts = facts_of(node.target)
        if writes and not (facts.draws or facts.checks):
            raise not_captured(
                f"{node.target} writes, in a step that branches on a value",
                "it would write before the branch is known",
                Fix("do it outside the step", "before or after the call"),
                place=note_of(node).source,
            )
    with graph.inserting_before(copies[0] if copies else end):
        make = NodeBuilder(graph, note_of(found[-1]))
        numbers = [_make_integer(make, v) for v in found]
        answers_found = make(_aten.stack.default, numbers)
        if copies:
            pairs = zip(numbers, map(_encode_answer, answers), strict=True)
            held = [make(_aten.eq.Scalar, v, a) for v, a in pairs]
            all_hold = make(_aten.all.default, make(_aten.stack.default, held))
    for copy in copies:
        into, value = copy.args[:2]
        with graph.inserting_before(copy):
            make = NodeBuilder(graph, note_of(copy))
            now, was = value.meta["val"], into.meta["val"]
            if now.dtype != was.dtype:
                value = make(_aten._to_copy.default, value, dtype=was.dtype)
            holds = all_hold
            if was.device != holds.meta["val"].device:
                holds = make(_aten._to_copy.default, holds, device=was.device)
            copy.args = (into, make(_aten.where.self, holds, value, into), *copy.args[2:])
    end.args = ([*results, answers_found],)


def _make_integer(make: NodeBuilder, value: fx.Node) -> Any:
    """Returns a number of the graph as an integer: for a float its bits."""
    if value.meta["val"].dtype is torch.float64:
        return make(_aten.view.dtype, value, torch.int64)
    return make(_aten._to_copy.default, value, dtype=torch.int64)
