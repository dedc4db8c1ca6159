"""Checks of a capture run: what the step asked and called that a graph cannot answer.

`check_truth` and `check_arguments` refuse `is` where it would compare a stand-in: `x.item() is
True`, and an argument (containers are made anew for the step) with an object known by name.
`check_constants` and `check_operators` look at the traced graph before anything is done to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from partita.layout import Fix
from partita.tensor.forms import find_unknown_effect
from partita.tensor.op_facts import facts_of

from ..arguments import is_taken_apart
from ..errors import not_captured
from ..graph_nodes import note_of
from ..guards.codes import asks_whether_true, asks_which_object
from ..guards.places import Place
from ..verify import SPACES
from .refusals import not_an_input

__all__ = ["check_arguments", "check_constants", "check_operators", "check_truth"]


def check_constants(graph: fx.Graph) -> None:
    """Raise CaptureError if a tensor that is no input is a constant of the graph.

    Tensors that a step makes of numbers are copied first (`lift_fresh_copy`). Fake modes refuse any
    other tensor, but a proxy mode handles some calls of one-element tensors itself.
    """
    for node in graph.find_nodes(op="get_attr"):
        for user in node.users:
            if user.op == "call_function" and not facts_of(user.target).lifts:
                raise not_an_input(note_of(user).source)


def check_operators(graph: fx.Graph) -> None:
    """Raise CaptureError if the step calls an operator that is not torch's own, and of which it is
    not known that it only makes tensors of its arguments."""
    for node in graph.nodes:
        space = getattr(node.target, "namespace", "aten")
        if node.op != "call_function" or space in (*SPACES, "profiler"):
            continue
        if effect := find_unknown_effect(node.target):
            raise not_captured(
                f"the step calls {node.target}, an operator of a library of its own",
                effect,
                Fix(
                    "torch.library.custom_op(..., mutates_args=())",
                    "for what only gives new tensors",
                ),
                Fix("call it outside the step", "before or after, or between compiled regions"),
                place=note_of(node).source,
            )


def check_truth(codes: Iterable[CodeType], line: str) -> None:
    """Raise CaptureError if a function asks `is True` in a step that calls `.item()` at `line`."""
    for asking in filter(asks_whether_true, codes if line else ()):
        raise not_captured(
            f"{asking.co_name} asks whether something `is True`, in a step that reads a value",
            "what .item() gives has no value while a step is captured, and is not True itself",
            Fix("return x.item()", "and ask outside of the step"),
            place=line,
        )


def check_arguments(call: Any, places: Iterable[Place], codes: Iterable[CodeType]) -> None:
    """Raise CaptureError if the step may ask whether an argument is an object known by name.

    Containers and objects of tensors are made anew for the step, which would find two.

    Args:
        call: the arguments and keyword arguments.
        places: what the step reads.
        codes: of the functions that ran.
    """
    asking = next(filter(asks_which_object, codes), None)
    if asking is None:
        return
    made_anew = _made_anew(call)
    for place in places if made_anew else ():
        if any(place.value is v or type(place.value) is _own_class(v) for v in made_anew):
            raise not_captured(
                f"{asking.co_name} asks whether something is another object, an argument is a "
                f"{type(place.value).__name__}, and so is {place.name}",
                "a step is given its arguments made anew: `is` would find two objects for one",
                Fix("pass it, or read it by its name", "not both"),
                place=f"{asking.co_filename}:{asking.co_firstlineno}",
            )


def _own_class(value: Any) -> type | None:
    """The class of an object of the user's; None of a list or dictionary."""
    return None if type(value).__module__ == "builtins" else type(value)


def _made_anew(call: Any) -> list[Any]:
    """The containers and objects among the arguments that `flatten_call` takes apart."""
    found: list[Any] = []

    def look(value: Any) -> bool:
        apart = not pytree.tree_is_leaf(value) or is_taken_apart(value)
        if apart and not isinstance(value, tuple):
            found.append(value)
        return False

    pytree.tree_leaves(call, is_leaf=look)
    return found
