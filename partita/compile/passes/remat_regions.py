"""Regions of `pt.remat` in a graph: which of their nodes are recomputed in backward.

All are, but those that a region's policy keeps and those that others read. Regions that share a
budget keep, of the rest, what saves the most operations within it, as in eager code: the budget
less the predicted peak of their activations when nothing is kept is the room for what is kept.
"""

from __future__ import annotations

from torch import fx

from ..errors import CaptureError
from ..graph_nodes import Note, note_of
from ..memory.knapsack import Candidate, choose_kept, make_budget_error
from ..memory.storages import Storages, memory_of, storages_of
from ..program import Program
from .recompute import can_be_made_again, flops_of, is_late, trial_of

__all__ = ["find_recomputed_in_regions"]

Budget = tuple[int, int]


def find_recomputed_in_regions(program: Program) -> set[fx.Node]:
    """The nodes of regions that are to be recomputed.

    Raises:
        CaptureError: a budget is too small even if nothing is kept; it tells the least.
    """
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
    if is_late(user):
        return False
    note, its_note = note_of(node), note_of(user)
    return its_note.region != note.region or (note.kept and not its_note.kept)


def _exclude_kept(inside: set[fx.Node], storages: Storages, kept: set[int]) -> set[fx.Node]:
    """The nodes that make no kept storage. (Views of kept ones are recomputed: free.)"""
    return {n for n in inside if kept.isdisjoint(storages.made_by(n))}


def _choose_kept_storages(
    program: Program, again: set[fx.Node], storages: Storages, budget: Budget
) -> set[int]:
    """The storages, of those that the nodes `again` make, that are kept within a budget."""
    trial, copies = trial_of(program, {n.name for n in again})
    made = set(copies.values())
    activations = {
        n.name
        for n in trial.graph.graph.nodes
        if _is_activation(note_of(n), budget) and (n in made or not is_late(n))
    }
    _, nbytes = budget
    peak = max(memory_of(trial).live_of(lambda b: b.name in activations), default=0)
    if peak > nbytes:
        raise make_budget_error(CaptureError, nbytes, "the model", peak)
    recomputed = {n.name for n in copies}
    nodes = [n for n in program.graph.graph.nodes if n.name in recomputed and n in again]
    found, candidates = [], []
    for node in nodes:
        for s in storages.made_by(node) if _is_activation(note_of(node), budget) else ():
            size = storages.nbytes[s]
            found.append(s)
            candidates.append(Candidate(size, flops_of(node), size))
    return {found[i] for i in choose_kept(candidates, nbytes - peak)}


def _is_activation(note: Note, budget: Budget) -> bool:
    """Is it of a region with this budget, and no gathered parameter?"""
    return note.budget == budget and note.reason not in ("gather", "regather")
