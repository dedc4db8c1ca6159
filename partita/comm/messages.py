"""Messages between ranks: values and errors as JSON, since to unpickle what comes from the network
could run code.

A message has Python's own types, tensors' shapes and dtypes, paths, dataclasses that were declared
with `message`, and errors: Python's own, those of partita's layouts, and any other as the nearest
of these, with its name in its text.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from partita.layout import Fix, LayoutError

T = TypeVar("T")
_declared: dict[str, type] = {}


def message(kind: type[T]) -> type[T]:
    """A class decorator: this dataclass may be sent to other ranks."""
    _declared[kind.__name__] = kind
    return kind


message(Fix)


def pack(thing: Any) -> bytes:
    """`thing` as bytes.

    Raises:
        TypeError: something in it has no place in a message.
    """
    return json.dumps(_to_json(thing), separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """What was packed.

    Raises:
        ValueError: these bytes are no message.
    """
    try:
        return _from_json(json.loads(data))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"a rank has sent what is no message: {error}") from None


def hash_text(text: str, nbytes: int = 16) -> bytes:
    """A digest of `text`, equal in every process."""
    return hashlib.blake2b(text.encode(), digest_size=nbytes).digest()


_PLAIN = (str, int, float, bool, type(None))


def _to_json(x: Any) -> Any:
    kind = type(x)
    if kind in _PLAIN:
        return x
    if kind is list:
        return [_to_json(y) for y in x]
    if kind is tuple:
        return {"tuple": [_to_json(y) for y in x]}
    if isinstance(x, Mapping):
        return {"dict": [[_to_json(k), _to_json(v)] for k, v in x.items()]}
    if kind is bytes:
        return {"bytes": base64.b64encode(x).decode()}
    if kind is torch.Size:
        return {"size": list(x)}
    if kind is torch.dtype:
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, Path):
        return {"path": str(x)}
    if isinstance(x, BaseException):
        return {"error": _error_to_json(x)}
    if _declared.get(kind.__name__) is kind:
        parts = {one.name: _to_json(getattr(x, one.name)) for one in fields(x)}
        return {"message": [kind.__name__, parts]}
    raise TypeError(f"a {kind.__qualname__} has no place in a message between ranks")


def _from_json(x: Any) -> Any:
    if type(x) is list:
        return [_from_json(y) for y in x]
    if type(x) is not dict:
        return x
    ((kind, inside),) = x.items()
    return _READ[kind](inside)


def _message_from_json(inside: Any) -> Any:
    name, parts = inside
    return _declared[name](**{part: _from_json(value) for part, value in parts.items()})


def _dtype_from_json(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


# -- errors ----------------------------------------------------------------------------------------


def _error_to_json(error: BaseException) -> dict[str, Any]:
    # Another class may need any arguments: it is sent as the nearest base that is known.
    bases = type(error).__mro__
    name = next(base.__name__ for base in bases if _known_error(base.__name__) is base)
    parts: dict[str, Any] = {"class": name, "text": str(error)}
    if name != type(error).__name__:
        parts["text"] = f"{type(error).__name__}: {error}"
    if isinstance(error, LayoutError):
        parts["said"] = {
            key: _to_json(getattr(error, key))
            for key in ("fact", "place", "operands", "reason", "fixes")
        }
    elif isinstance(error, OSError) and error.errno is not None:
        file = None if error.filename is None else str(error.filename)
        parts["args"] = [error.errno, error.strerror, file]
    notes = getattr(error, "__notes__", [])
    return {**parts, "notes": list(map(str, notes))}


def _error_from_json(parts: dict[str, Any]) -> BaseException:
    kind = _known_error(parts["class"])
    if kind is None:
        raise TypeError(f"{parts['class']} is no error")
    error: BaseException
    if "said" in parts:
        error = kind(**{key: _from_json(value) for key, value in parts["said"].items()})
    elif "args" in parts:
        number, text, name = parts["args"]
        error = kind(number, text) if name is None else kind(number, text, name)
    else:
        try:
            error = kind(parts["text"])
        except TypeError:  # it takes more than a text, as a UnicodeDecodeError does
            error = ValueError(f"{parts['class']}: {parts['text']}")
    for note in parts["notes"]:
        error.add_note(note)
    return error


def _known_error(name: str) -> type[BaseException] | None:
    """Python's error of that name, or one of partita's with the arguments of LayoutError."""
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    return _layout_errors().get(name)


def _layout_errors() -> dict[str, type[LayoutError]]:
    found: dict[str, type[LayoutError]] = {}
    waiting: list[type[LayoutError]] = [LayoutError]
    while waiting:
        kind = waiting.pop()
        if kind.__module__.startswith("partita.") and kind.__init__ is LayoutError.__init__:
            found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found


_READ: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda x: tuple(map(_from_json, x)),
    "dict": lambda x: {_from_json(k): _from_json(v) for k, v in x},
    "bytes": base64.b64decode,
    "size": torch.Size,
    "dtype": _dtype_from_json,
    "path": Path,
    "error": _error_from_json,
    "message": _message_from_json,
}
