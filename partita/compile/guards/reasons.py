"""Recompile reasons: in which words it is said why a step was captured again."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
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

__all__ = ["Description", "History", "described", "reason_of"]

Description = dict[str, dict[str, str]]
"""Of a call: by the name of each part of it, what it is in each respect."""
_SHOWN = 3  # parts that differ, in a reason
_REMEMBERED = 1000
_IN_A_ROW = 3  # captures for another value of the same entry, after which it is taken for a counter


def described(state: State, tensors: Sequence[Any], names: Sequence[str], call: Any) -> Description:
    """All that a program is made for, as a person would say it.

    Args:
        tensors, names: the tensors and values of the call, and what they are called.
        call: its arguments.
    """
    found: Description = {}
    first: dict[int, str] = {}
    for name, value in zip(names, tensors, strict=True):
        if isinstance(value, torch.Tensor):
            found[name] = _describe_tensor(value, first.setdefault(id(value), name), name)
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
    said = {"shape": str(tuple(t.shape))}
    with Local():
        if isinstance(t, DTensor):
            said["layout"] = t._spec.layout.brief()
            said["mesh"] = str(t._spec.wire.mesh)
        said |= {"dtype": short_dtype(t.dtype), "device": str(t.device)}
        said["requires_grad"] = str(t.requires_grad)
        said["strides"] = "contiguous" if t.is_contiguous() else str(t.stride())
        said |= {"conjugated": str(t.is_conj()), "negated": str(t.is_neg())}
        grad = t.grad if t.requires_grad and t.is_leaf else None
    said["gradient"] = "none" if grad is None else "there"
    if first != name:
        said["tensor"] = first
    return said


def reason_of(now: Description, known: Iterable[tuple[Description, Guards | None]]) -> str:
    """How a call differs from the nearest of those for which there is a program, the latest."""
    nearest = min(
        reversed([*known]), key=lambda other: _count_differences(now, other[0]), default=None
    )
    if nearest is None:
        return "the first call"
    was, guards = nearest
    told = _list_differences(now, was)
    if guards is not None and len(told) < _SHOWN:
        said = {text.split(":")[0] for text in told}
        told += [t for t in guards.differences(_SHOWN) if t.split(":")[0] not in said]
    text = "; ".join(told[:_SHOWN]) or "something is not as it was"
    return text if len(told) <= _SHOWN else f"{text}; and {len(told) - _SHOWN} more"


def _count_differences(now: Description, was: Description) -> int:
    return sum(
        len(now.get(name, {}).items() ^ was.get(name, {}).items()) for name in {**now, **was}
    )


def _list_differences(now: Description, was: Description) -> list[str]:
    found = []
    for name in dict.fromkeys([*now, *was]):
        one, other = was.get(name, {}), now.get(name, {})
        if not one or not other:
            found.append(f"{name} is {'new' if other else 'gone'}")
        elif one != other:
            found.append(f"{name}: {_describe_change(one, other)}")
    return found


def _describe_change(one: dict[str, str], other: dict[str, str]) -> str:
    """The first respect in which they differ: a layout's change is told by its shape, too."""
    for what in dict.fromkeys([*one, *other]):
        before, after = one.get(what), other.get(what)
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


def _shorten_text(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]}...{text[-17:]}"


class History:
    """What was captured for a step, and why.

    Attributes:
        reasons: for each capture, the last `_REMEMBERED` of them, why it was made.
    """

    def __init__(self, what: str):
        self.what = what
        self.reasons: list[str] = []
        self._kept: dict[Any, tuple[Description, Guards | None]] = {}
        self._dropped: set[int] = set()
        self._warned = False
        self._row: list[set[str]] = []  # of captures of which none was used by a second call
        self._told: set[str] = set()

    def reason(self, description: Description) -> str:
        """Why such a call needs a program of its own."""
        return reason_of(description, self._kept.values())

    def note_capture(
        self, reason: str, key: Any, description: Description, guards: Guards | None, keep: int
    ) -> None:
        """A program was made, one of `keep` that are kept.

        Args:
            reason: why.
            key: the call's signature, and what tells programs of one signature apart.
        """
        self._look_for_counters(reason, description)
        if hash(key[0]) in self._dropped:
            reason += " (captured before, and dropped)"
            self._warn_of_recapture(reason, keep)
        self._kept[key] = description, guards
        self.reasons.append(reason)
        del self.reasons[:-_REMEMBERED]

    def note_reuse(self) -> None:
        """A program serves another call."""
        self._row.clear()

    def _look_for_counters(self, reason: str, description: Description) -> None:
        """Warn of what Python holds that is another value in each call."""
        names = {text.split(": ")[0] for text in reason.split("; ") if " became " in text}
        self._row.append({name for name in names if name not in description})
        always = set.intersection(*self._row[-_IN_A_ROW:]) - self._told
        if len(self._row) >= _IN_A_ROW and always:
            self._told |= always
            warnings.warn(
                f"{self.what} is captured at each call: {reason}. If the step does not need "
                f"{' or '.join(sorted(always))}, keep it apart from what the step reads; if it "
                "does, give it as an argument, as a tensor or a float",
                stacklevel=6,  # of the call of the step
            )

    def note_drop(self, key: Any) -> None:
        """This program is not kept any longer."""
        self._kept.pop(key, None)
        if len(self._dropped) >= _REMEMBERED:
            self._dropped.clear()
        self._dropped.add(hash(key[0]))

    def _warn_of_recapture(self, reason: str, keep: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.what} is captured again and again: {reason}; keep={keep} programs are "
                "kept. Raise keep=, or bring batches to fewer shapes with pt.pad_to_bucket",
                stacklevel=6,  # of the call of the step
            )
