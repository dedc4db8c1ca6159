"""Records of what a step reads of Python while it is captured.

Functions are entered as they are called: the globals, cells and defaults that they name are read
then. Attributes are recorded as they are read (see `instrument`). A container is taken whole when
it is first reached. What is read is settled, as the guards of a program, when capture is over and
everything stands again where it was.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partita.layout import Fix

from ..errors import CaptureError
from . import places
from .calls import Calls, unguarded
from .codes import is_recorded
from .expected import MISSING
from .functions import Functions
from .guards import Guards
from .instrument import instrument, reads_by_itself, recorded_by, release
from .modes import function_modes
from .objects import (
    INSIDE,
    PLAIN,
    WITH_FIELDS,
    dict_of,
    dict_that_has,
    has_settings,
    holds_more,
    is_slot,
    may_be_hidden,
    slots_of,
)
from .places import Place
from .reached_objects import has_tensor_keys, reach_by_kind
from .writes import Snapshots

__all__ = ["ReadRecord"]

_MODULES = vars(nn.modules.module)
_HOOKS_OF_ALL = [  # private torch: hooks of all modules, which each call of a module looks at
    key for key in _MODULES if key.startswith("_global_") and key.endswith("_hooks")
]
_WEAK = (
    weakref.ref,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    weakref.ProxyType,
    weakref.CallableProxyType,
)


@dataclass(eq=False)
class _Known:
    """An object that was there before the step.

    Attributes:
        names: the attributes that were read.
        held: what its `__dict__` held when it was reached.
        slots: the descriptors of its `__slots__`.
        whole: whether all of its attributes are taken as read.
    """

    value: Any
    name: str
    held: dict[str, Any]
    slots: dict[str, Any]
    whole: bool = False
    names: dict[str, None] = field(default_factory=dict)


class ReadRecord:
    """What one run of a step under capture reads.

    Args:
        names: of modules and optimizers that are found beforehand: by identity, their names.

    Attributes:
        stand_in_for_float: called for each float that is reached, before the step reads it, with
            its name, its home, its key and itself; gives what stands there while the step runs, or
            None. What has a stand-in is guarded by its type alone.
        before_backward: called where a backward begins, with the tensors whose gradients are asked
            for by name: one, several or None.
        places: what was read, in order.
        snapshots: of what was reached, to see what the step writes.
        by_name: whether what is reached now is perhaps not what the step reads.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.stand_in_for_float: Callable[[str, Any, Any, float], Any] = lambda *_: None
        self.before_backward: Callable[[Any], None] = lambda _: None
        self.places: dict[tuple[int, Any], Place] = {}
        self.types: dict[int, tuple[Any, type]] = {}
        self.numbers: dict[tuple[int, Any], tuple[Place, float]] = {}
        self.huge: dict[int, tuple[str, Any]] = {}
        self.snapshots = Snapshots()
        self.error: CaptureError | None = None
        self._names = names
        self._known: dict[int, _Known] = {}
        self._homes: dict[int, Any] = {}  # an id is one object's as long as that lives
        self._kept: dict[int, Any] = {}
        self._instrumented: list[type] = []
        self._busy = False
        self._by_library = False  # what is reached now is what torch's own code reads
        self.by_name = False
        self.functions = Functions(self)
        self.calls = Calls(self)

    @contextmanager
    def recording(self, step: Any, arguments: Iterable[tuple[str, Any]]) -> Iterator[None]:
        """Within, what this thread reads is recorded; `step` is what is going to run."""
        try:
            self._instrument_type(nn.Module)
            # Where a profiler listens to calls, what functions name is read before they run.
            self.functions.all_at_once = sys.getprofile() is not None
            with self.quietly():
                self.read_at(Place("the step", self, "step", lambda: step), step)
                for key in _HOOKS_OF_ALL:
                    self.read_at(places.entry(key, _MODULES, key), _MODULES[key])
                for name, value in arguments:
                    self.reach(value, name)
                for mode in function_modes():
                    self.reach(mode, type(mode).__name__)
            try:
                with recorded_by(self), self.calls.heard(not self.functions.all_at_once):
                    yield
            except Exception as error:
                if self.error is None or self.error is error:
                    raise
            if self.error is not None:  # which the step, or a library, may have taken for another
                raise self.error
        finally:
            self.functions.put_back()
            release(self._instrumented)
            self._instrumented = []

    @contextmanager
    def quietly(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    @contextmanager
    def found_by_name(self) -> Iterator[None]:
        """Within, what is reached is perhaps not what the step reads: its name is used."""
        before, self.by_name = self.by_name, True
        try:
            yield
        finally:
            self.by_name = before

    def keep(self, value: Any) -> None:
        """Note that `value` is reached, and is no concern."""
        self._kept[id(value)] = value

    def is_reached(self, value: Any) -> bool:
        """Is it an object whose attributes the step has read?"""
        known = self._known.get(id(value))
        return known is not None and known.value is value

    def kinds(self) -> list[type]:
        """The types of the objects that were reached."""
        return [type(known.value) for known in self._known.values()]

    def guards(self, floats: Callable[[Any, Any], bool], slots: Any, extra: Any) -> Guards:
        """What was read, as it is now.

        Args:
            floats: whether the number at a place is an input, beside those with a stand-in.
            slots: the places of the graph's tensors.
            extra: places to be guarded beside those that were read.
        """

        def is_symbolic_number(home: Any, key: Any) -> bool:
            try:
                return (id(home), key) in self.numbers or floats(home, key)
            except TypeError:  # an unhashable key
                return False

        return Guards(
            [*self.places.values(), *extra],
            [*self.types.values()],
            is_symbolic_number,
            [*self.huge.values()],
            slots,
            self.functions.classes,
            self.functions.spaces(),
        )

    def watch(self, value: Any, name: str) -> None:
        """See what the step writes into what the capture has made anew, and what is in it."""
        self.snapshots.made_anew(value, name, self._kept)

    def put_back(self) -> None:
        """Put the floats back that have a stand-in."""
        for place, value in self.numbers.values():
            place.write(value)

    def refuse(self, fact: str, reason: str, name: str = "", fix: Fix | None = None) -> None:
        """Note that the step reads what no guard can hold, and raise it."""
        self.error = self.error or unguarded(fact, reason, name, fix)
        raise self.error

    # -- attributes --------------------------------------------------------------------------------

    def read(self, owner: Any, name: str) -> None:
        """An attribute is read."""
        known = self._known.get(id(owner))
        if known is None or self._busy or name in known.names:
            return
        known.names[name] = None
        by_user = is_recorded(sys._getframe(2).f_code.co_filename)
        if name == "__class__" and by_user:
            with self.quietly():
                self.functions.reach_class(type(owner))
            return
        if name == "__dict__":
            # Of torch's own code, which looks its modules' parameters up there.
            if by_user:
                with self.quietly():
                    self._take_whole(known)
            else:
                del known.names[name]
            return
        before, self._by_library = self._by_library, not by_user
        try:
            with self.quietly():
                self._record_read(known, name)
        finally:
            self._by_library = before

    def _record_read(self, known: _Known, name: str) -> None:
        owner, called = known.value, f"{known.name}.{name}"
        if isinstance(owner, torch.optim.Optimizer) and name in ("state", "param_groups"):
            return
        if isinstance(owner, logging.Logger) and name == "_cache":  # it fills as it is asked
            self.read_at(places.level(known.name, owner), None, alone=True)
            return
        if name in known.held:
            self.read_at(places.entry(called, dict_of(owner), name), known.held[name])
            return
        if name in known.slots:
            place = places.slot(called, owner, known.slots[name])
            self.read_at(place, place.value)
            return
        inside = dict_that_has(owner, name)
        if inside is not None:
            self.read_at(places.entry(called, inside, name), inside[name])
            return
        found = self.read_of_class(type(owner), name)
        if found is MISSING and not name.startswith("__"):  # a class may come to have it
            kind = type(owner)
            self.read_at(places.attribute_of_class(f"{kind.__name__}.{name}", kind, name), MISSING)
        if may_be_hidden(type(owner), name, found) and known.held is not None:
            home = dict_of(owner)
            if home is not None:
                self.read_at(places.entry(called, home, name), MISSING)
            if found is MISSING and isinstance(owner, nn.Module):
                for within in INSIDE:
                    self.read_at(places.entry(called, home[within], name), MISSING)

    def take_whole(self, owner: Any) -> None:
        """All attributes of `owner` may be read, if it is an object that was reached."""
        known = self._known.get(id(owner))
        if known is not None and not known.whole:
            self._take_whole(known)

    def _take_whole(self, known: _Known) -> None:
        known.whole = True
        home = dict_of(known.value)
        if home is not None:
            self.read_at(places.Place(known.name, known.value, "__dict__", lambda: home), home)

    def read_of_class(self, kind: type, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in WITH_FIELDS:
            return MISSING
        place = places.attribute_of_class(f"{kind.__name__}.{name}", kind, name)
        value = place.value
        if place.identity in self.places:
            return value
        if value is not MISSING and not is_slot(value):
            self.read_at(place, value)
            inner = ("fget", "__func__", "func", "dispatcher")
            for function in (getattr(value, a, None) for a in inner):
                if function is not None:
                    self.reach(function, place.name)
        return value

    # -- what is reached ---------------------------------------------------------------------------

    def read_at(self, place: Place, value: Any, alone: bool = False) -> None:
        """The value of a place is read, which was `value` before the step.

        Args:
            alone: whether what it holds is no concern, nor can anything stand for it: a library's.
        """
        if place.identity in self.places:
            return
        self.places[place.identity] = place
        self._homes[id(place.home)] = place.home
        if place.get is None or place.put is not None or not alone:
            self.snapshots.place(place, value)
        if alone:
            return
        if type(value) is float:
            self.offer(place, value)
        else:
            self.reach(value, place.name)

    def offer(self, place: Place, value: float, item: bool = False) -> None:
        """A float is reached, for which another may stand; an `item` of a known container."""
        stands = self.stand_in_for_float(place.name, place.home, place.key, value)
        if stands is None:
            return
        self.numbers[place.identity] = (place, value)
        place.write(stands)
        if item:
            self.snapshots.item(place, stands)
        else:
            self.snapshots.place(place, stands, again=True)

    def reach(self, value: Any, name: str) -> None:
        """`value`, which was there before the step, is reached."""
        if type(value) in PLAIN or id(value) in self._kept:
            return
        if issubclass(type(value), _WEAK):
            if not self.by_name:
                self._refuse_weak(value, name)
            return
        if has_tensor_keys(value) and not self.by_name and not self._by_library:
            self.refuse(
                f"the step reads {name}, which finds tensors by identity ({type(value).__name__})",
                "while it is captured others stand for its tensors, which are not found there",
                fix=Fix("names instead", "as named_parameters() gives them, or tensors in a list"),
            )
        if isinstance(value, torch.Tensor) or (isinstance(value, PLAIN) and not holds_more(value)):
            return
        self._kept[id(value)] = value
        reach_by_kind(self, value, name)

    def _refuse_weak(self, value: Any, name: str) -> None:
        if self._by_library:  # as recurrent layers refer to their weights, which they hold too
            return
        self.refuse(
            f"the step reads {name}, which holds weakly ({type(value).__name__})",
            "what only it refers to may be gone before the next call, and a graph would keep it",
            name,
        )

    def reach_object(self, value: Any, name: str) -> None:
        kind = type(value)
        if not kind.__flags__ & (1 << 9) or not has_settings(kind):  # made in C, or not looked into
            return
        if not self._instrument_type(kind):
            return
        held = dict_of(value)
        name = self._names.get(id(value), name)
        known = _Known(value, name, dict(held or {}), slots_of(kind))
        self._known[id(value)] = known
        self.types[id(value)] = (value, kind)
        self.snapshots.owner(value, name, held, known.slots)
        self.functions.reach_functions(kind, kind.__name__)
        if self.functions.types_read:
            self.functions.reach_class(kind)
        if reads_by_itself(kind):
            self._take_whole(known)
            for key, v in known.held.items():
                self.reach(v, f"{name}.{key}")

    def _instrument_type(self, kind: type) -> bool:
        if kind in self._instrumented:
            return True
        if instrument(kind):
            self._instrumented.append(kind)
            return True
        return False
