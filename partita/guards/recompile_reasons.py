"""Recompile reasons: why a call needs another capture, as text.

`describe_call` describes a call. `CaptureHistory`, the record of a step's captures, compares a call
with the most similar one that has a program. It stores the difference, and warns if a step is
captured too often.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.utils import _pytree as pytree

from partita.capture.graph_inputs import user_attributes_of
from partita.comm import enabled_autocast_dtypes, read_autocast_state
from partita.graph.torch_settings import SETTINGS, read_settings
from partita.tensor.dtensor import DTensor, short_dtype
from partita.tensor.dtensor_gradients import user_hooks_of

from .guards import Guards, enters_padded, find_owner
from .values import brief, shorten_text, text_of

if TYPE_CHECKING:
    from .inputs import State

Description = dict[str, dict[str, str]]
"""A call's description: for each part, a text for each property, as {"x": {"shape": "(8, 4)"}}."""
_FIRST_CALL = "the first call"
_OTHER_OBJECTS = "two places or arguments are one object, and were two, or the other way round"
_SHOWN = 3  # the most differing parts that a reason lists
_REMEMBERED = 1000
_IN_A_ROW = 3  # captures in a row because of one value, after which it counts as a counter


def describe_call(
    state: State, tensors: Sequence[Any], names: Sequence[str], call: Any
) -> Description:
    """Returns a readable description of a call; `CaptureHistory` compares two to say what changed.

    Args:
        state: the modules, optimizers and tensors that the step reaches.
        tensors, names: the leaves (tensors and numbers) of the call, and their names.
        call: the (args, kwargs) of the call.
    """
    found: Description = {}
    first: dict[int, str] = {}
    for name, value in zip(names, tensors, strict=True):
        if isinstance(value, torch.Tensor):
            found[name] = _describe_tensor(value, first.setdefault(id(value), name), name)
        elif isinstance(value, float):  # an input, so that programs do not depend on its value
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
        **{name: str(value) for name, value in zip(SETTINGS, read_settings(), strict=True)},
    }
    found["the arguments"] = {"structure": str(pytree.tree_structure(call))}
    return found


def _describe_tensor(t: torch.Tensor, first: str, name: str) -> dict[str, str]:
    found = {"shape": str(tuple(t.shape))}
    with local_ops():
        if isinstance(t, DTensor):
            found["layout"] = t._spec.layout.brief()
            found["mesh"] = str(t._spec.wire.mesh)
        found |= {"dtype": short_dtype(t.dtype), "device": str(t.device)}
        found["requires_grad"] = str(t.requires_grad)
        strides = "contiguous" if enters_padded(t) or t.is_contiguous() else str(t.stride())
        found["strides"] = strides
        found |= {"conjugated": str(t.is_conj()), "negated": str(t.is_neg())}
        grad = t.grad if t.requires_grad and t.is_leaf else None
    found["gradient"] = "none" if grad is None else "there"
    hooks = user_hooks_of(find_owner(t)) if t.requires_grad else ()
    names = user_attributes_of(t)
    if hooks or names:
        found |= {"hooks": ", ".join(map(brief, hooks)) or "none", "attributes": ", ".join(names)}
    if first != name:
        found["tensor"] = first
    return found


def _explain_difference(
    now: Description,
    leaves: Sequence[Any],
    known: Iterable[tuple[Description, Guards | None]],
) -> str:
    """Returns how a call differs from the most similar one that has a program, as text."""
    nearest = min(
        reversed([*known]), key=lambda other: _count_differences(now, other[0]), default=None
    )
    if nearest is None:
        return _FIRST_CALL
    was, guards = nearest
    differences = _list_differences(now, was)
    if guards is not None and len(differences) < _SHOWN:
        names = {text.split(":")[0] for text in differences}
        # If leaves are new or gone, leaves with one index are not comparable.
        found = guards.differences(leaves if now.keys() == was.keys() else None, _SHOWN)
        differences += [text for text in found if text.split(":")[0] not in names]
    text = "; ".join(differences[:_SHOWN]) or _OTHER_OBJECTS
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
    """Returns the first difference between two descriptions of a part, as text."""
    for what in dict.fromkeys([*was, *now]):
        before, after = was.get(what), now.get(what)
        if before == after:
            continue
        if what == "value":
            return f"{shorten_text(str(before))} became {shorten_text(str(after))}"
        if what == "structure":
            return "put together in another way"
        if what == "mesh" or (what == "layout" and None in (before, after)):
            return "a plain tensor became a DTensor" if after else "a DTensor became a plain tensor"
        if what == "tensor":
            return f"the same tensor as {after}" if after else f"not the same tensor as {before}"
        return f"{what} {before} became {after}"
    raise AssertionError("they are equal")


_READ_AS_NUMBER = re.compile(r"is read as a number| == -?[\d.e+-]+ at ")
"""Matches a reason by which a program is for one value of a float only."""


class CaptureHistory:
    """The captures of one step and the reason of each. It warns if a step is captured too often.

    Args:
        what: the step's name, in warnings.

    Attributes:
        reasons: the reasons of the last `_REMEMBERED` captures.
    """

    def __init__(self, what: str):
        self.what = what
        self.reasons: list[str] = []
        self._described: dict[Any, tuple[Description, Guards | None]] = {}
        self._identities: dict[Any, int] = {}  # of each described program, a hash of its conditions
        self._dropped: set[int] = set()  # the same hashes of programs that were dropped
        self._warned = False
        # For each capture since a program was reused, the names that changed.
        self._changed_in_a_row: list[set[str]] = []
        self._warned_of: set[str] = set()

    def reason(self, describe: Callable[[], Description], leaves: Sequence[Any]) -> str:
        """Returns why a call needs a new capture, compared with earlier captures.

        Args:
            describe: a function that returns the description of the call.
            leaves: the leaves (tensors and numbers) of the call.
        """
        if not self._described:
            return _FIRST_CALL
        return _explain_difference(describe(), leaves, self._described.values())

    def note_capture(
        self,
        reason: str,
        key: Any,
        description: Description,
        guards: Guards | None,
        numbers: int,
        keep: int,
    ) -> None:
        """Records that the step was captured, and why. Warns if this happens too often.

        Args:
            reason: the reason of the capture.
            key: a pair of the call's signature and the number of the capture.
            description: the description of the call.
            guards: the guards of the new program; None if there are none.
            numbers: the result of `Conditions.identify_numbers`.
            keep: the most programs that the step keeps.
        """
        self._look_for_counters(reason, description)
        identity = hash((key[0], None if guards is None else guards.digest(), numbers))
        if identity in self._dropped:
            reason += " (captured before, and dropped)"
            self._warn_of_recapture(reason, keep)
        self._described[key] = description, guards
        self._identities[key] = identity
        self.reasons.append(reason)
        del self.reasons[:-_REMEMBERED]

    def note_reuse(self) -> None:
        """Records that a call has run an existing program, and resets the count for the warning."""
        self._changed_in_a_row.clear()

    def _look_for_counters(self, reason: str, description: Description) -> None:
        """Warns about values that differ in each call.

        These may be Python values, int arguments, and floats that are read as numbers.
        """
        names = {text.split(": ")[0] for text in reason.split("; ") if " became " in text}
        values = {name: description.get(name, {}).get("value", "") for name in names}
        ints = {name for name, text in values.items() if text.removeprefix("-").isdigit()}
        floats = {name for name in names if _READ_AS_NUMBER.search(reason)}
        changed = ints | floats | {name for name in names if name not in description}
        self._changed_in_a_row.append(changed)
        always_changed = set.intersection(*self._changed_in_a_row[-_IN_A_ROW:]) - self._warned_of
        if len(self._changed_in_a_row) < _IN_A_ROW or not always_changed:
            return
        self._warned_of |= always_changed
        names_text = " or ".join(sorted(always_changed))
        if always_changed <= ints:
            advice = f"An int is captured by its value: pass {names_text} as a float or a tensor"
        elif always_changed <= floats:
            advice = f"Create a tensor from {names_text} outside of the step, and pass the tensor"
        else:
            advice = (
                f"If {names_text} is a number, pass it as an argument, as a float or a tensor. "
                "If it is a function or an object, create it once, before the step. "
                "If the step does not need it, do not read it in the step"
            )
        warnings.warn(
            f"{self.what} is captured at each call: {reason}. {advice}",
            stacklevel=6,  # the line that calls the step
        )

    def note_drop(self, key: Any) -> None:
        """Records that the step no longer keeps the program with this key (see `note_capture`)."""
        self._described.pop(key, None)
        if len(self._dropped) >= _REMEMBERED:
            self._dropped.clear()
        self._dropped.add(self._identities.pop(key))

    def _warn_of_recapture(self, reason: str, keep: int) -> None:
        if not self._warned:
            self._warned = True
            shapes = ": shape " in reason
            fewer = ", or pad batches to fewer shapes with pt.pad_to_bucket" if shapes else ""
            warnings.warn(
                f"{self.what} is captured again and again: {reason}; keep={keep} programs are "
                f"kept. Raise keep={fewer}",
                stacklevel=6,  # of the call of the step
            )
