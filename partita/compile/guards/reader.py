"""The reader of a step under capture, as those see it who tell it what the step reads.

`ReadRecord` is the one there is. Each of the files that it is made of knows it by this alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from partita.layout import Fix

from ..errors import CaptureError
from .places import Place

__all__ = ["CallReader", "FunctionReader", "StateReader"]


class FunctionReader(Protocol):
    """Reads what functions name, as they are called."""

    codes: dict[int, CodeType]
    all_at_once: bool
    constants: set[str]

    def note_asked_names(self, names: set[str]) -> None:
        """Attributes of these names are asked for in C."""

    def reach_function(self, f: FunctionType, name: str) -> None:
        """A function may be called."""

    def reach_functions(self, kind: type, name: str) -> None:
        """So may those of a class."""

    def reach_cached(self, f: Any, name: str) -> None:
        """So may one of which results are kept."""

    def reach_class(self, kind: type) -> None:
        """A class is reached, of which anything may be read."""

    def reach_space(self, space: Any, name: str) -> None:
        """So is a module of the user's."""

    def entered(self, frame: FrameType) -> None:
        """A function begins."""

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """All of a module's names may be read."""


class CallReader(Protocol):
    """Hears what a step calls."""

    def refuse_if_random(self, value: Any, name: str) -> None:
        """`value` is reached, of which the calls may not be heard."""


class StateReader(Protocol):
    """Notes what a step reads.

    Attributes:
        functions: reads what functions name.
        calls: hears what is called.
        huge: containers of which not all is looked at, by identity: name and value.
        snapshots: of what was reached.
        by_name: whether what is reached now is perhaps not what the step reads.
        error: what is raised when the step is over, whoever caught it.
        before_backward: called where a backward begins, with the tensors whose gradients are asked.
    """

    huge: dict[int, tuple[str, Any]]
    snapshots: Any
    by_name: bool
    error: CaptureError | None
    before_backward: Callable[[Any], None]

    @property
    def functions(self) -> FunctionReader: ...

    @property
    def calls(self) -> CallReader: ...

    def read(self, owner: Any, name: str) -> None:
        """An attribute is read."""

    def read_at(self, place: Place, value: Any, alone: bool = False) -> None:
        """A place is read, at which `value` stands; with what is in it, but where `alone`."""

    def read_of_class(self, kind: type, name: str) -> Any:
        """An attribute of a class is read: its value, MISSING where there is none."""

    def reach(self, value: Any, name: str) -> None:
        """The step has `value` in its hands."""

    def reach_object(self, value: Any, name: str) -> None:
        """It has an object, of which attributes may be read."""

    def take_whole(self, owner: Any) -> None:
        """All attributes of an object that was reached may be read."""

    def offer(self, place: Place, value: float, item: bool = False) -> None:
        """A float stands at a place, for which another may stand; an `item` of a container."""

    def keep(self, value: Any) -> None:
        """What is reached here is no concern."""

    def kinds(self) -> list[type]:
        """The types of the objects that were reached."""

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Raise CaptureError: no guard can hold what the step reads."""

    def quietly(self) -> AbstractContextManager[None]:
        """Within, attributes are read by the reader, and not by the step."""

    def found_by_name(self) -> AbstractContextManager[None]:
        """Within, what is reached is perhaps not what the step reads: its name is used."""
