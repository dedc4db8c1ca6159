"""The search of a plan: which ways are simulated, in which order, and which are left out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .machine import Machine
from .plan_bounds import guess_bytes, guess_seconds, least_bytes, least_seconds
from .simulate import simulate
from .simulation import Simulation
from .strategy import ModelShape
from .way import Way

__all__ = ["LEFT", "OUTCOMES", "PlannedWay", "WaySearch"]

FITS, TOO_BIG, BOUND = "fit", "too big", "too big by weights and optimizer"
RULED_OUT = "hold more than one that is too big"
SLOW, LEFT = "too slow by bound", "not looked at"
OUTCOMES = (FITS, TOO_BIG, BOUND, RULED_OUT, SLOW, LEFT)
"""How a way may end: each ends in one of them."""

_SMALL = 16
"""Blocks of all micro-batches together that are simulated whole to rank a way."""
_WHOLE = 128
"""Likewise, to show it: of a step of more, four micro-batches are."""
_MARGIN = 1.02
"""A way that holds so much more than the limit rules out those that keep more than it does: a
schedule that keeps less may hold half a percent more for a moment."""
_DOUBT = 4
"""How much faster must a way be that is thought to hold more than the limit: a tenth more, 1.8x."""


@dataclass(frozen=True)
class PlannedWay:
    """A way that fits.

    Attributes:
        way: the mesh and the strategy.
        seconds: of a step.
        peak: bytes on a rank.
        simulation: of its step; of its first four micro-batches where all of them have more than
            128 blocks together.
    """

    way: Way
    seconds: float
    peak: int
    simulation: Simulation


class WaySearch:
    """The search for the best ways: bounds leave out, guesses order, simulations rank.

    Attributes:
        memory: bytes that a rank may hold.
        prune: leave out what bounds exclude.
        keep: the number of best ways that are asked for.
        watch: is told how many ways were simulated, how many will be at most, and what is next.
        ended: how each way ended that was looked at.
        found: seconds and peak of those that were simulated.
    """

    def __init__(
        self,
        model: ModelShape,
        memory: float,
        machine: Machine,
        prune: bool = True,
        keep: int = 5,
        watch: Callable[[int, int, str], None] = lambda *said: None,
    ):
        self.model, self.memory, self.machine, self.prune = model, memory, machine, prune
        self.keep, self.watch = keep, watch
        self.ended: dict[Way, str] = {}
        self.found: dict[Way, tuple[float, float]] = {}
        self._known: dict[Way, Simulation] = {}
        self._guessed: dict[Way, tuple[float, float]] = {}

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many ways ended how; they add up to all of them."""
        counted = Counter(self.ended.values())
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def run(self, ways: list[Way], most: int) -> tuple[PlannedWay, ...]:
        """The best that fit, fastest first, of which at most `most` ways were simulated."""
        left = self._leave_out_by_bytes(ways)
        while left and len(self.found) < most:
            way = self._choose_next(left)
            left.remove(way)
            if self.prune and least_seconds(self.model, way, self.machine) > self._slowest_kept():
                self.ended[way] = SLOW
                continue
            self.watch(len(self.found), min(most, len(self.found) + 1 + len(left)), str(way))
            self.found[way] = self._estimate_cost(way)
            peak = self.found[way][1]
            self.ended[way] = FITS if peak <= self.memory else TOO_BIG
            if self.prune and peak > _MARGIN * self.memory:
                left = self._leave_out_bigger(left, way)
        self.ended.update(dict.fromkeys(left, LEFT))
        return self._confirm_choices()

    # -- which is next -----------------------------------------------------------------------------

    def _leave_out_by_bytes(self, ways: list[Way]) -> list[Way]:
        if not self.prune:
            return [*ways]
        big = [way for way in ways if least_bytes(self.model, way) > self.memory]
        self.ended.update(dict.fromkeys(big, BOUND))
        return [way for way in ways if way not in self.ended]

    def _leave_out_bigger(self, left: list[Way], way: Way) -> list[Way]:
        """What is left without the ways that keep all that `way` keeps, and more."""
        bigger = [one for one in left if _keeps_more(one, way)]
        self.ended.update(dict.fromkeys(bigger, RULED_OUT))
        return [one for one in left if one not in self.ended]

    def _choose_next(self, left: list[Way]) -> Way:
        """The one that is thought to be fastest of those that are thought to fit.

        Until one is found that fits, the one that is thought to hold least: that tells whether any
        does, and how near the guesses are.
        """
        thought = {way: self._think_of(way) for way in left}
        if FITS not in self.ended.values():
            return min(left, key=lambda way: (thought[way][1], thought[way][0]))

        def rank(way: Way) -> tuple[float, ...]:
            seconds, size = thought[way]
            doubt = max(size / self.memory, 1.0) ** _DOUBT
            return seconds * doubt, *_simplest_first(way)

        return min(left, key=rank)

    def _think_of(self, way: Way) -> tuple[float, float]:
        """Seconds and bytes as guessed, corrected as those ways that are most alike showed."""
        seconds, size = self._guess_cost(way)
        if not self.found:
            return seconds, size
        nearest = max(map(_make_likeness(way), self.found))
        alike = [one for one in self.found if _make_likeness(way)(one) == nearest]
        pairs = [(self.found[one], self._guess_cost(one)) for one in alike]
        ratios = [
            math.exp(sum(math.log(real[i] / said[i]) for real, said in pairs) / len(pairs))
            for i in (0, 1)
        ]
        return seconds * ratios[0], size * ratios[1]

    def _guess_cost(self, way: Way) -> tuple[float, float]:
        if way not in self._guessed:
            seconds = guess_seconds(self.model, way, self.machine)
            self._guessed[way] = seconds, guess_bytes(self.model, way)
        return self._guessed[way]

    def _slowest_kept(self) -> float:
        """Seconds that a way must undercut to be shown."""
        fitting = sorted(self.found[way][0] for way, end in self.ended.items() if end == FITS)
        return fitting[self.keep - 1] if len(fitting) >= self.keep else math.inf

    # -- what it costs -----------------------------------------------------------------------------

    def _confirm_choices(self) -> tuple[PlannedWay, ...]:
        """The first that fit when all of their blocks and micro-batches are simulated."""
        fitting = [way for way, end in self.ended.items() if end == FITS]
        choices: list[PlannedWay] = []
        for way in sorted(fitting, key=lambda way: self.found[way][0]):
            self.watch(len(self.found), len(self.found), f"{way}, whole")
            seconds, peak, simulation = self.price_way(way)
            if peak <= self.memory:
                choices.append(PlannedWay(way, seconds, peak, simulation))
            else:
                self.ended[way] = TOO_BIG
            if len(choices) == self.keep:
                break
        return tuple(sorted(choices, key=lambda choice: choice.seconds))

    def price_way(self, way: Way) -> tuple[float, int, Simulation]:
        """Seconds, peak and simulation of a way with all of its blocks.

        With all of its micro-batches, too; but of a step of more than 128 blocks in all of them
        each micro-batch after the fourth adds what the fourth added, to the peak as well.
        """
        count = way.strategy.micro_batches
        if count <= 4 or self._layers_of(way) * count <= _WHOLE:
            whole = self._simulate_once(way)
            return whole.seconds, whole.peak, whole
        third, fourth = (
            self._simulate_once(_replace_strategy(way, micro_batches=n)) for n in (3, 4)
        )
        seconds, peak = _extrapolate_batches(third, fourth, count - 4)
        return seconds, math.ceil(peak), fourth

    def _layers_of(self, way: Way) -> int:
        return way.strategy.layers or self.model.layers

    def _estimate_cost(self, way: Way) -> tuple[float, float]:
        """Seconds and peak; of a deep model as one block and two say, and of many micro-batches
        as the second and the third do.

        The peak is the highest of several moments, and of another one in a deeper model: each
        grows by a block's weights at least.
        """
        layers = self._layers_of(way)
        if layers <= 2 or layers * way.strategy.micro_batches <= _SMALL:
            return self._estimate_batches(way, layers)
        one, two = (self._estimate_batches(_replace_strategy(way, layers=n), n) for n in (1, 2))
        weights = least_bytes(self.model, way)
        weights -= least_bytes(self.model, _replace_strategy(way, layers=1))
        seconds = one[0] + (layers - 1) * max(two[0] - one[0], 0.0)
        return seconds, one[1] + max((layers - 1) * (two[1] - one[1]), weights)

    def _estimate_batches(self, way: Way, layers: int) -> tuple[float, float]:
        count = way.strategy.micro_batches
        if count <= 3 or layers * count <= _SMALL:
            whole = self._simulate_once(way)
            return whole.seconds, whole.peak
        second, third = (
            self._simulate_once(_replace_strategy(way, micro_batches=n)) for n in (2, 3)
        )
        return _extrapolate_batches(second, third, count - 3)[0], third.peak

    def _simulate_once(self, way: Way) -> Simulation:
        if way not in self._known:
            self._known[way] = simulate(self.model, way.mesh, self.machine, strategy=way.strategy)
        return self._known[way]


def _extrapolate_batches(before: Simulation, last: Simulation, further: int) -> tuple[float, float]:
    """Seconds and peak with so many further micro-batches that each add what the last did."""
    seconds = last.seconds + further * max(last.seconds - before.seconds, 0.0)
    return seconds, last.peak + further * max(last.peak - before.peak, 0)


def _keeps_more(one: Way, other: Way) -> bool:
    """Does `one` keep all that `other` keeps, on the same mesh and of the same micro-batches?"""
    of, than = one.strategy, other.strategy
    same = dataclasses.replace(of, zero=than.zero, remat=than.remat) == than
    return (one.dp, one.tp) == (other.dp, other.tp) and same and (
        of.zero <= than.zero and of.remat <= than.remat
    )  # fmt: skip


def _make_likeness(way: Way) -> Callable[[Way], int]:
    """In how much another way is like this one."""

    def facts_of(way: Way) -> tuple[Any, ...]:
        of = way.strategy
        return way.tp, of.sequence, of.zero, of.zero == 3, of.remat, of.micro_batches

    own = facts_of(way)
    return lambda other: sum(a == b for a, b in zip(own, facts_of(other), strict=True))


def _simplest_first(way: Way) -> tuple[int, ...]:
    of = way.strategy
    return of.remat, of.micro_batches, of.zero, of.sequence


def _replace_strategy(way: Way, **changes: Any) -> Way:
    return dataclasses.replace(way, strategy=dataclasses.replace(way.strategy, **changes))
