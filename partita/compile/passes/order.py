"""The order of the passes.

A pass is a function of a `Program` that changes its graph and returns what it did in a few words.
It may count on a legal graph and must leave one (`compile.verify`) that does the same
(`compile.passes.contract`). Both are checked after each user's pass, and after the last pass; with
`PARTITA_VERIFY=1` in the environment after every pass, so that an error names the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..capture.shared_results import keep_apart
from ..graph_nodes import drop_unused
from ..program import Program
from ..verify import IllegalGraph, verifies_each_pass, verify
from .backend_ways import backend_ways
from .bucket import bucket
from .cancel import cancel
from .cast import cast
from .change import Change, GraphFigures, Pass
from .contract import PassContract, recompute_metadata
from .dedupe import dedupe
from .lifetime import lifetime
from .merge_views import merge_views
from .overlap import overlap
from .regather import regather
from .remat import remat

__all__ = [
    "PASSES",
    "Pass",
    "Passes",
    "order_passes",
    "record_changes",
    "record_each_change",
    "run_passes",
]

PASSES: dict[str, Pass] = {
    "dedupe": dedupe,
    "cancel": cancel,
    "cast": cast,
    "remat": remat,
    "regather": regather,
    "bucket": bucket,
    "merge_views": merge_views,
    "lifetime": lifetime,
    "overlap": overlap,
    "backend_ways": backend_ways,
}

Passes = Iterable[Pass] | Mapping[str, Pass | Iterable[Pass]]
"""A user's passes: in order, before all others; or by the name of the pass that they precede."""


def order_passes(passes: Passes = (), without: Iterable[str] = ()) -> dict[str, Pass]:
    """The passes that run, by name.

    Raises:
        ValueError: `without`, or a place, names an unknown pass; two passes have one name.
    """
    first = next(iter(PASSES))
    by_place = passes if isinstance(passes, Mapping) else {first: passes}
    unknown = set(by_place) - {*PASSES, "end"}
    if unknown:
        raise ValueError(f'passes: a place is {", ".join(PASSES)} or "end", not {unknown}')
    found: dict[str, Pass] = {}
    for place in (*PASSES, "end"):
        given: Any = by_place.get(place, ())
        for change in (given,) if callable(given) else given:
            name = getattr(change, "__name__", type(change).__name__)
            if name in PASSES or name in found or name == "end":
                raise ValueError(f"passes: there is a pass {name!r} already")
            found[name] = change
        if place in PASSES:
            found[place] = PASSES[place]
    left_out = set(without)
    if left_out - set(found):
        raise ValueError(f"without: the passes are {', '.join(found)}, not {left_out - set(found)}")
    return {name: change for name, change in found.items() if name not in left_out}


def run_passes(program: Program, without: Iterable[str] = (), passes: Passes = ()) -> None:
    """Run all passes but those named in `without`.

    Raises:
        ValueError: see `order_passes`.
        IllegalGraph: the graph then breaks the grammar, or does something else.
    """
    for _ in _run_one_by_one(program, without, passes):
        pass


def record_changes(
    program: Program, without: Iterable[str] = (), passes: Passes = ()
) -> list[Change]:
    """Run the passes, and return what each did. Raises as `run_passes`."""
    return [*record_each_change(program, without, passes)]


def record_each_change(
    program: Program, without: Iterable[str] = (), passes: Passes = ()
) -> Iterator[Change]:
    """Run one pass after another, each when what the one before did was taken."""
    before = GraphFigures(program)
    for name, change, did in _run_one_by_one(program, without, passes):
        now = GraphFigures(program)
        promise = (change.__doc__ or name).strip().split("\n")[0]
        yield before.compare(now, name, promise, did)
        before = now


def _run_one_by_one(
    program: Program, without: Iterable[str], passes: Passes
) -> Iterator[tuple[str, Pass, str]]:
    """Run the passes; yield after each its name, itself, and its report of what it did."""
    contract_of_graph = PassContract.of_program(program)
    each, last = verifies_each_pass(), ""
    for name, change in order_passes(passes, without).items():
        did = _run_pass(program, name, change)
        keep_apart(program.graph.graph, contract_of_graph.overlapping)
        drop_unused(program.graph.graph)
        if name not in PASSES:
            _lint_graph(program, name)
            recompute_metadata(program, name)
        if each or name not in PASSES:
            verify(program, name)
            contract_of_graph.check(program, name)
        else:
            last = name
        yield name, change, did
    if last:
        verify(program, f"the passes, the last of them {last}")
        contract_of_graph.check(program, "the passes")


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
