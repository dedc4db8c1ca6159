"""The dispatch mode of a captured step: `Recorder`, which every ATen call goes through.

It adds a node for the call, with a `Note`: the user's line (in backward: the line of the forward
call whose gradient it is), the phase of the step and, inside a redistribution, the redistribution.
Equal calls and redistributions are traced once, and their nodes are copied (`RepeatedCalls`,
`RepeatedMoves`), which is much faster.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita.comm import Wire, user_line
from partita.graph.errors import (
    CaptureError,
    make_data_dependent_shape_error,
    not_an_input,
    not_captured,
)
from partita.graph.graph_nodes import (
    BLOCK,
    NO_NOTE,
    NOTE,
    Note,
    add_call,
    copy_node,
    nodes_since,
    note_of,
)
from partita.graph.torch_settings import read_kernel_settings
from partita.layout import Fix
from partita.redistribute import Move
from partita.redistribute.move import bytes_sent
from partita.tensor.aliasing import SOME_OVERLAP, checks_overlap, do_parts_overlap
from partita.tensor.arguments import read_number
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_overrides import is_read_in_part
from partita.tensor.tensor_state import HERE, next_node, note_unseen_write, own_state

from .capture_context import FakeRunHooks, attribute_set, unprofiled
from .equal_calls import (
    RepeatedCalls,
    is_over_lists,
    node_of,
    set_node_of,
    tensors_of,
)
from .fakes import count_writes_of_lists, has_memory, tensors_written
from .functional_calls import REPLACED, replace_symbolic_numbers, with_exact_numbers
from .functional_memory import ReplacedData
from .graph_inputs import GraphInputs
from .known_masks import KnownMasks

_aten = torch.ops.aten
_ONEDNN_LSTM = _aten.mkldnn_rnn_layer.default
_READ = _aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
_DETACH = _aten.detach.default


def _shape_of_value(value: Any) -> Any:
    with local_ops():
        return value.shape if isinstance(value, torch.Tensor) else ()


def _is_shaped(func: Any, args: Any, kwargs: Any) -> bool:
    """True if this call has an output of known shape, although other calls of `func` do not."""
    if func is _aten.index.Tensor:  # masks select a data-dependent count, integers do not
        given = [i for i in args[1] if i is not None]
        return not any(i.dtype in (torch.bool, torch.uint8) for i in given)
    if func is _aten.one_hot.default:
        return (args[1] if len(args) > 1 else (kwargs or {}).get("num_classes", -1)) >= 0
    if func is _aten.repeat_interleave.Tensor:
        return (kwargs or {}).get("output_size") is not None
    return func in REPLACED


# -- shapes that depend on data --------------------------------------------------------------------

_Count = Callable[[torch.Tensor], int]


def _repeat_counted(count: _Count, repeats: torch.Tensor, output_size: Any = None) -> torch.Tensor:
    total = count(_aten._to_copy.default(repeats, dtype=torch.int64))
    found: torch.Tensor = _aten.repeat_interleave.Tensor(repeats, output_size=total)
    return found


def _find_places(count: _Count, x: torch.Tensor) -> torch.Tensor:
    is_there = _aten.ne.Scalar(x, 0)
    found: torch.Tensor = _aten.nonzero_static.default(x, size=count(is_there))
    return found


def _select_counted(count: _Count, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    flat = _aten.reshape.default(_aten.expand.default(mask, shape), [-1])
    places = _aten.select.int(_find_places(count, flat), 1, 0)
    found: torch.Tensor = _aten.take.default(_aten.expand.default(x, shape), places)
    return found


def _index_counted(count: _Count, x: torch.Tensor, indices: Sequence[Any]) -> torch.Tensor:
    found: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            places = _find_places(count, index)
            found += [_aten.select.int(places, 1, dim) for dim in range(index.ndim)]
        else:
            found.append(index)
    out: torch.Tensor = _aten.index.Tensor(x, found)
    return out


def _find_unique_counted(
    count: _Count, x: torch.Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> tuple[torch.Tensor, ...]:
    if counts or dim is not None or not x.numel():
        raise make_data_dependent_shape_error("aten::unique_consecutive")
    flat = _aten.reshape.default(x, [-1])
    before, after = _aten.slice.Tensor(flat, 0, 0, -1), _aten.slice.Tensor(flat, 0, 1)
    is_new = _aten.constant_pad_nd.default(_aten.ne.Tensor(after, before), [1, 0], 1)
    found = _index_counted(count, flat, [is_new])
    none = _aten.new_empty.default(x, [0], dtype=torch.int64)
    if not inverse:
        return found, none, none
    numbers = _aten.sub.Tensor(_aten.cumsum.default(is_new, 0), 1)
    return found, _aten.reshape.default(numbers, x.shape), none


_COUNTED: dict[Any, Callable[..., Any]] = {
    _aten.unique_consecutive.default: _find_unique_counted,
    _aten.repeat_interleave.Tensor: _repeat_counted,
    _aten.nonzero.default: _find_places,
    _aten.masked_select.default: _select_counted,
    _aten.index.Tensor: _index_counted,
}
"""Maps an op whose output shape depends on data to a function that runs it for a known count.

Its first argument counts the true elements of a mask, or sums repeats."""


def _other_settings() -> CaptureError:
    return not_captured(
        "the step changes the default dtype, the matmul precision or the deterministic mode, and "
        "then computes",
        "the kernels of a graph run under the settings of its caller",
        Fix("torch.set_default_dtype(...) and similar calls", "outside of the step"),
        Fix("dtype=...", "for tensors made inside"),
        place=user_line(),
    )


def _refuse_overlaps(written: Sequence[torch.Tensor], operands: Sequence[Any]) -> None:
    """Raises torch's error if an operand overlaps a written tensor. Fake kernels do not check."""
    tensors = [t for t in operands if isinstance(t, torch.Tensor)]
    with local_ops():
        reads = [t for t in tensors if t.layout is torch.strided]  # a sparse one has no storage
        for into in written:
            if into.layout is not torch.strided:
                continue
            memory = into.untyped_storage()._cdata
            for read in reads:
                is_shared = read is not into and read.untyped_storage()._cdata == memory
                if is_shared and do_parts_overlap(into, read):
                    raise RuntimeError(SOME_OVERLAP)


class Recorder(FakeRunHooks, TorchDispatchMode):
    """The dispatch mode that adds a node for each ATen call of a step, with a note on its origin.

    Attributes:
        masks: the attention masks of the run.
        updating: True while an optimizer steps.
        exact: while an optimizer of torch steps, the ids of the scalars that eager code keeps in
            float32 (see `with_exact_numbers`); otherwise None.
        regions_begun: the number of remat regions that have begun.
        regions_that_read_again: the numbers of the regions that eager code runs again with the
            values that exist in backward. Torch's checkpoint does so.
        follows_from_integers: a predicate: True for a number that depends only on integers and
            bools of the step's arguments.
        note_read: a function that is called with each number that is read from a tensor, and the
            tensor.
        replaced: maps the last node before `x.data = y` to these assignments.
        changed_bases: for each change of a shape in place, the arguments of `check_changed_bases`.
        block_kinds: for each call of a block, a tuple of the block's class. For each update of a
            block, the classes of the optimizer and of the block.
    """

    def __init__(self, graph: fx.Graph, inputs: GraphInputs):
        super().__init__()
        # It may outlive the inputs.
        self.graph, self._identities, self._renewed = graph, inputs.identities, inputs.renewed
        self._repeated = RepeatedCalls(graph, inputs.mode)
        self.masks = KnownMasks()
        self.updating = False
        self.exact: set[int] | None = None
        self._is_behind_forward = False
        self.regions_begun = 0
        self.regions_that_read_again: set[int] = set()
        self.follows_from_integers: Callable[[Any], bool] = lambda number: False
        self.note_read: Callable[[Any, torch.Tensor], None] = lambda number, of: None
        self._outer: list[Any] = []
        self._within = NO_NOTE  # the move, region and policy that nodes belong to now
        self._noted: tuple[Any, ...] = ()  # what the last note was made from
        self._note = NO_NOTE
        self._moves = 0
        self._last = self.newest_node()
        self._lines: dict[int, str] = {}
        self._here = os.getcwd()
        self._settings = read_kernel_settings()
        self._made: list[tuple[fx.Node, torch.Tensor]] = []
        self.replaced: dict[fx.Node, list[ReplacedData]] = {}
        self.changed_bases: list[tuple[fx.Node, list[fx.Node], CaptureError]] = []
        self.block_kinds: list[tuple[type, ...]] = []
        self._running_block: int | None = None
        self._last_block: int | None = None
        # The first and the last sequence number of the autograd nodes that each block call made.
        self._first_numbers: list[int] = []
        self._last_numbers: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True if each dispatch must turn Dynamo off. Private torch; capture has turned it off."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Kernels over lists read it several times for each operand: a sixth of a trace.
            return args[0].device
        return unprofiled(self._call_and_note, func, args, kwargs or {})

    def _call_and_note(self, func: Any, args: Any, kwargs: Any) -> Any:
        if read_kernel_settings() != self._settings:
            raise _other_settings()
        if torch.Tag.dynamic_output_shape in func.tags and not _is_shaped(func, args, kwargs):
            return self._call_for_count(func, args, kwargs)
        if func is _ONEDNN_LSTM and args[-1]:
            raise not_captured(
                "torch.lstm with gradients runs as one oneDNN kernel",
                "the kernel allocates memory for backward, and only oneDNN knows its size",
                Fix("torch.nn.LSTM", "is captured as the calls that it is made of"),
            )
        if func is _READ and is_read_in_part(args[0]):
            with self:
                return read_number(args[0])
        written = tensors_written(func, args, kwargs)
        if any(map(has_memory, written)):  # real, so no input
            raise not_an_input(user_line())
        if written and checks_overlap(func._opname.removesuffix("_")):
            _refuse_overlaps(written, args)
        args, kwargs = replace_symbolic_numbers(func, args, kwargs)
        if self.exact is not None:
            args, kwargs = with_exact_numbers(func, args, kwargs, self.exact)
        out = self._trace_or_repeat(func, args, kwargs)
        if func is _READ:
            self.note_read(out, args[0])
        count_writes_of_lists(func, args, kwargs)
        if any(type(n) is not int for t in pytree.tree_leaves(out) for n in _shape_of_value(t)):
            raise make_data_dependent_shape_error(func._schema.name)
        newest = self.newest_node()
        if newest is not self._last:
            self._note_nodes(nodes_since(self.graph, self._last), self._make_note())
            self._last = newest
            if isinstance(out, torch.Tensor):
                self._made.append((newest, out))
        return out

    def _call_for_count(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the value of a call whose output shape depends on data.

        The shape must follow from integers in the step's arguments: it is the count of true
        elements, or the sum of repeats.
        """
        call = _COUNTED.get(func)
        if call is None:
            raise make_data_dependent_shape_error(func._schema.name)

        def count(x: torch.Tensor) -> int:
            total = _aten.sum.default(x if x.dtype is torch.int64 else _aten.ne.Scalar(x, 0))
            number = _READ(total)
            if not self.follows_from_integers(number):
                raise make_data_dependent_shape_error(func._schema.name)
            return int(number)

        with self, DisableTorchFunction():
            return call(count, *args, **kwargs)

    def _trace_or_repeat(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = None if func in REPLACED else self._repeated.key(func, args, kwargs)
        if key is not None and (out := self._repeated.repeat(key, func, args, kwargs)) is not None:
            return out
        if is_over_lists(func):
            out = self._repeated.call_over_lists(func, args, kwargs)
            if out is not NotImplemented:
                return out
        first = self.newest_node()
        with local_ops():
            out = REPLACED.get(func, func)(*args, **kwargs)
        if key is not None:
            self._repeated.learn(key, func, out, first)
        return out

    def finish(self) -> None:
        """Writes the layouts of tensors into the nodes' notes, at the end of the trace.

        A tensor gets its layout only after the call that makes it.
        """
        for node, made in self._made:
            if isinstance(made, DTensor):
                node.meta[NOTE] = replace(note_of(node), layout=str(made.layout_over_mesh))
        self._made.clear()

    def noting(
        self, wire: Wire, move: Move, itemsize: int, op: str, reason: str
    ) -> AbstractContextManager[None]:
        """Returns a context manager that writes a redistribution into the notes of new nodes.

        Args:
            wire: the wire (connection to the ranks) that makes the redistribution.
            move: the redistribution.
            itemsize: bytes per element.
            op, reason: the op that needs it, and why, for the ledger.
        """
        self._moves += 1
        return self._noting(
            kind=move.kind,
            axes=move.axes,
            nbytes=bytes_sent(move, wire.mesh, itemsize),
            op=op,
            reason=reason,
            before=move.before.brief(),
            after=move.after.brief(),
            move=self._moves,
        )

    def _noting(self, **fields: Any) -> AbstractContextManager[None]:
        """Returns a context manager. Nodes added inside get these fields in their notes."""
        return attribute_set(self, "_within", replace(self._within, **fields))

    def region(self, reads_again: bool = False) -> AbstractContextManager[None]:
        """Returns a context manager. Nodes that are added inside belong to a new remat region.

        In nested regions, they belong to the outermost one.

        Args:
            reads_again: True if eager code runs the region again with the values that exist in
                backward, as torch's checkpoint does.
        """
        if not self._within.region:
            self.regions_begun += 1
            if reads_again:
                self.regions_that_read_again.add(self.regions_begun)
        return self._noting(region=self._within.region or self.regions_begun)

    def refuse_budget(self, nbytes: int, title: str) -> None:
        """Raises CaptureError for a remat region with its own budget: only the step has one.

        Inside another region, nothing is raised.

        Args:
            nbytes: the region's budget.
            title: the region's name in the error.
        """
        if HERE.watcher is not None:  # inside another region, whose policy applies
            return
        raise not_captured(
            f"pt.remat gives {title} a budget of {nbytes} bytes of its own",
            "a compiled step plans recomputation for the whole step, so a region has no budget "
            "of its own",
            Fix(f"pt.compile(step, budget={nbytes})", "all that the step needs, gradients too"),
            Fix("pt.remat(model, blocks=...)", "without a budget: regions keep nothing"),
        )

    def keeping(self, keep: bool) -> AbstractContextManager[None]:
        """Returns a context manager. If `keep`, values computed inside are saved for backward.

        Otherwise a remat region recomputes them.
        """
        return self._noting(kept=self._within.kept or keep)

    def keep(self, x: torch.Tensor) -> None:
        """Marks the nodes that computed the memory of `x`: their values are saved for backward.

        A remat region does not recompute them.
        """
        with local_ops():
            wanted = x.untyped_storage()._cdata
            for node, made in self._made:
                if made.untyped_storage()._cdata == wanted:
                    node.meta[NOTE] = replace(note_of(node), kept=True)

    def fill_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Writes `value` into `x` in place, where eager code would assign `x.data`.

        If `x` is an input of the step, it gets new memory, as in eager code. So views of it that
        are older than the step keep their values.
        """
        if id(x) in self._identities:
            self.replace_value(x, value.clone())
        else:
            x.copy_(value)

    def replace_value(self, x: torch.Tensor, value: torch.Tensor) -> None:
        if id(x) in self._identities:
            self._renewed.add(id(x))
        self.assign_data(x, value)

    def assign_data(self, x: torch.Tensor, value: torch.Tensor) -> None:
        """Makes later reads of `x` use `value`, as after `x.data = value` in eager code."""
        mode = get_proxy_mode()
        assert mode is not None
        old, new = node_of(x), node_of(value)
        if old is not None and new is not None:
            found = ReplacedData(old, new, self.line())
            self.replaced.setdefault(self.newest_node(), []).append(found)
        # Hidden from torch-function modes: the user does not write here.
        with torch._C.DisableTorchFunction():
            x.data = value
        own_state(x).retyped = None
        note_unseen_write(x)  # what ZeRO has gathered of it is written back
        # Private torch: the node of a tensor. Later calls on x read the node of `value`.
        set_proxy_slot(x, mode.tracer, get_proxy_slot(value, mode.tracer))  # type: ignore[arg-type]

    def __enter__(self) -> Any:
        self._outer.append(HERE.trace)  # itself, if it is entered again for its own calls
        HERE.trace = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        HERE.trace = self._outer.pop()
        return super().__exit__(*error)

    def behind_forward(self) -> AbstractContextManager[None]:
        """Returns a context manager. Nodes that are added inside count as part of backward."""
        return attribute_set(self, "_is_behind_forward", True)

    def is_behind_forward(self) -> bool:
        return self._is_behind_forward

    def line(self) -> str:
        """Returns the user's current line; during backward, the line of the forward call."""
        backward = torch._C._current_autograd_node()  # private torch: there is no public function
        if backward is not None:
            known = self._lines.get(backward._sequence_nr(), "")
            if known:
                return known
        line = user_line(here=self._here)
        if torch.is_grad_enabled() or self._within.kind:
            # The autograd node of this call has the number before the next one.
            self._lines[next_node() - 1] = line
        return line

    def _make_note(self) -> Note:
        phase = "forward"
        if self._within.reason == "settle":  # the reduction of a pending gradient
            phase = "backward"
        elif self.updating:
            phase = "update"
        elif self._is_behind_forward or torch._C._current_graph_task_id() != -1:
            phase = "backward"
        line = self.line()
        made = self._within, line, phase
        if made != self._noted:
            self._note = replace(self._within, source=line, phase=phase)
            self._noted = made
        return self._note

    def note_made(self, *nodes: fx.Node) -> None:
        """Writes notes (user's line, phase) on nodes that were added without a traced call."""
        self._note_nodes(nodes, unprofiled(self._make_note))
        self._note_new_nodes()

    def _note_new_nodes(self) -> None:
        """Gives a note to new nodes that have none: arithmetic of numbers, which calls no op."""
        for node in nodes_since(self.graph, self._last):
            if NOTE not in node.meta:
                self._note_nodes([node], unprofiled(self._make_note))
        self._last = self.newest_node()

    def note_copies(self, nodes: Sequence[fx.Node], made: fx.Node, out: torch.Tensor) -> None:
        """Writes notes on `nodes`, copies of an earlier trace; `made` computes the value `out`."""
        self.note_made(*nodes)
        self._made.append((made, out))

    def add_alias(self, made: torch.Tensor) -> fx.Node:
        """Adds a node that is an alias of a fake tensor. Later reads of `made` use this node."""
        shown = node_of(made)
        assert shown is not None
        node = add_call(self.graph, _DETACH, (shown,))
        node.meta["val"] = shown.meta["val"]
        self._note_nodes([node], note_of(shown))
        set_node_of(made, node)
        self._note_new_nodes()
        self._made.append((node, made))
        return node

    # -- blocks ------------------------------------------------------------------------------------

    @contextmanager
    def block(self, *kinds: type) -> Iterator[None]:
        """Assigns nodes made inside the `with` block, and their backward, to one call of a block.

        A block is a repeated module, such as a layer. Nodes of a block inside another block belong
        to the outer one.

        Args:
            kinds: the class of the block; for an update, the optimizer's class and the block's
                class. If it is empty, nodes are assigned to no block.
        """
        if self._running_block is not None or not kinds:
            yield
            return
        self._running_block = len(self.block_kinds)
        self.block_kinds.append(kinds)
        self._first_numbers.append(next_node())
        self._last_numbers.append(sys.maxsize)
        try:
            yield
        finally:
            self._last_numbers[self._running_block] = next_node() - 1
            self._running_block = None

    def _find_block(self) -> int | None:
        """Returns the number of the block call that a node added now belongs to."""
        if self._running_block is not None:
            return self._running_block
        if torch._C._current_graph_task_id() == -1 or not self.block_kinds:
            self._last_block = None
            return None
        backward = torch._C._current_autograd_node()
        if backward is not None:  # otherwise the engine sums gradients of that block
            number = backward._sequence_nr()
            block = bisect_right(self._first_numbers, number) - 1
            is_within = block >= 0 and number <= self._last_numbers[block]
            self._last_block = block if is_within else None
        return self._last_block

    def _note_nodes(self, nodes: Iterable[fx.Node], note: Note) -> None:
        block = self._find_block()
        for node in nodes:
            node.meta[NOTE], node.meta[BLOCK] = note, block

    def newest_node(self) -> fx.Node:
        """Returns the node that was added to the graph last."""
        return self.graph._root.prev


# -- repeated moves --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Traced:
    """A redistribution that was traced.

    Attributes:
        move: kept, so that its id stays unique: the key contains the id.
        given, made: the nodes of its operand and of its result.
        nodes: the nodes of the redistribution, in order.
        like: the fake value of its result.
    """

    move: Move
    given: fx.Node
    made: fx.Node
    nodes: list[fx.Node]
    like: torch.Tensor


class RepeatedMoves:
    """The redistributions that a capture has traced. An equal one copies their nodes."""

    def __init__(self, recorder: Recorder, mode: FakeTensorMode):
        self._recorder, self._mode = recorder, mode
        self._known: dict[Any, _Traced | None] = {}

    def carry(
        self, wire: Any, move: Move, x: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Returns `x` redistributed by `move`: traced, or copied from an equal redistribution.

        Args:
            wire: the wire (connection to the ranks) that makes the redistribution.
            run: traces the redistribution. It is called if there was no equal one.
        """
        given = node_of(x) if isinstance(x, FakeTensor) else None
        if given is None:
            return run()
        with DisableTorchFunction():
            key = (id(wire), id(move), wire.zeros, x.shape, x.stride(), x.dtype, x.device)
        known = self._known.get(key)
        if known is not None:
            return self._copy_move(known, given)
        first = self._recorder.newest_node()
        out = run()
        if key not in self._known:
            self._known[key] = self._traced(move, given, x, out, first)
        return out

    def _traced(
        self, move: Move, given: fx.Node, x: torch.Tensor, out: torch.Tensor, first: fx.Node
    ) -> _Traced | None:
        nodes = [*nodes_since(self._recorder.graph, first)][::-1]
        made = node_of(out)
        with DisableTorchFunction():
            shows = out.untyped_storage()._cdata == x.untyped_storage()._cdata
        if made is None or made not in nodes or shows:
            return None  # the result is an alias of the operand
        return _Traced(move, given, made, nodes, made.meta["val"])

    def _copy_move(self, known: _Traced, given: fx.Node) -> torch.Tensor:
        graph = self._recorder.graph
        of = {known.given: given}
        for node in known.nodes:
            of[node] = copy_node(graph, node, lambda n: of.get(n, n))
        made = of[known.made]
        (out,) = tensors_of([made], [known.like], self._mode)
        self._recorder.note_copies([of[n] for n in known.nodes], made, out)
        return out
