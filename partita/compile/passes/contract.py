"""The contract of a pass: which facts of a program it must not change.

A program has the same inputs after a pass, writes the same of them, and returns the same outputs,
each with its shape, dtype and layout, in the same shared memory. After a user's pass the metadata
of all nodes is computed again (`recompute_metadata`), so that the pass need not write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from partita.redistribute.cost import bytes_of

from ..capture.shared_results import Pairs, overlapping_results
from ..graph_nodes import NOTE, Note, is_collective, note_of
from ..program import Program, written_inputs
from ..verify import IllegalGraph
from .rewrite import fake_value_of

__all__ = ["PassContract", "recompute_metadata"]

_PHASES = ("forward", "backward", "update")
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class PassContract:
    """What a pass must leave as it is in a program.

    Attributes:
        inputs, outputs: their descriptions (`program.Input`, `program.Output`), by identity.
        made: for each output the text of its shape, dtype and device.
        written: the indices of the inputs that are written in place.
        overlapping: the pairs of outputs, or of an output and an input, that share memory.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    made: tuple[str, ...]
    written: tuple[int, ...]
    overlapping: Pairs

    @classmethod
    def of_program(cls, program: Program) -> PassContract:
        (end,) = program.graph.graph.find_nodes(op="output")
        return cls(
            tuple(id(given) for given in program.inputs),
            tuple((id(o), o.kind, o.spec, o.slot, o.index) for o in program.outputs),
            tuple(_describe_value(node) for node in end.args[0]),
            tuple(written_inputs(program.graph.graph)),
            overlapping_results(program.graph.graph),
        )

    def check(self, program: Program, name: str) -> None:
        """Raise IllegalGraph if the pass `name` changed any of it."""
        now = PassContract.of_program(program)
        if now.inputs != self.inputs:
            raise IllegalGraph(f"after {name}: the program takes other inputs")
        if now.outputs != self.outputs or len(now.made) != len(self.made):
            raise IllegalGraph(
                f"after {name}: the program gives other outputs, or in other layouts"
            )
        for i, (was, made) in enumerate(zip(self.made, now.made, strict=True)):
            if was != made:
                raise IllegalGraph(
                    f"after {name}: output {i} ({program.outputs[i].kind}) is {made}, it was {was}",
                    reason="what a step returns and leaves behind has the shape and dtype of eager",
                )
        for pair in sorted(self.overlapping - now.overlapping, key=sorted):
            raise IllegalGraph(
                f"after {name}: output {max(pair)} does not lie any more in the memory of "
                + (
                    f"output {min(pair)}"
                    if min(pair) >= 0
                    else self._name_of_input(program, min(pair))
                ),
                reason="who writes one of them after the step writes the other, as in eager",
            )
        for i in sorted(set(now.written) ^ set(self.written)):
            how = "written" if i in now.written else "not written any more"
            raise IllegalGraph(f"after {name}: {program.inputs[i].name} is {how}")

    @staticmethod
    def _name_of_input(program: Program, number: int) -> str:
        return program.inputs[-1 - number].name


def _describe_value(node: Any) -> str:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device.type}"


def recompute_metadata(program: Program, name: str) -> None:
    """Compute the fake value of each call again, and make a note for nodes without one.

    Args:
        name: of the pass that has run.

    Raises:
        IllegalGraph: a call fails with its operands.
    """
    for node in program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if NOTE not in node.meta:
            node.meta[NOTE] = _make_note(program, node, name)
        if node.target is torch.ops.aten.copy_.default:
            continue  # its value is the input that it writes
        try:
            node.meta["val"] = fake_value_of(node)
        except Exception as error:
            raise IllegalGraph(
                f"after {name}: {node.name} cannot be: {str(error).splitlines()[0]}",
                place=note_of(node).source,
                operands=(node.format_node() or node.name,),
            ) from error


def _make_note(program: Program, node: fx.Node, name: str) -> Note:
    """The note of a new node: source and phase of its operands; of a collective, its cost too."""
    read = [note_of(n) for n in node.all_input_nodes]
    phase = max((note.phase for note in read), key=_PHASES.index, default=_PHASES[0])
    source = next((note.source for note in reversed(read) if note.source), "")
    if not is_collective(node) or node.args[-1] not in program.groups:
        return Note(source, phase)
    wire, axes = program.groups[str(node.args[-1])]
    opname = str(getattr(node.target, "_opname", ""))
    kind = _KINDS.get(opname, opname)
    (x,) = (n.meta["val"] for n in node.all_input_nodes)
    nbytes = bytes_of(kind, wire.mesh_size(axes), x.numel() * x.element_size())
    return Note(source, phase, "", kind, axes, nbytes, name, "explicit")
