"""Events of a run, as its log has them: what each must hold for a report to be made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from partita.layout import Layout, Mesh

__all__ = ["check_event", "parse_mesh"]

Check = Callable[[Any], None]
"""Raises `_WrongError` where a value is not as it should be."""


class _WrongError(Exception):
    """A value that is not as it should be.

    Attributes:
        wanted: what it should be.
        at: where it is within the event, such as `["moves"][3]["nbytes"]`.
    """

    def __init__(self, value: Any, wanted: str):
        super().__init__(wanted)
        self.value, self.wanted, self.at = value, wanted, ""


def check_event(event: Any, facts: dict[str, Any]) -> None:
    """Raise ValueError where an event has not what a report shows of it.

    Events that no report shows, and what more an event has, are nobody's concern.
    """
    if not isinstance(event, str):
        raise ValueError(f"no event is called {_shorten(event)}")
    try:
        _EVENTS.get(event, _any)(facts)
    except _WrongError as wrong:
        said = f"no {wrong.at}"
        if wrong.value is not _ABSENT:
            said = f"{wrong.at} = {_shorten(wrong.value)}, where {wrong.wanted} belongs"
        raise ValueError(f'the event "{event}" has {said}') from None


def parse_mesh(text: str) -> Mesh:
    """The mesh that prints so: "dp=2 tp=4". Raises ValueError."""
    axes = [axis.split("=") for axis in text.split()]
    return Mesh(tuple(name for name, _ in axes), tuple(int(size) for _, size in axes))


def _shorten(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


# -- what a value should be ------------------------------------------------------------------------

_ABSENT = object()


def _any(value: Any) -> None:
    pass


def _text(value: Any) -> None:
    if not isinstance(value, str):
        raise _WrongError(value, "a text")


def _number(value: Any) -> None:
    """Also NaN and infinity, which a loss may be."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _WrongError(value, "a number")
    try:
        float(value)
    except OverflowError:
        raise _WrongError(value, "a number that a float can hold") from None


def _finite(value: Any) -> None:
    _number(value)
    if not math.isfinite(value):
        raise _WrongError(value, "a finite number")


def _whole(value: Any) -> None:
    _finite(value)
    if value != int(value):
        raise _WrongError(value, "a whole number")


def _within(at: str, check: Check, value: Any) -> None:
    """Check a part of a value; the error says where it is."""
    try:
        check(value)
    except _WrongError as wrong:
        wrong.at = at + wrong.at
        raise


def _key(name: str) -> str:
    return f"[{json.dumps(name)}]"


def _list_of(check: Check) -> Check:
    def check_list(value: Any) -> None:
        if not isinstance(value, list):
            raise _WrongError(value, "a list")
        for i, one in enumerate(value):
            _within(f"[{i}]", check, one)

    return check_list


def _row_of(*checks: Check, least: int | None = None) -> Check:
    """A list with a value for each check; those behind the first `least` may be left out."""
    wanted = f"a list of {len(checks)}"

    def check_row(value: Any) -> None:
        if not isinstance(value, list):
            raise _WrongError(value, wanted)
        if not (len(checks) if least is None else least) <= len(value) <= len(checks):
            raise _WrongError(value, wanted)
        for i, (check, one) in enumerate(zip(checks, value, strict=False)):
            _within(f"[{i}]", check, one)

    return check_row


def _table_of(check: Check) -> Check:
    """An object whose values are alike."""

    def check_table(value: Any) -> None:
        if not isinstance(value, dict):
            raise _WrongError(value, "an object")
        for name, one in value.items():
            _within(_key(name), check, one)

    return check_table


def _object(also: dict[str, Check] | None = None, **checks: Check) -> Check:
    """An object that has these, and may have those in `also`."""

    def check_object(value: Any) -> None:
        if not isinstance(value, dict):
            raise _WrongError(value, "an object")
        for name, check in checks.items():
            _within(_key(name), _there if name not in value else check, value.get(name))
        for name, check in (also or {}).items():
            if name in value:
                _within(_key(name), check, value[name])

    return check_object


def _there(value: Any) -> None:
    raise _WrongError(_ABSENT, "")


def _memory(value: Any) -> None:
    """Memory of a step: of each class a number for each place."""
    if value is None:  # of a step that was not captured
        return
    _MEMORY(value)
    for name, bytes_at in value["live"].items():
        if len(bytes_at) != len(value["places"]):
            wrong = _WrongError(bytes_at, f"a number for each of {len(value['places'])} places")
            wrong.at = f'["live"]{_key(name)}'
            raise wrong


def _parameter(value: Any) -> None:
    """[name, layout, mesh, bytes]; the layout is one over that mesh."""
    _PARAMETER(value)
    try:
        mesh = parse_mesh(value[2])
    except ValueError:
        raise _WrongError(value[2], "a mesh (dp=2 tp=4)") from None
    try:
        Layout.parse(value[1]).check_axes(mesh)
    except ValueError:
        raise _WrongError(value[1], f"a layout over {mesh}") from None


_PAIR = _row_of(_finite, _finite)
_PARAMETER = _row_of(_text, _text, _text, _finite)
_HOLDER = _object(name=_text, kind=_text, source=_text, nbytes=_finite)
_MEMORY = _object(
    places=_list_of(_text),
    held=_table_of(_finite),
    live=_table_of(_list_of(_finite)),
    holders=_list_of(_HOLDER),
)
_MOVE = _object(source=_text, kind=_text, axes=_text, reason=_text, nbytes=_finite, count=_finite)
_PASS = _object(name=_text, promise=_text, did=_text, collectives=_PAIR, sent=_PAIR, peak=_PAIR)
_WORK = _row_of(_text, _text, _finite, _finite, _text, _text, _text, _finite, least=5)

_EVENTS: dict[str, Check] = {
    "begin": _object({"time": _finite}, options=_table_of(_any)),
    "ready": _object({"parameters": _whole}),
    "step": _object(
        {"tokens_per_second": _finite, "mfu": _finite},
        step=_whole,
        loss=_number,
        seconds=_finite,
        nbytes=_finite,
    ),
    "layouts": _object(parameters=_list_of(_parameter)),
    "moves": _object(moves=_list_of(_MOVE)),
    "graph": _object(memory=_memory, passes=_list_of(_PASS)),
    "timeline": _object(events=_list_of(_WORK), source=_text),
    "sample": _object(prompt=_text, text=_text),
    "stopped": _object(message=_text),
}
