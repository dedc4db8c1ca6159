"""Captured programs: a program with the conditions of its capture, and how a call runs it.

`run` runs the graph and puts its outputs where the step would have put them: into slots, `.grad`,
the result. Conditions, guards and answers say when the program may run instead of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from partita.comm import agree
from partita.comm.device import default_generator
from partita.layout import Fix
from partita.tensor.dtensor import tagged
from partita.tensor.dtensor_gradients import clear_gradients
from partita.tensor.uneven_pieces import give_room

from .arguments import unflatten_call
from .backend.executor import function_of
from .budgets import BudgetSearch
from .capture.answers import Answers
from .capture.block_choice import BlocksTraced
from .conditions import Conditions
from .guards import Guards, Write
from .pass_report import AsCaptured
from .program import Program, ResultPlace
from .replicated_input_check import Compared
from .sharing import Sharing
from .step_facts import changes_of

__all__ = ["CapturedProgram"]


@dataclass(eq=False)
class CapturedProgram(Program):
    """A captured step.

    Attributes:
        compared: plain values used with DTensors, which ranks compare before the first run.
        conditions: on its inputs: numbers, gradients, facts of tensors.
        guards: on what the step read of Python at capture.
        writes: what the step changes in Python objects, the same in each call.
        answers: to what torch asks of values, for which the program was made.
        blocks: how its blocks were traced.
        work: its matrix products, for ledgers.
        captured: the program before any pass.
        search: finds how it is rewritten for its budget; None where it has none.
        sharing: finds inputs that overlap one that is written.
    """

    compared: Compared | None = None
    conditions: Conditions = field(default_factory=Conditions)
    guards: Guards | None = None
    writes: list[Write] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)
    blocks: BlocksTraced = field(default_factory=BlocksTraced)
    work: list[tuple[str, str, tuple[str, ...], float]] = field(default_factory=list)
    captured: AsCaptured[CapturedProgram] | None = field(init=False, default=None)
    search: BudgetSearch[CapturedProgram] | None = field(init=False, default=None)
    sharing: Sharing = field(init=False)

    @cached_property
    def changes(self) -> list[Any]:
        """What each pass did to the graph. The passes run again, which may take seconds."""
        assert self.captured is not None
        return [*changes_of(self.captured, self.without, self.passes)]

    def compare(self, tensors: Sequence[Any]) -> None:
        """Raise on all ranks if a number, or a plain value used with DTensors, differs."""
        numbers = [i for i in self.inputs if i.kind == "number"]
        for wire in self.wires if numbers else ():
            agree(
                "compile",
                "; ".join(f"{i.name} = {float(i.number(tensors))!r}" for i in numbers),
                wire,
                fact="the ranks bring other numbers to a step",
                reason="a number is one value, equal on every rank",
                fixes=(Fix("the same number", "on every rank, or a tensor that is split"),),
            )
        if self.compared is not None:
            self.compared.check(tensors, function_of(self.compared.graph, self.groups))

    def prepare_memory(self, tensors: Sequence[Any]) -> None:
        """Look at the memory of state, which may have been exchanged since the last call.

        Uneven shards get room for their padding, and `sharing` notes the storages.
        """
        for i, border in self.entering.items():
            if border.in_place:
                given = self.inputs[i]
                held = tensors[given.index]
                give_room(held.grad if given.kind == "gradient" else held)
        self.sharing.note_held(tensors)

    def run(self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None) -> Any:
        """Run it in a call with these leaves, and put its outputs where the step puts them.

        Args:
            inputs: as for `run_graph`.

        Returns:
            The step's result; or an `OtherAnswers` where this call's answers differ from the
            program's. Nothing has changed then, and generators are as they were.
        """
        if self.answers.values:
            generators = map(default_generator, self.draws_on)
            before = [(generator, generator.get_state()) for generator in generators]
            found = self.run_graph(tensors, inputs)
            at = next(i for i, o in enumerate(self.given) if o.kind == "answers")
            otherwise = self.answers.compare(found[at].tolist())
            if otherwise is not None:
                for generator, state in before:
                    generator.set_state(state)
                return otherwise
        else:
            found = self.run_graph(tensors, inputs)
        clear_gradients([tensors[i] for i in self.cleared])
        leaves: list[Any] = []
        made: dict[int, Any] = {}
        value: Any
        for i, (output, value) in enumerate(zip(self.given, found, strict=True)):
            if output.asks_gradient:  # of an input an alias: the input itself is the caller's
                value = (value.detach() if i in self.given_back else value).requires_grad_()
            if output.spec is not None:
                value = tagged(value, output.spec)
            if output.scalar and isinstance(value, torch.Tensor):  # else a constant of the step
                value = value.item()
            if output.retains_grad and value.requires_grad:  # else its history was used up
                value.retain_grad()
            made[output.tensor] = value
            if output.kind == "result":
                leaves.append(value)
            elif output.kind == "gradient":
                tensors[output.index].grad = value
            elif output.kind == "left gradient":
                made[output.index].grad = value
            elif output.kind == "slot":
                assert output.slot is not None
                output.slot.put(value)
        for write in self.writes:
            write.redo()
        of = {"result": leaves, "input": tensors}
        whole = [of[c.source][c.index] if type(c) is ResultPlace else c for c in self.constants]
        return unflatten_call(whole, self.result)
