"""Released weights: what is told to whoever reads a view of a gathered weight that is gone.

A view that outlives the forward of its block would read memory that holds nothing, or another
step's values. Views that are DTensors are found when the block is released, and lose their layout:
whatever is asked of it raises. Others (`to_local()`, NumPy's arrays, what C++ holds) cannot raise:
the memory stays theirs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunction as Unheard

from partita.comm import user_line
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import DTensor
from partita.tensor.engine import holders

__all__ = ["take_from_views", "views_of_memory"]

_storage_of = torch._C.TensorBase.untyped_storage


class _Released:
    """In the place of a view's layout: every use of it, as a key of a plan too, raises."""

    # Where its memory was, and that it is gone, may be asked.
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


def take_from_views(full: torch.Tensor, known: int, name_of: Callable[[int], str]) -> bool:
    """May the memory of `full` be freed? Those who keep views of it are told when they read them.

    Args:
        known: how many hold it where no one keeps a view.
        name_of: of the weight that lies at an element of `full`, for whoever reads it.
    """
    with Unheard():  # of the tensors themselves, whatever they stand for
        return _take_from_views(full, known, name_of)


def _take_from_views(full: torch.Tensor, known: int, name_of: Callable[[int], str]) -> bool:
    storage = _storage_of(full)
    kept = holders(storage) - known
    if kept <= 0:
        return True
    views = views_of_memory(full, storage, kept)
    typed = [t for t in views if isinstance(t, DTensor)]
    for t in typed:
        t._spec = _Released(name_of(torch._C.TensorBase.storage_offset(t)))  # type: ignore[assignment, arg-type]
    return len(typed) == kept


def views_of_memory(full: torch.Tensor, storage: torch.UntypedStorage, count: int) -> list[Any]:
    """The tensors of Python's that lie in `storage`, beside `full`; `count` are looked for.

    What a backward is at work with is young: all objects of a program are looked through only for
    what has outlived collections of garbage, or is held by C++.
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
    """The classes of tensors, by identity: they are not asked what they are."""
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
