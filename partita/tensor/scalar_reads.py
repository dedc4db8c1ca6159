"""Numbers that torch reads from DTensors in C++: `s` in `torch.add(a, b, alpha=s)`, a, b plain.

torch takes a tensor of no dimensions for a number, and where no operand is a DTensor no
`__torch_function__` is called. What reads the number is one operator of ATen,
`_local_scalar_dense`, which would find this rank's share. From the first DTensor on of which a rank
does not hold the number, that operator is replaced by one in Python, which costs each plain
`x.item()` about a microsecond. A program without such DTensors, or of one rank, keeps torch's own.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch._C import DisableTorchFunction  # type: ignore[attr-defined]  # for modes, too
from torch._C import _is_torch_function_enabled as _global_view

from partita.comm.device import keys_of_kernels

from .arguments import read_number
from .dtensor import DTensor
from .spec import ON_NEW_SPEC, Spec

__all__ = ["installed_libraries", "is_read_in_part"]

# C++ that no operator is behind: it reads the memory of one rank.
_value_held = torch._C.TensorBase.tolist


def is_read_in_part(x: torch.Tensor) -> bool:
    """Is `x` a DTensor of which torch would read, as the number that it is, this rank's part?"""
    return isinstance(x, DTensor) and _global_view() and not x._spec.is_whole


def _read_scalar(x: torch.Tensor) -> Any:
    if is_read_in_part(x):
        return read_number(x)  # type: ignore[arg-type]
    with DisableTorchFunction():
        value = _value_held(x)
    while type(value) is list:
        (value,) = value
    return value


installed_libraries: list[torch.library.Library] = []
"""What stands before torch\'s own kernels: nothing until a number is read that no rank holds."""
_installing = threading.Lock()


def _install_read_kernels(spec: Spec) -> None:
    """Take the operator's place where `spec` is of a number that no rank holds whole."""
    if spec.shape.numel() != 1 or spec.is_whole:
        return
    with _installing:
        if installed_libraries:
            return
        ON_NEW_SPEC.remove(_install_read_kernels)
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that there was a kernel before
            for key in keys_of_kernels():
                if torch._C._dispatch_has_kernel_for_dispatch_key(_OPERATOR, key):
                    library.impl("_local_scalar_dense", _read_scalar, key, allow_override=True)
        installed_libraries.append(library)


_OPERATOR = "aten::_local_scalar_dense"
ON_NEW_SPEC.append(_install_read_kernels)
