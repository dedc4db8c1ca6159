"""Recompile reasons: why a step was captured again, as text.

A call is described in each respect that a program is made for (`describe_call`). A reason lists the
differences from the most similar description for which there is a program, and then the differences
of that program's guards: "x: shape (8, 4) became (6, 4); cfg['k']: 1 became 4".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from partita.comm import enabled_autocast_dtypes, read_autocast_state
from partita.tensor.dtensor import DTensor, short_dtype

from .content_keys import text_of
from .guards import Guards

if TYPE_CHECKING:
    from ..capture.state import State

__all__ = ["Description", "History", "describe_call", "explain_difference"]

Description = dict[str, dict[str, str]]
"""Of a call: for the name of each part, the text of each respect: {"x": {"shape": "(8, 4)"}}."""
_FIRST_CALL = "the first call"
_SHOWN = 3  # parts that differ, in a reason
_REMEMBERED = 1000
_IN_A_ROW = 3  # captures because of one value, after which it is taken for a counter


def describe_call(
    state: State, tensors: Sequence[Any], names: Sequence[str], call: Any
) -> Description:
    """The description of a call.

    Args:
        tensors, names: the tensors and values of the call, and their names.
        call: its (args, kwargs).
    """
    found: Description = {}
    first: dict[int, str] = {}
    for name, value in zip(names, tensors, strict=True):
        if isinstance(value, torch.Tensor):
            found[name] = _describe_tensor(value, first.setdefault(id(value), name), name)
        elif isinstance(value, float):  # an input: its value is no part of what it was made for
            found[name] = {"value": f"a {type(value).__name__}"}
        else:
            found[name] = {"value": text_of(value)}
    for name, value in state.settings():
        found[name] = {"value": text_of(value)}
    casts = map(short_dtype, enabled_autocast_dtypes(read_autocast_state()))
    found["the mode"] = {
        "gradients": "on" if torch.is_grad_enabled() else "off",
        "inference mode": "on" if torch.is_inference_mode_enabled() else "off",
        "autocast": ", ".join(casts) or "off",
        "default dtype": short_dtype(torch.get_default_dtype()),
    }
    found["the arguments"] = {"structure": str(pytree.tree_structure(call))}
    return found


def _describe_tensor(t: torch.Tensor, first: str, name: str) -> dict[str, str]:
    found = {"shape": str(tuple(t.shape))}
    with Local():
        if isinstance(t, DTensor):
            found["layout"] = t._spec.layout.brief()
            found["mesh"] = str(t._spec.wire.mesh)
        found |= {"dtype": short_dtype(t.dtype), "device": str(t.device)}
        found["requires_grad"] = str(t.requires_grad)
        found["strides"] = "contiguous" if t.is_contiguous() else str(t.stride())
        found |= {"conjugated": str(t.is_conj()), "negated": str(t.is_neg())}
        grad = t.grad if t.requires_grad and t.is_leaf else None
    found["gradient"] = "none" if grad is None else "there"
    if first != name:
        found["tensor"] = first
    return found


def explain_difference(now: Description, known: Iterable[tuple[Description, Guards | None]]) -> str:
    """How a call differs from the most similar one that has a program; of several, the latest."""
    nearest = min(
        reversed([*known]), key=lambda other: _count_differences(now, other[0]), default=None
    )
    if nearest is None:
        return _FIRST_CALL
    was, guards = nearest
    differences = _list_differences(now, was)
    if guards is not None and len(differences) < _SHOWN:
        names = {text.split(":")[0] for text in differences}
        differences += [t for t in guards.differences(_SHOWN) if t.split(":")[0] not in names]
    text = "; ".join(differences[:_SHOWN]) or "something is not as it was"
    return text if len(differences) <= _SHOWN else f"{text}; and {len(differences) - _SHOWN} more"


def _count_differences(now: Description, was: Description) -> int:
    return sum(
        len(now.get(name, {}).items() ^ was.get(name, {}).items()) for name in {**now, **was}
    )


def _list_differences(now: Description, was: Description) -> list[str]:
    found = []
    for name in dict.fromkeys([*now, *was]):
        before, after = was.get(name, {}), now.get(name, {})
        if not before or not after:
            found.append(f"{name} is {'new' if after else 'gone'}")
        elif before != after:
            found.append(f"{name}: {_describe_change(before, after)}")
    return found


def _describe_change(was: dict[str, str], now: dict[str, str]) -> str:
    """The first respect in which two descriptions of a part differ."""
    for what in dict.fromkeys([*was, *now]):
        before, after = was.get(what), now.get(what)
        if before == after:
            continue
        if what == "value":
            return f"{_shorten_text(str(before))} became {_shorten_text(str(after))}"
        if what == "structure":
            return "put together in another way"
        if what == "mesh" or (what == "layout" and None in (before, after)):
            return "a plain tensor became a DTensor" if after else "a DTensor became a plain tensor"
        if what == "tensor":
            return f"the same tensor as {after}" if after else f"not the same tensor as {before}"
        return f"{what} {before} became {after}"
    raise AssertionError("they are equal")


def _is_int(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def _shorten_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


class History:
    """The captures of one step, and their reasons. Warns where a step is captured too often.

    Args:
        what: the step's name, in warnings.

    Attributes:
        reasons: of the last `_REMEMBERED` captures.
    """

    def __init__(self, what: str):
        self.what = what
        self.reasons: list[str] = []
        self._described: dict[Any, tuple[Description, Guards | None]] = {}
        self._identities: dict[Any, int] = {}  # of each described program, a hash of its conditions
        self._dropped: set[int] = set()  # likewise
        self._warned = False
        # Of each capture since a program was reused, the names that changed.
        self._changed_in_a_row: list[set[str]] = []
        self._warned_of: set[str] = set()

    def reason(self, describe: Callable[[], Description]) -> str:
        """Why a call needs a new program; `describe` says what it is."""
        if not self._described:
            return _FIRST_CALL
        return explain_difference(describe(), self._described.values())

    def note_capture(
        self, reason: str, key: Any, description: Description, guards: Guards | None, keep: int
    ) -> None:
        """Note that a program was captured.

        Args:
            reason: why.
            key: the call's signature, and what tells programs of one signature apart.
            keep: how many programs the step keeps.
        """
        self._look_for_counters(reason, description)
        identity = hash((key[0], None if guards is None else guards.digest()))
        if identity in self._dropped:
            reason += " (captured before, and dropped)"
            self._warn_of_recapture(reason, keep)
        self._described[key] = description, guards
        self._identities[key] = identity
        self.reasons.append(reason)
        del self.reasons[:-_REMEMBERED]

    def note_reuse(self) -> None:
        """Note that a program was reused."""
        self._changed_in_a_row.clear()

    def _look_for_counters(self, reason: str, description: Description) -> None:
        """Warn of a Python value, or of an int argument, that differs in each call."""
        names = {text.split(": ")[0] for text in reason.split("; ") if " became " in text}
        ints = {name for name in names if _is_int(description.get(name, {}).get("value", ""))}
        changed = ints | {name for name in names if name not in description}
        self._changed_in_a_row.append(changed)
        always_changed = set.intersection(*self._changed_in_a_row[-_IN_A_ROW:]) - self._warned_of
        if len(self._changed_in_a_row) < _IN_A_ROW or not always_changed:
            return
        self._warned_of |= always_changed
        names_text = " or ".join(sorted(always_changed))
        advice = (
            f"An int is captured by its value: give {names_text} as a float or a tensor"
            if always_changed <= ints
            else f"If the step does not need {names_text}, keep it apart from what the step reads; "
            "if it does, and it is a number, give it as an argument, as a float or a tensor"
        )
        warnings.warn(
            f"{self.what} is captured at each call: {reason}. {advice}",
            stacklevel=6,  # of the call of the step
        )

    def note_drop(self, key: Any) -> None:
        """Note that a program was dropped."""
        self._described.pop(key, None)
        if len(self._dropped) >= _REMEMBERED:
            self._dropped.clear()
        self._dropped.add(self._identities.pop(key))

    def _warn_of_recapture(self, reason: str, keep: int) -> None:
        if not self._warned:
            self._warned = True
            shapes = ": shape " in reason
            fewer = ", or bring batches to fewer shapes with pt.pad_to_bucket" if shapes else ""
            warnings.warn(
                f"{self.what} is captured again and again: {reason}; keep={keep} programs are "
                f"kept. Raise keep={fewer}",
                stacklevel=6,  # of the call of the step
            )
