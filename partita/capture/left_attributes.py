"""Fake tensors that a captured function stores in attributes of modules.

They are removed, and an error is raised. A program would not repeat the assignment, and the module
would keep a fake.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from partita.graph.errors import not_captured
from partita.layout import Fix
from partita.tensor.tensor_state import state_of

from .fakes import is_symbolic

HOMES_OF_SLOTS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose entries are slots."""


@contextmanager
def attributes_restored(
    homes: Sequence[dict[str, Any]], contains_fake: Callable[[Any], bool]
) -> Iterator[list[dict[str, Any]]]:
    """Restores attributes in which the `with` block has stored fake tensors, at its end.

    Lists and dictionaries that are attributes get their old items back.

    Args:
        homes: the dictionaries that hold the attributes, such as an object's `__dict__`.
        contains_fake: a predicate: True for a fake, and for a container that holds one.

    Yields:
        The attributes before the `with` block.
    """
    before = [{**home} for home in homes]
    containers = []
    for held in before:
        for key, value in held.items():
            if issubclass(type(value), (list, dict)) and key not in HOMES_OF_SLOTS:
                # A user's class may override the methods, and run any code there.
                base: Any = next(b for b in (OrderedDict, dict, list) if issubclass(type(value), b))
                items = base.items(value) if issubclass(base, dict) else base.__iter__(value)
                containers.append((value, base, [*items]))
    try:
        yield before
    finally:
        for home, held in zip(homes, before, strict=True):
            for key in find_keys_with_fakes(home, contains_fake):
                if key in held:
                    home[key] = held[key]
                else:
                    del home[key]
        for value, base, items in containers:
            if contains_fake(value):
                base.clear(value)
                (base.update if issubclass(base, dict) else base.extend)(value, items)


def find_keys_with_fakes(home: dict[str, Any], contains_fake: Callable[[Any], bool]) -> list[str]:
    """Returns the names of the attributes in `home` for whose value `contains_fake` is True.

    The attributes in which a module has its parameters, buffers and submodules are left out.
    """
    return [
        key for key, value in home.items() if key not in HOMES_OF_SLOTS and contains_fake(value)
    ]


def is_list_of_parameters(value: Any, before: Any) -> bool:
    """True if a list of parameters, or of weak references to them, replaces one of the same length.

    `value` is the new list, `before` the old one. nn.GRU makes a new list whenever its parameters
    are replaced.
    """
    if type(value) is not type(before) or not issubclass(type(value), (list, tuple)):
        return False
    return len(value) == len(before) and all(
        isinstance(v, nn.Parameter)
        or (isinstance(v, torch.Tensor) and state_of(v).gathered_from is not None)
        for v in (v() if isinstance(v, weakref.ref) else v for v in value)
        if v is not None
    )


@contextmanager
def attributes_taken_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Removes fakes that the `with` block has stored in `modules` or their submodules.

    Raises:
        CaptureError: fakes were removed, and the block itself has raised nothing.
    """
    named = [
        (f"{prefix}." if prefix else "", home)
        for module in modules
        for prefix, part in module.named_modules()
        for home in (part._parameters, part._buffers, vars(part))
    ]
    with attributes_restored([home for _, home in named], _holds_fake) as before:
        yield
        left = [
            prefix + key
            for (prefix, home), held in zip(named, before, strict=True)
            for key in find_keys_with_fakes(home, _holds_fake)
            if not is_list_of_parameters(home[key], held.get(key))
        ]
    if left:
        raise not_captured(
            f"the function leaves a tensor in the attribute {left[0]} of a module",
            "a program returns what it computes, and writes only declared state",
            Fix("return it"),
            Fix(f"self.register_buffer({left[0].rpartition('.')[2]!r}, ...)", "and write into it"),
        )


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
