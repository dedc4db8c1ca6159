"""Outputs of a captured graph: what a step leaves, and which of it the program keeps.

A step returns results, and leaves values in its slots, in attributes of modules and in `.grad`; a
caller may ask for gradients of results with a history ("cotangent"). "admitted" and "answers" are
values for checks alone. What the graph could not repeat in each call is refused: tensors in lists
or variables, attributes and hooks on tensors, writes of Python objects that change each time.
`program_of_trace` drops inputs that are not read, gradients that would only hold memory, and the
tensors of the captured call.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from partita.capture.conditions import Conditions
from partita.capture.differentiate import (
    Seed,
    asks_gradient,
    cut_history,
    differentiate,
    has_history,
    part_results,
    requires_grad,
)
from partita.capture.fakes import is_symbolic, is_text_of_unknown
from partita.capture.functional_memory import refuse_cut_views
from partita.capture.graph_inputs import WITHOUT_GRADIENT, GraphInputs
from partita.capture.recorder import Recorder
from partita.capture.whose_code import is_user_module
from partita.comm import TraceWire, Wire, user_line
from partita.graph.block_calls import is_block_node
from partita.graph.errors import CaptureError, not_captured
from partita.graph.graph_nodes import drop_unused, written_operands
from partita.graph.program import Input, Output, ResultPlace, border_of
from partita.graph.slots import Slot
from partita.layout import Fix
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.dtensor_gradients import user_hooks_of
from partita.tensor.tensor_state import Spec, spec_of, state_of

from . import ReadRecord, Write
from .arguments import flatten_call
from .bytecode import line_of_write
from .captured_program import CapturedProgram, extract_compared
from .inputs import State
from .values import MISSING, Place, brief, user_attributes_of

_NO_RESULTS = ("mark", "gradient")  # inputs of which no gradient is left or asked for

_grad: Any = torch._C.TensorBase.grad


class GraphOutputs:
    """The outputs of one capture.

    Args:
        inputs: of the graph.

    Attributes:
        all: in the graph's order.
        values: for each the traced tensor or number.
        result, constants, cleared: as in a `Program`.
        differentiable: the values that have a history, by number.
        seeds: the nodes at which their gradients enter the graph.
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
        self._places: dict[int, int] = {}

    def add_result(
        self, result: Any, returns_as_it_is: Callable[[Any], bool], known: Container[int]
    ) -> None:
        """Add what the step returns.

        Args:
            returns_as_it_is: was this part of it there before the step?
            known: ids of objects that were there before the step.
        """
        leaves, self.result = flatten_call(result, returns_as_it_is)
        results: list[Any] = []
        for leaf in leaves:
            if is_symbolic(leaf):
                self.constants.append(ResultPlace("result", len(results)))
                results.append(leaf)
                self._add_value("result", leaf)
            elif not isinstance(leaf, torch.Tensor):
                if not returns_as_it_is(leaf):
                    _check_result(leaf, known)
                self.constants.append(leaf)
            elif (given := self._inputs.input_of(leaf)) is not None:
                self.constants.append(ResultPlace("input", given.index))  # the tensor itself
            else:
                number = next((i for i, t in enumerate(results) if t is leaf), len(results))
                self.constants.append(ResultPlace("result", number))
                if number == len(results):
                    results.append(leaf)
                    self._add_value("result", leaf)

    def add_slot(self, slot: Slot, value: Any) -> None:
        """Add what a slot holds after the step."""
        self._add_value("slot", value, slot=slot)

    def add_left_gradients(self) -> None:
        """Add the gradients that the step leaves on tensors that it has made, and on inputs."""
        for i, output in enumerate([*self.all]):
            is_first = not output.scalar and output.tensor == i
            if is_first and self._inputs.input_of(self.values[i]) is None:
                _check_no_marks(self.values[i])
                if (grad := _left_gradient(self.values[i])) is not None:
                    spec = None if isinstance(grad, DTensor) else output.spec
                    self._add_tensor("left gradient", grad, spec=spec and spec.gradient, index=i)
        for given, fake in self._differentiable_inputs():
            if not fake.requires_grad and not given.may_have_gradient:
                continue
            with Local():
                grad = _grad.__get__(fake)
            if not given.tensor.is_leaf:
                if grad is not None:
                    raise _no_leaf_error(given)
            elif grad is None:
                self.cleared.append(given.index)
            elif id(grad) not in self._inputs.identities:
                spec = None if isinstance(grad, DTensor) else getattr(fake, "_spec", None)
                self._add_tensor("gradient", grad, spec=spec and spec.gradient, index=given.index)

    def add_cotangents(self, recorder: Recorder) -> None:
        """Add the gradients of inputs; none where the step has used up the results' history."""
        wanted = [(i, t) for i, t in self._differentiable_inputs() if requires_grad(t)]
        parts = part_results(self.differentiable) if wanted else []
        part_of = {n: i for i, part in enumerate(parts) for n in part.results}
        unheard = {n for part in parts for n in part.unheard}
        outputs = [
            replace(o, part=part_of.get(o.number, 0), unheard=o.number in unheard) for o in self.all
        ]
        found: list[tuple[Output, torch.Tensor]] = []
        seeds: list[Seed] = []
        for number, part in enumerate(parts):
            results = [self.differentiable[n] for n in part.results]
            ancestors = [self.differentiable[n] for n in part.ancestors]
            takes = [*ancestors, *(t for _, t in wanted)]
            with cut_history(ancestors):
                gradients = differentiate(results, takes, recorder, again=number + 1 < len(parts))
            if gradients is None:
                found, seeds = [], []
                break
            for seed in gradients[0]:
                spec = _untraced_spec(seed.spec)
                seeds.append(replace(seed, spec=spec, number=part.results[seed.number]))
            places: list[dict[str, Any]] = [*({"number": n} for n in part.ancestors)]
            places += [{"index": given.index} for given, _ in wanted]
            for place, taken, grad in zip(places, takes, gradients[1], strict=True):
                if grad is not None:
                    spec = getattr(taken, "_spec", None)
                    real = _untraced_spec(spec and spec.gradient)
                    found.append((Output("cotangent", real, part=number, **place), grad))
        self.seeds = seeds
        self.all = [*outputs, *(output for output, _ in found)]
        self.values += [grad for _, grad in found]

    def add_unreturned(self, kind: str, values: Sequence[Any]) -> None:
        """Add what the step does not return: plain values next to DTensors ("admitted"), or the
        "answers" to what torch has asked, which become one output."""
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
        spec = more.pop("spec", None) or getattr(value, "_spec", None)
        if "gradient" not in kind and has_history(value):
            more["number"] = len(self.differentiable)
            self.differentiable.append(value)
            more["retains_grad"] = _retains_gradient(value)
        elif "gradient" not in kind:
            more["asks_gradient"] = asks_gradient(value)
        self.all.append(Output(kind, _untraced_spec(spec), **more))
        self.values.append(value)


def list_trained(inputs: GraphInputs) -> list[tuple[int, bool]]:
    """Index and new value of `requires_grad` of each input for which the step sets it.

    Raises:
        CaptureError: it has hooks of the user's, which were not traced.
    """
    found = []
    for given, fake in zip(inputs.all, inputs.fakes, strict=True):
        is_leaf = given.kind not in WITHOUT_GRADIENT and given.tensor.is_leaf and fake.is_leaf
        if not is_leaf or fake.requires_grad == given.tensor.requires_grad:
            continue
        if fake.requires_grad and user_hooks_of(given.tensor):
            raise not_captured(
                f"the step has {given.name}, a tensor with hooks, require gradients",
                "these hooks were not called while the step was captured",
                Fix(f"{given.name}.requires_grad_()", "before the step"),
            )
        found.append((given.index, fake.requires_grad))
    return found


def _no_leaf_error(given: Input) -> Exception:
    return not_captured(
        f"{given.name} has a history of its own",
        "a backward within the step would have to go on outside the graph",
        Fix("pt.compile(forward)", "and go backward from what it gives"),
    )


def _untraced_spec(spec: Spec | None) -> Spec | None:
    if spec is None:
        return None
    wire = spec.wire
    return spec_of(spec.layout, wire.real if isinstance(wire, TraceWire) else wire)


# -- what a step leaves in attributes --------------------------------------------------------------

_SLOTS = ("_parameters", "_buffers", "_modules")  # whose entries are slots
_SHARED = (torch.Tensor, types.ModuleType, types.CodeType, types.FrameType)
_MOST_OBJECTS = 10_000  # that a search looks into


class ModuleAttributes:
    """The attributes of a step's modules, beside parameters and buffers."""

    def __init__(self, state: State):
        self._homes = [
            (f"{name}.{prefix}" if prefix else name, vars(part))
            for name, module in state.modules.items()
            for prefix, part in module.named_modules()
        ]
        self._before: list[dict[str, Any]] = []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, a step may set attributes; fake tensors are taken out again at the end."""
        self._before = [dict(home) for _, home in self._homes]
        containers = [
            (value, dict(dict.items(value)) if isinstance(value, dict) else list(value))
            for held in self._before
            for key, value in held.items()
            if isinstance(value, (list, dict)) and key not in _SLOTS
        ]
        try:
            yield
        finally:
            for (_, home), held in zip(self._homes, self._before, strict=True):
                for key in _find_filled_keys(home):
                    home.pop(key)
                    if key in held:
                        home[key] = held[key]
            for container, copy in containers:
                if is_filled(container):
                    container.clear()
                    (container.update if isinstance(container, dict) else container.extend)(copy)

    def is_of_module(self, home: Any) -> bool:
        """True if `home` is the `__dict__` of one of the modules."""
        return any(home is known for _, known in self._homes)

    def make_left_error(self, place: Place, value: Any) -> Exception:
        """The error to raise where the step leaves `value` in a place."""
        for _, attributes in self._homes:
            if place.home is attributes.get("_buffers"):
                return not_captured(
                    f"the step registers {place.name}, a buffer that its module did not have",
                    "which buffers a module has is known before a step is captured",
                    Fix("self.register_buffer(...) in __init__", "the step may register it anew"),
                    Fix("call the module once before", "where its forward registers what it lacks"),
                )
        return make_left_error(place.name, value)

    def list_left_tensors(self, known: Collection[tuple[int, Any]]) -> list[Slot]:
        """The attributes in which the step leaves a tensor; called within `restored`.

        Args:
            known: identities of the slots that are inputs.

        Raises:
            CaptureError: it leaves one in a list, a dictionary or a variable that held none.
        """
        found = []
        for (name, home), held in zip(self._homes, self._before, strict=True):
            for key in _find_filled_keys(home):
                if (id(home), key) in known or is_held(home[key], known):
                    continue
                if isinstance(home[key], torch.Tensor) or is_symbolic(home[key]):
                    found.append(Slot(f"{name}.{key}", "value", home, key))
                elif not _is_list_of_parameters(home[key], held.get(key)):
                    raise make_left_error(f"{name}.{key}")
        return found


# -- attributes of tensors -------------------------------------------------------------------------


class InputAttributes:
    """Attributes that the program has set on input tensors, and that their stand-ins have too.

    Args:
        record: of what the step reads of Python: these attributes become guards.
    """

    def __init__(self, record: ReadRecord):
        self._record = record
        self._before: list[tuple[Input, torch.Tensor, dict[str, Any], Any]] = []

    def copy(self, given: Input, fake: torch.Tensor, stand_in: Callable[[Any], Any]) -> None:
        """Give `fake`, which stands for an input, the input's attributes."""
        held = given.tensor.__dict__
        for name in user_attributes_of(given.tensor):
            self._record.read_place(Place(f"{given.name}.{name}", held, name), held[name])
            fake.__dict__[name] = stand_in(held[name])
        before = {name: fake.__dict__[name] for name in _attributes_given_to(fake)}
        self._before.append((given, fake, before, user_hooks_of(fake)))

    def check_unchanged(self) -> None:
        """Raise CaptureError if the step has set an attribute or a hook of an input tensor."""
        for given, fake, before, hooks in self._before:
            if user_hooks_of(fake) != hooks:
                raise not_captured(
                    f"the step changes the hooks of {given.name}",
                    "a hook is no part of a graph: it would be registered once, at capture",
                    Fix("register it before the step"),
                    Fix("handle.remove()", "within the step, for a hook of this call alone"),
                )
            for name in {*before, *_attributes_given_to(fake)}:
                if fake.__dict__.get(name, MISSING) is not before.get(name, MISSING):
                    raise not_captured(
                        f"the step sets {given.name}.{name}",
                        "an attribute of a tensor is no part of a graph: it would be set once",
                        Fix("do it outside the step", "before or after the call"),
                    )


# -- what holds a tensor that the step made --------------------------------------------------------


def _check_result(value: Any, known: Container[int]) -> None:
    """Raise CaptureError if a part of a result that is no tensor holds one, or is text of one."""
    if is_text_of_unknown(value):
        raise not_captured(
            "the step returns text that a tensor, or what .item() gave, was put into",
            "its values are known when the graph has run, and the text would be that of capture",
            Fix("return the tensor", "and write it down outside"),
        )
    if is_filled(value) or holds_made(value, known):
        kind = type(value).__name__
        raise not_captured(
            f"the step returns a {kind} that holds tensors",
            "what is not a tensor is returned as it was at capture",
            Fix("return a tuple or a dictionary"),
            Fix(f"torch.utils._pytree.register_dataclass({kind})"),
        )


def is_held(value: Any, known: Collection[tuple[int, Any]]) -> bool:
    """True if it is a list or dictionary whose tensors all stand at known places."""
    if not isinstance(value, (list, dict)):
        return False
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return all((id(value), key) in known or not is_filled(v) for key, v in items)


def _find_filled_keys(home: dict[str, Any]) -> list[str]:
    return [key for key, value in home.items() if key not in _SLOTS and is_filled(value)]


_HOLDING_NOTHING = frozenset((bool, int, float, complex, str, bytes, type(None), type))
_EMPTIABLE = frozenset((dict, list, tuple, set, collections.OrderedDict))


def is_filled(value: Any) -> bool:
    """True if it is, or as a container holds, a fake tensor or a symbolic number."""
    kind = type(value)
    if kind in _HOLDING_NOTHING or (kind in _EMPTIABLE and not value):
        return False  # as nearly all attributes of modules
    return any(map(_stands_in, _walk_reachable(value, _in_container)))


def holds_made(value: Any, known: Container[int]) -> bool:
    """True if an object that the step has made holds a fake tensor, or text of one.

    Args:
        known: ids of objects that were there before the step, which hold fakes for a while.
    """

    def list_held(held: Any) -> Iterable[Any]:
        return () if id(held) in known else _in_object(held)

    found = _walk_reachable(value, list_held)
    return any(_stands_in(v) or is_text_of_unknown(v) for v in found if id(v) not in known)


def _walk_reachable(value: Any, held_by: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """`value` and all that it holds, each once."""
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay theirs
    waiting = [value]
    while waiting and len(seen) < _MOST_OBJECTS:
        found = waiting.pop()
        if id(found) not in seen:
            seen[id(found)] = found
            yield found
            waiting += held_by(found)


def _in_container(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return ()


def _in_object(value: Any) -> Iterable[Any]:
    """What an object refers to, without what its code does."""
    kind = type(value)
    if isinstance(value, type):
        return [*vars(value).values()] if is_user_module(value.__module__) else ()
    if kind in _HOLDING_NOTHING or isinstance(value, _SHARED):
        return ()
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if kind.__module__.startswith("partita."):
        return ()
    return gc.get_referents(value)


def _stands_in(value: Any) -> bool:
    if isinstance(value, weakref.ref):
        value = value()
    return isinstance(value, FakeTensor) or is_symbolic(value)


def _is_list_of_parameters(value: Any, before: Any) -> bool:
    """True if a list of parameters, or of weak references to them, replaces an equal list.

    nn.GRU makes such a list whenever its parameters are exchanged.
    """
    if type(value) is not type(before) or not isinstance(value, (list, tuple)):
        return False
    return len(value) == len(before) and all(
        isinstance(v, torch.nn.Parameter)
        or (isinstance(v, torch.Tensor) and state_of(v).gathered_from is not None)
        for v in (v() if isinstance(v, weakref.ref) else v for v in value)
        if v is not None
    )


def make_left_error(name: str, value: Any = None) -> Exception:
    """The error to raise where the step leaves a tensor, a number or what holds one in `name`."""
    what = "a number that is an input" if is_symbolic(value) else "a tensor"
    if value is not None and not _stands_in(value) and not is_filled(value):
        kind = type(value).__name__
        return not_captured(
            f"the step makes a {kind} that holds tensors, and leaves it in {name}",
            "while a step is captured others stand for its tensors, which the object would keep",
            Fix(f"make the {kind} before the step", "as in __init__; then the step may use it"),
        )
    return not_captured(
        f"the step leaves {what} in {name}",
        "what it leaves in a list, a dictionary or a variable would be there once, not each time",
        Fix("return it"),
        Fix("an attribute of a module", "which may hold what a step computes"),
    )


# -- marks on tensors that the step makes ----------------------------------------------------------


_OF_FAKES = frozenset(FakeTensor.__annotations__)
"""Attributes that every fake tensor has."""
_MEMO = ("_memo", "_memo_vc", "_memo_epoch")


def _attributes_given_to(fake: torch.Tensor) -> list[str]:
    """The names of attributes set on a tensor, without what a fake caches, as of `.item()`."""
    return [name for name in user_attributes_of(fake) if not name.endswith(_MEMO)]


def _left_gradient(made: torch.Tensor) -> torch.Tensor | None:
    """The `.grad` that the step's backward passes left on a tensor that it made."""
    if has_history(made) and not _retains_gradient(made):
        return None  # torch warns whoever reads it
    with Local():
        found: torch.Tensor | None = _grad.__get__(made)
        return found


def _retains_gradient(made: torch.Tensor) -> bool:
    """True if the step has called `retain_grad()` on a value that it computed."""
    with Local():
        return made.retains_grad


def _check_no_marks(made: torch.Tensor) -> None:
    """Raise CaptureError if the step sets a hook or an attribute on a tensor that it makes."""
    given = [name for name in _attributes_given_to(made) if name not in _OF_FAKES]
    marks = [f"the attribute {name}" for name in given]
    if asks_gradient(made) and user_hooks_of(made):
        marks.append("a hook")
    if marks:
        raise not_captured(
            f"the step gives a tensor that it returns or leaves {marks[0]}",
            "what is no value is no part of a graph: it would be there once",
            Fix("set it outside the step", "on what the call returns"),
        )


# -- other writes ----------------------------------------------------------------------------------


def unrepeated_write_error(write: Write, codes: list[CodeType], step: Any) -> CaptureError:
    """The error to raise where a graph would not write again what the step writes into Python.

    Args:
        codes: of the functions that ran.
        step: whose line is given where that of the write is not known.
    """
    was, now = brief(write.before), brief(write.after)
    changed = f" ({was} became {now})" if was != now else ""
    return not_captured(
        f"the step changes {write.place.name}{changed}",
        "a graph is of tensors: this would change once, at capture, and not in each call",
        Fix("do it outside the step", "before or after the call"),
        place=line_of_write(codes, write.place.key) or _line_of(step),
    )


def _line_of(step: Any) -> str:
    """The line at which a step is defined; "" where it has none."""
    f = inspect.unwrap(step) if inspect.isfunction(step) else getattr(step, "__func__", step)
    code = getattr(f, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


# -- the program of a trace ------------------------------------------------------------------------


def program_of_trace(
    made: fx.GraphModule,
    inputs: GraphInputs,
    wires: dict[Wire, TraceWire],
    outputs: GraphOutputs,
    conditions: Conditions,
) -> CapturedProgram:
    """The program of a traced graph, which is changed in place.

    Args:
        wires: by real wire, the one that traced.
        conditions: under which the program may run.
    """
    graph = made.graph
    given = dict(zip(graph.find_nodes(op="placeholder"), inputs.all, strict=True))
    cleared = list(outputs.cleared)
    kept, admitted = _select_outputs(graph, given, wires, outputs, inputs.marked, cleared)
    cut = [i for i, output in enumerate(kept) if border_of(output.spec) is not None]
    if cut:
        refuse_cut_views(graph, cut)
    used = {node: _without_memory(i, inputs) for node, i in given.items() if node.users}
    for node in given:
        if node not in used:
            graph.erase_node(node)
    return CapturedProgram(
        made,
        [*used.values()],
        kept,
        outputs.result,
        outputs.constants,
        sorted(set(cleared)),
        {name: (t.real, axes) for t in wires.values() for name, axes in t.groups.items()},
        compared=extract_compared(made, used, admitted, user_line()),
        conditions=conditions,
    )


def _select_outputs(
    graph: fx.Graph,
    given: dict[fx.Node, Input],
    wires: dict[Wire, TraceWire],
    outputs: GraphOutputs,
    marked: Set[int],
    cleared: list[int],
) -> tuple[list[Output], list[Any]]:
    """The outputs that stay and the admitted (node, wire)s; others are taken off the graph.

    Args:
        given: by node, the input.
        marked: places of tensors that had no gradient, as the step has not read.
        cleared: gets the places of tensors whose gradients are taken off.
    """
    (end,) = graph.find_nodes(op="output")
    pairs = [*zip(outputs.all, end.args[0], strict=True)]
    updated = _updated_by_gradients(graph, given, pairs)
    # Gradients that the step did not read as it found them.
    unread = marked | {
        i.index for node, i in given.items() if i.kind == "gradient" and not node.users
    }
    kept, admitted = [], []
    traced_by = iter([t.real for t in wires.values() for _ in t.admitted])
    for output, value in pairs:
        # A gradient that the step did not accumulate, and that its update has used, would only
        # hold memory. One that accumulates, or is used by nothing, is kept.
        if output.kind == "admitted":
            admitted.append((_find_compared(value), next(traced_by)))
        elif output.kind == "gradient" and output.index in updated & unread:
            cleared.append(output.index)
        else:
            kept.append((output, value))
    end.args = ([value for _, value in kept],)
    drop_unused(graph)
    return [output for output, _ in kept], admitted


def _updated_by_gradients(
    graph: fx.Graph, given: dict[fx.Node, Input], outputs: Sequence[tuple[Output, fx.Node]]
) -> set[int]:
    """The places of tensors whose new values are computed from their new gradients."""
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
    """The input with a fake in place of a tensor that belongs to the captured call alone."""
    if given.kind != "argument" and given.tensor.is_leaf:
        return given
    with Local(), torch.no_grad():
        like = inputs.stand_in(given.tensor).detach()
    return replace(given, tensor=like if given.spec is None else tagged(like, given.spec))


def _find_compared(value: fx.Node) -> fx.Node:
    """What is compared for an "admitted" output, which is a copy of it; that of a block is made in
    the block."""
    return value if is_block_node(value) else value.args[0]  # type: ignore[return-value]
