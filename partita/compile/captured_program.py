"""Captured programs: a graph, what capture took for granted, and how a call of the step runs it."""

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
from partita.tensor.gradient_overrides import clear_gradients
from partita.tensor.padded_storage import give_room

from .arguments import unflatten_call
from .backend.executor import function_of
from .capture.answers import Answers
from .capture.block_choice import BlocksTraced
from .conditions import Conditions
from .guards import Guards, Write
from .pass_report import AsCaptured, changes_of
from .program import Program, ResultPlace
from .replicated_input_check import Compared
from .sharing import Sharing

__all__ = ["CapturedProgram"]


@dataclass(eq=False)
class CapturedProgram(Program):
    """A captured step.

    Attributes:
        compared: plain values that stand next to DTensors, which ranks compare before the first
            run.
        conditions: what it takes for granted of Python numbers.
        guards: what must be as it was at capture.
        writes: what the step changes of Python, the same in each call.
        answers: what it takes for granted of the values that torch asks for.
        blocks: how its blocks were traced.
        work: its matrix products, as ledgers are told of them; none where blocks are traced once.
        captured: it, before any pass.
        sharing: looks whether what it writes lies in the memory of another input.
    """

    compared: Compared | None = None
    conditions: Conditions = field(default_factory=Conditions)
    guards: Guards | None = None
    writes: list[Write] = field(default_factory=list)
    answers: Answers = field(default_factory=Answers)
    blocks: BlocksTraced = field(default_factory=BlocksTraced)
    work: list[tuple[str, str, tuple[str, ...], float]] = field(default_factory=list)
    captured: AsCaptured[CapturedProgram] | None = field(init=False, default=None)
    sharing: Sharing = field(init=False)

    @cached_property
    def changes(self) -> list[Any]:
        """What each pass did to the graph. They are run again: it may take seconds."""
        assert self.captured is not None
        return changes_of(self.captured, self.without, self.passes)

    def compare(self, tensors: Sequence[Any]) -> None:
        """Raise on all ranks if a plain value or a number that is taken for one value differs."""
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
        """Look at the memory of what stays between calls, which may be another than before.

        Let it have room for its padding, where it has come without, and note where it is.
        """
        for i, border in self.entering.items():
            if border.in_place:
                given = self.inputs[i]
                held = tensors[given.index]
                give_room(held.grad if given.kind == "gradient" else held)
        self.sharing.note_held(tensors)

    def run(self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None) -> Any:
        """Run it over the tensors of a call, and put everything where it belongs.

        Args:
            inputs: as for `run_graph`.

        Returns:
            What the step does; an `OtherAnswers` where the call has other answers: it has then
            changed nothing, and drawn nothing.
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
            if output.asks_gradient:  # itself, but for an input, which is the caller's
                value = (value.detach() if i in self.given_back else value).requires_grad_()
            if output.spec is not None:
                value = tagged(value, output.spec)
            if output.scalar and isinstance(value, torch.Tensor):  # else the step's own constant
                value = value.item()
            if output.retains_grad and value.requires_grad:  # else its history is used up
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
