"""Plans by search: `pt.autoplan`, the fastest way to train a model on given ranks that fits.

A *way* is a mesh and a strategy. Most ways are never simulated: lower bounds of time and memory
exclude them, and estimates decide which to simulate next. Bounds and estimates come from runs of
the unsharded model over tensors without memory, once with one block and once with two.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from partita.comm.device import HOST
from partita.compile.progress import phase_listener
from partita.layout.text import describe_value, escape_controls, human

from .machine import Machine, MachineError, MeasuredCurve, load_machine, read_amount
from .simulate import Simulation, simulate
from .strategy import (
    ModelShape,
    Strategy,
    StrategyError,
    Way,
    check_argument,
    check_counts,
    shape_of,
    train_command,
    ways_of,
    write_code,
)

MOST = 6
"""The default number of simulations, at most."""


@dataclass(frozen=True)
class ModelPlan:
    """The fastest ways to train a model on a cluster, as `autoplan` finds them. Print it.

    A way is a training configuration: a mesh, a ZeRO stage, tensor and sequence parallelism, remat,
    and micro-batches.

    Attributes:
        model: the name of the model.
        ranks: the number of ranks.
        memory: the limit in bytes per rank.
        batch: sequences per step, over all ranks.
        choices: at most five ways within `memory`, fastest first. Each was simulated completely.
        space: the number of possible ways.
        outcomes: the number of ways for each outcome of the search. They add up to `space`.
        shape: the shape of the model.
        simulated: the number of ways that were simulated.
    """

    model: str
    ranks: int
    memory: float
    batch: int
    choices: tuple[PlannedWay, ...]
    space: int
    outcomes: Mapping[str, int]
    shape: ModelShape
    simulated: int

    @property
    def best(self) -> PlannedWay:
        """The fastest of the ways that fit into memory."""
        return self.choices[0]

    @property
    def code(self) -> str:
        """The text of a program that trains the model in the best way. It runs on all ranks.

        Its step is the one that was simulated.
        """
        return write_code(self.shape, self.best.way)

    @property
    def command(self) -> str:
        """The `partita train` command that trains in the best way.

        "" if `partita train` cannot build the model.
        """
        return train_command(self.shape, self.best.way)

    @property
    def why(self) -> str:
        """A sentence that says why the second-best way is slower; "" if there is no second way."""
        if len(self.choices) < 2:
            return ""
        first, second = (choice.times for choice in self.choices[:2])
        more = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
        name = max(more, key=more.__getitem__)
        lost = self.choices[1].seconds - self.choices[0].seconds
        return (
            f"the runner-up loses {lost * 1e3:.3g} ms, most by {name}: {more[name] * 1e3:+.3g} ms"
        )

    def __str__(self) -> str:
        sequences = f"{self.batch} sequence{'s' * (self.batch != 1)} a step"
        head = f"{self.model} on {self.ranks} rank{'s' * (self.ranks != 1)}, {sequences}, "
        lines = [escape_controls(head) + f"at most {human(int(self.memory))} a rank"]
        for i, choice in enumerate(self.choices, 1):
            waiting = sum(s for name, s in choice.times.items() if name != _COMPUTING)
            exposed = waiting / choice.seconds
            lines.append(
                f"  {i}. {choice.seconds:8.4g} s  {human(choice.peak):>9}  "
                f"{exposed:4.0%} waiting  {choice.way}"
            )
        lines += [f"  {self.why}"] if self.why else []
        said = ", ".join(f"{n} {what}" for what, n in self.outcomes.items() if n)
        lines.append(f"  of {self.space} ways: {said}")
        if left := self.outcomes[LEFT]:
            lines.append(f"  {_say_limit(self.simulated, left)}")
        if self.command:
            lines += ["", self.command]
        return "\n".join([*lines, "", self.code])


def _say_limit(simulated: int, left: int) -> str:
    return f"{simulated} were simulated: with --most {simulated + left} (most=) all are simulated"


def autoplan(
    model: str | ModelShape,
    ranks: int,
    memory: float | str | None = None,
    machine: str | Path | Machine = "h100",
    *,
    batch: int | None = None,
    strategy: Strategy | None = None,
    most: int = MOST,
    prune: bool = True,
    watch: Callable[[int, int, str], None] | None = None,
) -> ModelPlan:
    """Finds the fastest ways to train a model on a number of ranks, within a memory limit.

    The search covers meshes, ZeRO stages, tensor and sequence parallelism, remat and micro-batches.
    It first simulates the configurations with the least estimated time. If the first is too big, it
    simulates the one with the least estimated memory next. It skips a configuration if its weights
    and optimizer alone exceed `memory`, or if it needs as much memory as one that was too big. It
    also skips a configuration whose shortest possible time exceeds the best time so far.

    Args:
        model: a name in `partita.predict.MODELS`, or a `ModelShape`.
        ranks: the number of ranks.
        memory: bytes per rank, or text such as "80GB". None: the machine's memory.
        machine: the name of a machine, the path of its TOML file, or a `Machine`.
        batch: sequences per step, over all ranks. None: one per rank.
        strategy: sets precision, context, layers and `remat_every`. Other fields keep their
            defaults, because they are searched.
        most: the most configurations to simulate.
        prune: True skips configurations that the bounds exclude.
        watch: a function that is called before each simulation. It gets the number of
            configurations simulated so far, the most that will be simulated, and the next one as
            text.

    Returns:
        A `ModelPlan` with the fastest configurations.

    Raises:
        StrategyError: nothing fits (the error says what comes nearest); an unknown model; an
            argument of a wrong type; or a strategy that sets a field that is searched.
        MachineError: an unknown machine.
    """
    shape = shape_of(model)
    found = load_machine(machine)
    base = _check_base(strategy)
    check_argument("prune", prune, isinstance(prune, bool), "True or False")
    allowed = "a function of two counts and a text, or None"
    check_argument("watch", watch, watch is None or callable(watch), allowed)
    limit = found.memory_bytes if memory is None else read_bytes(memory)
    count = ranks if batch is None else batch
    check_counts(ranks=ranks, batch=count, most=most)
    ways = list(ways_of(shape, ranks, count, found, base))
    if not ways:
        raise StrategyError(f"no mesh of {ranks} ranks divides {shape.name} and {count} sequences")
    search = WaySearch(shape, limit, found, prune, watch=watch or (lambda *said: None))
    with phase_listener(lambda phase: None):  # `watch` reports the ways, not each of their captures
        choices = search.run(ways, most)
    if not choices:
        raise StrategyError(_say_what_is_nearest(search, ways))
    ended = (len(ways), search.outcomes)
    return ModelPlan(shape.name, ranks, limit, count, choices, *ended, shape, len(search.found))


def _check_base(strategy: Any) -> Strategy:
    """Returns the strategy from which ways are made, if it sets no field that is searched.

    Raises:
        StrategyError: it sets one.
    """
    if strategy is None:
        return Strategy()
    check_argument("strategy", strategy, isinstance(strategy, Strategy), "a pt.Strategy, or None")
    usual = Strategy()
    for name in _SEARCHED:
        value = getattr(strategy, name)
        if value != getattr(usual, name):
            instead = _SEARCHED[name]
            raise StrategyError(f"strategy has {name}={value}, which is searched{instead}")
    return strategy  # type: ignore[no-any-return]


_ONE_WAY = ": pt.simulate(..., strategy=...) has the cost of one way"
_SEARCHED = dict.fromkeys(("zero", "remat", "sequence"), _ONE_WAY)
_SEARCHED |= dict.fromkeys(
    ("batch", "micro_batches"), ": batch= has the sequences of a step on all ranks together"
)
"""The fields of a strategy that a plan chooses, and the argument to use instead of each."""


def _say_what_is_nearest(search: WaySearch, ways: list[Way]) -> str:
    shape, ranks = search.model, ways[0].dp * ways[0].tp
    said = f"{shape.name} does not fit: no way on {ranks} ranks was found within "
    said += f"{human(int(search.memory))}; "
    if search.found:
        nearest = min(search.found, key=lambda way: search.found[way][1])
        said += f"{nearest} holds {human(int(search.found[nearest][1]))}"
    else:
        nearest = min(ways, key=lambda way: least_bytes(shape, way))
        said += f"{nearest} holds {human(int(least_bytes(shape, nearest)))} between steps"
    if left := search.outcomes[LEFT]:
        said += f"; {left} ways were not simulated: {_say_limit(len(search.found), left)}"
    return said


def read_bytes(text: float | str) -> float:
    """Returns a number of bytes for a positive number or a text such as "80GB" or "64 GiB".

    Raises:
        StrategyError: `text` is not an amount of memory.
    """
    is_number = isinstance(text, Real) and not isinstance(text, bool)
    allowed = "bytes as a number, or text such as '80GB'"
    check_argument("memory", text, is_number or isinstance(text, str), allowed)
    try:
        return read_amount("bytes")("memory", text)
    except MachineError:
        said = describe_value(text)
        raise StrategyError(f"{said} is not an amount of memory: write 80GB or 64GiB") from None


# -- the search ------------------------------------------------------------------------------------

FITS, TOO_BIG, BOUND = "fit", "too big", "too big by weights and optimizer"
RULED_OUT = "need more than a way that is too big"
SLOW, LEFT = "too slow by bound", "not looked at"
OUTCOMES = (FITS, TOO_BIG, BOUND, RULED_OUT, SLOW, LEFT)
"""The possible outcomes of a way. Each way has exactly one."""

_WHOLE, _FEW = 128, 4
"""Of a step with more than `_WHOLE` blocks, micro-batches included, `_FEW` micro-batches are
simulated."""
_COMPUTING = "computing"
_MARGIN = 1.02
"""A way that exceeds the limit by this factor excludes all ways that keep at least as much. The
margin is needed, because a schedule that keeps less may need half a percent more for a moment."""
_DOUBT = 4
"""The exponent of the speed that a way above the limit needs: 10 % above, a factor of 1.46."""


@dataclass(frozen=True)
class PlannedWay:
    """One way (mesh and strategy) to train the model that fits into memory, with its cost.

    Attributes:
        way: the mesh and the strategy.
        seconds: the duration of a step, in seconds.
        peak: the most bytes that a rank holds.
        times: the seconds of "computing", and of "waiting for dp" and other axes.
        simulation: the simulation of its step. If the micro-batches have more than 128 blocks
            together, only the first four are simulated.
    """

    way: Way
    seconds: float
    peak: int
    times: Mapping[str, float]
    simulation: Simulation


class WayCost(NamedTuple):
    """The cost of a training step: its duration, peak memory, and times.

    Attributes:
        seconds: the duration of a step, in seconds.
        peak: the most bytes that a rank holds.
        times: the seconds of "computing", and of "waiting for dp" and other axes.
    """

    seconds: float
    peak: int
    times: Mapping[str, float]

    def extend(self, before: WayCost, more: int) -> WayCost:
        """Returns the cost of a step with `more` further parts, each like its last one.

        Args:
            before: the cost without the last part.
        """

        def extend(last: float, first: float) -> float:
            return last + more * max(last - first, 0)

        times = {name: extend(t, before.times.get(name, 0.0)) for name, t in self.times.items()}
        peak = int(extend(self.peak, before.peak))
        return WayCost(extend(self.seconds, before.seconds), peak, times)


class WaySearch:
    """The search of `autoplan` for the best ways to train a model (a mesh and a strategy).

    Attributes:
        model, machine: the model, and the hardware of a rank.
        memory: bytes that a rank may hold.
        prune: True skips ways that lower bounds exclude.
        keep: the number of best ways to return.
        watch: a function that is called before each simulation. It gets the number of ways
            simulated so far, the most that will be simulated, and the next way as text.
        ended: for each way that was considered, how its search ended, such as "fit" or "too big".
        found: the cost of each way that was simulated.
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
        self.found: dict[Way, WayCost] = {}
        self._known: dict[Way, Simulation] = {}
        self._guessed: dict[Way, tuple[float, float]] = {}
        self._alike: dict[Way, tuple[int, list[Way]]] = {}

    @property
    def outcomes(self) -> Mapping[str, int]:
        """The number of ways for each outcome of the search. The sum is the number of ways."""
        counted = Counter(self.ended.values())
        return {outcome: counted[outcome] for outcome in OUTCOMES}

    def run(self, ways: list[Way], most: int) -> tuple[PlannedWay, ...]:
        """Simulates at most `most` of the ways. Returns the best that fit, fastest first."""
        left = self._leave_out(ways, BOUND, self._is_too_big_at_least)
        while left and len(self.found) < most:
            way = self._choose_next(left)
            left.remove(way)
            if self.prune and least_seconds(self.model, way, self.machine) > self._slowest_kept():
                self.ended[way] = SLOW
                continue
            self.watch(len(self.found), min(most, len(self.found) + 1 + len(left)), str(way))
            self.found[way] = self.price_way(way)
            self._note_alike(way, left)
            peak = self.found[way].peak
            self.ended[way] = FITS if peak <= self.memory else TOO_BIG
            if peak > _MARGIN * self.memory:
                left = self._leave_out(left, RULED_OUT, partial(_keeps_more, way))
        self.ended.update(dict.fromkeys(left, LEFT))
        fitting = [way for way, end in self.ended.items() if end == FITS]
        best = sorted(fitting, key=lambda way: self.found[way][0])[: self.keep]
        return tuple(self._make_choice(way) for way in best)

    # -- which is next -----------------------------------------------------------------------------

    def _leave_out(self, ways: list[Way], outcome: str, is_out: Callable[[Way], bool]) -> list[Way]:
        """Returns the ways that a bound does not exclude. The others get this outcome."""
        gone = [way for way in ways if self.prune and is_out(way)]
        self.ended.update(dict.fromkeys(gone, outcome))
        return [way for way in ways if way not in self.ended]

    def _is_too_big_at_least(self, way: Way) -> bool:
        return least_bytes(self.model, way) > self.memory

    def _choose_next(self, left: list[Way]) -> Way:
        """Returns the way with the least estimated time among those estimated to fit.

        If one was too big, and none has fitted yet: the way with the least estimated memory, which
        shows whether any way fits.
        """
        thought = {way: self._correct_guess(way) for way in left}
        if self.found and FITS not in self.ended.values():
            return min(left, key=lambda way: (thought[way][1], thought[way][0]))

        def rank(way: Way) -> tuple[float, ...]:
            seconds, size = thought[way]
            doubt = max(size / self.memory, 1.0) ** _DOUBT
            of = way.strategy  # of equal ways, the simplest
            return seconds * doubt, of.remat, of.micro_batches, of.zero, of.sequence

        return min(left, key=rank)

    def _correct_guess(self, way: Way) -> tuple[float, float]:
        """Returns the guessed seconds and bytes of a way, corrected by the most similar results."""
        seconds, size = self._guess_cost(way)
        _, alike = self._alike.get(way, (0, []))
        pairs = [(self.found[one][:2], self._guess_cost(one)) for one in alike]
        # The guess is 0 if the model's needs are unknown (`_measure_needs`).
        logs = [[math.log(real[i] / said[i]) for real, said in pairs if said[i]] for i in (0, 1)]
        ratios = [math.exp(sum(each) / max(len(each), 1)) for each in logs]
        return seconds * ratios[0], size * ratios[1]

    def _note_alike(self, found: Way, left: list[Way]) -> None:
        """Notes `found` for those of `left` to which no simulated way is more similar."""
        for way in left:
            count = _count_alike(way, found)
            nearest, alike = self._alike.get(way, (-1, []))
            if count >= nearest:
                self._alike[way] = count, [*alike, found] if count == nearest else [found]

    def _guess_cost(self, way: Way) -> tuple[float, float]:
        if way not in self._guessed:
            seconds = guess_seconds(self.model, way, self.machine)
            self._guessed[way] = seconds, guess_bytes(self.model, way)
        return self._guessed[way]

    def _slowest_kept(self) -> float:
        """Returns the seconds that a way must undercut to be one of the best; infinity at first."""
        fitting = sorted(self.found[way][0] for way, end in self.ended.items() if end == FITS)
        return fitting[self.keep - 1] if len(fitting) >= self.keep else math.inf

    # -- what it costs -----------------------------------------------------------------------------

    def _make_choice(self, way: Way) -> PlannedWay:
        cost, simulation = self._simulate_batches(way)
        return PlannedWay(way, *cost, simulation)

    def price_way(self, way: Way) -> WayCost:
        """Returns the cost of a way, with all blocks."""
        return self._simulate_batches(way)[0]

    def _simulate_batches(self, way: Way) -> tuple[WayCost, Simulation]:
        """Simulates a way, and returns its cost and the simulation.

        If all micro-batches have more than `_WHOLE` blocks together, the first four are simulated.
        Each further one costs as much as the last of these.
        """
        count, layers = way.strategy.micro_batches, way.strategy.layers or self.model.layers
        if count <= _FEW or layers * count <= _WHOLE:
            whole = self._simulate(way)
            return _cost_of(whole), whole
        few = (_replace_strategy(way, micro_batches=n) for n in (_FEW - 1, _FEW))
        before, last = map(self._simulate, few)
        return _cost_of(last).extend(_cost_of(before), count - _FEW), last

    def _simulate(self, way: Way) -> Simulation:
        if way not in self._known:
            self._known[way] = simulate(self.model, way.mesh, self.machine, strategy=way.strategy)
        return self._known[way]


def _cost_of(found: Simulation) -> WayCost:
    waiting = {f"waiting for {axes}": seconds for axes, seconds in found.exposed.items()}
    times = {_COMPUTING: found.compute_seconds, **waiting}
    return WayCost(found.seconds, found.peak, times)


def _keeps_more(than: Way, way: Way) -> bool:
    """True if `way` keeps all that `than` keeps, on the same mesh with the same micro-batches."""
    more, less = way.strategy, than.strategy
    same = dataclasses.replace(more, zero=less.zero, remat=less.remat) == less
    is_more = more.zero <= less.zero and more.remat <= less.remat
    return (way.dp, way.tp) == (than.dp, than.tp) and same and is_more


def _count_alike(one: Way, other: Way) -> int:
    """Returns the number of options in which two ways are alike."""
    a, b = one.strategy, other.strategy
    same = [getattr(a, name) == getattr(b, name) for name in _ALIKE]
    return sum([*same, one.tp == other.tp, (a.zero == 3) == (b.zero == 3)])


_ALIKE = ("sequence", "zero", "remat", "micro_batches")


def _replace_strategy(way: Way, **changes: Any) -> Way:
    return dataclasses.replace(way, strategy=dataclasses.replace(way.strategy, **changes))


# -- needs of a model ------------------------------------------------------------------------------

_PRODUCTS = ("matmul", "batched_matmul", "convolution", "convolution_backward")
_LEAST_SIZE = 2
"""The fewest bytes of an element in any precision."""
_KERNELS = 8
"""An estimate of the number of kernels for each matrix product."""


@dataclass
class _ModelNeeds:
    """The needs of one micro-batch of an unsharded model, in bytes if not stated otherwise.

    Attributes:
        weights: all parameters.
        state: AdamW's state of the parameters that get a gradient.
        gradients: the gradients of these parameters, in the smallest dtype in which they may be
            sent.
        results: the blocks' results, in the smallest dtype in which they may be sent.
        saved: the tensors that autograd saves for backward, without parameters, likewise.
        flops: the operations of matrix products, by dtype.
        products: the number of matrix products.
    """

    weights: float = 0.0
    state: float = 0.0
    gradients: float = 0.0
    results: float = 0.0
    saved: float = 0.0
    flops: Counter[torch.dtype] = field(default_factory=Counter)
    products: float = 0.0

    def extend_to_layers(self, two: _ModelNeeds, layers: int) -> _ModelNeeds:
        """Extrapolates the needs of `layers` blocks from the needs of one block and of two.

        Args:
            two: the needs of the model with two blocks. `self` has the needs with one block.
            layers: the number of blocks.
        """

        def extend(a: float, b: float) -> float:
            return max(a + (layers - 1) * (b - a), 0.0)

        names = ("weights", "state", "gradients", "results", "saved", "products")
        found = {name: extend(getattr(self, name), getattr(two, name)) for name in names}
        dtypes = self.flops.keys() | two.flops.keys()
        flops = Counter({d: extend(self.flops[d], two.flops[d]) for d in dtypes})
        return _ModelNeeds(**found, flops=flops)


# -- bounds ----------------------------------------------------------------------------------------


def least_bytes(shape: ModelShape, way: Way) -> float:
    """Returns a lower bound of a rank's peak: bytes of weights, and of AdamW's state for them."""
    of, needs = way.strategy, _needs_of(shape, way)
    weights = needs.weights / way.tp / (way.dp if of.zero == 3 else 1)
    return weights + needs.state / way.tp / (way.dp if of.zero else 1)


def least_seconds(shape: ModelShape, way: Way, machine: Machine) -> float:
    """Returns a lower bound of a step's seconds: the longer of computing and sending over an axis.

    A rank must compute its part of the model's matrix products. Over dp, each gradient is summed
    once per step. Stage 3 also gathers each weight once per micro-batch. Over tp, each block sums
    its results once per micro-batch, in forward.
    """
    of, needs = way.strategy, _needs_of(shape, way)
    compute = of.micro_batches * _least_compute(needs, way, machine)
    # With a single block, a gathered weight may be kept from one micro-batch to the next.
    gathers = of.micro_batches if (of.layers or shape.layers) > 1 else 1
    times = 1 + (gathers if of.zero == 3 else 0)
    over_dp = _least_to_send(times * needs.gradients / way.tp, "dp", way, machine)
    summed = shape.sums * of.micro_batches * needs.results
    over_tp = _least_to_send(summed, "tp", way, machine)
    return max(compute, over_dp, over_tp)


def _least_compute(needs: _ModelNeeds, way: Way, machine: Machine) -> float:
    """Returns the seconds of a micro-batch's matrix products, each in its fastest dtype."""
    curves = [machine.kernels[name] for name in _PRODUCTS if name in machine.kernels]
    reached = machine.efficiency["matmul"]
    seconds = 0.0
    for dtype, flops in needs.flops.items():
        names = (str(dtype).removeprefix("torch."), way.strategy.precision)
        peak = max(map(machine.peak_flops, names))
        slower = machine.peak_flops("float32") / peak
        rates = [peak * reached, *(_fastest_rate(curve) / slower for curve in curves)]
        seconds += flops / way.tp / max(rates)
    return seconds + (0.0 if curves else needs.products * machine.kernel_seconds)


def _least_to_send(nbytes: float, axis: str, way: Way, machine: Machine) -> float:
    """Returns the seconds to gather or reduce-scatter so many bytes over an axis's fastest link."""
    ranks = way.mesh.get(axis, 1)
    if ranks == 1:
        return 0.0
    fastest = machine.reached_link((axis,), way.mesh).bandwidth
    if machine.given_link((axis,)) is None:
        measured = [c for name, c in machine.collectives.items() if name.endswith(f"-{ranks}")]
        fastest = max([fastest, *map(_fastest_rate, measured)])
    return nbytes * (ranks - 1) / ranks / fastest


def _fastest_rate(curve: MeasuredCurve) -> float:
    """Returns the highest amount per second of a curve: at a point, or beyond the last one."""
    points = [*zip(curve.amounts, curve.seconds, strict=True)]
    if len(points) == 1:
        return math.inf
    (a, s), (b, t) = points[-2:]
    beyond = (b - a) / (t - s) if t > s else math.inf
    return max(beyond, *(amount / seconds for amount, seconds in points))


# -- guesses ---------------------------------------------------------------------------------------


def guess_seconds(shape: ModelShape, way: Way, machine: Machine) -> float:
    """Estimates the seconds of a step roughly, to decide what to simulate first.

    It adds matrix products, other kernels, and waiting for links.
    """
    of, needs = way.strategy, _needs_of(shape, way)
    n, again = of.micro_batches, 4 / 3 if of.remat else 1.0
    small = _KERNELS * needs.products * machine.kernel_seconds
    compute = n * again * (_least_compute(needs, way, machine) + small)
    times = 2 + (2 * n - 1 if of.zero == 3 else 0)
    over_dp = _least_to_send(times * needs.gradients / way.tp, "dp", way, machine)
    over_tp = _least_to_send(4 * shape.sums * again * n * needs.results, "tp", way, machine)
    return compute + over_tp + max(over_dp - compute / 2, over_dp / 10)


def guess_bytes(shape: ModelShape, way: Way) -> float:
    """Estimates a rank's peak bytes roughly, to decide what to simulate first.

    It adds weights and optimizer state, gradients, gathered weights, and activations saved for
    backward.
    """
    of, needs = way.strategy, _needs_of(shape, way)
    layers = of.layers or shape.layers
    share = needs.weights / way.tp
    gradients = share / layers if of.micro_batches == 1 else share / (way.dp if of.zero > 1 else 1)
    gathered = share / layers if of.zero == 3 else 0.0
    saved = needs.saved * (1 if of.precision == "bfloat16" else 2)
    if of.remat:
        saved = saved / layers + needs.results
    split = way.tp if of.sequence else 2 * way.tp / (1 + way.tp)
    return least_bytes(shape, way) + gradients + gathered + saved / split


# -- the run from which bounds and estimates are computed ------------------------------------------


def _needs_of(shape: ModelShape, way: Way) -> _ModelNeeds:
    of = way.strategy
    layers, context = of.layers or shape.layers, of.context or shape.context
    if layers <= 2:
        return _measure_needs(shape, layers, of.batch, context)
    one, two = (_measure_needs(shape, n, of.batch, context) for n in (1, 2))
    return one.extend_to_layers(two, layers)


@lru_cache(maxsize=256)
def _measure_needs(shape: ModelShape, layers: int, batch: int, context: int) -> _ModelNeeds:
    """Returns the needs of a model; only its weights if it cannot run without memory."""
    # Models of text in transformers read values of meta tensors, and those of images of fakes.
    places: tuple[Any, ...] = (FakeTensorMode(), HOST), (nullcontext(), torch.device("meta"))
    for mode, device in places:
        try:
            with mode, device:
                return _run_once(shape, layers, batch, context)
        except Exception:  # it reads a value, or calls an op without a kernel for such tensors
            continue
    with torch.device("meta"):
        return _ModelNeeds(weights=_count_bytes(shape.make(layers, context).parameters()))


def _run_once(shape: ModelShape, layers: int, batch: int, context: int) -> _ModelNeeds:
    module = shape.make(layers, context)
    parameters = [*module.parameters()]
    needs = _ModelNeeds(weights=_count_bytes(parameters))
    inputs, targets = shape.make_batch(batch, context)
    with _counting_needs(module, needs):
        shape.loss(module(inputs), targets).backward()
    trained = [p for p in parameters if p.grad is not None]
    needs.state = 2 * _count_bytes(trained)
    needs.gradients = sum(float(p.numel() * _least_size(p)) for p in trained)
    return needs


def _count_bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors))


@contextmanager
def _counting_needs(module: nn.Module, needs: _ModelNeeds) -> Iterator[None]:
    """Counts what the module does inside the `with` block into `needs`."""
    own = {id(p) for p in module.parameters()}
    seen: dict[int, Tensor] = {}

    def keep(saved: Tensor) -> Tensor:
        if id(saved) not in own and id(saved._base) not in own:
            owner = saved if saved._base is None else saved._base
            if id(owner) not in seen:
                seen[id(owner)] = owner
                needs.saved += owner.numel() * _least_size(owner)
        return saved

    def count(block: nn.Module, args: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            needs.results += result.numel() * _least_size(result)

    blocks: Any = getattr(module, "blocks", ())
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_hook(count))
        stack.enter_context(saved_tensors_hooks(keep, lambda saved: saved))
        stack.enter_context(_WithoutAttention())
        stack.enter_context(_ProductCounter(needs))
        yield


def _least_size(x: Tensor) -> int:
    return min(x.element_size(), _LEAST_SIZE)


class _WithoutAttention(TorchFunctionMode):
    """A mode that replaces attention by cheap ops, because its kernels differ in operations."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
        q, k, v = (given[name] for name in ("query", "key", "value"))
        return q.sum(-1, keepdim=True).expand(*q.shape[:-1], v.shape[-1]) + k.sum() + v.sum()


class _ProductCounter(TorchDispatchMode):
    """Counts products, their operations and their dtypes."""

    def __init__(self, needs: _ModelNeeds):
        super().__init__()
        self.needs = needs

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            first = next(a for a in args if isinstance(a, Tensor))
            self.needs.flops[first.dtype] += int(count(*args, **(kwargs or {}), out_val=result))
            self.needs.products += 1
        return result
