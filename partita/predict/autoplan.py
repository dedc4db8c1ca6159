"""`pt.autoplan`: the way to spread a model that fits and is fastest, by simulation."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.comm.ledger import human
from partita.parallel import plans

from .machine import Machine, load_machine
from .plan_space import Way, least_bytes, least_seconds, ways_of
from .simulate import simulate
from .simulation import Simulation
from .strategy import ModelShape, Strategy, StrategyError, check_counts, shape_of

__all__ = ["ModelPlan", "PlannedWay", "WaySearch", "autoplan", "read_bytes"]

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class PlannedWay:
    """A way that fits.

    Attributes:
        way: the mesh and the strategy.
        seconds: of a step.
        peak: bytes on a rank.
        simulation: of at most two micro-batches; those after the second cost as much as it does.
    """

    way: Way
    seconds: float
    peak: int
    simulation: Simulation


@dataclass(frozen=True)
class ModelPlan:
    """The best ways, fastest first; print it.

    Attributes:
        model, ranks, memory, batch: what was asked.
        choices: at most five, each simulated whole and within `memory`.
        space: how many ways there are.
        outcomes: how many of them ended how.
        plan: of tensor parallelism, as its function is called.
    """

    model: str
    ranks: int
    memory: float
    batch: int
    choices: tuple[PlannedWay, ...]
    space: int
    outcomes: Mapping[str, int]
    plan: str = "plan"

    @property
    def best(self) -> PlannedWay:
        """The fastest."""
        return self.choices[0]

    @property
    def code(self) -> str:
        """Python that spreads a model as the best way does."""
        of, best = self.best.way.strategy, self.best.way
        sizes, names = tuple(best.mesh.values()), tuple(best.mesh)
        lines = [f"mesh = pt.init_device_mesh(device, {sizes}, mesh_dim_names={names})"]
        if best.tp > 1:
            lines.append(f"pt.parallelize(model, mesh, {self.plan}(sequence={of.sequence}))")
        elif best.dp > 1:
            lines.append("pt.parallelize(model, mesh, None)")
        if best.dp > 1:
            precision = f", precision=torch.{of.precision}" if of.zero == 3 else ""
            lines.append(f'pt.zero(model, mesh, "dp", stage={of.zero}{precision})')
        if of.remat:
            lines.append("pt.remat(model, blocks=list(model.blocks))")
        lines.append(f"# {of.micro_batches} micro-batches of {of.batch} sequences on each dp rank")
        return "\n".join(lines)

    @property
    def why(self) -> str:
        """What made the runner-up slower; "" where there is none."""
        if len(self.choices) < 2:
            return ""
        first, second = (self._find_time_parts(choice) for choice in self.choices[:2])
        more = {name: second.get(name, 0.0) - first.get(name, 0.0) for name in {*first, *second}}
        name = max(more, key=more.__getitem__)
        lost = self.choices[1].seconds - self.choices[0].seconds
        return (
            f"the runner-up loses {lost * 1e3:.3g} ms, most by {name}: {more[name] * 1e3:+.3g} ms"
        )

    @staticmethod
    def _find_time_parts(choice: PlannedWay) -> dict[str, float]:
        found = choice.simulation
        scale = choice.seconds / found.seconds
        parts = {f"waiting for {axes}": s * scale for axes, s in found.exposed.items()}
        return {"computing": found.compute_seconds * scale, **parts}

    def __str__(self) -> str:
        head = f"{self.model} on {self.ranks} ranks, {self.batch} sequences a step, "
        lines = [head + f"at most {human(int(self.memory))} a rank"]
        for i, choice in enumerate(self.choices, 1):
            found = choice.simulation
            exposed = sum(found.exposed.values()) / found.seconds
            lines.append(
                f"  {i}. {choice.seconds:8.4g} s  {human(choice.peak):>9}  "
                f"{exposed:4.0%} waiting  {choice.way}"
            )
        lines += [f"  {self.why}"] if self.why else []
        said = ", ".join(f"{n} {what}" for what, n in self.outcomes.items() if n)
        lines.append(f"  of {self.space} ways: {said}")
        return "\n".join([*lines, "", self.code])


def autoplan(
    model: str | ModelShape,
    ranks: int,
    memory: float | str | None = None,
    machine: str | Path | Machine = "h100",
    *,
    batch: int | None = None,
    strategy: Strategy | None = None,
    most: int = 24,
    prune: bool = True,
) -> ModelPlan:
    """The meshes, ZeRO stages, tensor and sequence parallelism, remat and micro-batches that fit.

    Ways whose weights and optimizer alone exceed `memory`, and those whose least time exceeds what
    was found already, are not simulated. The others are ranked by models of one and two blocks, as
    a block costs what the one before costs; the best are then simulated whole, and left out where
    that shows more than `memory`.

    Args:
        model: a name of `partita.predict.MODELS`, or a `ModelShape` of one's own.
        memory: bytes of a rank, or text such as "80GB"; the machine's where None.
        batch: sequences of a step on all ranks together; one for each rank where None.
        strategy: precision, context and layers; the rest of it is what is searched.
        most: ways that are simulated, those with the least bounds first.
        prune: leave out what bounds exclude.

    Raises:
        StrategyError: nothing fits; says what comes nearest. Or a model that is not known.
        MachineError: a machine that is not known.
    """
    shape = shape_of(model)
    found = load_machine(machine)
    limit = found.memory_bytes if memory is None else read_bytes(memory)
    count = ranks if batch is None else batch
    check_counts(ranks=ranks, batch=count, most=most)
    ways = list(ways_of(shape, ranks, count, found, strategy or Strategy()))
    if not ways:
        raise StrategyError(f"no mesh of {ranks} ranks divides {shape.name} and {count} sequences")
    search = WaySearch(shape, limit, found, prune)
    choices = search.run(ways, most)
    if not choices:
        least = min(ways, key=lambda c: least_bytes(shape, c))
        raise StrategyError(
            f"{shape.name} does not fit: no way on {ranks} ranks was found within "
            f"{human(int(limit))}; {least} holds {human(int(least_bytes(shape, least)))} between "
            "steps"
        )
    named = {plans.gpt: "pt.plans.gpt", plans.llama: "pt.plans.llama"}
    return ModelPlan(
        shape.name,
        ranks,
        limit,
        count,
        choices,
        len(ways),
        search.outcomes,
        named.get(shape.plan, "plan"),
    )


class WaySearch:
    """The search for the best ways: bounds leave out, simulations rank.

    Attributes:
        memory: bytes that a rank may hold.
        prune: leave out what bounds exclude.
        keep: the number of best ways that are asked for.
        outcomes: how many ways ended how.
        known: the simulations so far.
    """

    def __init__(
        self, model: ModelShape, memory: float, machine: Machine, prune: bool, keep: int = 5
    ):
        self.model, self.memory, self.machine, self.prune = model, memory, machine, prune
        self.keep, self.layers = keep, model.layers
        self.outcomes = dict.fromkeys(
            ("simulated", "too big by weights and optimizer", "too slow by bound", "too big",
             "not looked at"), 0
        )  # fmt: skip
        self.known: dict[Way, Simulation] = {}

    def run(self, ways: list[Way], most: int) -> tuple[PlannedWay, ...]:
        """The best that fit, fastest first, of which at most `most` ways were simulated."""
        ranked: list[tuple[float, int, Way]] = []  # seconds, a number, and the way
        bounds = {way: least_seconds(self.model, way, self.machine) for way in ways}
        kept = sorted(ways, key=lambda way: (bounds[way], *_simplest_first(way)))
        for way in kept:
            if self.prune and least_bytes(self.model, way) > self.memory:
                self.outcomes["too big by weights and optimizer"] += 1
            elif self.prune and bounds[way] > self._slowest_kept(ranked):
                self.outcomes["too slow by bound"] += 1
            elif self.outcomes["simulated"] >= most:
                self.outcomes["not looked at"] += 1
            else:
                self.outcomes["simulated"] += 1
                seconds, peak = self._estimate_cost(way)
                if peak <= self.memory:
                    ranked.append((seconds, len(ranked), way))
                else:
                    self.outcomes["too big"] += 1
        return self._confirm_choices([way for _, _, way in sorted(ranked)])

    def _slowest_kept(self, ranked: list[tuple[float, int, Way]]) -> float:
        """Seconds that a way must undercut to be shown."""
        return sorted(ranked)[self.keep - 1][0] if len(ranked) >= self.keep else math.inf

    def _confirm_choices(self, ranked: list[Way]) -> tuple[PlannedWay, ...]:
        """The first that fit when all of their blocks are simulated."""
        choices: list[PlannedWay] = []
        for way in ranked:
            seconds, peak, simulation = self.price_way(way)
            if peak <= self.memory:
                choices.append(PlannedWay(way, seconds, peak, simulation))
            else:
                self.outcomes["too big"] += 1
            if len(choices) == self.keep:
                break
        return tuple(sorted(choices, key=lambda c: c.seconds))

    def _estimate_cost(self, way: Way) -> tuple[float, float]:
        """Seconds and peak, of one block and of two where there are more."""
        layers = way.strategy.layers or self.layers
        if layers <= 2:
            return self.price_way(way)[:2]
        one, two = (self.price_way(_replace_strategy(way, layers=n))[:2] for n in (1, 2))
        seconds, peak = (a + (layers - 1) * max(b - a, 0.0) for a, b in zip(one, two, strict=True))
        return seconds, peak

    def price_way(self, way: Way) -> tuple[float, int, Simulation]:
        """Seconds, peak and simulation of a way whose further micro-batches are as its second."""
        count = way.strategy.micro_batches
        first = self._simulate_once(_replace_strategy(way, micro_batches=1))
        if count == 1:
            return first.seconds, first.peak, first
        second = self._simulate_once(_replace_strategy(way, micro_batches=2))
        seconds = second.seconds + (count - 2) * max(second.seconds - first.seconds, 0.0)
        return seconds, max(first.peak, second.peak), second

    def _simulate_once(self, way: Way) -> Simulation:
        if way not in self.known:
            self.known[way] = simulate(self.model, way.mesh, self.machine, strategy=way.strategy)
        return self.known[way]


def _simplest_first(way: Way) -> tuple[int, ...]:
    of = way.strategy
    return of.remat, of.micro_batches, of.zero, of.sequence


def _replace_strategy(way: Way, **changes: Any) -> Way:
    return dataclasses.replace(way, strategy=dataclasses.replace(way.strategy, **changes))


def read_bytes(text: float | str) -> float:
    """Bytes of "80GB", "64 GiB" or a number, more than 0. Raises StrategyError otherwise."""
    if isinstance(text, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)", text.strip())
        number = float(match[1]) * _UNITS.get(match[2], 0) if match else 0.0
    else:
        number = float(text)
    if not 0 < number < math.inf:
        raise StrategyError(f"{text!r} is no amount of memory: write 80GB or 64GiB")
    return number
