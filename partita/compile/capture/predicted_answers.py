"""Predicted answers: what a question is likely to be answered, from what the call brings along.

How often an average was updated is known before a step runs. Where all that a question is computed
of is small, and an input that the step has not written, it is computed of the call's own values.
That is a guess: it spares a run and a capture where it is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils._python_dispatch import _disable_current_modes

from partita.tensor.op_facts import facts_of

from .fakes import local_of
from .symbolic import is_symbolic

__all__ = ["predict_answer"]

_SMALL = 64  # elements
_DEEP = 32  # calls


def predict_answer(
    question: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None]
) -> bool | None:
    """The likely answer; None where it cannot be told.

    Args:
        value_of: what an input of the graph is in the call, where that may be read.
    """
    known: dict[fx.Node, Any] = {}
    try:
        with _disable_current_modes(), Local(), torch.no_grad():
            return bool(_predict_value(question, value_of, known))
    except Exception:  # a guess raises nothing
        return None


class _Unknown(Exception):
    pass


def _predict_value(
    node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None], known: dict[fx.Node, Any]
) -> Any:
    if node not in known:
        if len(known) > _DEEP or any(facts_of(u.target).writes for u in node.users):
            raise _Unknown
        known[node] = found = _compute_node(node, value_of, known)
        if found is None or (isinstance(found, torch.Tensor) and found.numel() > _SMALL):
            raise _Unknown
    return known[node]


def _compute_node(
    node: fx.Node, value_of: Callable[[fx.Node], torch.Tensor | None], known: dict[fx.Node, Any]
) -> Any:
    if node.op == "placeholder":
        stands_in: Any = node.meta.get("val")
        if is_symbolic(stands_in):
            return stands_in.node.hint
        value = value_of(node)
        return None if value is None else local_of(value)
    target: Any = node.target
    facts = facts_of(target)
    sent = getattr(target, "namespace", "aten") not in ("aten", "prims")
    if node.op != "call_function" or facts.draws or facts.writes or sent:
        raise _Unknown
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _predict_value(n, value_of, known)
    )
    return target(*args, **kwargs)
