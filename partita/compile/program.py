"""What is captured: a graph, and what its inputs and outputs are to the user's program?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from partita.comm import Record, Wire
from partita.tensor.autocast import without_any_autocast
from partita.tensor.op_facts import facts_of
from partita.tensor.spec import Spec
from partita.tensor.tensor_state import state_of

from .backend.built import Built
from .capture.fakes import local_of
from .capture.state_slots import Slot
from .padding_boundary import Border, border_of

__all__ = ["Call", "Input", "Output", "Program", "ResultPlace", "written_inputs"]

Call = Callable[..., Sequence[torch.Tensor]]

# Private torch. A graph has its own backward: without this each collective would pass through
# Python code of torch's that looks whether it is to be differentiated, at 8 us a call.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


@dataclass(frozen=True, eq=False)
class Input:
    """One input of a graph.

    Attributes:
        name: as a person would say it.
        kind: "parameter", "buffer", "optimizer", "value", "argument", "gradient", "number" (a
            Python float), "coordinate" (of the rank on a mesh axis), "cotangent" (the gradient of
            a result, which backward is given), "saved" (by forward, for backward), "kept" (an
            input of forward that backward reads too) or, only while a step is captured, "mark" (a
            gradient that is not there, to see whether the step reads it).
        tensor: what it was at capture, or one like it without memory; of a coordinate what it
            always is.
        index: where it stands among the tensors of a call; for a gradient, where its tensor does;
            for a cotangent the number of its result.
        home, path: of a number where it stands, `home[path[0]][path[1]]...`, unless it is a leaf
            of the call itself.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    index: int = -1
    home: Any = None
    path: tuple[Any, ...] = ()

    @property
    def spec(self) -> Spec | None:
        """Of a DTensor."""
        return getattr(self.tensor, "_spec", None)

    @property
    def border(self) -> Border | None:
        """What it passes on its way into the graph, where its pieces are uneven."""
        if self.kind == "saved":  # as the graph made it
            return None
        zeros = self.kind in ("gradient", "cotangent", "mark")
        # Of a parameter that ZeRO gathers, and of what is only updated, nobody reads the padding.
        read = self.kind != "optimizer" and state_of(self.tensor).rest is None
        stays = self.kind not in ("argument", "cotangent")  # what a caller brings along is copied
        return border_of(self.spec, stays=stays, zeros=zeros, read=read)

    def now(self, tensors: Sequence[Any]) -> torch.Tensor:
        """What it is in a call."""
        if self.kind == "coordinate":
            return self.tensor
        if self.kind == "number":
            return torch.tensor(float(self.number(tensors)), dtype=torch.float64)
        found: torch.Tensor = tensors[self.index]
        if self.kind == "gradient":
            grad = found.grad
            assert grad is not None
            return local_of(grad)
        return local_of(found)

    def number(self, tensors: Sequence[Any]) -> Any:
        """What a number is in a call."""
        if self.index >= 0:
            return tensors[self.index]
        found = self.home
        for key in self.path:
            found = found[key]
        return found


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a graph.

    Attributes:
        kind: "result" of the step, "slot" (it takes the place of a slot's value), "gradient",
            "left gradient" (of a tensor that the step made), "cotangent" (a gradient that backward
            gives), "saved" (for backward) or "answers" (of torch's questions, as they are in this
            run).
        spec: of a DTensor.
        slot: which it becomes the value of.
        index: where the tensor whose gradient it is stands among the tensors of a call; of a left
            gradient: the `tensor` of that.
        number: of a result or slot with a history: among all of these; of a gradient that is that
            of such a result: of that. Else -1.
        part: of what has a history: the part of the backward that it begins; of a gradient that
            backward gives: the part that gives it.
        unheard: of a result: others are made of it, whose gradients do not come by way of it.
        scalar: it is a Python number to the program.
        tensor: equal for outputs that are one tensor to the step.
        asks_gradient: it has no history, and requires a gradient: so does a view of a parameter
            that is made under `no_grad`.
        retains_grad: it has a history, and the step has asked for its gradient.
    """

    kind: str
    spec: Spec | None
    slot: Slot | None = None
    index: int = -1
    number: int = -1
    part: int = 0
    unheard: bool = False
    scalar: bool = False
    tensor: int = -1
    asks_gradient: bool = False
    retains_grad: bool = False


@dataclass(frozen=True)
class ResultPlace:
    """Where a tensor that a step returns comes from.

    Attributes:
        source: "result": the graph makes it; "input": it is a tensor of the call itself.
        index: among the graph's results, or among the tensors of the call.
    """

    source: str
    index: int


@dataclass(eq=False)
class Program:
    """A graph, and what goes into it and comes out of it.

    Attributes:
        graph: local ATen calls and collectives; the only writes are `copy_` into inputs, at its
            end.
        inputs, outputs: in the graph's order.
        result: how what the step returns is put together of `constants`: a `ResultPlace` for each
            tensor, and what is no tensor itself.
        cleared: places of the tensors whose gradients the step leaves None.
        groups: by the name that the graph calls it, each group: its wire and axes.
        key: equal for equal programs.
        call: what runs it, over its inputs.
        carried: the moves that it makes, once somebody has asked for them.
        written: the places of the inputs that it writes.
        entering, leaving: how inputs are padded and outputs cut, by place, where those are uneven.
        taken, given: the inputs that a call takes and the outputs that it gives: all, but for the
            gradients that backward takes and gives.
        built: what was compiled of it, or loaded; None where it runs otherwise.
        metadata: what is kept of it beside what is compiled; JSON.
        budget: the most bytes that the step may take above its inputs, where it is given one.
        without, passes: the names of the passes that are left out, and those that were given.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    result: pytree.TreeSpec
    constants: list[Any]
    cleared: list[int]
    groups: dict[str, tuple[Wire, tuple[str, ...]]]
    call: Call | None = None
    key: str = ""
    built: Built | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None
    without: tuple[str, ...] = ()
    passes: Any = ()
    carried: list[Record] | None = field(init=False, default=None)
    _has_run: bool = field(init=False, default=False)
    written: list[int] = field(init=False)
    taken: list[Input] = field(init=False)
    given: list[Output] = field(init=False)

    def __post_init__(self) -> None:
        self.written = written_inputs(self.graph.graph)
        self.scope = self.wires[0].scope if self.wires else None
        self.entering = _index_borders([i.border for i in self.inputs])
        self.leaving = _index_borders([border_of(o.spec) for o in self.outputs])
        self.taken = [i for i in self.inputs if i.kind != "cotangent"]
        self.given = [o for o in self.outputs if o.kind != "cotangent"]

    @property
    def wires(self) -> list[Wire]:
        """Those of its inputs, its outputs and its collectives, in one order on all ranks."""
        specs = [*(x.spec for x in self.inputs), *(x.spec for x in self.outputs)]
        # What stands in for a result's gradient was laid out while the step was captured.
        found = [getattr(s.wire, "real", s.wire) for s in specs if s is not None]
        return list(dict.fromkeys([*found, *(wire for wire, _ in self.groups.values())]))

    @cached_property
    def given_back(self) -> dict[int, int]:
        """By the place of an output that is an input the place of that."""
        (end,) = self.graph.graph.find_nodes(op="output")
        inputs = {n: i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder"))}
        return {i: inputs[n] for i, n in enumerate(end.args[0]) if n in inputs}

    @cached_property
    def given_again(self) -> dict[int, int]:
        """By the place of an output that is an earlier output too the place of that. One whose
        padding is cut off is another than what backward is kept of it."""
        (end,) = self.graph.graph.find_nodes(op="output")
        first: dict[Any, int] = {}
        found = {
            i: first.setdefault((n, i in self.leaving), i)
            for i, n in enumerate(end.args[0])
            if isinstance(n, fx.Node)
        }
        return {i: j for i, j in found.items() if i != j}

    @cached_property
    def ranks(self) -> list[int]:
        """Those that its collectives may wait for for ever, as the job numbers them."""
        return sorted({r for wire in self.wires for r in wire.ranks_to_wait_for})

    @cached_property
    def draws_on(self) -> list[torch.device]:
        """The devices of whose generators it draws."""
        nodes = [n for n in self.graph.graph.nodes if facts_of(n.target).draws]
        made = [pytree.tree_leaves(n.meta["val"])[0] for n in nodes]
        return list(dict.fromkeys(value.device for value in made))

    @cached_property
    def numbers_to_keep(self) -> set[Input]:
        """The inputs that are numbers of which nothing but new values are made: a tensor of one may
        serve again, since no result lies in its memory."""
        nodes = self.graph.graph.find_nodes(op="placeholder")
        numbers = [(n, i) for n, i in zip(nodes, self.inputs, strict=True) if i.kind == "number"]
        return {
            given
            for node, given in numbers
            if all(facts_of(user.target).makes_new for user in node.users)
        }

    @property
    def runs(self) -> Program:
        """What runs when it is called: itself."""
        return self

    def example(self) -> list[torch.Tensor]:
        """Tensors without memory like the inputs, for a compiler."""
        return [n.meta["val"] for n in self.graph.graph.nodes if n.op == "placeholder"]

    def prepare(self, call_of: Callable[[Program], Call]) -> None:
        """Have what runs it: `call_of` compiles a program."""
        self.call = call_of(self)

    def run_graph(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        """Run what `call` is over the tensors of a call; local values of the outputs.

        Args:
            inputs: what those in `taken` are in this call, where that is known.
        """
        assert self.call is not None
        locals_ = [i.now(tensors) for i in self.inputs] if inputs is None else inputs
        with Local(), torch.no_grad(), _BelowAutograd(), without_any_autocast():
            if self.entering or self.leaving:
                found = self._call_padded(self.call, locals_)
            else:
                found = self.call(*locals_)
        if not self._has_run:  # a compiler may find that two nodes are one
            self._has_run, first = True, dict[int, int]()
            places = {i: first.setdefault(id(t), i) for i, t in enumerate(found)}
            self.given_again.update({i: j for i, j in places.items() if i != j})
        if self.given_again:
            found = list(found)
            for i, j in self.given_again.items():
                one = self.outputs[i].tensor == self.outputs[j].tensor
                found[i] = found[j] if one else found[j].detach()
        # What is changed from outside torch's dispatcher is not counted, and we go by that count.
        increment_version([locals_[i] for i in self.written])
        return found

    def _call_padded(self, call: Call, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """`call` over `given`, where some pieces are smaller than those of the first rank."""
        inputs = list(given)
        for i, border in self.entering.items():
            inputs[i] = border.enter(given[i])
        found = list(call(*inputs))
        for i in self.written:
            if inputs[i].data_ptr() != given[i].data_ptr():  # it was copied
                given[i].copy_(self.entering[i].cut(inputs[i]))
        for i, border in self.leaving.items():
            came = self.given_back.get(i)
            if i not in self.given_again:
                found[i] = border.leave(found[i]) if came is None else given[came]
        return found


def _index_borders(borders: Sequence[Border | None]) -> dict[int, Border]:
    return {i: border for i, border in enumerate(borders) if border is not None}


def written_inputs(graph: fx.Graph) -> list[int]:
    """The places of the inputs into which the graph copies."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    targets = {n.args[0] for n in graph.nodes if n.target is torch.ops.aten.copy_.default}
    return [i for i, n in enumerate(inputs) if n in targets]
