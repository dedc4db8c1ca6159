"""Guards: may a program be used for another call, and if not, why is the step captured again?

A call has a signature (`signature_of`): the metadata of its tensors and of those that the step
reaches, the keys of other arguments, torch's modes. Calls of equal signatures may run one program,
if its guards hold: `Guards`, of what the step read of Python, and `TensorGuard`. `Guards.hold`
first compares object identities, in a few passes that run in C; where some object is another one,
every place is compared by type and content. What differs becomes the reason, as text: "x: shape (8,
4) became (6, 4); cfg['k']: 1 became 4" (`History`).
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count, repeat
from operator import getitem, is_
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree

from partita.comm import enabled_autocast_dtypes, read_autocast_state
from partita.tensor.dtensor import DTensor, short_dtype

from ..arguments import flatten_call
from .record import count_own_attributes
from .values import (
    MISSING,
    OWN_ATTRIBUTES,
    PLAIN,
    AttributesAndHooks,
    ByIdentity,
    ByType,
    ContainerKey,
    ContentWalk,
    EntriesKey,
    Place,
    argument_key,
    content_key,
    find_difference,
    is_attributes_or_hooks,
    is_user_module,
    shorten_text,
    text_of,
    user_attributes_of,
    user_hooks_of,
    whole_key,
)

if TYPE_CHECKING:
    from ..capture.capture_context import Slot
    from ..capture.inputs import State

# -- guards of what was read -----------------------------------------------------------------------


class Guards:
    """What must be unchanged for a program to run again.

    Args:
        places: what the step read; the values of now are expected there.
        types: objects whose type was read, with the type.
        is_number_input: given home and key of a place, whether the number there is a graph input.
        huge: containers that are not compared deeply.
        slots: identities of the places whose tensors are graph inputs, which `TensorGuard` checks.
        classes: classes whose number of attributes is guarded: a new one may hide another.
        namespaces: name, variables and read names of modules, classes and functions: of the read
            names none may be added or removed.
    """

    def __init__(
        self,
        places: Sequence[Place],
        types: Sequence[tuple[Any, type]] = (),
        is_number_input: Callable[[Any, Any], bool] = lambda home, key: False,
        huge: Sequence[Any] = (),
        slots: frozenset[tuple[int, Any]] = frozenset(),
        classes: Sequence[type] = (),
        namespaces: Sequence[tuple[str, dict[str, Any], frozenset[str]]] = (),
    ):
        self._arguments = (places, types, is_number_input, huge, slots, classes, namespaces)
        self._places, self._slots, self._classes = places, slots, classes
        self._huge = {id(value): value for value in huge}
        self._objects = [o for o, _ in types]
        self._types = [t for _, t in types]
        self._namespaces = [
            (name, held, names, names & held.keys()) for name, held, names in namespaces
        ]
        self._namespace_dicts = [held for _, held, _ in namespaces]
        self._class_dicts = [vars(kind) for kind in classes]
        self._class_sizes = [*map(count_own_attributes, classes)]
        walk = ContentWalk(is_number_input=is_number_input, huge=self._huge)
        self._keys = self._arm_guards(walk, [None for _ in places])

    def __len__(self) -> int:
        return len(self._places)

    def as_of_now(self) -> Guards:
        """Guards of the same places, which expect the values of now."""
        places, types = self._arguments[:2]
        return Guards(places, [(o, type(o)) for o, _ in types], *self._arguments[2:])

    def digest(self) -> int:
        """A hash of what is expected: equal for captures that have read the same of Python."""
        return hash((tuple(place.name for place in self._places), tuple(self._keys)))

    def hold(self) -> bool:
        """Is everything as expected? The next call is then compared with the objects of now."""
        if self.hold_by_identity():
            return True
        if self.differences(1):
            return False
        self._arm_guards(ContentWalk(huge=self._huge), self._keys)
        return True

    def differences(self, most: int = 3) -> list[str]:
        """Up to `most` differences, as text: "cfg['k']: 1 became 4"."""
        found = []
        for owner, kind in zip(self._objects, self._types, strict=True):
            if type(owner) is not kind:
                found.append(f"a {kind.__name__} became a {type(owner).__name__}")
        for kind, size in zip(self._classes, self._class_sizes, strict=True):
            if (there := count_own_attributes(kind)) != size:
                found.append(f"{kind.__name__}: {size} attributes became {there}")
        for name, held, names, known in self._namespaces:
            found += [f"{name}.{key} is new" for key in sorted((names & held.keys()) - known)]
        walk = ContentWalk(huge=self._huge)
        for place, key, fixed in zip(self._places, self._keys, self._fixed, strict=True):
            if len(found) >= most:
                break
            value = place.value
            if value is fixed:
                continue
            now = walk.make_part(value, place.home, place.key, key)
            if (differs := find_difference(key, now)) is not None:
                found.append(f"{place.name}{differs[0]}: {differs[1]} became {differs[2]}")
        return found[:most]

    def hold_by_identity(self) -> bool:
        """Is everything the same objects? `hold` asks this first, since it is fast."""
        return (
            not any(self._empty_containers)
            and all(
                map(
                    is_,
                    map(dict.get, self._entry_homes, self._entry_keys, repeat(MISSING)),
                    self._entry_values,
                )
            )
            and all(map(is_, map(type, self._objects), self._types))
            and self._tensor_extras.unchanged()
            and all(map(is_, [get() for get in self._getters], self._got_values))
            and [*map(len, self._class_dicts)] == self._class_sizes
            and [*map(len, self._namespace_dicts)] == self._namespace_sizes
            and [*map(len, self._containers)] == self._container_lengths
            and all(
                map(is_, chain.from_iterable(self._iterate_containers()), self._container_items)
            )
            and all(_type_of(place.value) is kind for place, kind in self._typed_places)
            and all(content_key(get()) == key for get, key in self._contents)
            and all(len(value) == length for value, length in self._container_sizes)
        )

    def _iterate_containers(self) -> Any:
        return chain(self._containers, map(dict.values, self._dict_containers))

    def _arm_guards(self, walk: ContentWalk, expected: Sequence[Any]) -> list[Any]:
        """Store the objects of now, for `hold_by_identity`.

        Args:
            walk: makes keys.
            expected: of each place, the key of before; None where there is none yet.

        Returns:
            Of each place, the key of what stands there now.
        """
        # Entries of dictionaries; places with a getter; and containers, by identity of their items.
        self._entry_homes: list[Any] = []
        self._entry_keys: list[Any] = []
        self._entry_values: list[Any] = []
        self._getters: list[Callable[[], Any]] = []
        self._got_values: list[Any] = []
        self._containers: list[Any] = []
        self._dict_containers: list[Any] = []
        self._empty_containers: list[Any] = []
        self._container_sizes: list[tuple[Any, int]] = []
        # What has no lasting identity is compared by type or content each time.
        self._typed_places: list[tuple[Place, type]] = []
        self._contents: list[tuple[Callable[[], Any], Any]] = []
        self._tensor_extras = AttributesAndHooks([*filter(is_attributes_or_hooks, self._places)])
        # Of each place the value, where that cannot change in place.
        self._fixed: list[Any] = []
        keys = []
        for place, was in zip(self._places, expected, strict=True):
            value = place.value
            key = walk.make_part(value, place.home, place.key, was)
            keys.append(key)
            self._fixed.append(value if _is_fixed(key) else _CHANGEABLE)
            if is_attributes_or_hooks(place):
                continue
            if key is torch.Tensor or isinstance(key, ByType):
                if place.identity not in self._slots:
                    self._typed_places.append((place, _type_of(place.value)))
            elif place.get is None:
                self._watch_entry(place.home, place.key)
            elif place.key == "()" and not isinstance(key[-1], ByIdentity):
                self._contents.append((place.get, key))  # each answer is a new object
            else:
                self._watch_answer(place.get)
        for part, key in walk.changeable:
            self._watch_contents(part, key)
        self._namespace_sizes = [*map(len, self._namespace_dicts)]
        self._container_lengths = [*map(len, self._containers)]
        self._container_items = [*chain.from_iterable(self._iterate_containers())]
        return keys

    def _watch_entry(self, home: Any, key: Any) -> None:
        self._entry_homes.append(home)
        self._entry_keys.append(key)
        self._entry_values.append(dict.get(home, key, MISSING))

    def _watch_answer(self, get: Callable[[], Any]) -> None:
        self._getters.append(get)
        self._got_values.append(get())

    def _watch_contents(self, part: Any, key: Any) -> None:
        """Store what a part of a value contains now."""
        if isinstance(part, (tuple, frozenset)):
            return  # it cannot change
        if isinstance(part, SimpleNamespace):
            part = vars(part)
        by_identity = isinstance(key, (ContainerKey, EntriesKey))
        if not by_identity or isinstance(part, (MappingProxyType, functools.partial)):
            self._contents.append((functools.partial(_as_it_is, part), key))
        elif not len(part):
            self._empty_containers.append(part)
        elif isinstance(key, ContainerKey) and any(isinstance(k, ByType) for k in key.parts):
            self._watch_items(part, key)
        else:
            self._containers.append(part)
            if isinstance(part, dict):
                self._dict_containers.append(part)

    def _watch_items(self, part: Any, key: ContainerKey) -> None:
        """Store the items of a container that holds numbers that are graph inputs."""
        self._container_sizes.append((part, len(part)))
        for at, was in zip(part if isinstance(part, dict) else count(), key.parts, strict=False):
            if isinstance(was, ByType):
                get = None if isinstance(part, dict) else functools.partial(getitem, part, at)
                self._typed_places.append((Place("", part, at, get), type(was.value)))
            elif isinstance(part, dict):
                self._watch_entry(part, at)
            else:
                self._watch_answer(functools.partial(getitem, part, at))


_CHANGEABLE = object()


def _is_fixed(key: Any) -> bool:
    """Is it the key of a plain value, or of an object that counts by identity?"""
    return type(key) is tuple and (key[0] in PLAIN or isinstance(key[-1], ByIdentity))


def _type_of(value: Any) -> type:
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _as_it_is(value: Any) -> Any:
    return value


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
        """Are the same tensors there, and are they what they were?

        Raises:
            LookupError: a list or a dictionary in which one was has become shorter.
        """
        if not all(map(is_, map(getitem, self._homes, self._keys), self._found)):
            return False
        *now, specs = self._read_tensor_state()
        *were, known = self._were
        return now == were and all(map(is_, specs, known))

    def _read_tensor_state(self) -> tuple[list[Any], ...]:
        with Local():
            specs = [*map(dict.get, map(vars, self._each), repeat("_spec"))]
            return (*[[*map(read, self._each)] for read in _TENSOR_PROPERTIES], specs)


# -- call signatures -------------------------------------------------------------------------------


def signature_of(state: State, tensors: list[Any], call: Any) -> tuple[Any, ...]:
    """The signature of a call: a tuple of (name, value...) for each part.

    Args:
        tensors: the leaves of what the step reaches, then those of the call.
        call: its (args, kwargs).
    """
    first: dict[int, int] = {}
    arguments, structure = flatten_call(call)
    parts: list[Any] = [("structure", structure)]
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
    """The strides of arguments and of results of other steps, which may differ from call to call;
    of the step's own tensors only where they are not contiguous."""
    with Local():
        return [
            t.stride() if i >= arguments or not t.is_leaf or not t.is_contiguous() else ()
            for i, t in enumerate(tensors)
            if isinstance(t, torch.Tensor) and t.layout == torch.strided
        ]


def kind_of_tensor(t: torch.Tensor) -> tuple[Any, ...]:
    """What a program is made for, of a tensor: shape, layout, dtype, hooks, not strides."""
    with Local():
        attributes = t.__dict__
        spec = attributes.get("_spec")
        own: tuple[Any, ...] = ()
        if attributes and not OWN_ATTRIBUTES.issuperset(attributes):
            names = user_attributes_of(t)
            own = tuple([(name, _attribute_key(attributes[name])) for name in names])
        trained = _requires_grad(t)
        hooks = user_hooks_of(t) if trained else ()
        shown = t.is_conj(), t.is_neg()
        return (spec or t.shape, _dtype(t), trained, t.device, type(t), own, hooks, shown)


def _attribute_key(value: Any) -> Any:
    return torch.Tensor if isinstance(value, torch.Tensor) else whole_key(value)


# -- torch modes -----------------------------------------------------------------------------------

# Private torch: the mode of `with torch.device(...)`.
_Device = torch.utils._device.DeviceContext


def active_modes() -> tuple[Any, ...]:
    """The torch modes of now, as a hashable value."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_anomaly_enabled(),
        read_autocast_state(),
        *kernel_settings(),
        # By these kernels are chosen when a graph is captured or compiled.
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        *map(_key_of_mode, function_modes()),
    )


def kernel_settings() -> tuple[Any, ...]:
    """The settings that kernels read when they run; a graph's kernels read those of its caller."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
    )


def function_modes() -> list[Any]:
    """The user's active TorchFunctionModes, the outermost first: their effect is in the graph."""
    count = torch._C._len_torch_function_stack()
    if not count:
        return []
    found = map(torch._C._get_function_stack_at, range(count))
    return [m for m in found if isinstance(m, _Device) or is_user_module(type(m).__module__)]


def hearing_modes() -> list[Any]:
    """Those of `function_modes` that hear calls: `torch.device` says where tensors are made."""
    return [mode for mode in function_modes() if not isinstance(mode, _Device)]


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Within, no TorchFunctionMode is active. Private torch: `_pop_mode_temporarily`."""
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield


def _key_of_mode(mode: Any) -> Any:
    return mode.device if isinstance(mode, _Device) else ByIdentity(mode)


# -- recompile reasons -----------------------------------------------------------------------------

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


def _explain_difference(
    now: Description, known: Iterable[tuple[Description, Guards | None]]
) -> str:
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

    def reason(self, describe: Callable[[], Description]) -> str:
        """Why a call needs a new program; `describe` says what it is."""
        if not self._described:
            return _FIRST_CALL
        return _explain_difference(describe(), self._described.values())

    def note_capture(
        self,
        reason: str,
        key: Any,
        description: Description,
        guards: Guards | None,
        numbers: int,
        keep: int,
    ) -> None:
        """Note that a program was captured.

        Args:
            reason: why.
            key: the call's signature, and what tells programs of one signature apart.
            numbers: `Conditions.identify_numbers`.
            keep: how many programs the step keeps.
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
        """Warn of what differs in each call: a Python value, an int argument, a float that is read
        as a number."""
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
                f"If the step does not need {names_text}, keep it apart from what the step reads; "
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
