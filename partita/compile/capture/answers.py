"""Answers: what torch's own code asks of a tensor's value, and what a program takes them to be.

An update is skipped where gradients overflow, an average begins as a copy, a loss looks whether its
variances are negative: torch asks for a value, and goes one way or the other. While a step is
captured there are no values. Capture goes one way, and the graph gives the answers as it finds
them. Where one is another than the program was made for, the graph leaves what it writes as it
was, and the call runs the program of these answers instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils._python_dispatch import _disable_current_modes

from partita.comm import user_line
from partita.layout import Fix
from partita.tensor.op_facts import facts_of

from ..errors import not_captured
from ..graph_nodes import has_effect
from ..node_metadata import note_of
from ..passes.making import Making
from .fakes import local_of
from .symbolic import is_symbolic

__all__ = [
    "Answers",
    "AskedQuestions",
    "Guesses",
    "OtherAnswers",
    "StepRaises",
    "gate_writes",
    "predict_answer",
]


_TORCH = os.path.dirname(torch.__file__) + os.sep
_PARTITA = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_MACHINERY = ("__init__.py", "_tensor.py", "overrides.py", "fx" + os.sep, "utils" + os.sep)
"""Of torch: what hands a question on, and asks none."""
_CHECKS = "distributions" + os.sep
_MOST = 4096  # questions of a step
_WAYS = 8  # that are tried where the step raises


@dataclass(frozen=True)
class Guesses:
    """What the first questions of a capture are answered; those that follow are predicted.

    Attributes:
        values: the answers.
        certain: so many of them are known to be the call's.
        turned: the numbers of those that were tried both ways.
        tried: how many ways were.
    """

    values: tuple[bool, ...] = ()
    certain: int = 0
    turned: frozenset[int] = frozenset()
    tried: int = 1

    def try_other_way(self, answers: Sequence[bool]) -> Guesses | None:
        """Other guesses, where the step has raised on the way of `answers`: perhaps it is not the
        call's. None where all ways were tried."""
        for i in reversed(range(self.certain, len(answers) if self.tried < _WAYS else 0)):
            if i not in self.turned:
                before = {n for n in self.turned if n < i}
                values = (*answers[:i], not answers[i])
                return Guesses(values, self.certain, frozenset({*before, i}), self.tried + 1)
        return None


@dataclass(frozen=True)
class OtherAnswers:
    """A run whose answers were others than its program's: it has changed nothing.

    Attributes:
        answers: as the graph found them.
        certain: so many of them are the call's, whichever program it runs: those behind the first
            that is another were found on a way that the call does not go.
        line: the user's, whose call asks for the first that is another.
    """

    answers: tuple[bool, ...]
    certain: int
    line: str

    @property
    def reason(self) -> str:
        """Why another program is due."""
        last = self.answers[self.certain - 1]
        return f"what torch asks of a value at {self.line}: {not last} became {last}"

    @property
    def guesses(self) -> Guesses:
        """What another capture goes by."""
        return Guesses(self.answers, self.certain)

    def agrees(self, answers: Sequence[bool]) -> bool:
        """May a program that takes these for granted run in the call?"""
        return tuple(answers[: self.certain]) == self.answers[: self.certain]


@dataclass(frozen=True)
class Answers:
    """What a program takes for granted of the values that torch asks for.

    Attributes:
        values: the answers, in the order of the questions.
        lines: of each question the user's, whose call asks.
    """

    values: tuple[bool, ...] = ()
    lines: tuple[str, ...] = ()

    def compare(self, found: Sequence[bool]) -> OtherAnswers | None:
        """What to do where a run has found other answers."""
        for i, (one, other) in enumerate(zip(self.values, found, strict=True)):
            if one is not other:
                return OtherAnswers(tuple(found), i + 1, self.lines[i])
        return None


class StepRaises(Exception):
    """The step raises on the way that the call's answers lead. The call runs eagerly, so that
    it raises what it does there, with values.

    Attributes:
        error: what it raised while it was captured.
    """

    def __init__(self, error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


class AskedQuestions:
    """The questions of one capture.

    Attributes:
        values: of each question what stands for its answer.
    """

    def __init__(self, guesses: Guesses):
        self._guesses = guesses
        self.values: list[torch.SymBool] = []
        self._answers: list[bool] = []
        self._lines: list[str] = []
        self._known: dict[Any, bool] = {}

    def answer(self, question: Any, predict: Callable[[torch.SymBool], bool]) -> bool | None:
        """The answer that capture goes on with; None where it is the user's code that asks.

        Args:
            question: the node of a symbolic bool.
            predict: the likely answer to one that nothing is known of.
        """
        file = _file_that_asks()
        if not file:
            return None
        known = self._known.get(question.expr)
        if known is not None:
            return known
        number = len(self._answers)
        if number == _MOST:
            raise not_captured(
                f"torch asks for more than {_MOST} values in one step",
                "each answer is one more way through it, and a graph of its own",
                Fix("pt.compile(part of the step)", "leave out what asks"),
            )
        guesses, value = self._guesses.values, torch.SymBool(question)
        found = guesses[number] if number < len(guesses) else _is_check(file) or predict(value)
        self._known[question.expr] = found
        self.values.append(value)
        self._answers.append(found)
        self._lines.append(user_line())
        return found

    def other_way(self) -> Guesses | None:
        """Guesses by which the step may not raise as it did; None where it is the call's way."""
        return self._guesses.try_other_way(self._answers)

    @property
    def given(self) -> Answers:
        """Those that capture went on with."""
        return Answers(tuple(self._answers), tuple(self._lines))


def _is_check(file: str) -> bool:
    """Does a distribution of torch's check its arguments, most of which are right?"""
    return file.startswith(_CHECKS)


def _file_that_asks() -> str:
    """The file of torch's whose code asks for a value now; "" where it is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PARTITA):
            if not name.startswith(_TORCH):
                return ""
            if not name.removeprefix(_TORCH).startswith(_MACHINERY):
                return name.removeprefix(_TORCH)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


_SMALL = 64  # elements
_DEEP = 32  # calls


def predict_answer(
    question: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]
) -> bool | None:
    """The likely answer; None where it cannot be told.

    Args:
        value_of: what an input of the graph is in the call, where that may be read.
    """
    known: dict[fx.Node, Any] = {}
    try:
        with _disable_current_modes(), Local(), torch.no_grad():
            return bool(_predict_value(question, value_of, known))
    except Exception:  # a guess raises nothing
        return None


class _Unknown(Exception):
    pass


def _predict_value(
    node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None], known: dict[fx.Node, Any]
) -> Any:
    if node not in known:
        if len(known) > _DEEP or any(facts_of(u.target).writes for u in node.users):
            raise _Unknown
        known[node] = found = _compute_node(node, value_of, known)
        if found is None or (isinstance(found, torch.Tensor) and found.numel() > _SMALL):
            raise _Unknown
    return known[node]


def _compute_node(
    node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None], known: dict[fx.Node, Any]
) -> Any:
    if node.op == "placeholder":
        stands_in: Any = node.meta.get("val")
        if is_symbolic(stands_in):
            return stands_in.node.hint
        value = value_of(node)
        return None if value is None else local_of(value)
    target: Any = node.target
    facts = facts_of(target)
    sent = getattr(target, "namespace", "aten") not in ("aten", "prims")
    if node.op != "call_function" or facts.draws or facts.writes or sent:
        raise _Unknown
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _predict_value(n, value_of, known)
    )
    return target(*args, **kwargs)


_aten = torch.ops.aten


def gate_writes(graph: fx.Graph, answers: Sequence[bool]) -> None:
    """Have a graph write only where the answers, its last outputs, are those that are given.

    They become one output: a tensor of bools.

    Raises:
        CaptureError: a call of the graph writes by itself, whatever the answers are.
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
                f"{node.target} writes, in a step in which torch asks for a value",
                "it would have written before the answer is known",
                Fix("do it outside the step", "before or after the call"),
                place=note_of(node).source,
            )
    with graph.inserting_before(copies[0] if copies else end):
        make = Making(graph, note_of(found[-1]))
        answers_found = make(_aten.stack.default, found)
        if copies:
            held = [
                v if a else make(_aten.logical_not.default, v)
                for v, a in zip(found, answers, strict=True)
            ]
            all_hold = make(_aten.all.default, make(_aten.stack.default, held))
    for copy in copies:
        into, value = copy.args[:2]
        with graph.inserting_before(copy):
            make = Making(graph, note_of(copy))
            now, was = value.meta["val"], into.meta["val"]
            if now.dtype != was.dtype:
                value = make(_aten._to_copy.default, value, dtype=was.dtype)
            holds = all_hold
            if was.device != holds.meta["val"].device:
                holds = make(_aten._to_copy.default, holds, device=was.device)
            copy.args = (into, make(_aten.where.self, holds, value, into), *copy.args[2:])
    end.args = ([*results, answers_found],)
