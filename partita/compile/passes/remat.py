"""Recomputation: what is computed again in backward, so that it need not wait there.

For a budget there are choices, in an order (`_make_levels`); a program says by number which one is
taken in its graph, and in those of its blocks (`compile.budgets` finds the number).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from torch import fx

from ..graph_nodes import is_collective, nbytes_of, note_of
from ..memory.storages import Storages, storages_of
from ..program import Program
from .recompute import can_be_made_again, flops_of, is_late, recompute
from .remat_regions import find_recomputed_in_regions

__all__ = ["BLOCK_RESULT", "remat"]

BLOCK_RESULT = "result of a block"
"""The key, in the `meta` of a node, of a mark: it makes what a block gives."""

_LEVELS = 8
"""Among how many choices a budget finds its own, those apart that go back further."""

_ALONE = 1.25
"""So many times its own bytes may be needed beside what all of forward passes through."""


def remat(program: Program) -> str:
    """What regions of `pt.remat` made, but what their policies keep, is made again in backward.

    Right before backward first reads it, from what is there then; a gathered weight is gathered
    again. Random numbers are kept, never drawn twice. For a budget of the whole step, those values
    are made again whose recompute costs least for the bytes that it saves, as many as the program's
    level says.
    """
    graph = program.graph.graph
    made = len(recompute(graph, find_recomputed_in_regions(program)))
    if program.budget is not None:
        levels = _make_levels(program)
        names = levels[min(program.level, len(levels) - 1)]
        program.levels = max(program.levels, len(levels))
        made += len(recompute(graph, {n for n in graph.nodes if n.name in names}))
    return f"{made} calls are made again in backward"


# -- under a budget --------------------------------------------------------------------------------


def _make_levels(program: Program) -> list[frozenset[str]]:
    """Choices, each with more recomputed than the one before; the first with nothing.

    First go what is cheap for its bytes. What all of forward passes through stays, so that no
    recompute goes back further than to the one before; at the end of those only every second
    stays, every fourth, and so on, until none does. What a block takes is of no call of the block,
    and stays.
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
    levels = [frozenset[str]()]
    for some in dropped:
        held = {s for n in set(saved).difference(some) for s in saved[n]}
        gone = {s for n in some for s in storages.made_by(n)}
        levels.append(frozenset(_close_over_inputs(graph, storages, gone, held)))
    return list(dict.fromkeys(levels))


def _find_narrow_points(
    graph: fx.Graph, storages: Storages, saved: Mapping[fx.Node, set[int]]
) -> list[fx.Node]:
    """Of the calls in `saved` those beside whose results the rest of forward needs next to nothing
    else; where it is known what blocks give, only of these.

    So a recompute through several blocks makes again all that a variant of a block would.
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
    """The calls of forward that can be made again and whose results backward reads: for each those
    of its storages. What one call makes is let go together, or not."""
    found: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if is_late(node):
            for read in node.all_input_nodes:
                for s in storages.of[read]:
                    if can_be_made_again(storages.maker[s]) and storages.nbytes[s]:
                        found.setdefault(storages.maker[s], set()).add(s)
    return found


def _close_over_inputs(
    graph: fx.Graph, storages: Storages, dropped: set[int], held: set[int]
) -> set[str]:
    """The nodes that show what is dropped, and those that must run for them to be made again."""
    chosen = {n for n in graph.nodes if can_be_made_again(n) and dropped.issuperset(storages.of[n])}
    chosen = {n for n in chosen if storages.of[n]}
    waiting = list(chosen)
    while waiting:
        node = waiting.pop()
        is_item = node.target is operator.getitem  # of what has other items, which may be held
        for read in node.all_input_nodes:
            if (
                read not in chosen
                and can_be_made_again(read)
                and (is_item or held.isdisjoint(storages.of[read]))
            ):
                chosen.add(read)
                waiting.append(read)
    return {n.name for n in chosen}


def _estimate_seconds(node: fx.Node) -> float:
    """Seconds that a recompute of one call takes, about: it ranks, and is no measurement."""
    nbytes = nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
    seconds = nbytes / 1e10
    if is_collective(node):
        return seconds + nbytes / 1e9
    return seconds + flops_of(node) / 5e10
