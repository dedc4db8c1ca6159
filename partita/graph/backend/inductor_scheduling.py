"""Scheduling of Inductor's kernels: which calls it fuses, and in which order kernels run.

Inductor's own choices are changed where they would raise the memory peak:

- Fusion (`FusionChoices`): Inductor also fuses calls that only read a common operand, such as all
  updates, which read one learning rate. Then all gradients live until the last one is computed. If
  a recomputed call were fused with the equal call in forward, the value would live until backward.
- Order (`UpdateOrder`): Inductor moves every update of a parameter to the end of the graph, so that
  all gradients wait for it, and calls with few prerequisites to the beginning. `UpdateOrder`
  restores the order of the passes, and moves each write to where its operands are ready.
- Combination (`UpdateOrder`): on a GPU, updates wait for later updates if that does not raise the
  peak. Adjacent updates are launched as one kernel, as Inductor does for a `torch._foreach_*` call.
- Buckets (`lowering_buckets`): on a GPU, one kernel casts and copies all members of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._inductor import custom_graph_pass as torchs
from torch._inductor.choices import InductorChoices
from torch._inductor.ir import (
    ConcatKernel,
    MutationLayoutSHOULDREMOVE,
    NonOwningLayout,
    TensorBox,
    _CollectiveKernel,
)
from torch._inductor.lowering import lowerings, pointwise_cat, register_lowering
from torch._inductor.scheduler import (
    ForeachKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V

from partita.comm.collective import WAIT, all_gather_pieces
from partita.comm.device import Device
from partita.versions import base_of_scheduler_passes

from ..graph_nodes import note_of, order_by_needs
from ..passes.regather import only_moves

_SMALL = 1 << 16  # bytes, below which lifetimes do not matter
_MOST_ARGUMENTS = 250  # of a combined kernel; Inductor's own limit counts inner values too
_SHARED = 4  # large calls are fused only if one in so many of their bytes is shared


_FORWARD, _AGAIN, _UNPACKED = "forward", "again", "unpacked"
_OURS, _PACKS = "partita", "packs"


def mark_origin(node: fx.Node) -> None:
    """Marks where a node comes from, for `FusionChoices`, which decides what Inductor fuses.

    The mark is forward, recomputed, or the concatenation of a bucket. It is stored in the node's
    `meta` as `custom`. Tracing copies no other entry of `meta` that users may set.
    """
    note = note_of(node)
    if node.op == "call_function" and (note.again or note.phase == "forward"):
        again = _UNPACKED if _unpacks_gathered(node) else _AGAIN
        mine = {_OURS: again if note.again else _FORWARD}
        node.meta["custom"] = node.meta.get("custom", {}) | mine
    if node.target is _CAT and note.kind:
        node.meta["custom"] = node.meta.get("custom", {}) | {_PACKS: True}


def _unpacks_gathered(node: fx.Node) -> bool:
    """True if a node only moves elements of a gathered value that no call of forward reads."""
    while node.op == "call_function" and node.target is not WAIT:
        if len(node.all_input_nodes) != 1 or not only_moves(node):
            return False
        (node,) = node.all_input_nodes
    return note_of(node).kind == "all_gather"  # in a section the value is an input


class FusionChoices(InductorChoices):
    """Inductor's rules for fusion, with three changes.

    - A recomputed call is not fused with a call of forward. On a GPU, a call that unpacks a
      gathered value may be.
    - Large independent kernels are fused only if they share many bytes. On a GPU, neighbours in the
      graph's order are fused in any case.
    - A large reduction is not fused with a kernel that reads its result, unless they share many
      bytes.
    """

    def uuid(self) -> str:
        """Returns a text that identifies these rules in Inductor's cache keys."""
        return f"partita.graph.backend.inductor_scheduling fusion 9 {_SMALL} {_SHARED}"

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """True if Inductor may fuse two kernels. Applies to dependent and to independent kernels.

        Args:
            scheduler: Inductor's scheduler.
            node1, node2: the kernels, as nodes of the scheduler.
            shared_data_score: Inductor's estimate of the bytes that both read or write.
        """
        marks = [_marks_of_kernel(node1), _marks_of_kernel(node2)]
        if not node1.is_gpu():
            marks = [{_AGAIN if m == _UNPACKED else m for m in mine} for mine in marks]
        if any(_AGAIN in one and _FORWARD in other for one, other in (marks, marks[::-1])):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """True if Inductor may fuse a kernel with an earlier one, whose result it reads.

        A reduction that frees much more than it writes is not fused, so that it can run early.

        Args:
            scheduler: Inductor's scheduler.
            node1, node2: the earlier and the later kernel, as nodes of the scheduler.
            shared_data_score: Inductor's estimate of the bytes that both read or write.
        """
        if node1.is_reduction():
            read = _count_bytes(scheduler, node1.read_writes.reads)
            written = _count_bytes(scheduler, node1.read_writes.writes)
            if read > _SMALL and _SHARED * max(written, shared_data_score) < read:
                return False  # it frees more than it makes, and should run when it can
        return InductorChoices.can_fuse_vertical(scheduler, node1, node2, shared_data_score)

    @staticmethod
    def can_fuse_horizontal(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        """True if Inductor may fuse two kernels that do not read each other's results.

        Large kernels must share many bytes, or be neighbours in the graph's order on a GPU.

        Args:
            scheduler: Inductor's scheduler.
            node1, node2: the kernels, as nodes of the scheduler.
            shared_data_score: Inductor's estimate of the bytes that both read or write.
        """
        both = (node.read_writes for node in (node1, node2))
        least = min(_count_bytes(scheduler, (*one.reads, *one.writes)) for one in both)
        shared = shared_data_score
        if node1.is_gpu():
            if _are_neighbors(node1, node2):
                shared = least  # nothing lives longer for it
            elif node1.is_reduction() and node2.is_reduction():
                # For sums over rows and over columns, Inductor's score is not a number of bytes.
                shared = max(shared, _count_shared_reads(scheduler, node1, node2))
        if least > _SMALL and _SHARED * shared < least:
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _count_bytes(scheduler: Any, dependencies: Iterable[Any]) -> int:
    return sum(map(scheduler.dep_size_hint, dependencies))


def _count_shared_reads(scheduler: Any, node1: Any, node2: Any) -> int:
    """Returns the bytes of the buffers that both kernels read."""
    read = {dep.name: dep for dep in node2.read_writes.reads}
    return _count_bytes(scheduler, (d for d in node1.read_writes.reads if d.name in read))


def _are_neighbors(node1: Any, node2: Any) -> bool:
    """True if no other node is between two nodes in the order of the graph."""
    return node1.max_order + 1 == node2.min_order or node2.max_order + 1 == node1.min_order


def _marks_of_kernel(node: Any) -> set[str]:
    """Returns the marks of the graph's nodes that a kernel computes."""
    return {o.meta.get("custom", {}).get(_OURS, "") for o in _list_origins(node)}


def _list_origins(node: Any) -> list[fx.Node]:
    """Returns the graph's nodes that a kernel computes."""
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    return [origin for part in parts for origin in part.get_origins()]


# -- buckets ---------------------------------------------------------------------------------------

_CAT = torch.ops.aten.cat.default
_MOST_PACKED = 32
"""Members of a bucket that one kernel packs: for each element it compares with all their places."""


@contextmanager
def lowering_buckets() -> Iterator[None]:
    """Makes Inductor pack a bucket in one kernel on a GPU, inside the `with` block.

    By default Inductor makes a kernel for each member, if there are many members or one of them is
    a sum. This uses private torch: its lowerings.
    """
    lower_any = lowerings[_CAT]

    def lower(inputs: list[TensorBox], dim: int = 0) -> TensorBox:
        packs = V.current_node.meta.get("custom", {}).get(_PACKS)
        device = inputs[0].get_device()
        if not packs or device is None or Device(device.type).is_host:
            return lower_any(inputs, dim)
        starts = range(0, len(inputs), _MOST_PACKED)
        parts = [pointwise_cat(inputs[i : i + _MOST_PACKED], dim) for i in starts]
        return parts[0] if len(parts) == 1 else TensorBox(ConcatKernel.create(parts, dim))

    lowerings[_CAT] = lower
    try:
        yield
    finally:
        lowerings[_CAT] = lower_any


@register_lowering(all_gather_pieces, type_promotion_kind=None)
def _lower_all_gather_pieces(x: TensorBox, *given: Any) -> TensorBox:
    """Lowers partita's collective like torch's: the operand is kept until the wait for it."""
    begun: Any = _CollectiveKernel.create_out_of_place(all_gather_pieces, x, *given)
    return TensorBox.create(begun)


# -- the order of fused kernels --------------------------------------------------------------------

_Pass: Any = base_of_scheduler_passes(torchs)


class UpdateOrder(_Pass):  # type: ignore[misc]
    """A pass of Inductor's scheduler that orders kernels after fusion, to free memory early.

    This uses private torch, because there is no public hook after fusion. Before fusion a pass
    could not move a write into an input, which must be at the end.
    """

    def uuid(self) -> str:
        """Returns a text that identifies this order in Inductor's cache keys."""
        return "partita.graph.backend.inductor_scheduling order 5"

    def __call__(self, nodes: list[Any]) -> list[Any]:
        makers = {name: node for node in nodes for name in node.get_buffer_names()}
        needs = {node: _find_dependencies(node, makers) for node in nodes}
        nodes = _as_in_graph(nodes, needs)
        late = _find_late_kernels(nodes, needs)
        place = {node: i for i, node in enumerate(nodes)}
        ready: dict[Any, int] = {}
        for node in nodes:  # in an order in which what is needed comes first
            places = [ready[n] if n in late else place[n] for n in needs[node]]
            ready[node] = max(places, default=-1)
        behind: dict[int, list[Any]] = {}
        for node in nodes:
            # A node that reads only inputs may run at any time: it is put before its first reader.
            if node in late and (ready[node] >= 0 or _writes_input(node)):
                behind.setdefault(ready[node], []).append(node)
        done: set[Any] = set()
        order = list(order_by_needs(behind.get(-1, []), needs, done))
        for i, node in enumerate(nodes):
            if node not in late and node not in done:
                done.add(node)
                order.append(node)
            order += order_by_needs(behind.get(i, []), needs, done)
        assert len(order) == len(nodes)
        return _combine_updates(order, needs)


def _combine_updates(order: list[Any], needs: dict[Any, list[Any]]) -> list[Any]:
    """Returns an order of kernels in which neighbouring updates on a GPU become one node.

    Torch's own combination sorts all kernels by depth in the graph, which makes buffers live
    longer.
    """
    if not any(node.is_gpu() for node in order):
        return order
    summed = [n for n in order if type(n).__name__ == "FusedMixOrderReductions"]
    parts = {name for node in summed for name in node.get_buffer_names()}
    order = _delay_updates(order, needs, parts)
    combined: list[Any] = []
    group, behind = list[Any](), list[Any]()  # kernels, and the nodes without a kernel that follow
    arguments = set[str]()
    for node in [*order, None]:
        if isinstance(node, NopKernelSchedulerNode) and group:
            behind.append(node)
            continue
        if group and not (
            node is not None
            and _can_combine(node, parts)
            and not {*group, *behind}.intersection(needs[node])
            and len(arguments | _list_arguments(node)) <= _MOST_ARGUMENTS
        ):
            combined += [_one_launch(group), *behind]
            group, behind, arguments = [], [], set()
        if node is None:
            break
        if _can_combine(node, parts):
            group.append(node)
            arguments |= _list_arguments(node)
        else:
            combined.append(node)
    scheduler = order[0].scheduler
    for node in combined:
        node.prune_redundant_deps(scheduler.name_to_fused_node)
    return combined


def _delay_updates(order: list[Any], needs: dict[Any, list[Any]], parts: set[str]) -> list[Any]:
    """Returns an order in which updates run with later updates, if that does not raise the peak.

    The gradients that they read live until then.

    Args:
        parts: the same as for `_can_combine`.
    """
    last = {dep.name: i for i, node in enumerate(order) for dep in node.read_writes.reads}
    live = _list_live_bytes(order)
    peak, more = max(live), 0
    found, waiting = list[Any](), dict[Any, None]()
    for i, node in enumerate(order):
        is_needed = not waiting.keys().isdisjoint(needs[node])
        if _can_combine(node, parts) and not is_needed:
            written = {name for b in node.get_outputs() for name in b.get_mutations()}
            ends = (d for d in node.read_writes.reads if last[d.name] == i)
            more += _count_bytes(node.scheduler, {d for d in ends if d.name not in written})
            waiting[node] = None
            continue
        if is_needed or live[i] + more > peak:
            found += waiting
            waiting, more = {}, 0
        found.append(node)
    return [*found, *waiting]


def _list_live_bytes(order: list[Any]) -> list[int]:
    """Returns for each kernel the bytes of buffers that are allocated while it runs."""
    same = order[0].scheduler.mutation_real_name  # a buffer has a new name where it was written
    last, held, live = dict[str, int](), dict[str, int](), list[int]()
    for i, node in enumerate(order):
        last.update({same.get(d.name, d.name): i for d in node.read_writes.reads})
    ends: dict[int, list[str]] = {}
    for name, i in last.items():
        ends.setdefault(i, []).append(name)
    total = 0
    for i, node in enumerate(order):
        made = _find_allocated(node)
        held |= made
        total += sum(made.values())
        live.append(total)
        total -= sum(held.pop(name, 0) for name in ends.get(i, ()))
    return live


def _list_arguments(node: Any) -> set[str]:
    """Returns the names of the buffers that a kernel reads or writes, except its temporaries."""
    made = node.get_buffer_names()
    removed = node.scheduler.can_buffer_be_removed_through_fusion
    inside = {b for b in made if removed(b, node.get_operation_names())}
    written_inputs = {b.get_name() for b in node.get_outputs() if b.get_mutations()}
    return {d.name for d in node.read_writes.reads_and_writes()} - inside - written_inputs


def _one_launch(kernels: list[Any]) -> Any:
    """Returns one node for independent updates, like that of a `torch._foreach_*` call.

    Private torch: its combo kernels.
    """
    if len(kernels) == 1:
        return kernels[0]
    scheduler = kernels[0].scheduler
    combo = ForeachKernelSchedulerNode(
        scheduler, kernels, use_custom_partition_algo=False, enable_autotune=False
    )
    scheduler.name_to_fused_node.update({part.get_name(): combo for part in combo.get_nodes()})
    return combo


def _can_combine(node: Any, parts: set[str]) -> bool:
    """True for the kernel of an update, on a GPU, that Inductor can launch together with others.

    Args:
        parts: the names of buffers of partial sums. Kernels that use them are not combined.
    """
    if not node.is_gpu() or parts.intersection(node.used_buffer_names()):
        return False
    return _is_update(node) and bool(ForeachKernelSchedulerNode.combinable_nodes([node]))


def _is_update(node: Any) -> bool:
    """True for an element-wise kernel of an optimizer that writes its result into an input."""
    return _writes_input(node) and not node.is_reduction()


def _find_allocated(node: Any) -> dict[str, int]:
    """Returns the bytes of each new buffer that a kernel makes for other kernels, by name."""
    there = MutationLayoutSHOULDREMOVE, NonOwningLayout
    inside = node.get_operation_names()
    is_inside = node.scheduler.can_buffer_be_removed_through_fusion
    results = (b for b in node.get_outputs() if not isinstance(b.node.layout, there))
    made = {b.get_name() for b in results if not is_inside(b.get_name(), inside)}
    writes, size_of = node.read_writes.writes, node.scheduler.dep_size_hint
    return {d.name: size_of(d) for d in writes if d.name in made}


def _as_in_graph(nodes: list[Any], needs: dict[Any, list[Any]]) -> list[Any]:
    """Returns kernels in the order of their last graph nodes, as far as dependencies allow."""
    graph: Any = V.graph.module.graph
    index = {node: i for i, node in enumerate(graph.nodes)}
    place = {n: max((index.get(o, -1) for o in _list_origins(n)), default=-1) for n in nodes}
    return list(order_by_needs(sorted(nodes, key=place.__getitem__), needs, set()))


def _find_dependencies(node: Any, makers: dict[str, Any]) -> list[Any]:
    found = dict.fromkeys(makers[d.name] for d in node.unmet_dependencies if d.name in makers)
    return [n for n in found if n is not node]


def _writes_input(node: Any) -> bool:
    inputs = V.graph.graph_inputs
    return any(name in inputs for b in node.get_outputs() for name in b.get_mutations())


def _find_late_kernels(nodes: list[Any], needs: dict[Any, list[Any]]) -> set[Any]:
    """Returns the kernels that write into inputs, and those that only such kernels read."""
    users: dict[Any, list[Any]] = {}
    for node in nodes:
        for need in needs[node]:
            users.setdefault(need, []).append(node)
    late: set[Any] = set()
    for node in reversed(nodes):
        made = [b for b in node.get_outputs() if not b.get_mutations()]
        returned = any(user.get_name() == "OUTPUT" for b in made for user in b.users)
        if returned or node.is_extern():
            continue
        if _writes_input(node) or (node in users and late.issuperset(users[node])):
            late.add(node)
    return late
