"""The order of the passes: what rewrites a graph, and in which order?

A pass is a function of a `Program` that changes its graph and returns what it did in a few words.
It may count on a legal graph and must leave one (`compile.verify`) that does the same
(`compile.passes.contract`). Both are checked after each pass of a user's, and behind the last pass;
with `PARTITA_VERIFY=1` in the environment after every pass, so that an error names the one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..capture.shared_results import keep_apart
from ..graph_nodes import drop_unused
from ..program import Program
from ..verify import IllegalGraph, verifies_each_pass, verify
from .backend_ways import backend_ways
from .bucket import bucket
from .cancel import cancel
from .cast import cast
from .change import Change, Pass, Seen
from .contract import Promised, work_out
from .dedupe import dedupe
from .lifetime import lifetime
from .merge_views import merge_views
from .overlap import overlap
from .regather import regather
from .remat import remat_before

__all__ = ["PASSES", "Pass", "Passes", "in_order", "record_changes", "run_passes"]

_BEHIND_REMAT: dict[str, Pass] = {
    "regather": regather,
    "bucket": bucket,
    "merge_views": merge_views,
    "lifetime": lifetime,
    "overlap": overlap,
    "backend_ways": backend_ways,
}
PASSES: dict[str, Pass] = {
    "dedupe": dedupe,
    "cancel": cancel,
    "cast": cast,
    "remat": remat_before(_BEHIND_REMAT),
    **_BEHIND_REMAT,
}

Passes = Iterable[Pass] | Mapping[str, Pass | Iterable[Pass]]
"""A user's: in order, before all others; or by the name of the pass before which they run."""


def in_order(passes: Passes = (), without: Iterable[str] = ()) -> dict[str, Pass]:
    """The passes that run, by name.

    Raises:
        ValueError: `without`, or a place, names a pass that there is not; two have one name.
    """
    first = next(iter(PASSES))
    by_place = passes if isinstance(passes, Mapping) else {first: passes}
    unknown = set(by_place) - {*PASSES, "end"}
    if unknown:
        raise ValueError(f'passes: a place is {", ".join(PASSES)} or "end", not {unknown}')
    found: dict[str, Pass] = {}
    for place in (*PASSES, "end"):
        given: Any = by_place.get(place, ())
        for one in (given,) if callable(given) else given:
            name = getattr(one, "__name__", type(one).__name__)
            if name in PASSES or name in found or name == "end":
                raise ValueError(f"passes: there is a pass {name!r} already")
            found[name] = one
        if place in PASSES:
            found[place] = PASSES[place]
    left_out = set(without)
    if left_out - set(found):
        raise ValueError(f"without: the passes are {', '.join(found)}, not {left_out - set(found)}")
    return {name: change for name, change in found.items() if name not in left_out}


def run_passes(program: Program, without: Iterable[str] = (), passes: Passes = ()) -> None:
    """Run the passes but those named in `without`.

    Raises:
        ValueError: see `in_order`.
        IllegalGraph: they left a graph that breaks the grammar or does something else.
    """
    for _ in _one_by_one(program, without, passes):
        pass


def record_changes(
    program: Program,
    without: Iterable[str] = (),
    passes: Passes = (),
    after: Callable[[Change], None] = lambda change: None,
) -> list[Change]:
    """`run_passes`, and what each pass did. `after` hears of it at once."""
    changes = []
    before = Seen(program)
    for name, change, did in _one_by_one(program, without, passes):
        now = Seen(program)
        promise = (change.__doc__ or name).strip().split("\n")[0]
        changes.append(before.changed_to(now, name, promise, did))
        after(changes[-1])
        before = now
    return changes


def _one_by_one(
    program: Program, without: Iterable[str], passes: Passes
) -> Iterator[tuple[str, Pass, str]]:
    """Run the passes; after each its name, it, and what it says that it did."""
    promised = Promised.of_program(program)
    each, last = verifies_each_pass(), ""
    for name, change in in_order(passes, without).items():
        did = _run_pass(program, name, change)
        keep_apart(program.graph.graph, promised.overlapping)
        drop_unused(program.graph.graph)
        if name not in PASSES:
            _lint_graph(program, name)
            work_out(program, name)
        if each or name not in PASSES:
            verify(program, name)
            promised.check(program, name)
        else:
            last = name
        yield name, change, did
    if last:
        verify(program, f"the passes, the last of them {last}")
        promised.check(program, "the passes")


def _run_pass(program: Program, name: str, change: Pass) -> str:
    try:
        did = change(program)
    except IllegalGraph:
        raise
    except Exception as error:
        if name in PASSES:
            raise
        raise IllegalGraph(f"pass {name} raised {type(error).__name__}: {error}") from error
    return did if isinstance(did, str) and did else "(it does not say what it did)"


def _lint_graph(program: Program, name: str) -> None:
    try:
        program.graph.graph.lint()
    except RuntimeError as error:
        raise IllegalGraph(f"after {name}: {str(error).splitlines()[0]}") from error
