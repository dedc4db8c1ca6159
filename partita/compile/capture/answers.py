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

from partita.comm import user_line
from partita.layout import Fix

from ..errors import not_captured

__all__ = ["Answers", "Asked", "Guesses", "OtherAnswers", "StepRaises"]

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


class Asked:
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
