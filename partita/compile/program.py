"""What is captured: a graph, and what its inputs and outputs are to the user's program?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from partita.comm import Wire, user_line
from partita.layout import Fix, LayoutError
from partita.tensor.checksum import checksum
from partita.tensor.dtensor import tagged
from partita.tensor.spec import Spec

from .fakes import local_of
from .state import Slot

__all__ = ["Input", "Output", "Program"]

Call = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class Input:
    """One input of a graph.

    Attributes:
        name: as a person would say it.
        kind: "parameter", "buffer", "optimizer", "value", "argument", "gradient", "rate" (a
            learning rate), "coordinate" (of the rank on a mesh axis) or, only while a step is
            captured, "mark" (a gradient that is not there, to see whether the step reads it).
        tensor: what it was at capture; of a coordinate what it always is.
        index: where it stands among the tensors of a call; for a gradient, where its tensor does.
        home: of a rate the parameter group that has it.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    index: int = -1
    home: Any = None

    @property
    def spec(self) -> Spec | None:
        """Of a DTensor."""
        return getattr(self.tensor, "_spec", None)

    def now(self, tensors: Sequence[Any]) -> torch.Tensor:
        """What it is in a call."""
        if self.kind == "coordinate":
            return self.tensor
        if self.kind == "rate":
            return torch.tensor(float(self.home["lr"]), dtype=torch.float64)
        found: torch.Tensor = tensors[self.index]
        if self.kind == "gradient":
            grad = found.grad
            assert grad is not None
            return local_of(grad)
        return local_of(found)


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a graph.

    Attributes:
        kind: "result" of the step, "slot" (it takes the place of a slot's value), or "gradient".
        spec: of a DTensor.
        slot: which it becomes the value of.
        index: where the tensor whose gradient it is stands among the tensors of a call.
    """

    kind: str
    spec: Spec | None
    slot: Slot | None = None
    index: int = -1


@dataclass(eq=False)
class Program:
    """A captured step.

    Attributes:
        graph: local ATen calls and collectives; the only writes are `copy_` into inputs, at its
            end.
        inputs, outputs: in the graph's order.
        result: how what the step returns is put together, `constants` at the places of what is no
            tensor.
        cleared: places of the tensors whose gradients the step leaves None.
        compared: plain inputs that stand next to DTensors, and the wires on which ranks compare
            them before the first run.
        key: equal for equal programs.
        changes: what each pass did to the graph.
        call: what runs it, over its inputs.
        written: the places of the inputs that it writes.
        groups: by the name that the graph calls it, each group: its wire and axes.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    result: pytree.TreeSpec
    constants: list[Any]
    cleared: list[int]
    groups: dict[str, tuple[Wire, tuple[str, ...]]]
    call: Call | None = None
    compared: list[tuple[int, Wire]] = field(default_factory=list)
    key: str = ""
    changes: list[Any] = field(default_factory=list)
    written: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.written = written_inputs(self.graph.graph)

    def example(self) -> list[torch.Tensor]:
        """Tensors without memory like the inputs, for a compiler."""
        return [n.meta["val"] for n in self.graph.graph.nodes if n.op == "placeholder"]

    def compare(self, tensors: Sequence[Any]) -> None:
        """Raise on all ranks if a plain input that is taken for one whole value differs."""
        for place, wire in self.compared:
            given = self.inputs[place]
            told = wire.gather_ints(checksum(given.now(tensors)))
            for rank, theirs in enumerate(told):
                if theirs != told[0]:
                    raise LayoutError(
                        f"compile: {given.name}, a plain tensor next to DTensors, differs between "
                        f"ranks 0 and {rank}",
                        place=user_line(),
                        reason="a plain tensor is taken as one whole value, equal on every rank",
                        fixes=(
                            Fix("pt.DTensor.from_local(t, mesh, placements)", "a rank's piece"),
                            Fix("pt.distribute_tensor(t, mesh, placements)", "to take rank 0's"),
                        ),
                    )

    def run(self, tensors: Sequence[Any]) -> Any:
        """Run what `call` is over the tensors of a call, and put everything where it belongs."""
        assert self.call is not None
        locals_ = [i.now(tensors) for i in self.inputs]
        with Local(), torch.no_grad():
            found = self.call(*locals_)
        # What is changed from outside torch's dispatcher is not counted, and we go by that count.
        increment_version([locals_[i] for i in self.written])
        for i in self.cleared:
            tensors[i].grad = None
        results = iter(self.constants)
        leaves = []
        for output, value in zip(self.outputs, found, strict=True):
            if output.spec is not None:
                value = tagged(value, output.spec)
            if output.kind == "result":
                leaves.append(value)
            elif output.kind == "gradient":
                tensors[output.index].grad = value
            else:
                assert output.slot is not None
                output.slot.put(value)
        made = iter(leaves)
        whole = [next(made) if c is _TENSOR else c for c in results]
        return pytree.tree_unflatten(whole, self.result)


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


_TENSOR = _Tensor()
"""Stands among `Program.constants` where the step returns a tensor."""
TENSOR: Any = _TENSOR


def written_inputs(graph: fx.Graph) -> list[int]:
    """The places of the inputs into which the graph copies."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    targets = {n.args[0] for n in graph.nodes if n.target is torch.ops.aten.copy_.default}
    return [i for i, n in enumerate(inputs) if n in targets]
