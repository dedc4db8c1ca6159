"""Guards: decide whether a program may be used for another call, and if not, why.

A call has a signature (`signature_of`): the metadata of its tensors and of those that the step
reaches, the keys of other arguments, torch's modes. Calls of equal signatures may run one program,
if its guards hold: `Guards`, of what the step read of Python, and `TensorGuard`. `Guards.hold`
first compares object identities, in a few passes that run in C. Places that hold or reach other
objects than before are then compared by type and content. What differs becomes the reason, as text:
"x: shape (8, 4) became (6, 4); cfg['k']: 1 became 4" (`History`).

A leaf is a leaf of the call here: one of the tensors and values that `tensors_of_call` lists. Only
`t.is_leaf` is autograd's word.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress, cycle, islice, repeat
from operator import call, getitem, is_, is_not
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils import _pytree as pytree

from partita.capture.capture_context import DeviceMode, function_modes
from partita.capture.graph_inputs import OWN_ATTRIBUTES, user_attributes_of
from partita.capture.torch_settings import SETTINGS, read_settings
from partita.comm import enabled_autocast_dtypes, read_autocast_state
from partita.graph.graph_nodes import ByIdentity
from partita.tensor.dtensor import DTensor, short_dtype
from partita.tensor.dtensor_gradients import user_hooks_of
from partita.tensor.tensor_state import state_of

from .arguments import flatten_call
from .record import count_own_attributes
from .values import (
    INSIDE,
    MISSING,
    ByType,
    ContainerKey,
    ContentWalk,
    EntriesKey,
    LeafKey,
    Place,
    argument_key,
    base_of_container,
    brief,
    content_key,
    dict_of,
    find_difference,
    find_last_leaf,
    forget_leaves,
    is_read_as_base,
    shorten_text,
    text_of,
    whole_key,
)

if TYPE_CHECKING:
    from partita.graph.program import Input
    from partita.graph.slots import Slot

    from .inputs import State

_INSIDE = frozenset(INSIDE)

# -- guards of what was read -----------------------------------------------------------------------


class Guards:
    """What must be unchanged for a program to run again.

    Args:
        places: what the step read; the current values are expected there.
        types: objects whose type was read, with the type.
        inputs: which of these are inputs of the graph.
        huge: containers that are not compared deeply.
        classes: classes whose number of attributes is guarded: a new one may hide another.
        namespaces: name, variables and read names (None for all) of modules, functions and
            objects: none of the read names may be added or removed.
        owners: name and object of which attributes were read: its `__dict__`, the home of these
            places, must stay the same one.
        compared: identities of the places whose values code may compare by `is` or `id`; None if no
            code does.
    """

    def __init__(
        self,
        places: Sequence[Place],
        types: Sequence[tuple[Any, type]] = (),
        inputs: ReadInputs | None = None,
        huge: Sequence[Any] = (),
        classes: Sequence[type] = (),
        namespaces: Sequence[tuple[str, dict[str, Any], frozenset[str] | None]] = (),
        owners: Sequence[tuple[str, Any]] = (),
        compared: Set[tuple[int, Any]] | None = None,
    ):
        self._arguments = (places, types, inputs, huge, classes, namespaces, owners, compared)
        self._compared = compared
        self._places, self._classes = places, classes
        self._inputs = inputs or ReadInputs()
        self._huge = {id(value): value for value in huge}
        self._objects = [o for o, _ in types]
        self._types = [t for _, t in types]
        self._namespaces = [
            (name, held, names, _select_names(held, names)) for name, held, names in namespaces
        ]
        self._namespace_dicts = [held for _, held, _ in namespaces]
        self._class_dicts = [vars(kind) for kind in classes]
        self._class_sizes = [*map(count_own_attributes, classes)]
        self._owner_names, self._owners = [name for name, _ in owners], [o for _, o in owners]
        self._dicts = [*self._read_dicts()]
        modules = [held for held in self._dicts if held.keys() >= _INSIDE]
        self._modules = [held for held in modules for _ in INSIDE]
        self._inside = [*map(dict.get, self._modules, cycle(INSIDE))]
        self._parts: dict[int, Parts] = {}  # of each place, what may change in place
        self._shared: set[int] = set()  # ids of parts that were met more than once
        # Places whose parts have been other objects in some call: they are expected to change
        # again (a new container in each call). The other places with parts are at rest. The two
        # are watched apart (`_moving_items`, `_resting_items`), so that a change of a moving place
        # sets up again only the small watch of those.
        self._moving: set[int] | None = None
        # Of each place that has parts, their ids as they were met.
        self._met: dict[int, tuple[int, ...]] = {}
        # Of each place, ids of tensors that are no leaves: if one becomes a leaf, the key differs.
        self._others: dict[int, frozenset[int]] = {}
        walk = self._make_walk(self._inputs.leaves)
        found = {at: self._look_at(at, walk) for at in range(len(places))}
        self._keys = [content.key for content in found.values()]
        last_leaves = {at: find_last_leaf(key) for at, key in enumerate(self._keys)}
        self._last_leaf = max(last_leaves.values(), default=-1)
        self._of_leaves = {at for at, last in last_leaves.items() if last >= 0}
        self._choose_comparisons()
        self._expect_objects(found, walk, set())
        self._sharing, self._first_met = self._find_sharing({})
        self._shared_by_numbers = self._find_shared_by_numbers()

    def __len__(self) -> int:
        return len(self._places)

    def as_of_now(self) -> Guards:
        """Guards of the same places, which expect the values of now."""
        places, types = self._arguments[:2]
        return Guards(places, [(o, type(o)) for o, _ in types], *self._arguments[2:])

    def digest(self) -> int:
        """Returns a hash of what is expected.

        It is equal for captures that have read the same of Python.
        """
        return hash((tuple(place.name for place in self._places), tuple(self._keys)))

    def reads_only(self, count: int) -> bool:
        """True if all tensors that were read are among the first `count` leaves of the call."""
        return self._last_leaf < count

    def hold(self, leaves: Sequence[Any] = (), are_the_same: bool = False) -> bool:
        """True if everything is as expected, and each tensor that was read is the leaf of the call
        that was read in its place. The next call is then compared with the objects of now.

        Args:
            leaves: of the call.
            are_the_same: those that were read are the same tensors as in the last call.
        """
        moved = self._find_moved()
        if not moved and are_the_same and self._have_same_names():
            return self._find_shared_by_numbers() == self._shared_by_numbers
        if self._list_other_names():
            return False
        walk = self._make_walk(find_first_leaves(leaves))
        found: dict[int, PlaceContent] = {}
        compared = moved
        if not are_the_same:
            others = self._others.items()
            now_leaves = {at for at, ids in others if not ids.isdisjoint(walk.leaves)}
            compared = moved | self._of_leaves | now_leaves
        for at in sorted(compared):
            found[at] = self._look_at(at, walk)
            if found[at].key != self._keys[at]:
                return False
        if not self._holds_sharing(found if moved else {}):
            return False
        self._expect_objects(found, walk, {at for at in moved if found[at].parts})
        return True

    def _make_walk(self, leaves: Mapping[int, int]) -> ContentWalk:
        inputs = self._inputs
        walk = ContentWalk(False, inputs.find_numbers(), leaves, self._huge, inputs.written)
        walk.compared = None if self._compared is None else []
        return walk

    def _holds_sharing(self, found: Mapping[int, PlaceContent]) -> bool:
        """True if what was one object is one, and what was two objects is two. `found` holds what
        some places hold now."""
        sharing, first_met = (
            self._find_sharing(found) if found else (self._sharing, self._first_met)
        )
        if sharing != self._sharing:
            return False
        self._first_met = first_met
        return self._find_shared_by_numbers() == self._shared_by_numbers

    def _find_shared_by_numbers(self) -> list[int]:
        """Returns for each number that is an input of the graph what else is the same object.

        That is its number in `_find_sharing`; or -2 - i for the variable of the number i, if the
        step reads both; -1 if there is none.
        """
        if self._compared is None:
            return []
        first: dict[int, int] = {}
        found = []
        for i, given in enumerate(self._inputs.numbers):
            try:
                value = given.number(())
            except (LookupError, AttributeError, ValueError):  # its place is gone
                found.append(-1)
                continue
            shared = self._first_met.get(id(value), -1)
            if shared < 0 and not given.path and given.place in self._compared:
                other = first.setdefault(id(value), i)
                shared = -1 if other == i else -2 - other
            found.append(shared)
        return found

    def find_shared_numbers(self) -> list[Input]:
        """Returns the graph inputs that code may compare with another place of the same number."""
        numbers = self._inputs.numbers
        found = {i: None for i, shared in enumerate(self._shared_by_numbers) if shared != -1}
        found |= {-2 - shared: None for shared in self._shared_by_numbers if shared < -1}
        return [numbers[i] for i in found]

    def _find_sharing(
        self, found: Mapping[int, PlaceContent]
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """Returns for each place the numbers of what it holds: equal if two are one object.

        Args:
            found: what some places hold now; the others hold what they held.

        Returns:
            The numbers; and the number of each object by id.
        """
        first: dict[int, int] = {}
        met = {**self._met, **{at: content.met for at, content in found.items()}}
        sharing = {
            at: tuple([first.setdefault(part, len(first)) for part in met[at]])
            for at in sorted(met)
            if met[at]
        }
        return sharing, first

    def differences(self, leaves: Sequence[Any] | None, most: int = 3) -> list[str]:
        """Returns up to `most` differences for a call, as text: "cfg['k']: 1 became 4".

        Args:
            leaves: of the call; None counts all tensors as equal.
        """
        found = self._list_other_names()
        walk = self._make_walk(find_first_leaves(leaves or ()))
        for at, place in enumerate(self._places):
            if len(found) >= most:
                break
            was = self._keys[at] if leaves is not None else forget_leaves(self._keys[at])
            differs = find_difference(was, self._look_at(at, walk).key)
            if differs is not None:
                found.append(f"{place.name}{differs[0]}: {differs[1]} became {differs[2]}")
        if not found and self._compared is not None:
            found.append("two places hold one object, and held two, or the other way round")
        return found[:most]

    def _list_other_names(self) -> list[str]:
        """The differences of types, and of the names in classes and namespaces."""
        found = []
        for owner, kind in zip(self._objects, self._types, strict=True):
            if type(owner) is not kind:
                found.append(f"a {kind.__name__} became a {type(owner).__name__}")
        for kind, size in zip(self._classes, self._class_sizes, strict=True):
            if (there := count_own_attributes(kind)) != size:
                found.append(f"{kind.__name__}: {size} attributes became {there}")
        for name, held, names, known in self._namespaces:
            found += [f"{name}.{key} is new" for key in sorted(_select_names(held, names) - known)]
        for name, held, now in zip(self._owner_names, self._dicts, self._read_dicts(), strict=True):
            if now is not held:
                found.append(f"{name}.__dict__ is another dictionary")
        if not all(map(is_, map(dict.get, self._modules, cycle(INSIDE)), self._inside)):
            found.append("the parameters, buffers or modules of a module are another dictionary")
        return found

    def _look_at(self, at: int, walk: ContentWalk) -> PlaceContent:
        """Returns what a place holds now. What is expected stays as it is, for it may differ."""
        place, before, others = self._places[at], len(walk.changeable), len(walk.others)
        first = len(walk.compared or ())
        key = walk.make_part(place.value, place.home, place.key)
        parts = walk.changeable[before:]
        if walk.compared is None or self._compared is None:
            met = [id(part) for part, _ in parts]
        else:
            met = walk.compared[first:] if place.identity in self._compared else []
        return PlaceContent(key, parts, frozenset(walk.others[others:]), tuple(met))

    def knows_no(self, tensors: Iterable[int]) -> bool:
        """True if none of the tensors with these ids was found in Python state at capture.

        Such a tensor was no leaf of that call. As an argument of this call it would be one.
        """
        return all(ids.isdisjoint(tensors) for ids in self._others.values())

    def hold_by_identity(self) -> bool:
        """True if everything is the same objects."""
        return self._have_same_names() and not self._find_moved()

    def _have_same_names(self) -> bool:
        """True if all types are the same, and classes and namespaces have as many names."""
        return (
            all(map(is_, map(type, self._objects), self._types))
            and [*map(len, self._class_dicts)] == self._class_sizes
            and self._read_ends() == self._namespace_ends
            and all(map(is_, self._read_dicts(), self._dicts))
            and all(map(is_, map(dict.get, self._modules, cycle(INSIDE)), self._inside))
        )

    def _read_ends(self) -> list[Any]:
        """The size and the last name of each namespace: a new name is the last."""
        held = self._namespace_dicts
        return [*map(len, held), *map(next, map(reversed, held), repeat(None))]

    def _read_dicts(self) -> Iterator[Any]:
        return map(object.__getattribute__, self._owners, repeat("__dict__"))

    def _read_objects(self) -> Iterator[Any]:
        """The objects in the places that are compared by identity."""
        entries = map(dict.get, self._entry_homes, self._entry_keys, repeat(MISSING))
        return chain(entries, map(call, self._getters))

    def _find_moved(self) -> set[int]:
        """The places that hold, or reach, other objects than before. All others are as expected."""
        moved: set[int] = set()
        if not all(map(is_, self._read_objects(), self._were)):
            moved.update(compress(self._watched, map(is_not, self._read_objects(), self._were)))
        if not self._resting_items.unchanged():
            moved.update(self._resting_items.find_changed())
        if self._moving:
            moved.update(self._moving_items.find_changed())
        for at, kind in self._typed:
            value = self._places[at].value
            if _type_of(value) is not kind or (
                kind is torch.Tensor and id(value) not in self._others.get(at, ())
            ):
                moved.add(at)
        for at in self._answers:
            if content_key(self._places[at].value) != self._keys[at]:
                moved.add(at)
        if not moved:
            return moved
        parts = self._parts  # what others share with these has moved there too
        while shared := self._shared.intersection(chain(*[parts.get(at, ()) for at in moved])):
            more = {at for at, there in parts.items() if not shared.isdisjoint(there)}
            if more <= moved:
                break
            moved |= more
        return moved

    def _choose_comparisons(self) -> None:
        """Choose for each place how `hold_by_identity` compares it, which its key says."""
        # What has no lasting identity is compared by type or content each time.
        self._typed: list[tuple[int, type]] = []
        self._answers: list[int] = []
        entries, others = [], []
        for at, (place, key) in enumerate(zip(self._places, self._keys, strict=True)):
            if key is torch.Tensor or isinstance(key, ByType):
                self._typed.append((at, _type_of(place.value)))
            elif isinstance(key, LeafKey) and place.identity in self._inputs.slots:
                continue  # `TensorGuard` compares it
            elif place.get is None:
                entries.append(at)
            elif place.key == "()" and not isinstance(key[-1], ByIdentity):
                self._answers.append(at)  # each is a new object
            else:
                others.append(at)
        self._watched = entries + others
        self._entry_homes = [self._places[at].home for at in entries]
        self._entry_keys = [self._places[at].key for at in entries]
        self._getters: list[Any] = [self._places[at].get for at in others]

    def _expect_objects(
        self, found: Mapping[int, PlaceContent], walk: ContentWalk, moving: set[int]
    ) -> None:
        """Store the objects of now, for `hold_by_identity`.

        Args:
            found: what the places hold that `walk` has compared.
            moving: of these the ones whose parts are watched apart, since they will move again.
        """
        for at, content in found.items():
            self._others.pop(at, None)
            if content.others:
                self._others[at] = content.others
            if content.parts:
                self._parts[at] = {id(part): (part, key) for part, key in content.parts}
            if content.met or at in self._met:
                self._met[at] = content.met
        if walk.shared:
            known = chain.from_iterable(self._parts.values())
            self._shared = (self._shared | walk.shared).intersection(known)
        self._were = [*self._read_objects()]
        self._namespace_ends = self._read_ends()
        before, self._moving = self._moving, moving.union(self._moving or ())
        if self._moving != before:
            resting = self._parts.keys() - self._moving
            self._resting_items = WatchedItems({at: self._parts[at] for at in resting})
        self._moving_items = WatchedItems({at: self._parts[at] for at in self._moving})


class PlaceContent(NamedTuple):
    """What a place holds.

    Attributes:
        parts: the objects that may change in place, each with its key, as they were met.
        others: ids of tensors that are no leaves of the call.
        met: ids of the parts; or of all that code may compare by `is`.
    """

    key: Any
    parts: Sequence[tuple[Any, Any]]
    others: frozenset[int]
    met: tuple[int, ...]


def _select_names(held: dict[str, Any], names: frozenset[str] | None) -> Set[str]:
    """The names that variables have, of those that were read (None for all)."""
    return {*held} if names is None else names & held.keys()


@dataclass(frozen=True)
class ReadInputs:
    """The graph inputs among what the step read, and the containers that the program writes.

    Attributes:
        leaves: by id, the first index of each tensor among the leaves of the captured call.
        slots: identities of the places in which `TensorGuard` compares the tensors.
        numbers: those that stand in a slot or in a group of an optimizer.
        written: ids of containers.
    """

    leaves: Mapping[int, int] = field(default_factory=dict)
    slots: frozenset[tuple[int, Any]] = frozenset()
    numbers: Sequence[Input] = ()
    written: frozenset[int] = frozenset()

    def find_numbers(self) -> dict[tuple[int, Any], int]:
        """Returns the index of each number, by the identity of its current place."""
        found = {}
        for i, given in enumerate(self.numbers):
            with suppress(LookupError):  # an optimizer may have fewer groups now
                found[given.place] = i
        return found


def find_first_leaves(leaves: Sequence[Any]) -> dict[int, int]:
    """Returns by id the first index of each tensor among the leaves of a call."""
    last_first = reversed([*enumerate(leaves)])
    return {id(t): i for i, t in last_first if isinstance(t, torch.Tensor)}


Parts = dict[int, tuple[Any, Any]]
"""Objects that may change in place, each with its key, by id."""


class WatchedItems:
    """The current contents of containers, arrays and similar objects.

    Args:
        parts: for each place, which of these it reaches.
    """

    def __init__(self, parts: dict[int, Parts]):
        self._empty: list[Any] = []
        self._places_of_empty: list[list[int]] = []
        self._sources: list[Any] = []  # of objects that are compared by identity
        self._compared: list[tuple[Any, Any, list[int]]] = []  # by content, with key and places
        self._places: list[list[int]] = []  # of each source
        each: Parts = {}
        places: dict[int, list[int]] = {}
        for at, found in parts.items():
            each |= found
            for part_id in found:
                places.setdefault(part_id, []).append(at)
        for part_id, (part, key) in each.items():
            self._watch(part, key, places[part_id])
        self._lengths = [*map(len, self._sources)]
        self._items = [*chain.from_iterable(self._sources)]

    def _watch(self, part: Any, key: Any, places: list[int]) -> None:
        kind: type = type(part)
        if issubclass(kind, (tuple, frozenset)):
            return  # it cannot change
        if issubclass(kind, SimpleNamespace):
            part, kind = dict_of(part), dict
        by_identity = isinstance(key, (ContainerKey, EntriesKey))
        if not by_identity or issubclass(kind, (MappingProxyType, functools.partial)):
            self._compared.append((part, key, places))
            return
        base = base_of_container(part)
        source = part if is_read_as_base(part) else _BaseItems(part, base)
        if not len(source):
            self._empty.append(source)
            self._places_of_empty.append(places)
            return
        sources = [source, base.values(part)] if issubclass(base, dict) else [source]
        if isinstance(key, ContainerKey) and any(isinstance(k, ByType) for k in key.parts):
            sources[-1] = _ItemsWithInputs(sources[-1], key)
        self._sources += sources
        self._places += [places for _ in sources]

    def unchanged(self) -> bool:
        """True if these are the same objects."""
        return (
            not any(self._empty)
            and [*map(len, self._sources)] == self._lengths
            and all(map(is_, chain.from_iterable(self._sources), self._items))
            and all(content_key(part) == key for part, key, _ in self._compared)
        )

    def find_changed(self) -> Iterator[int]:
        """The places that reach what holds something else now."""
        yield from chain(*compress(self._places_of_empty, self._empty))
        items = iter(self._items)
        for source, length, places in zip(self._sources, self._lengths, self._places, strict=True):
            were = [*islice(items, length)]
            if len(source) != length or not all(map(is_, source, were)):
                yield from places
        for part, key, places in self._compared:
            if content_key(part) != key:
                yield from places


class _BaseItems:
    """The items of a container, past overrides of a user's class."""

    def __init__(self, container: Any, base: Any):
        self._container = container
        self._count, self._iterate = base.__len__, base.__iter__

    def __len__(self) -> int:
        return int(self._count(self._container))

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._container)  # type: ignore[no-any-return]


class _ItemsWithInputs:
    """The items of a container now; of those that are graph inputs the types, behind the others."""

    def __init__(self, items: Any, key: ContainerKey):
        self._items = items
        self._are_inputs = [isinstance(part, ByType) for part in key.parts]
        self._are_others = [not is_input for is_input in self._are_inputs]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        types = map(type, compress(self._items, self._are_inputs))
        return chain(compress(self._items, self._are_others), types)


def _type_of(value: Any) -> type:
    return torch.Tensor if issubclass(type(value), torch.Tensor) else type(value)


# -- tensor guards ---------------------------------------------------------------------------------

_base: Any = torch._C.TensorBase
_dtype, _requires_grad = _base.dtype.__get__, _base.requires_grad.__get__
_TENSOR_PROPERTIES = (_base.data_ptr, _base.size, _base.stride, _dtype, _requires_grad)


class TensorGuard:
    """The tensors in some slots, as they are now.

    The same object may have another storage, shape, dtype or layout than before. There are four
    tensors for each parameter, so each property is read of all tensors in one pass that runs in C.

    Args:
        tensors: of each slot, its tensor.
    """

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]):
        self._homes = [slot.home for slot in slots]
        self._keys = [slot.key for slot in slots]
        self._found = tensors
        self._each = [*{id(t): t for t in tensors}.values()]
        self._were = self._read_tensor_state()

    def same(self) -> bool:
        """True if the same tensors are there, and are what they were."""
        try:
            if not all(map(is_, map(getitem, self._homes, self._keys), self._found)):
                return False
        except (LookupError, AttributeError, ValueError):
            return False  # an item, an attribute or a variable that held one is deleted
        *now, specs = self._read_tensor_state()
        *were, known = self._were
        return now == were and all(map(is_, specs, known))

    def _read_tensor_state(self) -> tuple[list[Any], ...]:
        with Local():
            specs = [*map(dict.get, map(vars, self._each), repeat("_spec"))]
            return (*[[*map(read, self._each)] for read in _TENSOR_PROPERTIES], specs)


# -- call signatures -------------------------------------------------------------------------------


def signature_of(
    state: State, tensors: list[Any], names: Sequence[str], call: Any
) -> tuple[Any, ...]:
    """Returns the signature of a call: a tuple of (name, value...) for each part.

    Args:
        tensors, names: the leaves of what the step reaches, then those of the call; and their
            names, which describe the path to each.
        call: its (args, kwargs).
    """
    first: dict[int, int] = {}
    arguments, structure = flatten_call(call)
    parts: list[Any] = [("structure", structure), ("names", *names)]
    for i, t in enumerate(tensors):
        if not isinstance(t, torch.Tensor):
            parts.append((f"value {i}", argument_key(t)))
            continue
        same = first.setdefault(id(t), i)
        parts.append((f"tensor {i}", same, kind_of_tensor(t)))
    parts += [(name, argument_key(value)) for name, value in state.settings()]
    parts.append(("strides", *_strides_of_tensors(tensors, len(tensors) - len(arguments))))
    parts.append(("modes", *active_modes()))
    return tuple(parts)


def _strides_of_tensors(tensors: list[Any], arguments: int) -> list[tuple[int, ...]]:
    """Returns the strides of arguments and of results of other steps, which may vary between calls.

    For the step's own tensors only if they are not contiguous. Not for uneven pieces, which enter a
    graph contiguous and padded: whether a piece of one row, or of none, is contiguous may differ
    between ranks, and all ranks must find the same program.
    """
    with Local():
        return [
            ()
            if enters_padded(t) or (i < arguments and t.is_leaf and t.is_contiguous())
            else t.stride()
            for i, t in enumerate(tensors)
            if isinstance(t, torch.Tensor) and t.layout == torch.strided
        ]


def enters_padded(t: torch.Tensor) -> bool:
    """True if a graph takes a piece padded, since the pieces of `t` are uneven."""
    spec = t.__dict__.get("_spec")
    return spec is not None and spec.is_uneven


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """Returns the properties of a tensor that a program is made for.

    These are shape, layout, dtype and hooks, but not strides.
    """
    with Local():
        attributes = t.__dict__
        spec = attributes.get("_spec")
        own: tuple[Any, ...] = ()
        if attributes and not OWN_ATTRIBUTES.issuperset(attributes):
            names = user_attributes_of(t)
            own = tuple([(name, _attribute_key(attributes[name])) for name in names])
        trained = _requires_grad(t)
        hooks = user_hooks_of(_find_owner(t)) if trained else ()
        shown = t.is_conj(), t.is_neg()
        return (spec or t.shape, _dtype(t), trained, t.device, type(t), own, hooks, shown)


def _find_owner(t: torch.Tensor) -> torch.Tensor:
    """The tensor on which the user sets hooks: of a gathered one the parameter at rest."""
    rest = state_of(t).gathered_from
    return t if rest is None else rest[0]


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else whole_key(value)


# -- torch modes -----------------------------------------------------------------------------------


def active_modes() -> tuple[Any, ...]:
    """The torch modes of now, as a hashable value."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        read_autocast_state(),
        *read_settings(),
        *map(_key_of_mode, function_modes()),
    )


def _key_of_mode(mode: Any) -> Any:
    return mode.device if isinstance(mode, DeviceMode) else ByIdentity(mode)


# -- recompile reasons -----------------------------------------------------------------------------

Description = dict[str, dict[str, str]]
"""The description of a call. By the name of each part and each property, a text: {"x": {"shape":
"(8, 4)"}}.
"""
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
        **{name: str(value) for name, value in zip(SETTINGS, read_settings(), strict=True)},
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
        strides = "contiguous" if enters_padded(t) or t.is_contiguous() else str(t.stride())
        found["strides"] = strides
        found |= {"conjugated": str(t.is_conj()), "negated": str(t.is_neg())}
        grad = t.grad if t.requires_grad and t.is_leaf else None
    found["gradient"] = "none" if grad is None else "there"
    hooks = user_hooks_of(_find_owner(t)) if t.requires_grad else ()
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
    """Returns how a call differs from the most similar one with a program.

    Of several it is the latest.
    """
    nearest = min(
        reversed([*known]), key=lambda other: _count_differences(now, other[0]), default=None
    )
    if nearest is None:
        return _FIRST_CALL
    was, guards = nearest
    differences = _list_differences(now, was)
    if guards is not None and len(differences) < _SHOWN:
        names = {text.split(":")[0] for text in differences}
        # Where leaves are new or gone, those of one index are not the same ones.
        found = guards.differences(leaves if now.keys() == was.keys() else None, _SHOWN)
        differences += [text for text in found if text.split(":")[0] not in names]
    text = "; ".join(differences[:_SHOWN]) or "something changed"
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
"""Says in a reason that the value of a float is in the program, which is for that value alone."""


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

    def reason(self, describe: Callable[[], Description], leaves: Sequence[Any]) -> str:
        """Returns why a call with these leaves needs a new program; `describe` returns its
        description.
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
        """Record that a program was captured.

        Args:
            reason: why.
            key: the call's signature, and what distinguishes programs of one signature.
            numbers: `Conditions.identify_numbers`.
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
        """Note that a program was reused."""
        self._changed_in_a_row.clear()

    def _look_for_counters(self, reason: str, description: Description) -> None:
        """Warn about values that differ in each call: a Python value, an int argument, a float that
        is read as a number.
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
            advice = f"An int is captured by its value: give {names_text} as a float or a tensor"
        elif always_changed <= floats:
            advice = f"Make a tensor of {names_text} outside of the step, and give the step that"
        else:
            advice = (
                f"If the step does not need {names_text}, keep it out of what the step reads; "
                "if it does, and it is a number, give it as an argument, as a float or a tensor; "
                "if it is a function or an object, make it once, before the step"
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
