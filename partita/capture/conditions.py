"""Conditions: checks of a call's inputs that decide if a captured program may run in the call.

Some numbers, gradients and properties of tensors must be as at capture (`Conditions`). If one
differs, another program is found or captured, and `reason` says why. A program must not write
memory that another input overlaps (`OverlapCheck`): its graph treats inputs as separate values, so
it would not do what eager does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import is_alone
from partita.graph.errors import CaptureError, not_captured
from partita.graph.program import Input, Program
from partita.layout import Fix
from partita.tensor.aliasing import first_base_of


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition on Python numbers under which a captured program may run.

    Attributes:
        text: the condition in messages: "optimizer.weight_decay[0] != 0".
        line: the user's line of the branch.
        numbers: the inputs that the condition depends on.
        values: the values of `numbers` at capture.
        code: a compiled expression of `symbols` that must be true. If None, the numbers must have
            the same `values` as at capture.
        symbols: the names of `numbers` in `code`.
    """

    text: str
    line: str
    numbers: tuple[Input, ...]
    values: tuple[float, ...]
    code: Any
    symbols: tuple[str, ...] = ()

    def holds(self, tensors: Sequence[Any]) -> bool:
        now = [given.number(tensors) for given in self.numbers]
        if self.code is None:
            return all(map(_is_same_number, now, self.values))
        try:
            values = dict(zip(self.symbols, now, strict=True))
            return bool(eval(self.code, _names_in_code(), values))
        except ArithmeticError:
            return False

    def reason(self, tensors: Sequence[Any]) -> str:
        """Returns why the condition fails: which number changed, and the line of the branch."""
        changed = [
            f"{given.name}: {was} became {now}"
            for given, was in zip(self.numbers, self.values, strict=True)
            if not _is_same_number(now := given.number(tensors), was)
        ]
        return f"{', '.join(changed)}, and {self.text} at {self.line}"


@cache
def _names_in_code() -> dict[str, Any]:
    """Returns what names mean in `Condition.code`. Sympy is imported only if there is such code."""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    return dict(SYMPY_INTERP)


def _is_same_number(one: float, other: float) -> bool:
    if type(one) is not type(other):
        return False
    if one == other:
        return math.copysign(1, one) == math.copysign(1, other)
    return math.isnan(one) and math.isnan(other)


@dataclass(frozen=True, eq=False)
class GradientCondition:
    """A condition that the `.grad` of an input has the same metadata as at capture.

    Attributes:
        name: the name of the tensor.
        index: the tensor's index among the leaves (tensors and numbers) of a call.
        kind: the result of `kind_of_gradient` at capture.
    """

    name: str
    index: int
    kind: Any

    def holds(self, tensors: Sequence[Any]) -> bool:
        return kind_of_gradient(tensors[self.index]) == self.kind

    def reason(self, tensors: Sequence[Any]) -> str:
        now = kind_of_gradient(tensors[self.index])
        if now is None or self.kind is None:
            was, became = ("none", "there") if self.kind is None else ("there", "none")
            return f"{self.name}: gradient {was} became {became}"
        return f"{self.name}: its gradient is of another kind"


@dataclass(frozen=True, eq=False)
class GradientObjects:
    """A condition that tensors share their `.grad` objects with the same tensors as at capture.

    Attributes:
        indices: the tensors' indices among the leaves (tensors and numbers) of a call.
        first: for each tensor, the position in `indices` of the first one with the same `.grad`.
    """

    indices: Sequence[int]
    first: Sequence[int]

    def holds(self, tensors: Sequence[Any]) -> bool:
        with local_ops():
            objects = [id(_grad.__get__(tensors[i])) for i in self.indices]
        places = {found: i for i, found in reversed([*enumerate(objects)])}
        return [places[found] for found in objects] == self.first

    def reason(self, tensors: Sequence[Any]) -> str:
        return "tensors have one object as their .grad, or no longer have"


@dataclass(frozen=True, eq=False)
class EqualInputs:
    """A condition that several tensors of one element have the same value, such as step counts.

    Attributes:
        names: the names of the tensors.
        indices: the tensors' indices among the leaves (tensors and numbers) of a call.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]

    def holds(self, tensors: Sequence[Any]) -> bool:
        values = self._read_counts(tensors)
        return values.count(values[0]) == len(values)

    def reason(self, tensors: Sequence[Any]) -> str:
        values = self._read_counts(tensors)
        i = next((i for i, v in enumerate(values) if not _is_same_number(v, values[0])), 0)
        return (
            f"{self.names[i]} is {values[i]} and {self.names[0]} is {values[0]}, "
            f"where all {len(values)} such numbers were equal"
        )

    def _read_counts(self, tensors: Sequence[Any]) -> list[float]:
        return read_counts([tensors[i] for i in self.indices])


def read_counts(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Returns the values of zero-dimensional tensors with equal metadata, in one read.

    Reading them one by one takes five times as long. Meta tensors count as 0.
    """
    with local_ops(), torch.no_grad():
        if tensors[0].is_meta:
            return [0.0] * len(tensors)
        found: list[float] = torch.stack([*tensors]).tolist()
        return found


_grad: Any = torch._C.TensorBase.grad


def kind_of_gradient(t: torch.Tensor) -> Any:
    """Returns the metadata of `t.grad` as a comparison key; None if there is no gradient."""
    with local_ops():
        grad = _grad.__get__(t)
        if grad is None:
            return None
        spec = grad.__dict__.get("_spec")
        # An uneven shard is made contiguous before the graph.
        strides = () if spec is not None and spec.is_uneven else grad.stride()
        return (spec or grad.shape, grad.dtype, grad.device, strides)


FACTS_OF_OBJECTS = ("grad_fn", "grad", "_base", "_backward_hooks")
"""Attributes of a tensor for which only "is it None" is compared."""


def read_fact(t: torch.Tensor, name: str) -> Any:
    """Returns the property `name` of the tensor `t`, such as the value of `is_leaf`.

    For names in `FACTS_OF_OBJECTS`, returns True if the attribute is not None; for "id", `id(t)`.
    """
    if name == "id":
        return id(t)
    with local_ops():
        found = getattr(t, name)
        if name in FACTS_OF_OBJECTS:
            return found is not None
        return found() if callable(found) else found


@dataclass(frozen=True, eq=False)
class FactCondition:
    """A condition that a property of an input tensor, such as `is_leaf`, is the same as at capture.

    The step has read this property.

    Attributes:
        name: the name of the tensor.
        index: the tensor's index among the leaves (tensors and numbers) of a call.
        fact: the name of the property, such as "is_leaf".
        value: the property's value at capture.
        line: the user's line that reads it.
    """

    name: str
    index: int
    fact: str
    value: Any
    line: str

    def holds(self, tensors: Sequence[Any]) -> bool:
        found: bool = read_fact(tensors[self.index], self.fact) == self.value
        return found

    def reason(self, tensors: Sequence[Any]) -> str:
        now = read_fact(tensors[self.index], self.fact)
        return f"{self.name}.{self.fact}: {self.value} became {now}, asked for at {self.line}"


class Conditions(
    tuple["Condition | EqualInputs | GradientCondition | GradientObjects | FactCondition", ...]
):
    """Conditions on the leaves of a call: a captured program may run only if all hold.

    Guards, answers and `OverlapCheck` also decide whether it may run.
    """

    def failed(self, tensors: Sequence[Any]) -> str | None:
        """Returns why a program may not run with the leaves `tensors`; None if it may."""
        for condition in self:
            if not condition.holds(tensors):
                return condition.reason(tensors)
        return None

    def identify_numbers(self) -> int:
        """Returns a hash of the conditions on Python numbers, to compare two programs."""
        asked = (c for c in self if isinstance(c, Condition))
        return hash(tuple((c.text, c.line, c.values if c.code is None else ()) for c in asked))

    def counts_differ(self, tensors: Sequence[Any]) -> bool:
        """True if an optimizer's step counts differ, but the program assumes equal ones."""
        return any(isinstance(c, EqualInputs) and not c.holds(tensors) for c in self)


# -- inputs that share memory ----------------------------------------------------------------------

_NO_CONFLICT = (-1, -1)
_OF_THE_CALL = ("parameter", "buffer", "optimizer", "value", "argument")


class OverlapCheck:
    """The check that a program writes no input whose memory another input uses, too.

    Inputs may be views of one storage if none of them is written, or if they do not overlap. A view
    copy is a view in plain PyTorch, but a copy here. It may not be an input if its base is written.
    """

    def __init__(self, program: Program):
        self.program = program
        self._arguments = [i.index for i in program.inputs if i.kind == "argument"]
        self._gradients = [i.index for i in program.inputs if i.kind == "gradient"]
        self._copies = [i for i in self._arguments if i in program.view_copies]
        # Positions of written arguments; (index, whether it may conflict with an argument) of
        # state; the storages of state that may.
        self._given_to = [i for i in program.written if program.inputs[i].kind == "argument"]
        self._written = set(program.written)
        added_to = {o.index for o in program.outputs if o.kind == "gradient"}
        self._changed = {id(program.inputs[i]) for i in program.written} | {
            id(i) for i in program.inputs if i.kind == "gradient" and i.index in added_to
        }
        self._state = [
            (given.index, bool(self._given_to) or i in self._written)
            for i, given in enumerate(program.inputs)
            if given.kind in _OF_THE_CALL and given.kind != "argument"
        ]
        self._held: set[int] = set()
        self._storages: set[int] = set()
        self._overlaps = False

    def may_overlap(self, tensors: Sequence[Any]) -> bool:
        """True if an argument or gradient of a call may overlap an input that the program writes.

        This is a fast check, which may be True although nothing overlaps: `find_error` decides. The
        storages of the state are those of the last call of `note_held`.

        Args:
            tensors: the leaves (tensors and numbers) of the call.
        """
        if self._gradients:
            gradients = {*self._storages_of_gradients(tensors)}
            with local_ops():
                copies = [self._storage_of(i, tensors[i]) for i in self._copies]
            if not (self._storages.isdisjoint(gradients) and gradients.isdisjoint(copies)):
                return True
        if not self.program.written:
            return False
        with local_ops():
            starts = [self._storage_of(i, tensors[i]) for i in self._arguments]
        if self._overlaps or not self._held.isdisjoint(starts):
            return True
        return bool(self._given_to) and len(set(starts)) < len(starts)

    def note_held(self, tensors: Sequence[Any]) -> None:
        """Records which storages the step's state uses now, for `may_overlap`.

        It must be called before the first `may_overlap`, and again after the state has got other
        tensors.

        Args:
            tensors: the leaves (tensors and numbers) of a call.
        """
        with local_ops():
            starts = [self._storage_of(i, tensors[i]) for i, _ in self._state]
        self._storages = {*starts}
        self._held = {s for s, (_, near) in zip(starts, self._state, strict=True) if near}
        together = len(self._storages) < len(starts)
        shared = self._find_shared(tensors) if together else []
        is_found = self._find_conflict(shared) != _NO_CONFLICT
        self._overlaps = is_found or bool(_wires_of_uneven(shared))

    def _is_copy(self, given: Input) -> bool:
        return given.kind != "gradient" and given.index in self.program.view_copies

    def _storage_of(self, index: int, t: Any) -> int:
        """Returns the storage of leaf `index`, or if it is a view copy, that of its base."""
        t = first_base_of(t)[0] if index in self.program.view_copies else t
        found: int = t.untyped_storage()._cdata  # torch has no public name for a storage
        return found

    def _storages_of_gradients(self, tensors: Sequence[Any]) -> Iterator[int]:
        with local_ops():
            for index in self._gradients:
                if (grad := _grad.__get__(tensors[index])) is not None:
                    yield grad.untyped_storage()._cdata

    def find_error(self, tensors: Sequence[Any]) -> CaptureError | None:
        """Returns the error if an input that is written overlaps another one; None otherwise.

        All ranks return an error, or none does. Pieces of uneven inputs may overlap on some ranks
        only, because an empty piece overlaps nothing. For uneven inputs, ranks share what they
        found.

        Args:
            tensors: the leaves (tensors and numbers) of the call.
        """
        shared = self._find_shared(tensors)
        found = self._find_conflict(shared)
        for wire in _wires_of_uneven(shared):
            found = max(wire.gather_ints(found, "whether inputs of a step overlap"))
        if found == _NO_CONFLICT:
            return None
        return _make_sharing_error(*(self.program.inputs[i] for i in found))

    def _find_shared(self, tensors: Sequence[Any]) -> list[list[tuple[Any, Input]]]:
        """Returns the inputs that share a storage with a written one, grouped by storage."""
        by_storage: dict[int, list[tuple[Any, Input]]] = {}
        with local_ops():
            for given in self.program.inputs:
                if given.kind not in (*_OF_THE_CALL, "gradient"):
                    continue
                t = tensors[given.index]
                if given.kind == "gradient" and (t := _grad.__get__(t)) is None:
                    continue
                start = self._storage_of(given.index if self._is_copy(given) else -1, t)
                by_storage.setdefault(start, []).append((t, given))
        return [
            found
            for found in by_storage.values()
            if len(found) > 1 and any(self._is_written(given) for _, given in found)
        ]

    def _is_written(self, given: Input) -> bool:
        return id(given) in self._changed

    def _find_conflict(self, shared: list[list[tuple[Any, Input]]]) -> tuple[int, ...]:
        """Returns the positions of a written input and of one that overlaps it on this rank.

        Returns `_NO_CONFLICT` if there are none.
        """
        places = {id(given): i for i, given in enumerate(self.program.inputs)}
        for together in shared:  # not by the spans of pieces, which may be empty on one rank
            copies = [given for _, given in together if self._is_copy(given)]
            changed = [given for _, given in together if self._is_written(given)]
            if copies:
                return places[id(changed[0])], places[id(copies[0])]
        with local_ops():
            spans = [[(*_span_of_bytes(t), given) for t, given in found] for found in shared]
        for found in spans:
            there = sorted((one for one in found if one[1] > one[0]), key=lambda one: one[:2])
            for i, (_, end, one) in enumerate(there):
                for first, _, other in there[i + 1 :]:
                    if first >= end:
                        break
                    for written, beside in ((one, other), (other, one)):
                        if self._is_written(written):
                            return places[id(written)], places[id(beside)]
        return _NO_CONFLICT


def _wires_of_uneven(shared: list[list[tuple[Any, Input]]]) -> list[Any]:
    """Returns the wires of uneven inputs among inputs that share storages."""
    wires = [
        spec.wire
        for together in shared
        # Pieces of gradients that ZeRO has reduced share a buffer on some ranks only.
        if any(given.kind != "gradient" for _, given in together)
        for t, _ in together
        if (spec := getattr(t, "_spec", None)) is not None and spec.is_uneven
    ]
    return [wire for wire in dict.fromkeys(wires) if not is_alone(wire)]


def _span_of_bytes(t: torch.Tensor) -> tuple[int, int]:
    """Returns the range of bytes [first, end) in its storage that a tensor spans."""
    first = t.storage_offset()
    if not t.numel():
        return first, first  # type: ignore[return-value]
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (first + last + 1) * t.element_size()  # type: ignore[return-value]


def _make_sharing_error(written: Input, other: Input) -> CaptureError:
    return not_captured(
        f"{written.name} and {other.name} share memory",
        f"the step writes {written.name}, and in the graph the other tensor would not change",
        Fix(f"{other.name}.clone()", "where it is made, to get its own memory"),
    )
