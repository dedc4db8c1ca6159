"""Recomputation: what is computed again in backward, so that it need not wait there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from ..errors import cannot_be_kept
from ..graph import canonical, is_collective, nbytes_of
from ..graph_nodes import drop_unused
from ..memory.storages import Storages, memory_of, storages_of
from ..node_metadata import note_of
from ..program import Program
from .change import Pass
from .recompute import can_be_made_again, flops_of, is_late, recompute, trial_of
from .remat_regions import find_recomputed_in_regions

__all__ = ["remat_before"]

_LEVELS = 8
"""Among how many choices a budget finds its own, those apart that go back further."""

_ALONE = 1.25
"""So many times its own bytes may be needed beside what all of forward passes through."""


def remat_before(behind: Mapping[str, Pass]) -> Callable[[Program], str]:
    """The pass that recomputes, where `behind` are the passes that run after it, by name: a budget
    is kept by the graph that they make."""

    def remat(program: Program) -> str:
        """What regions of `pt.remat` made, but what their policies keep, is made again in backward.

        Right before backward first reads it, from what is there then; a gathered weight is gathered
        again. Random numbers are kept, never drawn twice. For a budget of the whole step, those
        values are made again whose recompute costs least for the bytes that it saves, as few of
        them as keep the predicted peak, of the graph that all passes have made, under it.
        """
        made = len(recompute(program.graph.graph, find_recomputed_in_regions(program)))
        if program.budget is not None:
            made += _keep_within(program, program.budget, behind)
        return f"{made} calls are made again in backward"

    return remat


# -- under a budget --------------------------------------------------------------------------------


def _keep_within(program: Program, budget: int, behind: Mapping[str, Pass]) -> int:
    """Recompute so much that the predicted peak is at most `budget`; how many calls that are.

    Raises:
        CaptureError: no choice is small enough; it tells the least that is.
    """
    # All that the passes behind decide by.
    notes = [replace(note_of(n), source="", layout="") for n in program.graph.graph.nodes]
    backends = [type(wire.backend).__qualname__ for wire in program.wires]
    text = "\n".join([*canonical(program), *map(repr, notes), *backends, *program.without])
    least = None
    for names in _make_levels(program):
        key = hashlib.sha256(f"{text} {sorted(names)}".encode()).hexdigest()
        tried = _tried_before.get(key)
        if tried is None:  # another rank, a thread of this process, may be at the same
            tried = _tried_before[key] = _predict_peak(program, names, behind)
            for old in [*_tried_before][:-_REMEMBERED]:
                _tried_before.pop(old, None)
        least = tried if least is None else min(least, tried)
        if tried <= budget:
            graph = program.graph.graph
            return len(recompute(graph, {n for n in graph.nodes if n.name in names}))
    assert least is not None
    raise cannot_be_kept(budget, least)


_tried_before: dict[str, int] = {}
_REMEMBERED = 512


def _predict_peak(program: Program, names: frozenset[str], behind: Mapping[str, Pass]) -> int:
    """The predicted peak of the graph that all passes make if these are recomputed, in bytes."""
    trial, _ = trial_of(program, names)
    for name, change in behind.items():
        if name not in program.without:
            change(trial)
            drop_unused(trial.graph.graph)
    return memory_of(trial).peak


def _make_levels(program: Program) -> list[frozenset[str]]:
    """Choices, each with more recomputed than the one before; the first with nothing.

    First go what is cheap for its bytes. What all of forward passes through stays, so that no
    recompute goes back further than to the one before; at the end of those only every second
    stays, every fourth, and so on.
    """
    graph = program.graph.graph
    storages = storages_of(program)
    saved = _find_saved_storages(graph, storages)
    narrow = _find_narrow_points(graph, storages, saved)
    ranked = [s for s in saved if s not in narrow]
    ranked.sort(key=lambda s: (_estimate_seconds(storages.maker[s]) / storages.nbytes[s], s))
    step = max(1, -(-len(ranked) // _LEVELS))
    dropped = [ranked[:count] for count in range(step, len(ranked) + step, step)]
    stays = 2
    while stays < 2 * len(narrow):
        dropped.append(ranked + [s for i, s in enumerate(narrow) if i % stays != stays - 1])
        stays *= 2
    levels = [frozenset[str]()]
    for some in dropped:
        held = set(saved).difference(some)
        levels.append(frozenset(_close_over_inputs(graph, storages, set(some), held)))
    return list(dict.fromkeys(levels))


def _find_narrow_points(graph: fx.Graph, storages: Storages, saved: list[int]) -> list[int]:
    """Of what is saved, that beside which the rest of forward needs next to nothing else."""
    forward = [n for n in graph.nodes if n.op == "call_function" and note_of(n).phase == "forward"]
    last = {s: n for n in forward for read in n.all_input_nodes for s in storages.of[read]}
    live, found, wanted = 0, [], set(saved)
    for node in forward:
        made = storages.made_by(node)
        live += sum(storages.nbytes[s] for s in made if s in last)
        for read in node.all_input_nodes:
            for s in storages.of[read]:
                if last.get(s) is node and storages.maker[s].op == "call_function":
                    live -= storages.nbytes[s]
                    del last[s]
        found += [s for s in made if s in wanted and live <= _ALONE * storages.nbytes[s]]
    return found


def _find_saved_storages(graph: fx.Graph, storages: Storages) -> list[int]:
    """What forward makes, that can be made again, and backward reads."""
    found: dict[int, None] = {}
    for node in graph.nodes:
        if is_late(node):
            for read in node.all_input_nodes:
                for s in storages.of[read]:
                    if can_be_made_again(storages.maker[s]) and storages.nbytes[s]:
                        found[s] = None
    return list(found)


def _close_over_inputs(
    graph: fx.Graph, storages: Storages, dropped: set[int], held: set[int]
) -> set[str]:
    """The nodes that show what is dropped, and those that must run for them to be made again."""
    chosen = {n for n in graph.nodes if can_be_made_again(n) and dropped.issuperset(storages.of[n])}
    chosen = {n for n in chosen if storages.of[n]}
    waiting = list(chosen)
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if (
                read not in chosen
                and can_be_made_again(read)
                and held.isdisjoint(storages.of[read])
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
