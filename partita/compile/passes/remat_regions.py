"""Regions of `pt.remat` in a graph: what of the regions of `pt.remat` is made again in backward?

All but what their policies keep and what others read. Regions that share a budget keep, of the
rest, what saves the most operations within it, as they do eagerly: with nothing kept the predicted
peak of their activations leaves so much room, and what is kept adds at most its own bytes.
"""

from __future__ import annotations

from torch import fx

from ..errors import CaptureError
from ..memory.knapsack import Candidate, chosen, too_small
from ..memory.storages import Storages, memory_of, storages_of
from ..node_metadata import Note, note_of
from ..program import Program
from .recompute import can_be_made_again, flops_of, is_late, trial_of

__all__ = ["of_regions"]

Budget = tuple[int, int]


def of_regions(program: Program) -> set[fx.Node]:
    """The nodes of regions that are made again.

    Raises:
        CaptureError: a budget is less than what keeping nothing takes; it tells the least.
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
    again = _drop_kept(inside, storages, kept)
    budgets = {note.budget for n in again if (note := note_of(n)).budget is not None}
    for budget in sorted(budgets):
        kept |= _worth_keeping(program, again, storages, budget)
    return _drop_kept(again, storages, kept)


def _is_read_by_others(node: fx.Node, user: fx.Node) -> bool:
    """Does forward read it outside of its region or, if its call is kept, outside of that call?

    What a kept call only reads, and shows to its own kernels in another shape, is not kept with it.
    """
    if user.op == "output":
        return True
    if is_late(user):
        return False
    note, its_note = note_of(node), note_of(user)
    return its_note.region != note.region or (note.kept and not its_note.kept)


def _drop_kept(inside: set[fx.Node], storages: Storages, kept: set[int]) -> set[fx.Node]:
    # A view of what stays costs nothing to make again.
    return {n for n in inside if kept.isdisjoint(storages.made_by(n))}


def _worth_keeping(
    program: Program, again: set[fx.Node], storages: Storages, budget: Budget
) -> set[int]:
    """The storages of what `again` has that are kept within a budget."""
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
        raise too_small(CaptureError, nbytes, "the model", peak)
    recomputed = {n.name for n in copies}
    nodes = [n for n in program.graph.graph.nodes if n.name in recomputed and n in again]
    found, candidates = [], []
    for node in nodes:
        for s in storages.made_by(node) if _is_activation(note_of(node), budget) else ():
            size = storages.nbytes[s]
            found.append(s)
            candidates.append(Candidate(size, flops_of(node), size))
    return {found[i] for i in chosen(candidates, nbytes - peak)}


def _is_activation(note: Note, budget: Budget) -> bool:
    """Is it made where this budget holds, and no parameter that is gathered?"""
    return note.budget == budget and note.reason not in ("gather", "regather")
