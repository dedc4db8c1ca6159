"""Inputs of a graph: a fake tensor for each tensor of the state and the arguments.

The inputs are the rank's coordinate on each mesh axis, the tensors of the state and the arguments,
and their gradients. An input without a gradient gets a "mark" instead: a fake gradient that shows
whether the step reads it. Floats become inputs when the step reads them. If ranks have shards of
different sizes, the fake has the size of the largest, the first one. So all ranks trace the same
graph.

If the step reads properties of an input (is it a leaf, a view, shared, conjugated), these become
conditions of the program (`TensorFacts`). Reading its address or version counter is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import TraceWire, Wire, user_line
from partita.graph.errors import not_captured
from partita.graph.graph_nodes import add_input
from partita.graph.program import Input, local_of
from partita.layout import Fix
from partita.tensor.dtensor import as_dtensor
from partita.tensor.dtensor_gradients import select_user_hooks, update_spec
from partita.tensor.op_facts import FACTS_THAT_CHANGE, FACTS_THAT_STAY
from partita.tensor.tensor_state import OURS, Spec, count_writes, own_state, spec_of, state_of

from .code_origin import is_recorded_file, is_user_module
from .conditions import FACTS_OF_OBJECTS, FactCondition, read_fact
from .equal_calls import set_node_of
from .fakes import FakeMaker, identity_of

WITHOUT_GRADIENT = ("gradient", "mark", "number", "cotangent")
"""Kinds of inputs that have no `.grad`."""


class GraphInputs:
    """The inputs of a captured graph, each with the fake tensor that replaces it during capture.

    A mark is a fake gradient of a leaf without a gradient. It shows if the step reads `.grad`.

    Attributes:
        all: the inputs in the graph's order: coordinates, tensors, gradients and marks, numbers.
        fakes: the fake tensor of each input.
        identities: the ids of the fakes.
        renewed: the ids of the fakes of gradients whose memory the step has replaced, by a
            reduction or by an addition after it.
        shared_gradients: for a leaf that shares its `.grad` object with an earlier leaf: maps its
            index to the input of that gradient.
        leaves: the leaves of the call: the tensors and numbers of its state and arguments
            (`tensors_of_call`).
        marked: the indices of the leaves that got a mark at first.
        asked_gradients: the indices of the leaves whose `.grad` the step compares with None.

    Args:
        names: the (name, kind) of each leaf.
        unmarked: the indices of leaves that get no mark, even if they have no gradient.
    """

    def __init__(
        self, leaves: Sequence[Any], names: Sequence[tuple[str, str]], unmarked: Container[int] = ()
    ):
        from .number_env import make_fake_mode  # not at the top: it imports sympy and Dynamo

        self.mode = make_fake_mode()
        self.all: list[Input] = []
        self.fakes: list[torch.Tensor] = []
        self.identities: set[int] = set()
        self.renewed: set[int] = set()
        self.shared_gradients: dict[int, Input] = {}
        self.marked: set[int] = set()
        self.asked_gradients: set[int] = set()
        self._snapshots: list[torch.Tensor] = []
        self._fakes_by_id: dict[int, torch.Tensor] = {}
        self._coordinates: dict[tuple[Wire, str], int] = {}  # indices among all inputs
        self._by_leaf: dict[int, Input] = {}
        self.leaves = leaves
        self._add_coordinates(leaves)
        seen = set[int]()
        for i, (t, (name, kind)) in enumerate(zip(leaves, names, strict=True)):
            if isinstance(t, torch.Tensor) and id(t) not in seen:
                seen.add(id(t))
                _check_class(t, name)
                self._by_leaf[i] = Input(name, kind, t, i)
        self.all += self._by_leaf.values()
        gradients: dict[int, Input] = {}
        for given in self._by_leaf.values():
            if not given.tensor.is_leaf:  # only leaves of autograd have a `.grad`
                continue
            grad = given.tensor.grad
            name = given.name + ".grad"
            if id(grad) in gradients:
                self.shared_gradients[given.index] = gradients[id(grad)]
            elif grad is not None:
                gradients[id(grad)] = Input(name, "gradient", grad, given.index)
                self.all.append(gradients[id(grad)])
            elif given.index not in unmarked and given.tensor.requires_grad:
                self.all.append(Input(name, "mark", given.tensor, given.index))
                self.marked.add(given.index)
        self._make_fakes()
        self._by_fake = {id(self.stand_in(i.tensor)): i for i in self._by_leaf.values()}
        self._gradients = {
            id(fake): given
            for given, fake in zip(self.all, self.fakes, strict=True)
            if given.kind == "gradient"
        }

    def _add_coordinates(self, tensors: Sequence[Any]) -> None:
        wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
        for wire in wires:
            for axis, at in zip(wire.mesh.names, wire.at, strict=True):
                if wire.mesh.size(axis) > 1:
                    self._coordinates[(wire, axis)] = len(self.all)
                    self.all.append(Input(f"at {axis}", "coordinate", torch.tensor(at)))

    def _make_fakes(self) -> None:
        """Makes a fake, and a snapshot of it, for each input."""
        locals_ = [local_of(given.tensor) for given in self.all]
        maker = FakeMaker(self.mode, locals_)
        for given, local in zip(self.all, locals_, strict=True):
            spec = given.spec
            if spec is not None and spec.is_uneven:
                fake, snapshot = maker.make_empty(local, spec.padded_shape)
            elif given.kind == "mark":
                fake, snapshot = maker.make_empty(local)
            else:
                fake, snapshot = maker.make(local)
            if given.kind not in ("coordinate", "mark"):
                self._fakes_by_id[id(given.tensor)] = fake
            self.fakes.append(fake)
            self._snapshots.append(snapshot)
            self.identities.add(id(fake))

    def add_placeholders(self, graph: fx.Graph) -> list[fx.Node]:
        """Adds the input nodes to the empty graph that is traced, and returns them.

        Each node gets the metadata that the input has before the trace. (The trace may write the
        input's fake.)
        """
        nodes = []
        for i, (fake, snapshot) in enumerate(zip(self.fakes, self._snapshots, strict=True)):
            node = add_input(graph, f"arg{i}_1")
            node.meta["val"] = snapshot
            set_node_of(fake, node)
            nodes.append(node)
        return nodes

    def drop_unread_marks(self, graph: fx.Graph) -> None:
        """Removes marks (see the class) that no node reads, from the inputs and the graph."""
        kept: list[tuple[Input, torch.Tensor]] = []
        nodes = graph.find_nodes(op="placeholder")
        for node, given, fake in zip(nodes, self.all, self.fakes, strict=True):
            if given.kind == "mark" and not node.users:
                graph.erase_node(node)
            else:
                kept.append((given, fake))
        self.all, self.fakes = [i for i, _ in kept], [fake for _, fake in kept]

    def add_made(self, given: Input) -> None:
        """Adds an input that is not a leaf of the call: a number or the gradient of a result."""
        self.all.append(given)
        self.fakes.append(given.tensor)

    def tag_fakes(
        self, wires: Mapping[Wire, TraceWire], copy_attributes: Callable[..., None]
    ) -> list[Any]:
        """Gives fakes the layouts, gradients, hooks and attributes of the tensors they replace.

        Args:
            wires: maps the wire (connection to the ranks) of an input to the `TraceWire` that
                replaces it during the run.
            copy_attributes: a function like `InputAttributes.copy`.

        Returns:
            The handles of the hooks.
        """

        def traced_spec(spec: Spec) -> Spec:
            traced = spec_of(spec.layout, wires[spec.wire])
            return traced.as_copy if spec.is_copy else traced

        hooks: list[Any] = []
        for given, fake in zip(self.all, self.fakes, strict=True):
            spec = given.spec
            if spec is not None:
                spec = spec.gradient if given.kind == "mark" else spec
                as_dtensor(fake, traced_spec(spec))
            rest = state_of(given.tensor).zero_layouts
            if rest is not None and update_spec(given.tensor) is not spec:  # type: ignore[arg-type]  # ZeRO 1 and 2
                gradient, update = map(traced_spec, (rest.gradient, rest.update))
                own_state(fake).zero_layouts = replace(rest, gradient=gradient, update=update)
            if given.kind in ("mark", "gradient"):
                self.owner(given).grad = fake  # a DTensor: it may be reduced already
            elif given.tensor.requires_grad:
                with local_ops():
                    fake.requires_grad_()
                hooks += copy_user_hooks_to_fake(given.tensor, fake)
            fake._is_param = isinstance(given.tensor, torch.nn.Parameter)  # type: ignore[attr-defined]
            if given.kind not in WITHOUT_GRADIENT and given.kind != "coordinate":
                copy_attributes(given, fake, self.stand_in)
        for index, shared in self.shared_gradients.items():
            self.stand_in(self._by_leaf[index].tensor).grad = self.stand_in(shared.tensor)
        return hooks

    # -- tensors and their fakes -------------------------------------------------------------------

    def stand_in(self, value: Any) -> Any:
        """Returns the fake that replaces `value`; `value` itself if it is not an input."""
        return self._fakes_by_id.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def input_of(self, fake: torch.Tensor) -> Input | None:
        """Returns the input that a fake replaces; None if the fake was made in the step."""
        return self._by_fake.get(id(fake))

    def gradient_of_fake(self, fake: torch.Tensor) -> Input | None:
        """Returns the gradient input that a fake replaces; None if it replaces none."""
        return self._gradients.get(id(fake))

    def coordinates(self, wire: Wire) -> dict[str, torch.Tensor]:
        """Maps the axes of a mesh with more than one rank to fakes of this rank's coordinates."""
        return {axis: self.fakes[i] for (w, axis), i in self._coordinates.items() if w is wire}

    def owner(self, gradient: Input) -> torch.Tensor:
        """Returns the fake of the tensor whose `.grad` is this gradient input."""
        return self._fakes_by_id[id(self._by_leaf[gradient.index].tensor)]


def _check_class(t: torch.Tensor, name: str) -> None:
    """Raises CaptureError if `t` has a class of the user, which a fake cannot have."""
    kind = type(t)
    if is_user_module(kind.__module__) and not isinstance(t, torch.nn.Parameter):
        raise not_captured(
            f"the step takes {name}, whose class is a subclass of Tensor ({kind.__name__})",
            "its replacement in a graph has neither its methods nor its __torch_function__",
            Fix(f"{name}.as_subclass(torch.Tensor)", "is a plain tensor of the same memory"),
        )


# -- facts of input tensors ------------------------------------------------------------------------

_HELD = {inspect.getattr_static(torch.Tensor, name): name for name in FACTS_THAT_STAY}
_LOST = {inspect.getattr_static(torch.Tensor, name): name for name in FACTS_THAT_CHANGE}
_HELD[identity_of] = "id"
_OF_MEMORY = ("storage_offset", "is_shared", "is_pinned", "_base")
_WITHIN = (
    torch.Tensor.is_shared.__code__.co_filename,
    torch.overrides.__file__,
    identity_of.__code__.co_filename,
)


class TensorFacts:
    """Makes properties of inputs that a step reads, like `is_leaf`, conditions of the program."""

    def __init__(self, inputs: GraphInputs):
        self._inputs = inputs
        # By id of each gradient when the step begins: whether it is a mark, and its version.
        self._grads = {
            id(fake): (given.kind == "mark", count_writes(fake))
            for given, fake in zip(inputs.all, inputs.fakes, strict=True)
            if given.kind in ("mark", "gradient")
        }
        self._found: dict[tuple[int, str], FactCondition] = {}

    def conditions(self) -> list[FactCondition]:
        return [*self._found.values()]

    def answer(self, func: Any, args: Any, caller: FrameType) -> tuple[Any, ...]:
        """Returns `(value,)` if the user's code calls `func` to read a property of an input.

        Returns () for other calls.

        Args:
            func, args: the function that is called, and its arguments.
            caller: the frame that calls the function.

        Raises:
            CaptureError: the property is an address or a version counter, which differs in each
                call.
        """
        if not is_fact(func) or not args or not _is_asked_by_user(caller):
            return ()
        asked = getattr(func, "__self__", func)
        name = _HELD.get(asked) or _LOST[asked]
        if asked in _LOST:
            raise not_captured(
                f"the step reads {name} of a tensor",
                "addresses and version counters differ in each call",
                Fix("read it before the step", "and pass the result as an argument"),
                place=user_line(),
            )
        return self._answer(name, args[0], func)

    def _answer(self, name: str, fake: Any, func: Any) -> tuple[Any, ...]:
        given = self._inputs.input_of(fake)
        if given is None:
            if name in _OF_MEMORY and self._shows_input(fake):
                raise not_captured(
                    f"the step reads {name} of a view of one of its inputs",
                    "it depends on the memory of the call's arguments, which a graph does not read",
                    Fix(f"read {name} from the input itself", "which becomes a condition"),
                    place=user_line(),
                )
            return ()
        if name == "grad":
            with local_ops():
                found = fake.grad
            if found is not None and id(found) not in self._grads:
                return ()  # a gradient that the step has made
            self._inputs.asked_gradients.add(given.index)
            untouched = found is not None and self._grads[id(found)] == (True, count_writes(found))
        value = read_fact(given.tensor, name)
        condition = FactCondition(given.name, given.index, name, value, user_line())
        self._found.setdefault((given.index, name), condition)
        if name == "grad":
            return (None,) if untouched else ()
        if name in FACTS_OF_OBJECTS:
            with local_ops():
                return () if not value or func(fake) is not None else (func(given.tensor),)
        return (value,)

    def _shows_input(self, fake: Any) -> bool:
        with local_ops():
            memory = fake.untyped_storage()._cdata
            return any(x.untyped_storage()._cdata == memory for x in self._inputs.fakes)


def is_fact(func: Any) -> bool:
    """True if the torch function `func` only reads a property of a tensor, such as `is_leaf`."""
    asked = getattr(func, "__self__", func)
    reads = getattr(func, "__name__", "") not in ("__set__", "__delete__")
    return reads and (asked in _HELD or asked in _LOST)


def _is_asked_by_user(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename in _WITHIN:
        frame = frame.f_back
    return frame is not None and is_recorded_file(frame.f_code.co_filename)


def copy_user_hooks_to_fake(tensor: torch.Tensor, fake: torch.Tensor) -> list[Any]:
    """Registers the user's backward hooks of `tensor` on its fake, so that they are traced.

    Returns the handles. There are none if `tensor` is not a leaf of autograd.
    """
    if not tensor.is_leaf:  # autograd calls its hooks outside the graph
        return []
    found = [fake.register_hook(hook) for hook in select_user_hooks(tensor._backward_hooks)]
    for hook in select_user_hooks(getattr(tensor, "_post_accumulate_grad_hooks", None)):
        found.append(fake.register_post_accumulate_grad_hook(hook))
    return found


# Attributes that partita sets, and that torch sets on a parameter.
OWN_ATTRIBUTES = OURS | {"_is_param"}


def user_attributes_of(t: torch.Tensor) -> tuple[str, ...]:
    """Returns the names of the attributes that a user has set on the tensor object `t`."""
    return _names_of_user(tuple(t.__dict__))


@lru_cache(maxsize=4096)  # because most tensors have equal names
def _names_of_user(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([n for n in names if n not in OWN_ATTRIBUTES and not n.startswith("_dynamo")])
