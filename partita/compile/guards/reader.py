"""Protocols of the read record, as the files see it that tell it what a step reads.

`record.ReadRecord` is the only `StateReader`. It imports the files that implement parts of it, and
these know it by its protocol alone, so that there is no circle of imports.
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
    """Records what functions name (`functions.Functions`)."""

    codes: dict[int, CodeType]
    reads_ahead: bool
    constants: set[str]

    def note_asked_names(self, names: set[str]) -> None:
        """Note names that objects may be asked for."""

    def reach_function(self, f: FunctionType, name: str) -> None:
        """Note a function that may be called."""

    def reach_methods(self, kind: type, name: str) -> None:
        """Note the methods of a class."""

    def reach_cached_function(self, f: Any, name: str) -> None:
        """Enter a function whose results are cached."""

    def reach_class(self, kind: type) -> None:
        """Record the attributes of a class by the names in use."""

    def reach_namespace(self, space: Any, name: str) -> None:
        """Record the variables of a module or function by the names in use."""

    def enter_frame(self, frame: FrameType) -> None:
        """Record what a function names: it begins to run."""

    def reach_globals(self, variables: dict[str, Any]) -> None:
        """Record all globals of a module."""


class CallReader(Protocol):
    """Watches what a step calls (`calls.Calls`)."""

    def refuse_if_random(self, value: Any, name: str) -> None:
        """Raise CaptureError if `value` is a random generator."""


class StateReader(Protocol):
    """Records what a step reads.

    Attributes:
        functions: records what functions name.
        calls: watches what is called.
        huge: by id, name and value of containers that are not compared deeply.
        snapshots: `writes.Snapshots` of what was reached.
        reached_by_name: see `reaching_by_name`.
        error: the refusal to raise when the step is over, whoever caught it meanwhile.
        before_backward: called where a backward begins, with the tensors whose gradients are asked.
    """

    huge: dict[int, tuple[str, Any]]
    snapshots: Any
    reached_by_name: bool
    error: CaptureError | None
    before_backward: Callable[[Any], None]

    @property
    def functions(self) -> FunctionReader: ...

    @property
    def calls(self) -> CallReader: ...

    def read_attribute(self, owner: Any, name: str) -> None:
        """Record that an attribute is read."""

    def read_place(self, place: Place, value: Any, shallow: bool = False) -> None:
        """Record that a place is read, where `value` stands; reach that unless `shallow`."""

    def read_class_attribute(self, kind: type, name: str) -> Any:
        """Record that an attribute of a class is read; its value, or MISSING."""

    def reach_value(self, value: Any, name: str) -> None:
        """Record what the step can read of `value` without reading an attribute."""

    def reach_object(self, value: Any, name: str) -> None:
        """Record the attributes of an object from now on, as they are read."""

    def read_all_attributes(self, owner: Any) -> None:
        """Record all attributes of an object that was reached."""

    def offer_float(self, place: Place, value: float, item: bool = False) -> None:
        """Let capture replace a float at a place by a symbolic one; an `item` is of a container."""

    def ignore(self, value: Any) -> None:
        """Do not record what `value` leads to."""

    def reached_types(self) -> list[type]:
        """The types of the objects that were reached."""

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Raise CaptureError: no guard can cover what the step reads."""

    def without_recording(self) -> AbstractContextManager[None]:
        """Within, reads of attributes are not the step's, and not recorded."""

    def reaching_by_name(self) -> AbstractContextManager[None]:
        """Within, values are reached since code uses their names; the step may not read them."""
