"""Released weights: the error of whoever reads a view of a weight that is no longer gathered.

A view that outlives the forward of its block would read memory that is empty, or another step's
values. Views that are DTensors are found when the block is released, and their layout is replaced
by one whose every use raises. Other views (`to_local()`, NumPy arrays, those of C++) cannot raise:
they keep the memory, and the block gets new memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunction as Unheard

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.autograd import holders
from partita.tensor.dtensor import DTensor

__all__ = ["find_views_of_memory", "give_up_memory"]

_storage_of = torch._C.TensorBase.untyped_storage


class _Released:
    """Stands in place of a view's spec: every use raises, also as a part of a plan's key."""

    # These may be read without an error: of the memory, and that it is gone, one may ask.
    is_whole = True
    is_copy = False

    def __init__(self, name: str):
        self._name = name

    def _raise_released(self) -> NoReturn:
        raise LayoutError(
            f"{self._name} is released: this view of it was kept beyond the forward of its block",
            place=user_line(),
            reason="between the uses of a block each rank holds its shard of a weight only",
            fixes=(
                Fix("read the weight of the module anew", "its shards, where they are needed"),
                Fix("keep w.detach().clone()", "made in the forward: the value of that step"),
                Fix("compute with it in the forward", "and return what depends on it"),
            ),
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise_released()

    def __hash__(self) -> int:
        self._raise_released()

    def __eq__(self, other: object) -> bool:
        return self is other


def give_up_memory(full: torch.Tensor, known: int, name_of: Callable[[int], str]) -> bool:
    """May the memory of `full` be freed? Views of it that are DTensors raise from now on.

    Args:
        known: the number of holders of the storage where no one keeps a view.
        name_of: gives the name of the weight at an element of `full`, for the error.
    """
    with Unheard():  # of the tensors themselves, whatever they stand for
        return _give_up_memory_unheard(full, known, name_of)


def _give_up_memory_unheard(full: torch.Tensor, known: int, name_of: Callable[[int], str]) -> bool:
    storage = _storage_of(full)
    kept = holders(storage) - known
    if kept <= 0:
        return True
    views = find_views_of_memory(full, storage, kept)
    typed = [t for t in views if isinstance(t, DTensor)]
    for t in typed:
        t._spec = _Released(name_of(torch._C.TensorBase.storage_offset(t)))  # type: ignore[assignment, arg-type]
    return len(typed) == kept


def find_views_of_memory(
    full: torch.Tensor, storage: torch.UntypedStorage, count: int
) -> list[Any]:
    """The Python tensors, other than `full`, that lie in `storage`; `count` are looked for.

    Young objects are searched first, where a running backward's tensors are. All objects are
    searched only for tensors that have outlived garbage collections, or that C++ holds.
    """
    kinds, found = _kinds_of_tensors(), []
    for generation in range(3):
        for t in [t for t in gc.get_objects(generation) if id(type(t)) in kinds]:
            if t is not full and _lies_in(t, storage):
                found.append(t)
        if len(found) >= count:
            break
    return found


def _kinds_of_tensors() -> set[int]:
    """The ids of all tensor classes: `isinstance` could run code of the objects."""
    kinds: dict[int, type] = {}
    ahead: list[type] = [torch.Tensor]
    while ahead:
        kind = ahead.pop()
        if id(kind) not in kinds:
            kinds[id(kind)] = kind
            ahead += type.__subclasses__(kind)
    return set(kinds)


def _lies_in(t: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return _storage_of(t)._cdata == storage._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or no memory at all
        return False
