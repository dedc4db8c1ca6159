"""Programs: a captured graph, with where its inputs come from in a call and where its outputs go.

An input is a tensor argument or state tensor (a *leaf* of the call, by `index`), the gradient of a
leaf, a Python float at `home[path...]`, or the rank's coordinate on a mesh axis
(`Input.local_value`). An output becomes a part of the step's result, a new tensor of the state (in
a *slot*), a gradient, or something else that `Output.kind` lists. `Program.run_graph` runs the
compiled graph (`Built`) over local tensors; `guards.captured_program` and `compile.region` store
the outputs.

If a rank's shard is smaller than the largest, it is padded before the graph runs. The outputs are
cut afterwards (`PaddingBoundary`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree

from partita.comm import Record, Request, TraceWire, Wire, is_uneven
from partita.comm.device import Device
from partita.comm.move_steps import has_empty, places_of, span
from partita.redistribute.move import bytes_of
from partita.tensor.op_facts import facts_of, without_any_autocast
from partita.tensor.tensor_state import Spec, count_holders, spec_of, state_of
from partita.tensor.uneven_pieces import find_padded, narrow_storage

from .graph_nodes import calls_within, examples_of, written_inputs_of
from .slots import Slot
from .subgraphs import flatten_module

Pass = Callable[[Any], Any]
"""A function that changes the graph of a `Program` in place, and returns a text of what it did."""

Passes = Iterable[Pass] | Mapping[str, Pass | Iterable[Pass]]
"""A user's passes: a list of passes that run before all others, or a dictionary. It maps the name
of a pass of partita, or "end", to the user's passes that run before it."""

_BACKENDS = ("inductor", "graph")

OUTLINED_ABOVE = 2800
"""The nodes of a traced graph, inputs included, above which blocks are compiled as sections. A
smaller graph compiles as fast in one piece."""


@dataclass(frozen=True, eq=False)
class StepOptions:
    """The options that were passed to `pt.compile`, which documents them.

    Raises:
        ValueError: an unknown backend or fallback.
    """

    backend: str = "inductor"
    fallback: str | None = None
    without: tuple[str, ...] = ()
    passes: Passes = ()
    keep: int = 8
    budget: int | None = None
    blocks: bool | tuple[nn.Module | type, ...] | None = None
    sections: bool | None = None
    cuda_graphs: bool | None = None

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ValueError(
                f"compile: backend is one of {', '.join(_BACKENDS)}, not {self.backend!r}"
            )
        if self.fallback not in (None, "eager"):
            raise ValueError(f'compile: fallback is "eager" or None, not {self.fallback!r}')

    @property
    def section_threshold(self) -> int | None:
        """The graph size in nodes above which equal blocks are compiled only once; None for never.

        Capture folds blocks of equal structure into calls of one subgraph (`capture/fold.py`), and
        `FormSearch` inlines them if the budget requires it.
        """
        if self.sections is False or self.passes:
            return None
        return 0 if self.sections else OUTLINED_ABOVE

    def key_lines(self, ran: Iterable[str]) -> list[str]:
        """Returns the options, and the names of the passes that ran, as lines of the key."""
        return [
            f"backend {self.backend}, sections {self.sections}",
            f"without {sorted(self.without)}, passes {[*ran]}, budget {self.budget}",
        ]


# -- programs --------------------------------------------------------------------------------------


Call = Callable[..., Sequence[torch.Tensor]]
Axes = tuple[str, ...]
Groups = dict[str, tuple[Wire, Axes]]
"""Maps the name of a process group in a graph to its wire and the mesh axes that it spans."""

# Private torch. A graph has its own backward. Without this each collective would pass through
# torch's Python code that checks for differentiation, 8 us for each call.
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


@dataclass(frozen=True, eq=False)
class Input:
    """One input of a captured graph, and where its value comes from in a call.

    The leaves of a call are the tensors and numbers of its arguments and state, in a fixed order.

    Attributes:
        name: the name in messages, such as "model.head.weight".
        kind: one of these:
            "parameter", "buffer", "optimizer" (optimizer state), "value" (other state), "argument";
            "gradient": the `.grad` of a leaf;
            "number": a Python float;
            "coordinate": the rank's coordinate on a mesh axis;
            "cotangent": an input of backward: the gradient of a result;
            "saved": an input of backward that forward has computed;
            "kept": an input of forward that backward reads, too;
            "mark": during capture, a fake gradient in place of None, to see if the step reads it.
        tensor: the tensor at capture, or a fake of its metadata; for a coordinate, its value.
        index: the index among the leaves of a call. For a gradient, the index of the tensor that
            has it. For a cotangent, the number of the result. For other inputs -1.
        home, path: the place of a number that is not a leaf. If `path` is empty, it is the slot
            `home`. Otherwise it is `home[path[0]][path[1]]...`, in an optimizer's group.
    """

    name: str
    kind: str
    tensor: torch.Tensor
    index: int = -1
    home: Any = None
    path: tuple[Any, ...] = ()

    @property
    def spec(self) -> Spec | None:
        """The spec of an input that is a DTensor; None for a plain tensor."""
        return getattr(self.tensor, "_spec", None)

    @property
    def may_have_gradient(self) -> bool:
        """True if the input tensor requires grad, or has a `.grad`."""
        if not self.tensor.is_leaf:
            return self.tensor.requires_grad
        return self.tensor.requires_grad or self.tensor.grad is not None

    @property
    def padding(self) -> PaddingBoundary | None:
        """The padding of this rank's shard to the largest one; None if all have one shape."""
        if self.kind == "saved":  # the graph made it, with padding
            return None
        zeros = self.kind in ("gradient", "cotangent", "mark")
        # Nobody reads the padding of a parameter that ZeRO gathers, or of optimizer state.
        read = self.kind != "optimizer" and state_of(self.tensor).zero_layouts is None
        persistent = self.kind not in ("argument", "cotangent")  # a caller's tensors are copied
        return padding_boundary(self.spec, persistent=persistent, zeros=zeros, read=read)

    def local_value(self, tensors: Sequence[Any]) -> torch.Tensor:
        """Returns this input's local tensor in a call, from the call's leaves `tensors`."""
        if self.kind == "coordinate":
            return self.tensor
        if self.kind == "number":
            return torch.tensor(float(self.number(tensors)), dtype=torch.float64)
        found = tensors[self.index]
        return local_of(found.grad if self.kind == "gradient" else found)

    @property
    def place(self) -> tuple[int, Any]:
        """A key of the place that stores this Python number, equal for inputs of one place."""
        if not self.path:
            found: tuple[int, Any] = self.home.identity
            return found
        return id(self.home.now), self.path[0]

    def number(self, tensors: Sequence[Any]) -> Any:
        """Returns the Python number of a "number" input in a call with the leaves `tensors`."""
        if self.index >= 0:
            return tensors[self.index]
        found = self.home
        if not self.path:
            return found.home[found.key]
        for key in self.path:
            found = found[key]
        return found


class ViewOf(NamedTuple):
    """For a view copy among the outputs: the tensor that it is a view of in plain PyTorch.

    Here a view copy has its own memory (`tensor.aliasing`).

    Attributes:
        source: what the base is: "input" (a leaf of the call), "gradient" (the `.grad` of a leaf)
            or "output" (another output).
        place: the index of the leaf; for an output, its `Output.tensor`.
        view: a function that makes the view of the base; None if that needs tensors as arguments.
        graded: True if the step made the view with gradients enabled.
    """

    source: str
    place: int
    view: Callable[[Any], Any] | None
    graded: bool


class SpentBackward(NamedTuple):
    """The backward of an output whose autograd history is spent. It raises autograd's error.

    A history is spent after the step's own backward, or after a write to a tensor that it needs.

    Attributes:
        message: the error's message.
        leaves: the indices of the leaves of a call from which the output is computed.
    """

    message: str
    leaves: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Output:
    """One output of a captured graph, and where its value goes after a call.

    A value "with a history" requires gradients: autograd calls backward through it after the call.
    The leaves of a call are the tensors and numbers of its arguments and state.

    Attributes:
        kind: one of these:
            "result": a tensor in the step's result;
            "slot": the new value of a slot;
            "gradient": the `.grad` of an input;
            "left gradient": the `.grad` of a tensor that the step made;
            "held gradient": new values for a tensor that was an input's `.grad` before the call;
            "base": a tensor that other outputs are views of;
            "cotangent": a gradient that backward returns;
            "saved": a value that backward reads;
            "answers": the results of branches on values, to compare with those at capture;
            "admitted": during capture, a plain tensor that must be equal on all ranks.
        spec: the spec of a DTensor; None for a plain tensor.
        slot: the slot whose new value the output is.
        index: the index of a leaf: the one with this gradient, or the leaf itself that a slot gets.
            For a left gradient, the `Output.tensor` of the output that has it. Otherwise -1.
        number: the number of a result or slot with a history; for a cotangent, the number of the
            result whose gradient it is. Otherwise -1.
        part: for a value with a history, the part of backward that takes its gradient. For a
            cotangent, the part that returns it.
        hooks_miss_gradient: True for a result from which other results of its part are computed. A
            hook on it does not get the gradient that flows through those.
        scalar: True if the step returns or stores the output as a Python number.
        tensor: a number that is equal for outputs that are one tensor object in the step.
        asks_gradient: True if the output requires grad but has no history, such as a view of a
            parameter made under `no_grad`.
        retains_grad: True if the output has a history, and the step called `retain_grad()` on it.
        is_parameter: True if the step made the output an `nn.Parameter`.
        view_of: the base of a view copy, if the base is an input or an output too.
        held: if the output is the object that was the `.grad` of an input before the step: the
            index of that input. Otherwise -1.
        spent: how backward through the output fails, if autograd refuses it in the step itself.
    """

    kind: str
    spec: Spec | None
    slot: Slot | None = None
    index: int = -1
    number: int = -1
    part: int = 0
    hooks_miss_gradient: bool = False
    scalar: bool = False
    tensor: int = -1
    asks_gradient: bool = False
    retains_grad: bool = False
    is_parameter: bool = False
    view_of: ViewOf | None = None
    held: int = -1
    spent: SpentBackward | None = None


@dataclass(frozen=True)
class ResultPlace:
    """Where a tensor in a step's result comes from.

    Attributes:
        source: "result": an output of the graph. "input": a leaf of the call, which is a tensor of
            its arguments or state. "gradient": the object that was a leaf's `.grad` before the
            call.
        index: for "result", the position among the outputs of that kind; otherwise the leaf's
            index.
    """

    source: str
    index: int


@dataclass(eq=False)
class RecomputeLevel:
    """How much a step recomputes in backward to keep its memory budget.

    The step's graph and the graphs of its blocks share one object.

    Attributes:
        number: the choice of the pass `remat`. Choice 0 recomputes nothing for the budget, and each
            choice recomputes more than the one before.
        is_last: True if no graph of the step has a choice after this one.
    """

    number: int = 0
    is_last: bool = True


@dataclass(eq=False)
class Program:
    """A captured step: a graph, and where its inputs and outputs belong in the user's step.

    Attributes:
        graph: the graph of local ATen calls and collectives. Its only writes are `copy_` into
            inputs, at its end.
        inputs, outputs: the inputs and outputs, in the graph's order.
        result: the tree structure of the step's result.
        constants: for each leaf of the result, where it comes from (a `ResultPlace`). If the leaf
            is not a tensor: the leaf itself.
        cleared: indices of the leaves (tensors and numbers) of a call whose `.grad` the step sets
            to None.
        groups: the wire and mesh axes of each process group in the graph, by the group's name.
        key: a hash that is equal for equal programs.
        call: the compiled function over local inputs; None before `prepare`.
        carried: the ledger's records for the collectives of one call; None until they are computed.
        written: the positions of the inputs that the graph writes.
        entering: how each uneven input is padded before the graph runs, by position.
        leaving: how the padding of each uneven output is removed after the graph has run, by
            position.
        forward_inputs: all inputs except cotangents (gradients of results).
        forward_outputs: all outputs except cotangents (gradients of inputs).
        built: the compiled code; None if the graph runs without being compiled.
        not_recorded: why the kernels are not recorded as a CUDA graph; "" if they are.
        options: the options of the step.
        recompute: how much is recomputed in backward to meet a memory budget.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    outputs: list[Output]
    result: pytree.TreeSpec
    constants: list[Any]
    cleared: list[int]
    groups: Groups
    call: Call | None = None
    key: str = ""
    built: Built | None = None
    not_recorded: str = ""
    options: StepOptions = field(default_factory=StepOptions)
    recompute: RecomputeLevel = field(default_factory=RecomputeLevel)
    carried: list[Record] | None = field(init=False, default=None)
    _has_run: bool = field(init=False, default=False)
    written: list[int] = field(init=False)
    forward_inputs: list[Input] = field(init=False)
    forward_outputs: list[Output] = field(init=False)

    def __post_init__(self) -> None:
        self.written = [*written_inputs_of(self.graph.graph)]
        self.scope = self.wires[0].scope if self.wires else None
        self.entering = _index_borders([i.padding for i in self.inputs])
        self.leaving = _index_borders([padding_boundary(o.spec) for o in self.outputs])
        self.forward_inputs = [i for i in self.inputs if i.kind != "cotangent"]
        self.forward_outputs = [o for o in self.outputs if o.kind != "cotangent"]

    @property
    def level(self) -> int:
        """How much is recomputed in backward: the number of the chosen `RecomputeLevel`."""
        return self.recompute.number

    @property
    def wires(self) -> list[Wire]:
        """The wires (connections to a mesh's ranks) of inputs, outputs and collectives.

        Their order is the same on all ranks.
        """
        specs = [*(x.spec for x in self.inputs), *(x.spec for x in self.outputs)]
        # A cotangent's spec has a `TraceWire`, whose `real` is the wire.
        found = [getattr(s.wire, "real", s.wire) for s in specs if s is not None]
        return list(dict.fromkeys([*found, *(wire for wire, _ in self.groups.values())]))

    @cached_property
    def view_copies(self) -> frozenset[int]:
        """The indices of leaves (tensors of a call) that are view copies, which may be out of date.

        A view copy is a view in plain PyTorch, but has its own memory here.
        """
        given = [i for i in self.inputs if i.kind not in ("gradient", "cotangent")]
        return frozenset(i.index for i in given if i.spec is not None and i.spec.is_copy)

    @cached_property
    def held_gradients(self) -> frozenset[int]:
        """The indices of leaves whose `.grad` object before the call is still used after it.

        The step returns or stores the object, gives it a new value, or returns or stores a view of
        it.
        """
        found = {o.held for o in self.forward_outputs if o.held >= 0}
        views = [o.view_of for o in self.forward_outputs if o.view_of is not None]
        found |= {view.place for view in views if view.source == "gradient"}
        places = [c for c in self.constants if type(c) is ResultPlace]
        return frozenset(found | {c.index for c in places if c.source == "gradient"})

    @cached_property
    def returned_inputs(self) -> dict[int, int]:
        """The outputs that are unchanged inputs: maps an output's position to the input's."""
        (end,) = self.graph.graph.find_nodes(op="output")
        inputs = {n: i for i, n in enumerate(self.graph.graph.find_nodes(op="placeholder"))}
        return {i: inputs[n] for i, n in enumerate(end.args[0]) if n in inputs}

    @cached_property
    def repeated_outputs(self) -> dict[int, int]:
        """The outputs that repeat an earlier output: maps the later position to the earlier one.

        A node that is returned both with and without its padding counts as two values.
        """
        (end,) = self.graph.graph.find_nodes(op="output")
        first: dict[Any, int] = {}
        given = [(i, n) for i, n in enumerate(end.args[0]) if isinstance(n, fx.Node)]
        found = {i: first.setdefault((n, i in self.leaving), i) for i, n in given}
        return {i: j for i, j in found.items() if i != j}

    @cached_property
    def ranks(self) -> list[int]:
        """The global ranks of the program's collectives, for which a call may wait."""
        return sorted({r for wire in self.wires for r in wire.ranks_to_wait_for})

    @cached_property
    def draws_on(self) -> list[torch.device]:
        """The devices whose default random generators the program uses."""
        nodes = [n for n in calls_within(self.graph.graph) if facts_of(n.target).draws]
        made = [pytree.tree_leaves(n.meta["val"])[0] for n in nodes]
        return list(dict.fromkeys(value.device for value in made))

    @cached_property
    def numbers_to_keep(self) -> set[Input]:
        """The inputs that are Python numbers, if later calls can reuse the tensor of the number.

        They cannot if an output might be a view of that tensor.
        """
        nodes = self.graph.graph.find_nodes(op="placeholder")
        return {
            given
            for node, given in zip(nodes, self.inputs, strict=True)
            if given.kind == "number" and all(facts_of(u.target).makes_new for u in node.users)
        }

    @property
    def runs(self) -> Program:
        """The program that a call runs: this one, or for a `Region` the program of its forward."""
        return self

    @property
    def artifact(self) -> Built | None:
        """The compiled code of this program; None if its graph runs without compilation."""
        return self.built

    def flat(self) -> Program:
        """Returns this program with sections (subgraphs) inlined; itself if there are none."""
        graph = flatten_module(self.graph)
        if graph is self.graph:
            return self
        found = copy.copy(self)
        found.graph = graph
        return found

    def example(self) -> list[torch.Tensor]:
        """Returns fake tensors like the program's inputs, as example inputs for a compiler."""
        return examples_of(self.graph.graph)

    def prepare(self, call_of: Callable[[Program], Call]) -> None:
        """Compiles the program with `call_of`, which returns the function that runs it."""
        self.call = call_of(self)

    def run_graph(
        self, tensors: Sequence[Any], inputs: Sequence[torch.Tensor] | None = None
    ) -> Sequence[torch.Tensor]:
        """Runs the graph in a call, and returns this rank's local tensors of the outputs.

        Args:
            tensors: the call's leaves: tensors and numbers of the state and the arguments.
            inputs: the local value of each of `self.inputs`, if the caller already has them; None
                reads them from `tensors`.
        """
        assert self.call is not None
        locals_ = [i.local_value(tensors) for i in self.inputs] if inputs is None else inputs
        with local_ops(), torch.no_grad(), _BelowAutograd(), without_any_autocast():
            if self.entering or self.leaving:
                found = self._call_padded(self.call, locals_)
            else:
                found = self.call(*locals_)
        if not self._has_run:  # a compiler may return one tensor for two outputs
            self._has_run, first = True, dict[int, int]()
            places = {i: first.setdefault(id(t), i) for i, t in enumerate(found)}
            self.repeated_outputs.update({i: j for i, j in places.items() if i != j})
        if self.repeated_outputs:
            found = list(found)
            for i, j in self.repeated_outputs.items():
                one = self.outputs[i].tensor == self.outputs[j].tensor
                found[i] = found[j] if one else found[j].detach()
        # Compiled code does not increase the version counters by which partita detects writes.
        increment_version([locals_[i] for i in self.written])
        return found

    def _call_padded(self, call: Call, given: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns `call(*given)`, with uneven inputs padded and outputs cut."""
        inputs = list(given)
        for i, border in self.entering.items():
            inputs[i] = border.pad_input(given[i])
        found = list(call(*inputs))
        for i in self.written:
            if inputs[i].data_ptr() != given[i].data_ptr():  # it was padded in a copy
                given[i].copy_(self.entering[i].cut(inputs[i]))
        for i, border in self.leaving.items():
            came = self.returned_inputs.get(i)
            if i not in self.repeated_outputs:
                found[i] = border.unpad_output(found[i]) if came is None else given[came]
        return found


def _index_borders(borders: Sequence[PaddingBoundary | None]) -> dict[int, PaddingBoundary]:
    return {i: border for i, border in enumerate(borders) if border is not None}


# -- cotangents ------------------------------------------------------------------------------------


_NONE: frozenset[int] = frozenset()


def find_cotangents(program: Program) -> dict[fx.Node, frozenset[int]]:
    """Returns, for each node of backward, the numbers of the results on whose gradients it depends.

    If none of these gradients exists, autograd passes None, not zeros. So passes must not combine
    nodes that depend on different results.
    """
    graph = program.graph.graph
    inputs = zip(graph.find_nodes(op="placeholder"), program.inputs, strict=True)
    found = {n: frozenset((given.index,)) for n, given in inputs if given.kind == "cotangent"}
    for node in graph.nodes if found else ():
        numbers = _NONE.union(*(found.get(n, _NONE) for n in node.all_input_nodes))
        if numbers:
            found[node] = numbers
    return found


# -- the padding of uneven shards ------------------------------------------------------------------

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Lender:
    """The ranks among which one with an empty shard of a dimension gets elements of another."""

    axes: tuple[str, ...]
    members: int
    place: int | None


@dataclass(frozen=True)
class PaddingBoundary:
    """How a rank's smaller shard is padded before a graph, and how outputs are cut after it.

    A graph is compiled for the shape of the first rank, whose shard is the largest. A smaller shard
    is padded with copies of its last slice, so that no new NaN or infinity appears. A gradient is
    padded with zeros. A rank with an empty shard copies from the rank before it. If the storage has
    space after the shard, it is padded and written in place.

    Attributes:
        wire: the connection to the other ranks of the tensor's mesh.
        true, padded: the local shape of this rank, and of the first rank.
        behind: True if the padding follows the shard in memory, so that the tensor's own storage
            may have room for it.
        persistent: True if the tensor exists between calls, so that its storage gets room for it.
        zeros: True if it is padded with zeros.
        read: True if the graph may read the padding, which is then filled.
        lenders: for each dimension in which some ranks have empty shards: the ranks that send
            values to them.
    """

    wire: Wire
    true: Shape
    padded: Shape
    behind: bool
    persistent: bool
    zeros: bool
    read: bool
    lenders: dict[int, _Lender]

    @property
    def in_place(self) -> bool:
        """True if the tensor's own storage is padded; False if a padded copy is made."""
        return self.behind and self.persistent

    def pad_input(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the padded, contiguous local tensor: in its own storage, or a copy."""
        local = local.data  # so that padding does not count as a write
        whole = local.contiguous() if self.true == self.padded else None
        if whole is None and self.in_place:
            whole = find_padded(local, self.padded)
        if whole is None:
            whole = local.new_zeros(self.padded)
            self.cut(whole).copy_(local)
        if self.read:
            self._fill_padding(whole)
        return whole

    def _fill_padding(self, whole: torch.Tensor) -> None:
        for dim, (have, want) in enumerate(zip(self.true, self.padded, strict=True)):
            if have == want and dim not in self.lenders:
                continue
            here = whole  # padded in earlier dimensions, not yet in later ones
            for later in range(dim + 1, whole.dim()):
                here = here.narrow(later, 0, self.true[later])
            padding = here.narrow(dim, have, want - have)
            if self.zeros:
                padding.zero_()
            elif 0 < have < want:
                padding.copy_(here.narrow(dim, have - 1, 1))
            if dim in self.lenders:
                self._borrow_padding(here, dim, self.lenders[dim])

    def _borrow_padding(self, here: torch.Tensor, dim: int, lender: _Lender) -> None:
        last = here.narrow(dim, here.shape[dim] - 1, 1).contiguous()
        all_last = last.new_empty((lender.members, *last.shape))
        ask = Request("all_gather", None, "padding")
        self.wire.run_collective(all_last.view(-1), last.view(-1), lender.axes, ask)
        if lender.place is not None:
            here.copy_(all_last[lender.place])

    def moves(self, itemsize: int) -> list[tuple[tuple[str, ...], int]]:
        """Returns the traffic of padding: ranks with an empty shard get values from other ranks.

        Args:
            itemsize: bytes per element.

        Returns:
            For each collective: its axes, and the bytes that a rank sends.
        """
        found = []
        for dim, lender in self.lenders.items():
            nbytes = itemsize * math.prod(n for d, n in enumerate(self.padded) if d != dim)
            found.append((lender.axes, bytes_of("all_gather", lender.members, nbytes)))
        return found

    def unpad_output(self, value: torch.Tensor) -> torch.Tensor:
        """Returns an output of the graph without its padding, in its own storage.

        Returns `value` itself if it has no padding.
        """
        if self.true == self.padded:
            return value
        if self.behind and _fills_its_own(value):
            return narrow_storage(value, self.true)
        return self.cut(value).clone(memory_format=torch.contiguous_format)

    def cut(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a view of `value` without its padding."""
        for dim, n in enumerate(self.true):
            value = value.narrow(dim, 0, n)
        return value


def padding_boundary(
    spec: Spec | None, *, persistent: bool = True, zeros: bool = False, read: bool = True
) -> PaddingBoundary | None:
    """Returns how a tensor of `spec` is padded before a graph; None if all ranks have equal shapes.

    Args:
        persistent: True if the tensor exists between calls.
        zeros: True if it is padded with zeros, as gradients are.
        read: True if the graph may read the padding, which then copies the last slice.
    """
    if spec is None or not is_uneven(spec.layout, spec.wire.mesh):
        return None
    if isinstance(spec.wire, TraceWire):
        spec = spec_of(spec.layout, spec.wire.real)
    lenders = {} if zeros or not read else _find_lenders(spec)
    shapes = tuple(spec.local_shape), spec.padded_shape
    return PaddingBoundary(
        spec.wire, *shapes, spec.is_padded_behind, persistent, zeros, read, lenders
    )


def _fills_its_own(value: torch.Tensor) -> bool:
    """True if `value` fills a storage that nothing else refers to."""
    # On a GPU another stream may still use it: `record_stream` protects the storage itself, not
    # a new tensor that is made over it.
    at_once = Device(value.device.type).runs_at_once
    if not at_once or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    storage = value.untyped_storage()
    return count_holders(storage) == 2 and storage.nbytes() == value.nbytes


def _find_lenders(spec: Spec) -> dict[int, _Lender]:
    mesh, at = spec.wire.mesh, spec.wire.at
    found = {}
    for dim, (size, axes) in enumerate(zip(spec.layout.shape, spec.layout.shards, strict=True)):
        parts = [mesh.size(a) for a in axes]
        if not size or not has_empty(size, parts):
            continue
        key, order = spec.wire.group_order(axes)
        start, length = span(size, parts, [at[mesh.index(a)] for a in axes])
        place = None
        if not length:  # the first shard is not empty, so an element precedes this one
            where = dict(zip(axes, places_of(start - 1, size, parts)[0], strict=True))
            place = 0
            for axis in key:
                place = place * mesh.size(axis) + where[axis]
            place = place if order is None else order.index(place)
        found[dim] = _Lender(key, spec.wire.mesh_size(key), place)
    return found


# -- compiled programs -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Built:
    """A compiled program, with how and when it was compiled.

    Attributes:
        call: the function that runs the program over its inputs.
        loaded: True if it was loaded from the store; False if it was compiled here.
        seconds: the time to compile or load, without waiting for other ranks.
        key: the key of the artifact in the store: a hash of the program and of the machine,
            versions and settings.
        metadata: the artifact's description, and when and in how many seconds it was compiled.
        schedule: a function that returns the `memory.Memory`; None for a single section.
        sections: the distinct sections that the program calls, if it was cut.
    """

    call: Call
    loaded: bool
    seconds: float
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[[], Any] | None = None
    sections: tuple[Built, ...] = ()

    @classmethod
    def of_parts(cls, call: Call, key: str, parts: Iterable[Built]) -> Built:
        """Makes the `Built` of the function `call`, which calls the compiled `parts`."""
        parts = tuple(parts)
        loaded, seconds = all(p.loaded for p in parts), sum(p.seconds for p in parts)
        return cls(call, loaded, seconds, key, sections=parts)

    def __str__(self) -> str:
        how = "loaded" if self.loaded else "compiled"
        if self.sections:
            many = sum(not one.loaded for one in self.sections)
            how = f"{len(self.sections)} sections, {many} of them compiled,"
        return f"{how} in {self.seconds:.1f} s"


def local_of(x: torch.Tensor) -> torch.Tensor:
    """Returns this rank's local tensor of `x`: plain, and without autograd history."""
    with local_ops(), torch.no_grad():
        found: Any = x.detach()
    return found
