"""Objects implemented in C, whose content is read without reading an attribute.

An instrumented `__getattribute__` does not see such reads, so these are guarded by their content:
arrays and buffers by their bytes, files in memory by their text and position, a view of a
dictionary (`d.items()`) by the dictionary.
"""

from __future__ import annotations

import collections
import decimal
import gc
import io
import sys
from typing import Any

__all__ = [
    "dict_of_view",
    "has_raw_content",
    "is_shared_memory",
    "make_restorer",
    "read_raw_content",
]

_BUFFERS = (bytearray, memoryview)
_FILES = (io.StringIO, io.BytesIO)
_ORDERED: Any = collections.OrderedDict()
_VIEWS = tuple(
    type(view())
    for empty in (dict[Any, Any](), _ORDERED)
    for view in (empty.keys, empty.values, empty.items)
)


def has_raw_content(value: Any) -> bool:
    """Is it an array, a buffer, a file in memory or a decimal context, mutable in place?"""
    if isinstance(value, (*_BUFFERS, *_FILES, decimal.Context)):
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    kind = type(value)
    if kind.__module__ == "array":
        return kind.__name__ == "array"
    return any(base.__module__ == "_ctypes" for base in kind.__mro__) and not is_shared_memory(
        value
    )


def is_shared_memory(value: Any) -> bool:
    """Is it memory that other programs may write (`mmap`), or a pointer of ctypes?"""
    kinds = [(base.__module__, base.__name__) for base in type(value).__mro__]
    return ("mmap", "mmap") in kinds or ("_ctypes", "_Pointer") in kinds


def read_raw_content(value: Any) -> Any:
    """The content of an object now, to be compared with `==`."""
    if isinstance(value, _FILES):
        return "closed" if value.closed else (value.getvalue(), value.tell())
    if isinstance(value, decimal.Context):
        return repr(value)
    if hasattr(value, "dtype"):
        shape, flags = value.shape, value.flags.writeable
        if value.dtype.hasobject:
            return shape, flags, repr(value.tolist())
        return shape, flags, str(value.dtype), value.tobytes()
    view = memoryview(value)
    return view.shape, view.format, view.tobytes()


def make_restorer(value: Any) -> Any:
    """A function that restores the content that an object has now."""
    if isinstance(value, _FILES) and value.closed:
        return lambda: None
    if isinstance(value, _FILES):
        text, at = value.getvalue(), value.tell()

        def restore_stream() -> None:
            if value.closed:  # it cannot be opened again
                return
            value.seek(0)
            value.truncate()
            value.write(text)  # type: ignore[arg-type]
            value.seek(at)

        return restore_stream
    if isinstance(value, decimal.Context):
        before = value.copy()

        def restore_decimal_context() -> None:
            for key in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps"):
                setattr(value, key, getattr(before, key))

        return restore_decimal_context
    if hasattr(value, "dtype"):
        array, shape = value.copy(), value.shape

        def restore_array() -> None:
            if value.shape != shape:
                value.resize(shape, refcheck=False)
            value[...] = array

        return restore_array
    if isinstance(value, bytearray) or type(value).__module__ == "array":
        items = value[:]

        def restore_items() -> None:
            value[:] = items

        return restore_items
    if memoryview(value).readonly:
        return lambda: None
    held = bytes(value)

    def restore_bytes() -> None:
        memoryview(value).cast("B")[:] = held

    return restore_bytes


def dict_of_view(value: Any) -> Any:
    """The dictionary of a dictionary view; None for other objects."""
    if not isinstance(value, _VIEWS):
        return None
    found = gc.get_referents(value)
    return found[0] if found and isinstance(found[0], dict) else None
