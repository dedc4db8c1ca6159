"""Outputs of a graph: what a function returns, and what it stores in the state and in `.grad`.

If results require grad, the graph also returns gradients of inputs ("cotangent" outputs). Two kinds
of outputs serve only checks: "admitted" (plain tensors mixed with DTensors, which must be equal on
all ranks) and "answers" (the results of branches on values). `program_of_trace` makes the program;
it drops inputs that nothing reads and gradients that would only hold memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Wire
from partita.graph.errors import not_captured
from partita.graph.graph_nodes import drop_unused, subgraph_of, written_operands
from partita.graph.program import (
    Input,
    Output,
    Program,
    ResultPlace,
    SpentBackward,
    ViewOf,
    padding_boundary,
)
from partita.graph.shared_memory import part_of_storage
from partita.graph.slots import Slot
from partita.layout import Fix
from partita.tensor.aliasing import first_base_of
from partita.tensor.dtensor import DTensor, as_dtensor
from partita.tensor.dtensor_gradients import user_hooks_of
from partita.tensor.tensor_state import Spec, current, spec_of, state_of

from .differentiate import (
    Seed,
    SpentHistory,
    asks_gradient,
    cut_history,
    differentiate,
    find_leaves,
    find_spent,
    has_history,
    part_results,
    requires_grad,
)
from .fakes import is_symbolic
from .functional_memory import refuse_cut_views
from .graph_inputs import WITHOUT_GRADIENT, GraphInputs, user_attributes_of
from .recorder import Recorder

_P = TypeVar("_P", bound=Program)
_NO_RESULTS = ("mark", "gradient")  # inputs that get no gradient

_grad: Any = torch._C.TensorBase.grad


class GraphOutputs:
    """The outputs of one captured graph: results, new values of the state, gradients, and checks.

    Args:
        inputs: the inputs of the graph.

    Attributes:
        all: the outputs, in the graph's order.
        values: the traced tensor or number of each output.
        result, constants, cleared: as in a `Program`.
        differentiable: the results and slots with a history; `Output.number` is the index here.
        seeds: the nodes at which the gradients of these enter the graph.
        separate_data: a function from a tensor that the step returns to the tensor that the graph
            returns.
    """

    def __init__(self, inputs: GraphInputs):
        self._inputs = inputs
        self.all: list[Output] = []
        self.values: list[Any] = []
        self.result: pytree.TreeSpec
        self.constants: list[Any] = []
        self.cleared: list[int] = []
        self.differentiable: list[torch.Tensor] = []
        self.seeds: list[Seed] = []
        self.separate_data: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
        self._places: dict[int, int] = {}
        self._added: list[Any] = []  # kept alive, because `_places` has their ids

    def add_result(
        self,
        leaves: Sequence[Any],
        structure: pytree.TreeSpec,
        check: Callable[[Any], None],
        gives_inputs: bool = False,
    ) -> None:
        """Adds the values that the step returns to the outputs.

        Args:
            leaves, structure: the leaves and the structure of the result.
            check: called with each leaf that is neither a tensor nor a traced number. The leaf is
                kept as a constant, which every later call returns. `check` raises if that would be
                wrong.
            gives_inputs: True if a result that is itself an input also becomes an output of the
                graph.
        """
        self.result = structure
        results: list[Any] = []
        for leaf in leaves:
            if is_symbolic(leaf):
                self.constants.append(ResultPlace("result", len(results)))
                results.append(leaf)
                self._add_value("result", leaf)
            elif not isinstance(leaf, torch.Tensor):
                check(leaf)
                self.constants.append(leaf)
            elif not gives_inputs and (given := self._inputs.input_of(leaf)) is not None:
                self.constants.append(ResultPlace("input", given.index))  # the tensor itself
            elif not gives_inputs and (given := self._inputs.gradient_of_fake(leaf)) is not None:
                self.constants.append(ResultPlace("gradient", given.index))
            else:
                number = next((i for i, t in enumerate(results) if t is leaf), len(results))
                self.constants.append(ResultPlace("result", number))
                if number == len(results):
                    results.append(leaf)
                    self._add_value("result", leaf)

    def add_slot(self, slot: Slot, value: Any) -> None:
        """Adds the value that a tensor of the state has after the step to the outputs.

        Args:
            slot: the place of that tensor.
            value: the tensor's value after the step.
        """
        given = self._inputs.input_of(value)
        index = -1 if given is None else given.index
        self._add_value("slot", value, slot=slot, index=index)

    def find_bases(self) -> None:
        """Finds, for each output that is a view copy, the input or output that it is a view of.

        A view copy is a view on one device, but has its own memory here. If several outputs share a
        base that is neither an input nor an output, the base becomes an output.

        Raises:
            CaptureError: the base would become an output, but has shards of different sizes.
        """
        pairs = zip(self._inputs.all, self._inputs.fakes, strict=True)
        tensors: list[tuple[str, int, Any]] = [
            ("gradient" if given.kind == "gradient" else "input", given.index, fake)
            for given, fake in pairs
            if given.kind != "mark"
        ]
        tensors += [("output", o.tensor, t) for o, t in zip(self.all, self.values, strict=True)]
        tensors = [one for one in tensors if isinstance(one[2], DTensor)]
        for i, value in enumerate(list(self.values)):
            copied = state_of(value).copied_view if isinstance(value, DTensor) else None
            if copied is not None and self._inputs.input_of(value) is None:
                self.all[i] = replace(self.all[i], view_of=self._find_base(value, tensors))

    def _find_base(self, copy: DTensor, tensors: list[tuple[str, int, Any]]) -> ViewOf | None:
        """Returns the base of a view copy, or None if nothing else shares its memory.

        Args:
            tensors: (`ViewOf.source`, `ViewOf.place`, tensor) of inputs and outputs. A base that
                becomes an output is added.
        """
        base, view, graded = first_base_of(copy)
        memory, layout = _memory_of(base), base._spec.layout
        sharing = [t for t in tensors if t[2] is not copy and _memory_of(t[2]) == memory]
        bases = [t for t in sharing if state_of(t[2]).copied_view is None]
        with local_ops():
            alike = [t for t in bases if t[2]._spec.layout == layout]
            equal = [t for t in alike if part_of_storage(t[2]) == part_of_storage(base)]
        is_made = all(source == "output" for source, _, _ in sharing)
        is_even = padding_boundary(_untraced_spec(base._spec)) is None
        if sharing and not equal and is_made and is_even:
            self._add_tensor("base", base)
            bases = equal = [("output", self.all[-1].tensor, base)]
            tensors += bases
        if sharing and not bases:
            raise not_captured(
                "two outputs of the step are views of one tensor, which is no output",
                "a view that has another layout than its base has its own memory, so a later "
                "write to one would not change the other",
                Fix("x.clone()", "of the outputs, or return the tensor as well"),
            )
        if not bases:
            return None
        source, place, _ = (equal or bases)[0]
        return ViewOf(source, place, view if equal else None, graded)

    def add_left_gradients(self) -> None:
        """Adds the `.grad` that inputs, and tensors made in the step, have after the step.

        Also adds an input's old `.grad` object if the step gives it new memory. Inputs whose
        `.grad` is None are listed in `cleared`.

        Raises:
            CaptureError: an input with a `.grad` was computed from other tensors before the call.
        """
        for i, output in enumerate([*self.all]):
            is_first = not output.scalar and output.tensor == i and output.held < 0
            if is_first and self._inputs.input_of(self.values[i]) is None:
                _check_no_marks(self.values[i])
                if (grad := _left_gradient(self.values[i])) is not None:
                    spec = None if isinstance(grad, DTensor) else output.spec
                    self._add_tensor("left gradient", grad, spec=spec and spec.gradient, index=i)
        pairs = [*zip(self._inputs.all, self._inputs.fakes, strict=True)]
        before = {given.index: fake for given, fake in pairs if given.kind in _NO_RESULTS}
        shared = self._inputs.shared_gradients.items()
        before |= {index: before[first.index] for index, first in shared}
        for given, fake in self._differentiable_inputs():
            if not fake.requires_grad and not given.may_have_gradient:
                continue
            with local_ops():
                grad = _grad.__get__(fake)
            if not given.tensor.is_leaf:
                if grad is not None:
                    raise _no_leaf_error(given)
            elif grad is None:
                self.cleared.append(given.index)
            elif grad is not before.get(given.index):
                spec = None if isinstance(grad, DTensor) else getattr(fake, "_spec", None)
                self._add_tensor("gradient", grad, spec=spec and spec.gradient, index=given.index)
        for given, fake in pairs:
            if given.kind == "gradient" and _is_renewed(given, fake, self._inputs):
                self._add_tensor("held gradient", fake, index=given.index)

    def add_cotangents(self, recorder: Recorder) -> None:
        """Traces the backward of results that require grad; adds gradients of inputs as outputs.

        These gradients are "cotangent" outputs. Results with a spent history have none.

        Args:
            recorder: the recorder of the capture.
        """
        try:
            self._refuse_made_leaves(recorder)
            self._trace_parts(recorder)
        except SpentHistory:
            if not (spent := find_spent(self.differentiable, recorder)):
                raise
            self._set_apart(spent)
            self.add_cotangents(recorder)

    def _set_apart(self, spent: dict[int, str]) -> None:
        """Removes results from `differentiable`, and notes in their outputs that they are spent.

        Args:
            spent: autograd's messages, by the index of the result.
        """
        kept = [n for n in range(len(self.differentiable)) if n not in spent]
        for i, output in enumerate(self.all):
            if output.number in spent:
                leaves = find_leaves([self.differentiable[output.number]])
                given = [self._inputs.input_of(t) for t in leaves]
                places = [one.index for one in given if one and one.kind not in _NO_RESULTS]
                history = SpentBackward(spent[output.number], tuple(places))
                self.all[i] = replace(output, number=-1, spent=history)
            elif output.number >= 0:
                self.all[i] = replace(output, number=kept.index(output.number))
        self.differentiable = [self.differentiable[n] for n in kept]

    def _trace_parts(self, recorder: Recorder) -> None:
        wanted = [(i, t) for i, t in self._differentiable_inputs() if requires_grad(t)]
        parts = part_results(self.differentiable) if wanted else []
        part_of = {n: i for i, part in enumerate(parts) for n in part.results}
        hooks_miss_gradient = {n for part in parts for n in part.hooks_miss_gradient}
        outputs = [
            replace(
                o,
                part=part_of.get(o.number, 0),
                hooks_miss_gradient=o.number in hooks_miss_gradient,
            )
            for o in self.all
        ]
        found: list[tuple[Output, torch.Tensor]] = []
        seeds: list[Seed] = []
        for number, part in enumerate(parts):
            results = [self.differentiable[n] for n in part.results]
            ancestors = [self.differentiable[n] for n in part.ancestors]
            takes = [*ancestors, *(t for _, t in wanted)]
            with cut_history(ancestors):
                own_seeds, gradients = differentiate(results, takes, recorder)
            for seed in own_seeds:
                spec = _untraced_spec(seed.spec)
                seeds.append(replace(seed, spec=spec, number=part.results[seed.number]))
            places: list[dict[str, Any]] = [*({"number": n} for n in part.ancestors)]
            places += [{"index": given.index} for given, _ in wanted]
            for place, taken, grad in zip(places, takes, gradients, strict=True):
                if grad is not None:
                    spec = getattr(taken, "_spec", None)
                    real = _untraced_spec(spec and spec.gradient)
                    found.append((Output("cotangent", real, part=number, **place), grad))
        self.seeds = seeds
        self.all = [*outputs, *(output for output, _ in found)]
        self.values += [grad for _, grad in found]

    def _refuse_made_leaves(self, recorder: Recorder) -> None:
        """Raises CaptureError if the caller's backward would have to reach a leaf made in the step.

        That is a returned leaf, or any if no input requires grad: results would not require grad.
        """
        outputs = {id(t) for t in self.values}
        leaves = find_leaves(self.differentiable)
        made = [t for t in leaves if self._inputs.input_of(t) is None]
        if len(made) < len(leaves):
            made = [t for t in made if id(t) in outputs]
        if made:
            differentiate(self.differentiable, made, recorder)
            raise not_captured(
                "the step returns a result that is computed from a leaf that it makes",
                "in the next calls that result's history does not reach the leaf, which would get "
                "no gradient",
                Fix("make the leaf before the step", "and pass it, or keep it in a module"),
                Fix("return result.detach()", "if no gradient is needed"),
            )

    def add_unreturned(self, kind: str, values: Sequence[Any]) -> None:
        """Adds outputs for checks: values that the step itself does not return.

        Args:
            kind: "admitted": plain tensors that ranks compare, with an output for each. "answers":
                results of branches, with one output for all.
            values: the traced tensors or numbers.
        """
        many = len(values) if kind == "admitted" else 1
        self.all += [Output(kind, None) for _ in range(many)]
        self.values += values

    def _differentiable_inputs(self) -> Iterable[tuple[Input, torch.Tensor]]:
        pairs = zip(self._inputs.all, self._inputs.fakes, strict=True)
        return [(given, fake) for given, fake in pairs if given.kind not in _NO_RESULTS]

    def _add_value(self, kind: str, value: Any, **more: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._add_tensor(kind, value, **more)
        else:  # a number, plain or symbolic
            self.all.append(Output(kind, None, scalar=True, **more))
            self.values.append(value)

    def _add_tensor(self, kind: str, value: torch.Tensor, **more: Any) -> None:
        more["tensor"] = self._places.setdefault(id(value), len(self.values))
        self._added.append(value)
        spec = more.pop("spec", None) or getattr(value, "_spec", None)
        if (given := self._inputs.gradient_of_fake(value)) is not None:
            more["held"] = given.index
        value = self.separate_data(_read_again(value))
        if "gradient" not in kind and has_history(value):
            more["number"] = len(self.differentiable)
            self.differentiable.append(value)
            more["retains_grad"] = _retains_gradient(value)
        elif "gradient" not in kind:
            more["asks_gradient"] = asks_gradient(value)
            more["is_parameter"] = isinstance(value, nn.Parameter)
        self.all.append(Output(kind, _untraced_spec(spec), **more))
        self.values.append(value)


def _is_renewed(given: Input, fake: torch.Tensor, inputs: GraphInputs) -> bool:
    """True if a gradient that exists before the step gets another layout or memory in it."""
    before, after = given.spec, getattr(fake, "_spec", None)
    is_laid_out = before is None or after is None or before.layout == after.layout
    return id(fake) in inputs.renewed or not is_laid_out


def _read_again(value: Any) -> Any:
    """Returns the tensor that the user would get by reading `value` after the step.

    A DTensor is brought up to date, with its history.
    """
    if not isinstance(value, DTensor):
        return value
    with torch.enable_grad():
        return current(value)


def _memory_of(value: DTensor) -> int:
    """Returns a number that identifies the memory of a value; for a view copy, that of its base."""
    with local_ops():
        return first_base_of(value)[0].untyped_storage()._cdata


def list_trained(inputs: GraphInputs) -> list[tuple[int, bool]]:
    """Returns (index, new value) for each of `inputs` whose `requires_grad` the step changes.

    Raises:
        CaptureError: the input has the user's hooks, which were not traced.
    """
    found = []
    for given, fake in zip(inputs.all, inputs.fakes, strict=True):
        is_leaf = given.kind not in WITHOUT_GRADIENT and given.tensor.is_leaf and fake.is_leaf
        if not is_leaf or fake.requires_grad == given.tensor.requires_grad:
            continue
        if fake.requires_grad and user_hooks_of(given.tensor):
            raise not_captured(
                f"the step sets requires_grad of {given.name}, which has gradient hooks",
                "the hooks did not run while the step was captured",
                Fix(f"{given.name}.requires_grad_()", "before the step"),
            )
        found.append((given.index, fake.requires_grad))
    return found


def _no_leaf_error(given: Input) -> Exception:
    return not_captured(
        f"{given.name} was computed from other tensors before the call",
        "a backward in the step would have to continue into the earlier autograd graph",
        Fix("pt.compile(forward)", "and call backward() on its result, outside of the graph"),
    )


def _untraced_spec(spec: Spec | None) -> Spec | None:
    if spec is None:
        return None
    wire = spec.wire
    return spec_of(spec.layout, wire.real if isinstance(wire, TraceWire) else wire)


OF_FAKES = frozenset(FakeTensor.__annotations__)
"""The names of attributes that every fake tensor has."""

_MEMO = ("_memo", "_memo_vc", "_memo_epoch")


def attributes_given_to(fake: torch.Tensor) -> list[str]:
    """Returns the names of the attributes that the step has set on a fake tensor.

    Attributes that FakeTensor itself uses as a cache are not included.
    """
    return [name for name in user_attributes_of(fake) if not name.endswith(_MEMO)]


def _left_gradient(made: torch.Tensor) -> torch.Tensor | None:
    """Returns the `.grad` that the step's backward passes left on a tensor that it made."""
    if has_history(made) and not _retains_gradient(made):
        return None  # torch warns if it is read
    with local_ops():
        found: torch.Tensor | None = _grad.__get__(made)
        return found


def _retains_gradient(made: torch.Tensor) -> bool:
    """True if the step has called `retain_grad()` on a value that it computed."""
    with local_ops():
        return made.retains_grad


def _check_no_marks(made: torch.Tensor) -> None:
    """Raises CaptureError if the step has set a hook or an attribute on a tensor that it made."""
    given = [name for name in attributes_given_to(made) if name not in OF_FAKES]
    marks = [f"the attribute {name}" for name in given]
    if asks_gradient(made) and user_hooks_of(made):
        marks.append("a hook")
    if marks:
        raise not_captured(
            f"the step sets {marks[0]} on a tensor that it computes",
            "hooks and attributes are not part of a graph: only the first call would set them",
            Fix("set it outside the step", "on what the call returns"),
        )


def program_of_trace(
    made: fx.GraphModule,
    inputs: GraphInputs,
    wires: dict[Wire, TraceWire],
    outputs: GraphOutputs,
    kind: type[_P],
) -> tuple[_P, dict[fx.Node, Input], list[tuple[fx.Node, Wire]]]:
    """Makes the program of a traced graph, which is changed in place.

    Args:
        made: the module with the graph.
        inputs, outputs: the inputs and outputs of the graph.
        wires: maps the wire (connection to the ranks) of an input to the `TraceWire` that replaced
            it during the run.
        kind: the class of the program.

    Returns:
        The program, its inputs by node, and the "admitted" values, each with its wire.
    """
    graph = made.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs.all, strict=True))
    cleared = list(outputs.cleared)
    kept, admitted = _select_outputs(graph, given, wires, outputs, inputs, cleared)
    cut = [i for i, output in enumerate(kept) if padding_boundary(output.spec) is not None]
    if cut:
        refuse_cut_views(graph, cut)
    used = {node: _without_memory(i, inputs) for node, i in given.items() if node.users}
    for node in given:
        if node not in used:
            graph.erase_node(node)
    program = kind(
        made,
        [*used.values()],
        kept,
        outputs.result,
        outputs.constants,
        sorted(set(cleared)),
        {name: (t.real, axes) for t in wires.values() for name, axes in t.groups.items()},
    )
    return program, used, admitted


def _select_outputs(
    graph: fx.Graph,
    given: dict[fx.Node, Input],
    wires: dict[Wire, TraceWire],
    outputs: GraphOutputs,
    inputs: GraphInputs,
    cleared: list[int],
) -> tuple[list[Output], list[tuple[fx.Node, Wire]]]:
    """Drops outputs that are not needed; returns the others, and the admitted (node, wire) pairs.

    Args:
        given: the graph's inputs, by node.
        inputs: the inputs of the trace. The step has not read the marks of `inputs.marked`.
        cleared: a list to which the indices of tensors with dropped gradients are added.
    """
    (end,) = graph.find_nodes(op="output")
    pairs = [*zip(outputs.all, end.args[0], strict=True)]
    updated = _updated_by_gradients(graph, given, pairs)
    # Gradients whose values from before the step it did not read.
    unread = inputs.marked | {
        i.index for node, i in given.items() if i.kind == "gradient" and not node.users
    }
    dropped = (updated & unread) - inputs.asked_gradients
    bases = {o.view_of.place for o in outputs.all if o.view_of and o.view_of.source == "output"}
    kept: list[tuple[Output, fx.Node]] = []
    admitted: list[tuple[fx.Node, Wire]] = []
    traced_by = iter([t.real for t in wires.values() for _ in t.admitted])
    for output, value in pairs:
        # A gradient that the step did not accumulate, and that its update has used, would only
        # take memory. A gradient is kept if it accumulates, if nothing uses it, if the next call
        # reads it, or if a result is a view of it.
        if output.kind == "admitted":
            admitted.append((_find_compared(value), next(traced_by)))
        elif output.kind == "gradient" and output.index in dropped and output.tensor not in bases:
            cleared.append(output.index)
        else:
            kept.append((output, value))
    end.args = ([value for _, value in kept],)
    drop_unused(graph)
    return [output for output, _ in kept], admitted


def _updated_by_gradients(
    graph: fx.Graph, given: dict[fx.Node, Input], outputs: Sequence[tuple[Output, fx.Node]]
) -> set[int]:
    """Returns the indices of tensors whose new values depend on their new gradients."""
    gradients = {value: out.index for out, value in outputs if out.kind == "gradient"}
    found = set()
    # A bit for the place of each gradient that a node depends on.
    reached: dict[fx.Node, int] = {}
    for node in graph.nodes:
        bits = 1 << gradients[node] if node in gradients else 0
        for read in node.all_input_nodes:
            bits |= reached[read]
        reached[node] = bits
        for written in written_operands(node):
            one = given[written]
            if one.kind != "gradient" and bits >> one.index & 1:
                found.add(one.index)
    return found


def _without_memory(given: Input, inputs: GraphInputs) -> Input:
    """Returns an input that keeps no tensor of the captured call alive, but a fake of it."""
    if given.kind != "argument" and given.tensor.is_leaf:
        return given
    with local_ops(), torch.no_grad():
        like = inputs.stand_in(given.tensor).detach()
    return replace(given, tensor=like if given.spec is None else as_dtensor(like, given.spec))


def _find_compared(value: fx.Node) -> fx.Node:
    """Returns the node to compare for an "admitted" output, which is a copy: the copied node.

    If a subgraph computes the copied value, the copy itself is compared.
    """
    made: Any = value.args[0]
    return value if subgraph_of(made) is not None else made
