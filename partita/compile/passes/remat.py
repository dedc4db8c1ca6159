"""Recomputation: what is computed again in backward, so that it need not wait there.

For regions of `pt.remat` all of their nodes are, but those that a policy keeps, that others read,
and that a budget has room for (`choose_kept`, by which the eager `pt.remat` chooses as well). For a
budget of the whole step there are choices, in an order (`_make_levels`); a `RecomputeLevel` says by
number which one is taken in a step's graph and in those of its blocks (`FormSearch` finds the
number).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from partita.comm.ledger import human
from partita.layout import Fix, LayoutError
from partita.tensor.op_facts import facts_of

from ..errors import CaptureError
from ..graph_nodes import (
    BLOCK_RESULT,
    NOTE,
    Note,
    Section,
    copy_node,
    is_collective,
    lazy_graph_module,
    nbytes_of,
    note_of,
    order_by_needs,
    section_of,
)
from ..memory import Storages, memory_of, storages_of
from ..program import Program
from ..verify import SPACES

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
    made = len(recompute(graph, _find_recomputed_in_regions(program)))
    if program.options.budget is not None:
        made += len(recompute(graph, _choose_level(program)))
    return f"{made} calls are made again in backward"


# -- under a budget --------------------------------------------------------------------------------


def _choose_level(program: Program) -> set[fx.Node]:
    """What is made again at the program's level; at its last one where it has fewer."""
    chosen = set[fx.Node]()
    for number, level in enumerate(_make_levels(program)):
        if number > program.level:
            program.recompute.is_last = False
            break
        chosen = level
    return chosen


def _make_levels(program: Program) -> Iterator[set[fx.Node]]:
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
        if _is_late(node):
            for read in node.all_input_nodes:
                for s in storages.of[read]:
                    if _can_be_made_again(storages.maker[s]) and storages.nbytes[s]:
                        found.setdefault(storages.maker[s], set()).add(s)
    return found


def _close_over_inputs(
    graph: fx.Graph, storages: Storages, dropped: set[int], held: set[int]
) -> set[fx.Node]:
    """The nodes that show what is dropped, and those that must run for them to be made again."""
    chosen = {
        n for n in graph.nodes if _can_be_made_again(n) and dropped.issuperset(storages.of[n])
    }
    chosen = {n for n in chosen if storages.of[n]}
    waiting = list(chosen)
    while waiting:
        node = waiting.pop()
        is_item = node.target is operator.getitem  # of what has other items, which may be held
        for read in node.all_input_nodes:
            if (
                read not in chosen
                and _can_be_made_again(read)
                and (is_item or held.isdisjoint(storages.of[read]))
            ):
                chosen.add(read)
                waiting.append(read)
    return chosen


def _estimate_seconds(node: fx.Node) -> float:
    """Seconds that a recompute of one call takes, about: it ranks, and is no measurement."""
    nbytes = nbytes_of(node) + sum(map(nbytes_of, node.all_input_nodes))
    seconds = nbytes / 1e10
    if is_collective(node):
        return seconds + nbytes / 1e9
    return seconds + flops_of(node) / 5e10


# -- regions of pt.remat ---------------------------------------------------------------------------

_RegionsBudget = tuple[int, int]
"""The number of a budget that regions share, and its bytes."""


def _find_recomputed_in_regions(program: Program) -> set[fx.Node]:
    """The nodes of regions that are to be recomputed.

    Raises:
        CaptureError: a budget is too small even if nothing is kept; it tells the least.
    """
    graph = program.graph.graph
    inside = {n for n in graph.nodes if note_of(n).region and _can_be_made_again(n)}
    if not inside:
        return inside
    storages = storages_of(program)
    kept: set[int] = set()
    for node in inside:
        if note_of(node).kept:
            kept.update(storages.made_by(node))
        if any(_is_read_by_others(node, user) for user in node.users):
            kept.update(storages.of[node])
    again = _exclude_kept(inside, storages, kept)
    budgets = {note.budget for n in again if (note := note_of(n)).budget is not None}
    for budget in sorted(budgets):
        kept |= _choose_kept_storages(program, again, storages, budget)
    return _exclude_kept(again, storages, kept)


def _is_read_by_others(node: fx.Node, user: fx.Node) -> bool:
    """Does forward read `node` outside of its region or, if its call is kept, outside of that call?

    A view that a kept call makes only for its own kernels is not kept with it.
    """
    if user.op == "output":
        return True
    if _is_late(user):
        return False
    note, its_note = note_of(node), note_of(user)
    return its_note.region != note.region or (note.kept and not its_note.kept)


def _exclude_kept(inside: set[fx.Node], storages: Storages, kept: set[int]) -> set[fx.Node]:
    """The nodes that make no kept storage. (Views of kept ones are recomputed: free.)"""
    return {n for n in inside if kept.isdisjoint(storages.made_by(n))}


def _choose_kept_storages(
    program: Program, again: set[fx.Node], storages: Storages, budget: _RegionsBudget
) -> set[int]:
    """The storages, of those that the nodes `again` make, that are kept within a budget: what saves
    the most, in the room that the peak of its activations leaves when nothing is kept."""
    trial, copies = _trial_of(program, {n.name for n in again})
    made = set(copies.values())
    activations = {
        n.name
        for n in trial.graph.graph.nodes
        if _is_activation(note_of(n), budget) and (n in made or not _is_late(n))
    }
    _, nbytes = budget
    peak = max(memory_of(trial).live_of(lambda b: b.name in activations), default=0)
    if peak > nbytes:
        raise make_budget_error(CaptureError, nbytes, "the model", peak)
    recomputed = {n.name for n in copies}
    nodes = [n for n in program.graph.graph.nodes if n.name in recomputed and n in again]
    candidates = {
        s: Candidate(storages.nbytes[s], flops_of(node), storages.nbytes[s])
        for node in nodes
        if _is_activation(note_of(node), budget)
        for s in storages.made_by(node)
    }
    found = [*candidates]
    return {found[i] for i in choose_kept([*candidates.values()], nbytes - peak)}


def _is_activation(note: Note, budget: _RegionsBudget) -> bool:
    """Is it of a region with this budget, and no gathered parameter?"""
    return note.budget == budget and note.reason not in ("gather", "regather")


# -- copies in backward, and their cost ------------------------------------------------------------


def _can_be_made_again(node: fx.Node) -> bool:
    """Is it a call of forward that can be run again with the same result?

    Of a user's operator nobody knows what that costs, or that it draws nothing. What a block makes
    again is in its own graph; a section is no such call, nor is an item of what one gives.
    """
    if node.target is operator.getitem:
        return _can_be_made_again(node.args[0])  # type: ignore[arg-type]
    facts = facts_of(node.target)
    return (
        node.op == "call_function"
        and section_of(node) is None
        and getattr(node.target, "namespace", "aten") in SPACES
        and note_of(node).phase == "forward"
        and not facts.draws
        and not facts.writes
    )


def _is_late(node: fx.Node) -> bool:
    """Is it a call of backward?"""
    return node.op == "call_function" and note_of(node).phase == "backward"


def recompute(graph: fx.Graph, chosen: set[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Have backward read copies of `chosen`, made where first read, of operands that are copied
    likewise or still there; the copies by node."""
    copies: dict[fx.Node, fx.Node] = {}
    needs = {node: [n for n in node.all_input_nodes if n in chosen] for node in chosen}
    made: set[fx.Node] = set()

    def copy_for_backward(node: fx.Node) -> None:
        copies[node] = again = copy_node(graph, node, lambda n: copies.get(n, n))
        note = note_of(node)
        reason = "regather" if note.reason == "gather" else note.reason
        again.meta[NOTE] = replace(note, phase="backward", reason=reason, again=True)

    for node in list(graph.nodes):
        if not _is_late(node):
            continue
        for read in node.all_input_nodes:
            if read not in chosen:
                continue
            with graph.inserting_before(node):
                for needed in order_by_needs([read], needs, made):
                    copy_for_backward(needed)
                    # At once, else all items would stay until the last of them is read.
                    for item in list(needed.users):
                        if item in chosen and item.target is operator.getitem and item not in made:
                            made.add(item)
                            copy_for_backward(item)
            node.replace_input_with(read, copies[read])
    return copies


def _trial_of(program: Program, names: Collection[str]) -> tuple[Program, dict[fx.Node, fx.Node]]:
    """A copy of a program in which these nodes are recomputed, and their copies by node."""
    trial = copy.copy(program)
    trial.graph = lazy_graph_module(program.graph, copy.deepcopy(program.graph.graph))
    graph = trial.graph.graph
    return trial, recompute(graph, {n for n in graph.nodes if n.name in names})


_flops: dict[Any, Callable[..., int]] = flop_registry


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of a call, as torch's own counter has them; 0 where it has none."""
    count = _flops.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(count(*args, **kwargs, out_val=node.meta["val"]))


def cost_of_recompute(graph: fx.Graph) -> tuple[int, int]:
    """Operations, and bytes, that a graph makes again, those within each call of a section too.

    Without parameters that are gathered again, which is for `regather` to say.
    """
    within: dict[Section, tuple[int, int]] = {}
    flops = nbytes = 0
    for node in graph.nodes:
        section = section_of(node)
        if section is not None:
            if section not in within:
                within[section] = cost_of_recompute(section.graph.graph)
            flops, nbytes = flops + within[section][0], nbytes + within[section][1]
        elif _is_made_again(node):
            flops, nbytes = flops + flops_of(node), nbytes + nbytes_of(node)
    return flops, nbytes


def count_made_again(graph: fx.Graph) -> int:
    """How many calls of a graph are made again, those within sections not counted; without
    parameters that are gathered again."""
    return sum(map(_is_made_again, graph.nodes))


def _is_made_again(node: fx.Node) -> bool:
    note = note_of(node)
    item_of = node.args[0] if node.target is operator.getitem else node
    if section_of(item_of) is not None:  # type: ignore[arg-type]
        return False  # the section says it
    return note.again and note.reason not in ("gather", "regather")


# -- the knapsack of kept results ------------------------------------------------------------------

_STEPS = 8192
"""Bytes are rounded to a step: the bytes of all candidates, divided by this many."""


@dataclass
class Candidate:
    """A call whose result could be kept.

    Attributes:
        nbytes: of its result.
        flops: floating-point operations of its recompute.
        written: bytes that its recompute writes: its cost where it has no operations to count.
    """

    nbytes: int = 0
    flops: int = 0
    written: int = 0


def choose_kept(candidates: Sequence[Candidate], room: int) -> list[int]:
    """The indices of the candidates to keep within `room` bytes.

    Those that save the most operations, and then those that save the most bytes written. More room
    never means more recomputed operations nor, of as many operations, more bytes written: the first
    of two knapsacks, over operations, is solved exactly, in steps of bytes that do not depend on
    the room, and of equal solutions takes the one that leaves the second knapsack the most room.
    """
    heavy = [i for i, c in enumerate(candidates) if c.flops]
    light = [i for i, c in enumerate(candidates) if not c.flops and c.written]
    step = max(1, -(-sum(c.nbytes for c in candidates) // _STEPS))
    kept: list[int] = []
    for some, worth in ((heavy, "flops"), (light, "written")):
        items = [(candidates[i].nbytes, getattr(candidates[i], worth)) for i in some]
        room_left = room - sum(candidates[i].nbytes for i in kept)
        kept += [some[i] for i in _solve_knapsack(items, room_left, step)]
    return sorted(kept)


def make_budget_error(error: type[LayoutError], budget: int, title: str, peak: int) -> LayoutError:
    """The error to raise where `title` needs `peak` bytes when it keeps nothing, over `budget`."""
    return error(
        f"a budget of {budget} bytes ({human(budget)}) cannot be kept: {title} needs {peak} bytes "
        f"({human(peak)}) when it keeps nothing",
        reason="inputs of regions, what lies between them, and the recompute of one region",
        fixes=(
            Fix(f"policy={peak}", "the minimum"),
            Fix("smaller regions, by blocks=", "less is there at once"),
        ),
    )


def _solve_knapsack(items: list[tuple[int, int]], room: int, step: int) -> list[int]:
    """Of items (bytes, worth), the indices of those that fit and are worth the most together."""
    if sum(size for size, _ in items) <= room:
        return list(range(len(items)))
    capacity = max(0, room) // step
    best = torch.zeros(capacity + 1, dtype=torch.int64)
    takes = []
    for size, worth in items:
        need = -(-size // step)
        without, best = best, best.clone()
        if need <= capacity:
            torch.maximum(without[need:], without[: capacity + 1 - need] + worth, out=best[need:])
        takes.append(best > without)
    # Of equal solutions the one that needs the least room, which is the same for any larger room.
    found, left = [], int(torch.searchsorted(best, best[-1:]))
    for i in reversed(range(len(items))):
        if takes[i][left]:
            found.append(i)
            left -= -(-items[i][0] // step)
    return found[::-1]
