"""Recomputation: values are computed again in backward instead of being kept from forward.

In regions of `pt.remat` these are all values, except those that a policy keeps or that nodes
outside read. To keep a memory budget of the step, the pass has an ordered list of choices
(`_make_levels`), each of which recomputes more. `FormSearch` finds the first that suffices; its
number is the `RecomputeLevel`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.comm.collective import WAIT
from partita.tensor.op_facts import facts_of

from ..graph_nodes import (
    BLOCK_RESULT,
    NOTE,
    Subgraph,
    copy_node,
    is_collective,
    nbytes_of,
    note_of,
    order_by_needs,
    subgraph_of,
)
from ..memory import Storages, storages_of
from ..program import Program
from ..verify import SPACES

_LEVELS = 8
"""The number of choices for a budget, besides those that recompute across bottlenecks."""

_ALONE = 1.25
"""So many times its own bytes may be needed beside what all of forward passes through."""


def remat(program: Program) -> str:
    """Results in `pt.remat` regions that no policy keeps are computed again in backward.

    They are computed right before backward first reads them, from values that exist at that time. A
    gathered weight is gathered again. Random numbers are kept, never drawn twice. For a budget of
    the whole step, values are recomputed in order of cost per byte, up to the program's level.
    """
    graph = program.graph.graph
    made = len(recompute(graph, _find_recomputed_in_regions(program)))
    if program.options.budget is not None:
        made += len(recompute(graph, _choose_level(program)))
    return f"{made} calls are recomputed in backward"


# -- under a budget --------------------------------------------------------------------------------


def _choose_level(program: Program) -> set[fx.Node]:
    """Returns what is recomputed at the program's level, or at its last level if it has fewer."""
    chosen = set[fx.Node]()
    for number, level in enumerate(_make_levels(program)):
        if number > program.level:
            program.recompute.is_last = False
            break
        chosen = level
    return chosen


def _make_levels(program: Program) -> Iterator[set[fx.Node]]:
    """Yields choices of what to recompute: first nothing, then each time more.

    The values that are cheapest for their bytes come first. Bottlenecks of forward stay, so that no
    recomputation goes back further than to the last one. At the end only every second bottleneck
    stays, then every fourth, and so on, until none does. Inputs of a block are not results of its
    calls, and stay.
    """
    graph = program.graph.graph
    storages = storages_of(program)
    saved = _find_saved_storages(graph, storages)
    narrow = _find_narrow_points(graph, storages, saved)
    ranked = sorted((n for n in saved if n not in narrow), key=lambda n: min(saved[n]))
    ranked.sort(key=lambda n: _estimate_seconds(n) / sum(storages.nbytes[s] for s in saved[n]))
    step = max(1, -(-len(ranked) // _LEVELS))
    dropped = [ranked[:count] for count in range(step, len(ranked) + step, step)]
    stays = 2
    while stays < 4 * len(narrow):
        dropped.append(ranked + [n for i, n in enumerate(narrow) if i % stays != stays - 1])
        stays *= 2
    before: list[set[fx.Node]] = []
    for some in ([], *dropped):
        held = {s for n in set(saved).difference(some) for s in saved[n]}
        gone = {s for n in some for s in storages.made_by(n)}
        level = _close_over_inputs(graph, storages, gone, held) if some else set()
        if level not in before:
            before.append(level)
            yield level


def _find_narrow_points(
    graph: fx.Graph, storages: Storages, saved: Mapping[fx.Node, set[int]]
) -> list[fx.Node]:
    """Returns the bottlenecks: calls whose result is saved while almost nothing else is live.

    If it is known which calls are results of blocks, other calls are not returned. So a
    recomputation repeats whole blocks, as in a step whose blocks are calls.
    """
    forward = [n for n in graph.nodes if n.op == "call_function" and note_of(n).phase == "forward"]
    last = {s: n for n in forward for read in n.all_input_nodes for s in storages.of[read]}
    live = 0
    found: dict[fx.Node, None] = {}
    for node in forward:
        made = storages.made_by(node)
        live += sum(storages.nbytes[s] for s in made if s in last)
        for read in node.all_input_nodes:
            for s in storages.of[read]:
                if last.get(s) is node and storages.maker[s].op == "call_function":
                    live -= storages.nbytes[s]
                    del last[s]
        if any(live <= _ALONE * storages.nbytes[s] for s in saved.get(node, ())):
            found[node] = None
    marked = (n for n in graph.nodes if BLOCK_RESULT in n.meta)
    of_blocks = {storages.maker[s] for node in marked for s in storages.of[node]}
    return [node for node in found if not of_blocks or node in of_blocks]


def _find_saved_storages(graph: fx.Graph, storages: Storages) -> dict[fx.Node, set[int]]:
    """Returns the storages of calls of forward that can be made again and that backward reads.

    All storages of one call are dropped together, or none.
    """
    found: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if is_in_backward(node):
            for read in node.all_input_nodes:
                for s in storages.of[read]:
                    if can_be_made_again(storages.maker[s]) and storages.nbytes[s]:
                        found.setdefault(storages.maker[s], set()).add(s)
    return found


def _close_over_inputs(
    graph: fx.Graph, storages: Storages, dropped: set[int], held: set[int]
) -> set[fx.Node]:
    """Returns the nodes that must run again in backward if the storages `dropped` are not saved.

    These are the nodes whose results are in these storages, and the operands that they need, as far
    as those are not in storages of `held`.
    """
    chosen = {n for n in graph.nodes if can_be_made_again(n) and dropped.issuperset(storages.of[n])}
    chosen = {n for n in chosen if storages.of[n]}
    waiting = list(chosen)
    while waiting:
        node = waiting.pop()
        is_item = node.target is operator.getitem  # its call may have other items that are held
        for read in node.all_input_nodes:
            if (
                read not in chosen
                and can_be_made_again(read)
                and (is_item or held.isdisjoint(storages.of[read]))
            ):
                chosen.add(read)
                waiting.append(read)
    return chosen


def _estimate_seconds(node: fx.Node) -> float:
    """Returns roughly the seconds to recompute one call: good for a ranking, not a measurement."""
    nbytes = nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
    seconds = nbytes / 1e10
    if is_collective(node):
        return seconds + nbytes / 1e9
    return seconds + flops_of(node) / 5e10


# -- regions of pt.remat ---------------------------------------------------------------------------


def _find_recomputed_in_regions(program: Program) -> set[fx.Node]:
    """Returns the nodes of regions that are to be recomputed."""
    graph = program.graph.graph
    inside = {n for n in graph.nodes if note_of(n).region and can_be_made_again(n)}
    if not inside:
        return inside
    storages = storages_of(program)
    kept: set[int] = set()
    for node in inside:
        if note_of(node).kept:
            kept.update(storages.made_by(node))
        if any(_is_read_by_others(node, user) for user in node.users):
            kept.update(storages.of[node])
    # A view of a kept value is recomputed (it is free); a wait only with its collective.
    again = {n for n in inside if kept.isdisjoint(storages.made_by(n))}
    return {n for n in again if n.target is not WAIT or n.args[0] in again}


def _is_read_by_others(node: fx.Node, user: fx.Node) -> bool:
    """True if forward must save a node of a region for `user`, which reads the node.

    This is so if `user` is outside the region. For a kept node it is so if `user` is not kept: of a
    kept call, which is several nodes, only the values that other calls read are saved.
    """
    if user.op == "output":
        return True
    if is_in_backward(user):
        return False
    note, its_note = note_of(node), note_of(user)
    return its_note.region != note.region or (note.kept and not its_note.kept)


# -- copies in backward, and their cost ------------------------------------------------------------


def can_be_made_again(node: fx.Node) -> bool:
    """True if `node` is a call of forward that backward can run again, with the same result.

    An item of a call's result is treated as the call. False for calls that draw or write, and for:
    - a user's operator, whose cost is unknown, and which may draw random numbers
    - a call of a block or a section, because the block's own graph decides what is recomputed
    """
    if node.target is operator.getitem:
        return can_be_made_again(node.args[0])  # type: ignore[arg-type]
    facts = facts_of(node.target)
    return (
        node.op == "call_function"
        and subgraph_of(node) is None
        and getattr(node.target, "namespace", "aten") in SPACES
        and note_of(node).phase == "forward"
        and not facts.draws
        and not facts.writes
    )


def is_in_backward(node: fx.Node) -> bool:
    """True if `node` is a call of backward."""
    return node.op == "call_function" and note_of(node).phase == "backward"


def recompute(graph: fx.Graph, chosen: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Adds copies of `chosen` nodes to the backward of `graph`, so that their values are not kept.

    A copy is inserted before its first reader. Its operands are values that exist at that time, or
    other copies. Returns the copy of each node.
    """
    copies: dict[fx.Node, fx.Node] = {}
    needs = {node: [n for n in node.all_input_nodes if n in chosen] for node in chosen}
    made: set[fx.Node] = set()

    def copy_for_backward(node: fx.Node) -> None:
        copies[node] = again = copy_node(graph, node, lambda n: copies.get(n, n))
        note = note_of(node)
        reason = "regather" if note.reason == "gather" else note.reason
        again.meta[NOTE] = replace(note, phase="backward", reason=reason, again=True)

    for node in list(graph.nodes):
        if not is_in_backward(node):
            continue
        for read in node.all_input_nodes:
            if read not in chosen:
                continue
            with graph.inserting_before(node):
                for needed in order_by_needs([read], needs, made):
                    copy_for_backward(needed)
                    # All items at once: otherwise all would stay until the last one is read.
                    for item in list(needed.users):
                        if item in chosen and item.target is operator.getitem and item not in made:
                            made.add(item)
                            copy_for_backward(item)
            node.replace_input_with(read, copies[read])
    return copies


_flops: dict[Any, Callable[..., int]] = flop_registry


def flops_of(node: fx.Node) -> int:
    """Returns the floating-point operations of a node, by torch's flop counter."""
    count = _flops.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def cost_of_recompute(graph: fx.Graph) -> tuple[int, int]:
    """Returns the floating-point operations of all recomputed calls of a graph, and their bytes.

    Calls in sections are included. Two kinds of values do not count: parameters that are gathered
    again (`regather`), and values that are computed inside the kernels that read them
    (`free_remat`).
    """
    within: dict[Subgraph, tuple[int, int]] = {}
    flops = nbytes = 0
    for node in graph.nodes:
        section = subgraph_of(node)
        if section is not None:
            if section not in within:
                within[section] = cost_of_recompute(section.graph.graph)
            flops, nbytes = flops + within[section][0], nbytes + within[section][1]
        elif _is_made_again(node):
            flops, nbytes = flops + flops_of(node), nbytes + nbytes_of(node)
    return flops, nbytes


def count_recomputed(graph: fx.Graph) -> int:
    """Returns the number of calls that a graph recomputes in backward.

    Calls inside sections and parameters that are gathered again do not count.
    """
    return sum(map(_is_made_again, graph.nodes))


def _is_made_again(node: fx.Node) -> bool:
    note = note_of(node)
    item_of = node.args[0] if node.target is operator.getitem else node
    if subgraph_of(item_of) is not None:  # type: ignore[arg-type]
        return False  # the section says it
    return note.again and note.reason not in ("gather", "regather", "free")
