"""Tensor guards: whether the tensors that a step reaches are the same, with the same metadata.

The same object may have another storage, shape, dtype or layout than before. There are four tensors
for each parameter, so each property is read of all tensors in one pass that runs in C.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import getitem, is_
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

if TYPE_CHECKING:
    from ..capture.state_slots import Slot

__all__ = ["TensorGuard"]

_base: Any = torch._C.TensorBase
_data_ptr, _shape, _stride = _base.data_ptr, _base.size, _base.stride
_dtype, _requires_grad = _base.dtype.__get__, _base.requires_grad.__get__


class TensorGuard:
    """The tensors in some slots, as they are now.

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
        each = self._each
        with Local():
            return (
                [*map(_data_ptr, each)],
                [*map(_shape, each)],
                [*map(_stride, each)],
                [*map(_dtype, each)],
                [*map(_requires_grad, each)],
                [*map(dict.get, map(vars, each), repeat("_spec"))],
            )
