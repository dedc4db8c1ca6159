"""Kernel modes: what is a mode that stands at each kernel that runs, shards seen as plain tensors?

Below autograd and below layouts: each ATen call passes with the rank's own shards, in backward too.
"""

from __future__ import annotations

from typing import Any

from torch._C import DisableTorchFunctionSubclass as Local
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EachKernel"]


class EachKernel(TorchDispatchMode):
    """Calls `kernel` in place of each kernel that runs while it is entered.

    Regions that torch.compile makes are compiled as they are without it: else torch.compile would
    stand aside, and another program be looked at. What such a region computes in kernels of its own
    is not seen.
    """

    supports_higher_order_operators = True  # a compiled region may be one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Local():
            return self.kernel(func, args, kwargs or {})

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, or something in its stead; what it gives."""
        raise NotImplementedError
