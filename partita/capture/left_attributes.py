"""Fakes that a captured function leaves in attributes of declared modules.

A program would not repeat the assignment, and the module would keep a fake. So the attributes are
restored, and capture raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from partita.graph.errors import not_captured
from partita.layout import Fix

from .fakes import is_symbolic


@contextmanager
def attributes_taken_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """After the block, restore module attributes in which the block has stored fake tensors.

    Lists and dictionaries that are attributes get their old items back.

    Raises:
        CaptureError: there were such attributes, and the block itself has raised nothing.
    """
    before = [
        (f"{prefix}." if prefix else "", home, {**home}, _copies_of_containers(home))
        for module in modules
        for prefix, part in module.named_modules()
        for home in (part._parameters, part._buffers, vars(part))
    ]
    left: list[str] = []
    try:
        yield
    finally:
        for prefix, home, held, containers in before:
            for key in [key for key, value in home.items() if _holds_fake(value)]:
                if not _is_list_of_parameters(home[key], held.get(key)):
                    left.append(prefix + key)
                if not any(home[key] is container for container, _ in containers):
                    _restore_attribute(home, held, key)
            for container, items in containers:
                if _holds_fake(container):
                    container.clear()
                    container.update(items) if isinstance(items, dict) else container.extend(items)
    if left:
        raise not_captured(
            f"the function leaves a tensor in the attribute {left[0]} of a module",
            "a program returns what it computes, and writes only declared state",
            Fix("return it"),
            Fix(f"self.register_buffer({left[0].rpartition('.')[2]!r}, ...)", "and write into it"),
        )


def _copies_of_containers(home: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [
        (value, type(value)(value))
        for key, value in home.items()
        if type(value) in (list, dict) and key not in ("_parameters", "_buffers", "_modules")
    ]


def _restore_attribute(home: dict[str, Any], held: dict[str, Any], key: str) -> None:
    if key in held:
        home[key] = held[key]
    else:
        del home[key]


def _holds_fake(value: Any) -> bool:
    """True for a fake tensor or a symbolic number, and for a container that holds one."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        found = waiting.pop()
        kind = type(found)
        if issubclass(kind, FakeTensor) or is_symbolic(found):
            return True
        if kind in (list, tuple, set, dict) and id(found) not in seen:
            seen.add(id(found))
            waiting += [*found, *found.values()] if kind is dict else found
    return False


def _is_list_of_parameters(value: Any, before: Any) -> bool:
    """True for the list that nn.GRU makes of its parameters whenever these are replaced."""
    return (
        type(value) is type(before) is list
        and len(value) == len(before)
        and all(isinstance(v, nn.Parameter) for v in value)
    )
