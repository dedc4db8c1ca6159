"""The tracer: makes a graph of one run of a function over fake tensors.

Fake tensors (metadata without memory) replace the tensors of modules, optimizers and arguments. The
function then runs as it is, and torch's `make_fx` records each ATen call, also in backward and in
the optimizer, as a node. A redistribution becomes functional collectives on local tensors
(`TraceWire`). Nothing is sent, and the real tensors do not change.

`capture` is for functions whose state is passed to it. `guards.capture_run` uses a `Tracer` for
steps that reach their state through Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from partita.comm import TraceWire, Wire, substitute_wires
from partita.graph.backend.executor import make_graph_function
from partita.graph.errors import (
    UnsureOfWrites,
    explain_error,
    not_an_input,
    not_captured,
    user_line_of,
)
from partita.graph.graph_nodes import drop_unused, lazy_graph_modules, note_of
from partita.graph.program import Input, Program
from partita.graph.slots import ParamState, Slot
from partita.graph.subgraphs import inline_subgraphs
from partita.graph.verify import SPACES
from partita.layout import Fix
from partita.tensor.op_facts import facts_of, find_unknown_effect
from partita.tensor.plan import forget_plans_on
from partita.tensor.tensor_state import HERE, count_writes_of

from .block_choice import BlockChoice
from .block_updates import BlockUpdates
from .capture_context import attribute_set, set_for_capture, slots_swapped, taking_turns
from .differentiate import make_seeds_inputs
from .fakes import is_symbolic
from .fold import StepBlocks
from .function_mode import StepFunctionMode, check_changed_bases
from .functional_memory import refresh_gathered, refuse_writes_before_reruns
from .functionalize import functionalize_graph
from .graph_inputs import GraphInputs, TensorFacts
from .graph_outputs import GraphOutputs, program_of_trace
from .left_attributes import attributes_taken_back
from .optimizers import (
    CapturedOptimizers,
    drop_unused_state,
    find_equal_counts,
    make_optimizer_state,
    places_of_equal,
)
from .recorder import Recorder, RepeatedMoves

# -- a function over declared state ----------------------------------------------------------------


@taking_turns()
def capture(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    modules: Sequence[nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
    slots: Sequence[Slot] = (),
    blocks: BlockChoice | None = None,
) -> Program:
    """Captures `function(*args, **kwargs)` and returns its program. Its state is passed explicitly.

    - *State* is declared by the arguments: the parameters and buffers of `modules`, the state of
      `optimizers`, and tensors in `slots`. The function may read and write it, like the program.
    - *Leaves* of the arguments and of the result are tensors and numbers, in tuples, lists and
      dictionaries. A number, also an optimizer's learning rate, is a constant of the program.
    - *Anything else is an error*: a tensor that is neither state nor an argument, a branch on a
      tensor's value, a leaf of another type.
    - Gradients that exist when the program is captured must exist in each call; others must not.
    - Other Python values that the function reads are fixed at capture. Its writes to Python objects
      happen once, at capture. The caller must ensure that this is right (`guards` detects changes).
    - Arguments that are one tensor at capture must be one tensor in each call.
    - State that the first step of an optimizer makes is made at capture. `list_slots` then returns
      it.
    - If the function stores a tensor in an attribute of a module, the tensor is removed and an
      error is raised. The same holds for new state of an optimizer that was not made at capture.
    - If the function replaces a tensor of the state by another one, that is a "slot" output.

    `program.run_graph(leaves)` runs the program and returns this rank's values of its outputs,
    without a history. They include results that are inputs. The program writes state in place. The
    leaves of a call are the values of `list_slots` and of `slots`, then the tensors and numbers of
    the arguments.

    Args:
        slots: where the other tensors of the state are stored.
        blocks: the choice of modules that are blocks; None if there are no blocks.

    Raises:
        CaptureError: the function does what a graph cannot express.
    """
    names = {f"optimizer[{i}]" if i else "optimizer": o for i, o in enumerate(optimizers)}
    call = function, args, kwargs or {}, modules, names, slots, blocks or BlockChoice(())
    made_state = make_optimizer_state(names)
    try:
        program, read = _capture(*call)
        if drop_unused_state(made_state, lambda t: id(t) in read):
            # Some leaves were removed, so that the indices of the program's inputs are wrong.
            program, _ = _capture(*call)
    except BaseException:
        drop_unused_state(made_state, lambda t: False)
        raise
    return program


def _capture(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: Sequence[nn.Module],
    optimizers: Mapping[str, Optimizer],
    slots: Sequence[Slot],
    blocks: BlockChoice,
) -> tuple[Program, set[int]]:
    """Returns the program for `capture`, and the ids of the tensors that it reads."""
    places = [*list_slots(modules, [*optimizers.values()]), *slots]
    given, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = [*(slot.value for slot in places), *given]
    called = [(slot.name, slot.kind) for slot in places]
    called += [(f"argument[{i}]", "argument") for i, _ in enumerate(given)]
    for leaf, (name, _) in zip(leaves, called, strict=True):
        _check_leaf(leaf, name)
    inputs = GraphInputs(leaves, called, range(len(leaves)))
    taken = {given.index: id(given.tensor) for given in inputs.all}
    tracer = Tracer(inputs, places, modules, optimizers, blocks, counts_apart=True)
    line = ""

    def run() -> list[Any]:
        nonlocal line
        with tracer.tracing(lambda name, value, *_: value, lambda *_: None):
            now: Any = pytree.tree_unflatten([*map(inputs.stand_in, given)], structure)
            try:
                with tracer.following_functions() as functions:
                    result = function(*now[0], **now[1])
            except Exception as error:
                line = user_line_of(error)
                raise
            functions.check_data()
            functions.copy_back()
            with torch.no_grad():
                found, of_result = pytree.tree_flatten(result)
                check = partial(_check_leaf, name="a result")
                tracer.outputs.add_result(found, of_result, check, gives_inputs=True)
                tracer.collect_state()
                tracer.outputs.add_left_gradients()
            tracer.outputs.differentiable.clear()  # callers do not call backward on results
            tracer.finish_outputs()
        return tracer.outputs.values

    try:
        with attributes_taken_back(modules):
            made = tracer.trace(run)
        _refuse_new_state(tracer.outputs)
    except Exception as error:
        explained = explain_error(error, line, tracer.called_last)
        if explained is error:
            raise
        raise explained from error
    finally:
        tracer.forget()
    tracer.check(made)
    folded = tracer.fold(made)
    try:
        program, _ = tracer.make_program(made)
    except UnsureOfWrites:
        tracer.inline_blocks(made, folded)
        program, _ = tracer.make_program(made)
    program.call = make_graph_function(program.graph, program.groups)
    return program, {taken[i.index] for i in program.inputs if i.index in taken}


def list_slots(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[Slot]:
    """Returns a slot for each parameter, buffer and tensor of an optimizer's state.

    Args:
        modules: the modules, with their submodules, that have the parameters and buffers.
        optimizers: the optimizers.
    """
    found = []
    for i, module in enumerate(modules):
        for prefix, part in module.named_modules():
            where = ".".join(filter(None, (f"module[{i}]" if i else "module", prefix)))
            for kind, home in (("parameter", part._parameters), ("buffer", part._buffers)):
                for key, t in home.items():
                    if t is not None:
                        found.append(Slot(f"{where}.{key}", kind, home, key))
    for i, optimizer in enumerate(optimizers):
        for j, state in enumerate(optimizer.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found.append(Slot(f"optimizer[{i}][{j}].{key}", "optimizer", state, key))
    return found


def _refuse_new_state(outputs: GraphOutputs) -> None:
    """Raises CaptureError if the step has made optimizer state that did not exist before."""
    for output in outputs.all:
        slot = output.slot
        if slot is None or not isinstance(slot.home, ParamState):
            continue
        if slot.key not in slot.home.optimizer.state.get(slot.home.p.value, {}):
            raise not_captured(
                f"the step makes {slot.name}, which the optimizer did not have",
                "it is not an input of the program, so each call would be the first step",
                Fix("optimizer.step()", "once before the capture, which makes it"),
            )


def _check_leaf(leaf: Any, name: str) -> None:
    """Raises CaptureError if a leaf is neither a tensor nor a number."""
    if leaf is not None and not isinstance(leaf, (torch.Tensor, bool, int, float)):
        raise not_captured(
            f"{name} is a {type(leaf).__name__}",
            "a program takes and returns tensors and numbers",
            Fix("tuples, lists and dictionaries", "of tensors and numbers"),
        )


# -- one run ---------------------------------------------------------------------------------------


class Tracer:
    """Traces one run of a function over the fakes of its inputs.

    Args:
        inputs: the inputs of the graph.
        slots: where the tensors of the state are stored.
        modules: the modules of the state.
        optimizers: the optimizers of the state, by name.
        blocks: the choice of modules that are blocks.
        counts_apart: True if the parameters of one optimizer may have different step counts.

    Attributes:
        outputs: the outputs of the graph.
        facts: handles reads of the metadata of inputs.
        wires: maps the wire (connection to the ranks) of an input to the `TraceWire` that replaces
            it during the run.
        equal_counts: conditions that step counts are equal, so that the graph needs only one of
            them.
        recorder: the dispatch mode through which the calls of the run go.
        nodes: the nodes of the inputs in the graph that is traced.
        root: the module that holds the graph's constants.
        slot_values: the value of each slot when the run began.
        called_last: the name of the torch function that was called last.
    """

    recorder: Recorder
    nodes: list[fx.Node]
    root: Any
    slot_values: list[Any]
    called_last = ""

    def __init__(
        self,
        inputs: GraphInputs,
        slots: Sequence[Slot],
        modules: Iterable[nn.Module],
        optimizers: Mapping[str, Optimizer],
        blocks: BlockChoice,
        counts_apart: bool,
    ):
        self.inputs, self.slots, self.modules, self.blocks = inputs, slots, [*modules], blocks
        self.optimizers = CapturedOptimizers({**optimizers})
        counted = () if counts_apart else optimizers.values()
        self.equal_counts = find_equal_counts(inputs.all, counted)
        self.outputs, self.facts = GraphOutputs(inputs), TensorFacts(inputs)
        self.wires: dict[Wire, TraceWire] = {}
        self._slots_by_fake: dict[int, Slot] = {}
        self._hooks: list[Any] = []

    # -- the run -----------------------------------------------------------------------------------

    def trace(self, run: Callable[[], Sequence[Any]]) -> fx.GraphModule:
        """Calls `run`, which returns outputs, within `tracing`. Returns the graph of its calls."""
        with self.inputs.mode, lazy_graph_modules():
            try:
                made = make_fx(
                    # fx would take `self` of a method for an input.
                    lambda: self._trace(run),
                    _error_on_data_dependent_ops=True,
                    _disable_torch_fn_metadata_mode=True,
                )()
            except RuntimeError as error:
                changed = self.recorder.changed_bases
                if changed and "returned an invalid gradient" in str(error):
                    raise changed[-1][2] from error
                raise
        check_changed_bases(self.recorder.changed_bases)
        _drop_unused_numbers(made.graph)
        refresh_gathered(made.graph, self.recorder.replaced)
        return made

    def _trace(self, run: Callable[[], Sequence[Any]]) -> list[Any]:
        mode = get_proxy_mode()
        assert mode is not None
        self._fx_tracer, self.root = mode.tracer, getattr(mode.tracer, "root", None)
        _keep_dead_code(mode.tracer.graph)
        self.nodes = self.inputs.add_placeholders(mode.tracer.graph)
        self.recorder = Recorder(mode.tracer.graph, self.inputs)
        self._repeated = RepeatedMoves(self.recorder, self.inputs.mode)
        found = run()
        self.recorder.finish()
        return [*found]

    @contextmanager
    def tracing(
        self, number: Callable[..., Any], copy_attributes: Callable[..., None]
    ) -> Iterator[None]:
        """Replaces the state by fake tensors, and makes calls nodes, inside the `with` block.

        Only calls of this thread become nodes of the graph.

        Args:
            number: a function that returns the replacement of an optimizer's float, given its name,
                value, home and path.
            copy_attributes: copies a tensor's attributes to its fake (`GraphInputs.tag_fakes`).
        """
        stand_in, recorder = self.inputs.stand_in, self.recorder
        with ExitStack() as stack:
            stack.enter_context(recorder)
            self._make_wires()
            self._hooks = self.inputs.tag_fakes(self.wires, copy_attributes)
            stack.enter_context(substitute_wires(dict(self.wires)))
            stack.enter_context(set_for_capture(self.modules))
            stack.enter_context(
                _noting_blocks(self.blocks, self.modules, recorder, self._fx_tracer)
            )
            self.slot_values = stack.enter_context(slots_swapped(self.slots, stand_in))
            updates = BlockUpdates(recorder, self.blocks, self.modules)
            stack.enter_context(self.optimizers.standing_in(stand_in, number, recorder, updates))
            yield

    def _make_wires(self) -> None:
        for given in self.inputs.all:
            spec = given.spec
            if spec is not None and spec.wire not in self.wires:
                wire = spec.wire
                trace = TraceWire(wire, self.inputs.coordinates(wire))
                trace.noting = partial(self.recorder.noting, trace)
                trace.repeating = self._repeated.carry
                self.wires[wire] = trace

    @contextmanager
    def following_functions(self, reads_values: bool = False) -> Iterator[StepFunctionMode]:
        """Follows the torch functions that the step calls. Yields the `StepFunctionMode`.

        Args:
            reads_values: as for `StepFunctionMode`.
        """
        functions = StepFunctionMode(self.inputs, self.facts, reads_values)
        own = functions.calls.call_own
        # After ValuesWanted, no Exception, torch does not run the hooks after a module's forward.
        with (
            HERE.breaking_off(),
            attribute_set(self.recorder, "run_without_profiling", own),
            functions,
        ):
            try:
                yield functions
            finally:
                self.called_last = functions.called_last

    # -- collecting results ------------------------------------------------------------------------

    def collect_state(self) -> None:
        """Adds the values that the state has after the run to the graph's outputs.

        Raises:
            CaptureError: a slot no longer holds a tensor.
        """
        pairs = zip(self.slot_values, self.slots, strict=True)
        self._slots_by_fake = {id(fake): slot for fake, slot in reversed([*pairs])}
        new_state = self.optimizers.list_new_state(self._find_slot)
        for slot, first in zip(self.slots, self.slot_values, strict=True):
            value = slot.find_value()
            if value is not first and slot.kind != "optimizer":
                if not isinstance(value, torch.Tensor):
                    raise not_captured(
                        f"the step deleted or replaced the tensor {slot.name}",
                        "the program of the next call needs a tensor there",
                    )
                self.outputs.add_slot(slot, value)
        for slot, value in new_state:
            self.outputs.add_slot(slot, value)

    def _find_slot(self, fake: torch.Tensor) -> Slot | None:
        """Returns the slot of the input that `fake` replaces; None if it replaces none."""
        given = self.inputs.input_of(fake)
        if given is None:
            return None
        return self._slots_by_fake.get(id(fake)) or Slot(given.name, "value", [given.tensor], 0)

    def finish_outputs(self) -> None:
        """Adds outputs: gradients of inputs for the caller's backward, and compared values."""
        self.outputs.find_bases()
        if self.outputs.differentiable:
            for hook in self._hooks:  # the real tensors' hooks get the gradients of backward
                hook.remove()
            before = count_writes_of(self.inputs.fakes)
            self.outputs.add_cotangents(self.recorder)
            counts = zip(self.inputs.all, before, count_writes_of(self.inputs.fakes), strict=False)
            if written := [given.name for given, then, now in counts if then != now]:
                raise not_captured(
                    f"a hook, or a backward of the program's own, writes {written[0]}",
                    "it runs when the caller goes backward, but the write would be made in each "
                    "forward",
                    Fix("write it outside the compiled function", "in a hook on its result"),
                )
        admitted = [value for trace in self.wires.values() for value in trace.admitted]
        self.outputs.add_unreturned("admitted", admitted)

    # -- the graph ---------------------------------------------------------------------------------

    def check(self, made: fx.GraphModule) -> None:
        """Drops unused nodes. Raises CaptureError if the graph would not do what the run did."""
        _check_constants(made.graph)
        _check_operators(made.graph)
        if regions := self.recorder.regions_that_read_again:
            refuse_writes_before_reruns(made.graph, regions)
        self.inputs.drop_unread_marks(made.graph)
        drop_unused(made.graph)

    def fold(self, made: fx.GraphModule, flat: str = "") -> StepBlocks:
        """Replaces equal blocks of the traced graph by calls of one subgraph.

        Args:
            flat: a reason to leave all blocks flat; "" for none. Other reasons are a small graph, a
                result with a history, and `sections=False`.

        Returns:
            The blocks that were found, whether they were folded or not.
        """
        nodes, least = made.graph.find_nodes(op="placeholder"), self.blocks.section_threshold
        pairs = zip(nodes, self.inputs.all, strict=True)
        coordinates = {node for node, given in pairs if given.kind == "coordinate"}
        equal = [[nodes[i] for i in places] for places in self._places_of_equal()]
        env = self.inputs.mode.shape_env
        blocks = StepBlocks(made, self.recorder.block_kinds, coordinates, equal, env)
        if self.outputs.seeds:
            flat = "a result of the step has a history"
        if least is None:
            flat = "sections=False, or passes of your own"
        elif len(made.graph.nodes) < least:
            flat = flat or f"the step has {len(made.graph.nodes)} calls, fewer than {least}"
        if flat:
            blocks.leave_flat(flat)
        else:
            with self.inputs.mode:
                blocks.fold()
        return blocks

    def inline_blocks(self, made: fx.GraphModule, blocks: StepBlocks) -> None:
        """Replaces the calls of folded blocks by the blocks' nodes again.

        This is needed if functionalization cannot handle the graph with the calls. The report of
        `blocks`, the result of `fold`, then says that no block is folded.
        """
        inline_subgraphs(made.graph)
        blocks.leave_flat("around calls of blocks, the step has no graph without writes")

    def list_read_inputs(self, made: fx.GraphModule) -> list[Input]:
        """Returns the inputs that nodes of the traced graph read, and drops its unused nodes.

        First, the gradients of results become inputs, too.
        """
        make_seeds_inputs(made.graph, self.outputs.seeds, self.inputs)
        nodes = [n for n in made.graph.nodes if n.op == "placeholder"]
        drop_unused(made.graph)
        return [i for node, i in zip(nodes, self.inputs.all, strict=True) if node.users]

    def functionalize(self, made: fx.GraphModule) -> fx.GraphModule:
        """Returns the traced graph without in-place writes, except `copy_` into inputs at its end.

        Raises:
            UnsureOfWrites: calls of folded blocks in the graph must be inlined first.
        """
        with self.inputs.mode:
            return functionalize_graph(made, self._places_of_equal())

    def _places_of_equal(self) -> list[list[int]]:
        return places_of_equal(self.inputs.all, self.equal_counts)

    def make_program(self, made: fx.GraphModule) -> tuple[Program, list[Any]]:
        """Returns the program of a traced graph, and the plain tensors that ranks must compare.

        Each of these is a pair of a node and a wire.

        Raises:
            UnsureOfWrites: calls of folded blocks in the graph must be inlined first.
        """
        self.list_read_inputs(made)
        made = self.functionalize(made)
        with self.inputs.mode:
            program, _, admitted = program_of_trace(
                made, self.inputs, self.wires, self.outputs, Program
            )
        env: Any = self.inputs.mode.shape_env
        env.forget()
        return program, admitted

    def forget(self) -> None:
        """Frees plans and other data of the wires that existed only during a capture."""
        forget_plans_on(set(self.wires.values()))
        for wire in self.wires.values():
            wire.forget()


@contextmanager
def _noting_blocks(
    choice: BlockChoice, models: Iterable[nn.Module], recorder: Recorder, tracer: Any
) -> Iterator[None]:
    """Records for the nodes that fx's `tracer` makes which block (module) was running."""
    blocks, usual = choice.find(models), tracer.call_module

    def call_module(m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with recorder.block(type(m)) if m in blocks else nullcontext():
            return usual(m, forward, args, kwargs)

    if not blocks:
        yield
        return
    tracer.call_module = call_module
    try:
        yield
    finally:
        del tracer.call_module


def _keep_dead_code(graph: fx.Graph) -> None:
    """Makes `make_fx` skip its search for dead code, which takes a fortieth of a capture's time."""
    graph.eliminate_dead_code = lambda *_, **__: False  # type: ignore[method-assign]


def _drop_unused_numbers(graph: fx.Graph) -> None:
    """Erases numbers that are computed from numbers alone, and that nothing uses."""
    for node in reversed(graph.nodes):
        is_dead = not node.users and is_symbolic(node.meta.get("val")) and node.op != "placeholder"
        if is_dead and all(is_symbolic(n.meta.get("val")) for n in node.all_input_nodes):
            graph.erase_node(node)


# -- checks of a run -------------------------------------------------------------------------------


def _check_constants(graph: fx.Graph) -> None:
    """Raises CaptureError if a tensor that is not an input is a constant of the graph.

    Tensors that a step makes of numbers are copied first (`lift_fresh_copy`). Fake modes refuse any
    other tensor, but a proxy mode handles some calls of one-element tensors itself.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user.op == "call_function" and not facts_of(user.target).lifts:
                raise not_an_input(note_of(user).source)


def _check_operators(graph: fx.Graph) -> None:
    """Raises CaptureError if the step calls a custom operator that may have other effects."""
    for node in graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if node.op != "call_function" or space in (*SPACES, "profiler"):
            continue
        if effect := find_unknown_effect(node.target):
            raise not_captured(
                f"the step calls {node.target}, a custom operator",
                effect,
                Fix(
                    "torch.library.custom_op(..., mutates_args=())",
                    "if it only returns new tensors",
                ),
                Fix("call it outside the step", "before or after, or between compiled regions"),
                place=note_of(node).source,
            )
