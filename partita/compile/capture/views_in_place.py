"""Views in place: a call that has a tensor itself be shown otherwise, as a view that is its value.

`x.t_()` writes nothing: who reads `x` afterwards reads what the call gives. Pooling to a single
place does so, too, for images whose channels come last.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from partita.tensor.op_facts import facts_of

__all__ = ["without_views_in_place"]

_aten = torch.ops.aten


def without_views_in_place(graph: fx.Graph) -> None:
    """Have calls give views, where nobody reads afterwards what they were given.

    An input's own shape is no value: what changes that is left as it is.
    """
    place: dict[fx.Node, int] = {}
    for i, node in enumerate(graph.nodes):
        place[node] = i
        node.target = _find_view_said(node.target)
    for node, i in place.items():
        if node.op != "call_function" or torch.Tag.inplace_view not in getattr(
            node.target, "tags", ()
        ):
            continue
        view, shown = _view_like(node.target), node.args[0]
        if view is None or not isinstance(shown, fx.Node) or shown.op != "call_function":
            continue
        if all(place[user] <= i for user in shown.users):
            node.target = view


def _find_view_said(target: Any) -> Any:
    """What does the same as `target` and says in its schema that it gives views; else `target`."""
    if not facts_of(target).shows_unsaid or not target._opname.startswith("unsafe_"):
        return target
    return getattr(getattr(_aten, target._opname.removeprefix("unsafe_")), target._overloadname)


@functools.lru_cache(maxsize=64)
def _view_like(target: Any) -> Any:
    """The operator that gives the view; None where there is none of the same arguments."""
    packet = getattr(_aten, target._opname.removesuffix("_"), None)
    for name in packet.overloads() if packet is not None else ():
        found = getattr(packet, name)
        if _arguments_of_schema(found) == _arguments_of_schema(target):
            return found
    return None


def _arguments_of_schema(target: Any) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in target._schema.arguments]
