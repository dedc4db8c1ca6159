"""Guards: decide if a program may be used for another call, and if not, why.

A call has a signature (`signature_of`): metadata of its tensors and of the state's tensors, other
arguments, torch's modes. A program may run for calls with its signature if its guards hold:
`Guards` (what the step read from Python objects) and `TensorGuard` (storages and metadata of the
state).

`Guards.hold` first compares object identities, in a few C calls. Only places with other objects
than in the last call are then compared by type and content. The differences become the reason for
another capture (`recompile_reasons`): "x: shape (8, 4) became (6, 4); cfg['k']: 1 became 4".

For example, a list that the step reads gets another item:

1. `WatchedItems.unchanged` compares the list's length, and its items by identity. `find_changed`
   gives the places that contain the list.
2. `Guards.hold` computes the content keys of these places again (`guards/values.py`). If they are
   equal to those at capture, the program is used.
3. Otherwise `_find_kept_program` (`compile/step.py`) looks for another program whose guards hold.
4. If there is none, `_capture_call` captures the step again. `Guards.differences` gives the reason.

A "leaf" in this module is one of the tensors and values that `tensors_of_call` returns. Only
`t.is_leaf` has autograd's meaning.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, compress, cycle, islice, repeat
from operator import call, getitem, is_, is_not
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch.utils import _pytree as pytree

from partita.capture.capture_context import DeviceMode, function_modes
from partita.capture.graph_inputs import OWN_ATTRIBUTES, user_attributes_of
from partita.comm import read_autocast_state
from partita.graph.graph_nodes import ByIdentity
from partita.graph.torch_settings import read_settings
from partita.tensor.dtensor_gradients import user_hooks_of
from partita.tensor.tensor_state import state_of

from .arguments import classes_of_call, flatten_call, objects_of_call
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
    content_key,
    dict_of,
    find_difference,
    find_last_leaf,
    forget_leaves,
    key_by_fields,
    key_of_argument_key,
    reads_like_base,
)

if TYPE_CHECKING:
    from partita.graph.program import Input
    from partita.graph.slots import Slot

    from .inputs import State

_INSIDE = frozenset(INSIDE)
_read_bases = vars(type)["__bases__"].__get__

# -- guards of what was read -----------------------------------------------------------------------


class Guards:
    """Checks that the Python values which a step has read at capture are still the same.

    The captured program may run again only if they are.

    A *place* is an attribute, a global or an item that the step has read. Its value may contain
    *parts*: containers and other objects that may change in place. A value is compared by a
    comparison key (`values.content_key`). Computing keys is slow, so a place is skipped if it still
    has the same objects as in the last call.

    Args:
        places: the places that the step has read. Their current values become the expected ones.
        types: (object, type) of objects whose type was read.
        inputs: the values that are inputs of the graph.
        huge: containers whose entries are compared by identity.
        classes: classes whose bases and number of attributes must stay the same. A new attribute
            may hide another.
        namespaces: (name, variables, names that were read; None for all) of modules, functions and
            objects. None of these names may be added or removed.
        owners: (name, object) of objects whose attributes were read. Each must keep its `__dict__`,
            in which these attributes are stored.
        compared: identities of the places whose values the step may compare by `is` or `id`; None
            if it compares none.
        call: the (args, kwargs) of the captured call. The step may compare objects in them, too.
            None if the step has no program.
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
        call: Any = None,
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
        self._class_lengths = [*map(len, self._class_dicts)]
        self._class_bases = [*map(_read_bases, classes)]
        self._owner_names, self._owners = [name for name, _ in owners], [o for _, o in owners]
        self._dicts = [*self._read_dicts()]
        modules = [held for held in self._dicts if held.keys() >= _INSIDE]
        self._modules = [held for held in modules for _ in INSIDE]
        self._inside = [*map(dict.get, self._modules, cycle(INSIDE))]
        self._parts: dict[int, Parts] = {}  # of each place (by index), what may change in place
        self._shared: set[int] = set()  # ids of parts that several places reach
        # "Moving" places: their parts were other objects in some call, so they probably change
        # again (a new container in each call). Other places with parts are "resting". Each group
        # has its own watch (`_moving_items`, `_resting_items`), so that a change of a moving
        # place rebuilds only the small watch.
        self._moving: set[int] | None = None
        # For each place with parts, their ids in the order of the walk.
        self._met: dict[int, tuple[int, ...]] = {}
        # For each place, ids of tensors that are not leaves: if one becomes one, the key differs.
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
        numbers = () if compared is None else self._inputs.numbers
        self._numbers = [(i, not i.path and i.place in (compared or ())) for i in numbers]
        self._taken_apart = frozenset(classes_of_call(flatten_call(call)[1]))
        self._has_call = call is not None
        self._shared_beside = shared = self._find_shared_beside(call)
        # Numbers that code may compare with another name of the same object.
        also = {-2 - at for at in shared}
        self.shared_numbers = [
            given for i, (given, _) in enumerate(self._numbers) if shared[i] != -1 or i in also
        ]

    def __len__(self) -> int:
        return len(self._places)

    def as_of_now(self) -> Guards:
        """Returns guards of the same places that expect the values which these places have now."""
        places, types = self._arguments[:2]
        return Guards(places, [(o, type(o)) for o, _ in types], *self._arguments[2:])

    def digest(self) -> int:
        """Returns a hash of the expected values and their names, to find repeated captures."""
        return hash((tuple(place.name for place in self._places), tuple(self._keys)))

    def holds_no_arguments(self, count: int) -> bool:
        """True if no argument of a call is also read from a Python object, such as a global.

        Args:
            count: the number of leaves that are the state. The leaves after them are the arguments.
        """
        return self._last_leaf < count

    def hold(
        self, leaves: Sequence[Any] = (), call: Any = None, are_the_same: bool = False
    ) -> bool:
        """True if all places that the step has read have the expected values.

        Each tensor that was read must be the same leaf of the call as at capture. If the result is
        True, the current objects are stored, so that the next call can compare identities first.

        Args:
            leaves, call: the leaves and the (args, kwargs) of the call.
            are_the_same: True if the leaves that were read are the same tensors as in the last
                call.
        """
        moved = self._find_moved()
        if not moved and are_the_same and self._have_same_names():
            return self._find_shared_beside(call) == self._shared_beside
        if self._list_other_names():
            return False
        self._class_lengths = [*map(len, self._class_dicts)]
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
        if moved:
            sharing, first_met = self._find_sharing(found)
            if sharing != self._sharing:
                return False
            self._first_met = first_met
        if self._find_shared_beside(call) != self._shared_beside:
            return False
        self._expect_objects(found, walk, {at for at in moved if found[at].parts})
        return True

    def _make_walk(self, leaves: Mapping[int, int]) -> ContentWalk:
        inputs = self._inputs
        walk = ContentWalk(False, inputs.find_numbers(), leaves, self._huge, inputs.written)
        walk.compared = None if self._compared is None else []
        return walk

    def _list_beside(self, call: Any) -> Iterator[tuple[Any, bool]]:
        """Yields (object, True if the step reads it) for objects that are not values of places.

        These are the number inputs of slots and optimizers, and the containers and objects in the
        call's arguments. Numbers and strings in the arguments are left out, because equal ones need
        not be one object.
        """
        for given, read in self._numbers:
            try:
                yield given.number(()), read
            except (LookupError, AttributeError, ValueError):  # its place is gone
                yield MISSING, False
        for value in objects_of_call(call, self._taken_apart) if self._has_call else ():
            # Code that compares nothing may still write a container that is given twice.
            if self._compared is not None or not (
                type(value) is tuple or pytree.tree_is_leaf(value)
            ):
                yield value, True

    def _find_shared_beside(self, call: Any) -> list[int]:
        """Returns, for each object of `_list_beside`, a number that says with what it is identical.

        Returns:
            The number of the object in `_find_sharing`, if a place contains it. -2 - i, if the step
            reads it and it is identical with an earlier object i of the list. Otherwise -1.
        """
        first: dict[int, int] = {}
        found = []
        for i, (value, read) in enumerate(self._list_beside(call)):
            shared = -1
            if self._compared is not None and value is not MISSING:
                shared = self._first_met.get(id(value), -1)
            if shared < 0 and read:
                other = first.setdefault(id(value), i)
                shared = -1 if other == i else -2 - other
            found.append(shared)
        return found

    def _find_sharing(
        self, found: Mapping[int, PlaceContent]
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, int]]:
        """Numbers the objects in all places; an object that is in several places has one number.

        Args:
            found: the new contents of some places; others have their stored contents.

        Returns:
            The numbers of the objects in each place; and the number of each object, by its id.
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
        """Returns what differs from the expected values, as text: "cfg['k']: 1 became 4".

        At most `most` differences are returned.

        Args:
            leaves: the leaves (tensors and numbers) of the call. None: all tensors count as equal.
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
        return found[:most]

    def _list_other_names(self) -> list[str]:
        """Returns the differences of types, and of the names in classes and namespaces, as text."""
        found = []
        for owner, kind in zip(self._objects, self._types, strict=True):
            if type(owner) is not kind:
                found.append(f"a {kind.__name__} became a {type(owner).__name__}")
        for kind, size in zip(self._classes, self._class_sizes, strict=True):
            if (there := count_own_attributes(kind)) != size:
                found.append(f"{kind.__name__}: {size} attributes became {there}")
        for kind, bases in zip(self._classes, self._class_bases, strict=True):
            if _read_bases(kind) is not bases:
                found.append(f"{kind.__name__}.__bases__ is another tuple")
        for name, held, names, known in self._namespaces:
            found += [f"{name}.{key} is new" for key in sorted(_select_names(held, names) - known)]
        for name, held, now in zip(self._owner_names, self._dicts, self._read_dicts(), strict=True):
            if now is not held:
                found.append(f"{name}.__dict__ is another dictionary")
        if not all(map(is_, map(dict.get, self._modules, cycle(INSIDE)), self._inside)):
            found.append("the parameters, buffers or modules of a module are another dictionary")
        return found

    def _look_at(self, at: int, walk: ContentWalk) -> PlaceContent:
        """Returns the content that the place `at` has now; stores nothing."""
        place, before, others = self._places[at], len(walk.changeable), len(walk.others)
        first = len(walk.compared or ())
        key = walk.make_part(place.value, place.home, place.key)
        parts = walk.changeable[before:]
        if walk.compared is None or self._compared is None:
            met = [id(part) for part, _ in parts]
        else:
            met = walk.compared[first:] if place.identity in self._compared else []
        return PlaceContent(key, parts, frozenset(walk.others[others:]), tuple(met))

    def holds_none_of(self, tensors: Iterable[int]) -> bool:
        """True if none of the tensors with these ids is also in a guarded place, such as a global.

        `CallGuard` uses it for the tensors among a call's arguments. A tensor in a guarded place
        needs the full check.
        """
        return all(ids.isdisjoint(tensors) for ids in self._others.values())

    def hold_by_identity(self) -> bool:
        """True if all places have the same objects as in the last call. This is the fast check."""
        return self._have_same_names() and not self._find_moved()

    def _have_same_names(self) -> bool:
        """True if types are the same, and classes and namespaces have as many names."""
        return (
            all(map(is_, map(type, self._objects), self._types))
            and [*map(len, self._class_dicts)] == self._class_lengths
            and all(map(is_, map(_read_bases, self._classes), self._class_bases))
            and self._read_ends() == self._namespace_ends
            and all(map(is_, self._read_dicts(), self._dicts))
            and all(map(is_, map(dict.get, self._modules, cycle(INSIDE)), self._inside))
        )

    def _read_ends(self) -> list[Any]:
        """Returns the size and the last name of each namespace: a new name is the last."""
        held = self._namespace_dicts
        return [*map(len, held), *map(next, map(reversed, held), repeat(None))]

    def _read_dicts(self) -> Iterator[Any]:
        return map(object.__getattribute__, self._owners, repeat("__dict__"))

    def _read_objects(self) -> Iterator[Any]:
        """Returns the objects in the places that are compared by identity."""
        entries = map(dict.get, self._entry_homes, self._entry_keys, repeat(MISSING))
        return chain(entries, map(call, self._getters))

    def _find_moved(self) -> set[int]:
        """Returns the indices of places that may differ: their objects or parts have changed.

        Places that share a part with these are included.
        """
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
        parts = self._parts  # parts that others share with these have changed there too
        while shared := self._shared.intersection(chain(*[parts.get(at, ()) for at in moved])):
            more = {at for at, there in parts.items() if not shared.isdisjoint(there)}
            if more <= moved:
                break
            moved |= more
        return moved

    def _choose_comparisons(self) -> None:
        """Chooses for each place, by its key, how `hold_by_identity` compares it."""
        # Values that are new objects in each call are compared by type or content.
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
        """Stores the current objects, for `hold_by_identity`.

        Args:
            found: the contents of the places that `walk` has compared.
            moving: the places whose containers have changed. They are watched apart from the
                others, because they are likely to change again.
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
    """The content of a place (an attribute, a global, an item): its value's key and parts.

    Attributes:
        key: the key of the value.
        parts: (object, key) of objects that may change in place, in the order of the walk.
        others: the ids of those tensors in the value that are not leaves of the call.
        met: the ids of the parts. If code may compare by `is`: the ids of all objects in the value.
    """

    key: Any
    parts: Sequence[tuple[Any, Any]]
    others: frozenset[int]
    met: tuple[int, ...]


def _select_names(held: dict[str, Any], names: frozenset[str] | None) -> Set[str]:
    """Returns the keys of `held` that were read; all keys if `names` is None."""
    return {*held} if names is None else names & held.keys()


@dataclass(frozen=True)
class ReadInputs:
    """The values that a step reads and that are graph inputs. Guards do not compare them.

    Attributes:
        leaves: maps the id of each tensor to its first index among the leaves (tensors and numbers)
            of the captured call.
        slots: the identities of the places whose tensors `TensorGuard` compares.
        numbers: the number inputs that are in a slot or an optimizer's group.
        written: the ids of the containers that the program writes.
    """

    leaves: Mapping[int, int] = field(default_factory=dict)
    slots: frozenset[tuple[int, Any]] = frozenset()
    numbers: Sequence[Input] = ()
    written: frozenset[int] = frozenset()

    def find_numbers(self) -> dict[tuple[int, Any], int]:
        """Returns the index of each number among the inputs, by the identity of its place."""
        found = {}
        for i, given in enumerate(self.numbers):
            with suppress(LookupError):  # an optimizer may have fewer groups now
                found[given.place] = i
        return found


def find_first_leaves(leaves: Sequence[Any]) -> dict[int, int]:
    """Maps the id of each tensor in `leaves` to the index of the first leaf that is this tensor."""
    last_first = reversed([*enumerate(leaves)])
    return {id(t): i for i, t in last_first if isinstance(t, torch.Tensor)}


Parts = dict[int, tuple[Any, Any]]
"""Maps the id of an object that may change in place to (object, key)."""


class WatchedItems:
    """A copy of the items of containers and arrays at one time, to detect later changes.

    Args:
        parts: for each place, by its index, the containers and arrays in its value.
    """

    def __init__(self, parts: dict[int, Parts]):
        self._empty: list[Any] = []
        self._places_of_empty: list[list[int]] = []
        self._sources: list[Any] = []  # iterables whose items are compared by identity
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
        source = part if reads_like_base(part) else _BaseItems(part, base)
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
        """True if all watched objects have the same items as before."""
        return (
            not any(self._empty)
            and [*map(len, self._sources)] == self._lengths
            and all(map(is_, chain.from_iterable(self._sources), self._items))
            and all(content_key(part) == key for part, key, _ in self._compared)
        )

    def find_changed(self) -> Iterator[int]:
        """Yields the indices of places whose value contains a container with changed items."""
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
    """The items of a container, read without calling overrides in a user's class."""

    def __init__(self, container: Any, base: Any):
        self._container = container
        self._count, self._iterate = base.__len__, base.__iter__

    def __len__(self) -> int:
        return int(self._count(self._container))

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._container)  # type: ignore[no-any-return]


class _ItemsWithInputs:
    """The items of a container, then the types of those items that are number inputs.

    Only the items that are not number inputs are listed themselves.
    """

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
    """Stores the tensors of a step's state, their storages and metadata, to detect changes.

    A tensor object may get another storage, shape, dtype or layout. There are about four tensors
    for each parameter, so each property is read from all tensors in one C call.

    Args:
        slots: the places of the state's tensors.
        tensors: the tensor in each slot.
    """

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]):
        self._homes = [slot.home for slot in slots]
        self._keys = [slot.key for slot in slots]
        self._found = tensors
        self._each = [*{id(t): t for t in tensors}.values()]
        self._were = self._read_tensor_state()

    def same(self) -> bool:
        """True if the state's tensors have not changed since this guard was made.

        Objects, storages and metadata are compared.
        """
        try:
            if not all(map(is_, map(getitem, self._homes, self._keys), self._found)):
                return False
        except (LookupError, AttributeError, ValueError):
            return False  # an item, an attribute or a variable that held one is deleted
        *now, specs = self._read_tensor_state()
        *were, known = self._were
        return now == were and all(map(is_, specs, known))

    def _read_tensor_state(self) -> tuple[list[Any], ...]:
        with local_ops():
            specs = [*map(dict.get, map(vars, self._each), repeat("_spec"))]
            return (*[[*map(read, self._each)] for read in _TENSOR_PROPERTIES], specs)


# -- call signatures -------------------------------------------------------------------------------


_DICT_CONTEXTS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((dict, OrderedDict), lambda keys: keys),
    defaultdict: lambda context: context[1],
}
"""By the type of a dictionary, a function from the context of its structure to its keys."""


def keys_of_call(structure: pytree.TreeSpec) -> list[Any]:
    """Returns comparison keys for the dictionary keys in a call's arguments, except strings.

    `flatten_call`, whose structure this takes, compares keys by `==`: 1 is equal to True.
    """
    found, waiting = [], [structure]
    while waiting:
        part = waiting.pop()
        if part.type in _DICT_CONTEXTS:
            keys = _DICT_CONTEXTS[part.type](part.context)
            found += [key_of_argument_key(key) for key in keys if type(key) is not str]
        waiting += [child for child in part.children() if child.type is not None]
    return found


def signature_of(
    state: State, tensors: list[Any], names: Sequence[str], call: Any
) -> tuple[Any, ...]:
    """Returns the signature of a call. Calls with equal signatures may run the same program.

    The signature is a tuple with an entry (name, value, ...) for each property.

    Args:
        state: the modules, optimizers and tensors that the step reaches.
        tensors, names: the leaves (tensors and numbers) of the call, and their names, such as
            "batch['x']".
        call: the (args, kwargs) of the call.
    """
    first: dict[int, int] = {}
    arguments, structure = flatten_call(call)
    parts: list[Any] = [("structure", structure, *keys_of_call(structure)), ("names", *names)]
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

    Strides of the step's own tensors are included only if they are not contiguous. Those of uneven
    shards are not included, because such a shard enters the graph contiguous and padded. A shard
    with at most one row may be contiguous on some ranks only, and all ranks must find the same
    program.
    """
    with local_ops():
        return [
            ()
            if enters_padded(t) or (i < arguments and t.is_leaf and t.is_contiguous())
            else t.stride()
            for i, t in enumerate(tensors)
            if isinstance(t, torch.Tensor) and t.layout == torch.strided
        ]


def enters_padded(t: torch.Tensor) -> bool:
    """True if ranks hold shards of `t` of different sizes, so that a graph gets them padded."""
    spec = t.__dict__.get("_spec")
    return spec is not None and spec.is_uneven


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """Returns the properties of tensor `t` on which a program depends, except strides, as a key.

    These are shape, layout, dtype, `requires_grad`, device, class, the user's attributes and hooks,
    and whether `t` is lazily conjugated or negated.
    """
    with local_ops():
        attributes = t.__dict__
        spec = attributes.get("_spec")
        own: tuple[Any, ...] = ()
        if attributes and not OWN_ATTRIBUTES.issuperset(attributes):
            names = user_attributes_of(t)
            own = tuple([(name, _attribute_key(attributes[name])) for name in names])
        trained = _requires_grad(t)
        hooks = user_hooks_of(find_owner(t)) if trained else ()
        shown = t.is_conj(), t.is_neg()
        return (spec or t.shape, _dtype(t), trained, t.device, type(t), own, hooks, shown)


def find_owner(t: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on which the user sets hooks: for a gathered one the sharded parameter."""
    rest = state_of(t).gathered_from
    return t if rest is None else rest[0]


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else key_by_fields(value)


# -- torch modes -----------------------------------------------------------------------------------


def active_modes() -> tuple[Any, ...]:
    """Returns the modes and settings of torch on which a program depends, as a hashable value."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        read_autocast_state(),
        *read_settings(),
        *map(_key_of_mode, function_modes()),
    )


def _key_of_mode(mode: Any) -> Any:
    return mode.device if isinstance(mode, DeviceMode) else ByIdentity(mode)
