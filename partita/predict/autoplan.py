"""`pt.autoplan`: the way to spread a model that fits and is fastest, by simulation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from partita.comm.ledger import human

from .machine import Machine, load_machine
from .plan_bounds import least_bytes
from .strategy import ModelShape, Strategy, StrategyError, check_counts, shape_of
from .way import Way, train_options, ways_of, write_code
from .way_search import LEFT, PlannedWay, WaySearch

__all__ = ["MOST", "ModelPlan", "PlannedWay", "autoplan", "read_bytes"]

MOST = 32
"""Ways that are simulated, unless others are asked for."""

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class ModelPlan:
    """The best ways, fastest first; print it.

    Attributes:
        model, ranks, memory, batch: what was asked.
        choices: at most five, each simulated whole and within `memory`.
        space: how many ways there are.
        outcomes: how many of them ended how; they add up to `space`.
        shape: of the model.
        simulated: how many ways were.
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
        """The fastest."""
        return self.choices[0]

    @property
    def code(self) -> str:
        """A program for all ranks that trains the model as the best way does, and as simulated."""
        return write_code(self.shape, self.best.way)

    @property
    def command(self) -> str:
        """`partita train` with the best way's options; "" of a model that it does not know."""
        return train_options(self.shape, self.best.way)

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
        sequences = f"{self.batch} sequence{'s' * (self.batch != 1)} a step"
        head = f"{self.model} on {self.ranks} rank{'s' * (self.ranks != 1)}, {sequences}, "
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
        if left := self.outcomes[LEFT]:
            lines.append(f"  {_say_limit(self.simulated, left)}")
        if self.command:
            lines += ["", self.command]
        return "\n".join([*lines, "", self.code])


def _say_limit(simulated: int, left: int) -> str:
    return f"{simulated} were simulated: with --most {simulated + left} (most=) all are looked at"


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
    """The meshes, ZeRO stages, tensor and sequence parallelism, remat and micro-batches that fit.

    Ways whose weights and optimizer alone exceed `memory`, those that keep all that a way keeps
    that was too big, and those whose least time exceeds what was found already are not simulated.
    Of the others the one that is thought to hold least is simulated first, then those that are
    thought to be fastest of those that fit. A deep model is ranked by one block and two, as a block
    costs what the one before costs; the best are then simulated whole, and left out where that
    shows more than `memory`.

    Args:
        model: a name of `partita.predict.MODELS`, or a `ModelShape` of one's own.
        memory: bytes of a rank, or text such as "80GB"; the machine's where None.
        batch: sequences of a step on all ranks together; one for each rank where None.
        strategy: precision, context and layers; the rest of it is what is searched.
        most: ways that are simulated.
        prune: leave out what bounds exclude.
        watch: is told, before each simulation, how many ways were simulated, how many will be at
            most, and which is next.

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
    search = WaySearch(shape, limit, found, prune, watch=watch or (lambda *said: None))
    choices = search.run(ways, most)
    if not choices:
        raise StrategyError(_say_what_is_nearest(search, ways))
    return ModelPlan(
        shape.name,
        ranks,
        limit,
        count,
        choices,
        len(ways),
        search.outcomes,
        shape,
        len(search.found),
    )


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
        said += f"; {left} ways were not looked at: {_say_limit(len(search.found), left)}"
    return said


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
