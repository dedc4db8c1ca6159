"""What is in a state: which named tensors and values, and where do they go back to?

A state is nested dicts and lists. Anything in it that has `state_dict` and `load_state_dict` (a
module, an optimizer, a scheduler, a data loader) stands for its state dict. Names and paths are
those that torch.distributed.checkpoint gives: `{"a": {"b": [x]}}` has x under "a.b.0".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from partita.tensor import DTensor

from .named_optimizer import named_parameters_of, opened_optimizer, without_wrapper

if TYPE_CHECKING:
    from partita.comm.dcp_reading import Metadata

__all__ = ["Leaf", "OpenedState", "Path", "opened", "opened_module"]

Path = tuple[str | int, ...]


@dataclass
class Leaf:
    """A tensor or value in a state.

    Attributes:
        path: the keys on the way to it, as text, and the places in lists.
        holder: the dict or list that has it.
        key: under this key.
    """

    path: Path
    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]

    @value.setter
    def value(self, value: Any) -> None:
        self.holder[self.key] = value


@dataclass
class OpenedState:
    """A state whose objects have been opened.

    Attributes:
        leaves: by name, such as "optimizer.state.0.weight.exp_avg".
        closing: puts what was loaded into the leaves back into the objects, in order.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    closing: list[Callable[[], None]] = field(default_factory=list)


def opened(state: Mapping[str, Any], stored: Metadata | None = None) -> OpenedState:
    """All that is in `state`.

    Args:
        stored: the checkpoint that will be read into it: an optimizer that has not stepped yet
            gets the tensors that the checkpoint has for it.

    Raises:
        ValueError: two things of one name; a DTensor in a tuple or set; `state` is no dict.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state is a dict, and this is a {type(state).__name__}: "
            'write {"model": model, "optimizer": optimizer, "step": step}'
        )
    out = OpenedState()
    modules = list(_modules(state, ()))

    def open_value(value: Any, path: Path, holder: Any, key: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            names = named_parameters_of(value, modules)
            value, close = opened_optimizer(value, names, path, stored)
            out.closing.append(close)
        elif isinstance(value, torch.nn.Module):
            value, close = opened_module(value)
            out.closing.append(close)
        elif _is_stateful(value):
            owner, value = value, value.state_dict()
            out.closing.append(lambda: owner.load_state_dict(value))
        if isinstance(value, Mapping):
            for k, v in value.items():
                open_value(v, (*path, str(k)), value, k)
        elif isinstance(value, list) and not _is_one_value(value):
            for i, v in enumerate(value):
                open_value(v, (*path, i), value, i)
        else:
            name = ".".join(map(str, path))
            if name in out.leaves:
                raise ValueError(f"two things in the state are called {name}")
            if _hides_a_dtensor(value):
                raise ValueError(f"{name}: a DTensor in a {type(value).__name__}; put it in a list")
            out.leaves[name] = Leaf(path, holder, key)

    for key, value in state.items():
        open_value(value, (str(key),), state, key)
    return out


def _is_stateful(value: Any) -> bool:
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def _is_one_value(value: Any) -> bool:
    """A list is taken apart if it has in it what must be; else it is a value like any other."""
    if isinstance(value, list):
        return all(_is_one_value(v) for v in value)
    return not (isinstance(value, (torch.Tensor, Mapping)) or _is_stateful(value))


def _hides_a_dtensor(value: Any) -> bool:
    if isinstance(value, (tuple, set, frozenset)):
        return any(isinstance(v, DTensor) or _hides_a_dtensor(v) for v in value)
    return False


def _modules(value: Any, path: Path) -> Iterator[tuple[Path, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _modules(v, (*path, str(k)))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _modules(v, (*path, i))


def opened_module(module: torch.nn.Module) -> tuple[dict[str, Any], Callable[[], None]]:
    """Its state dict, under the names that it has without torch.compile."""
    own = module.state_dict()
    names = {name: without_wrapper(name) for name in own}
    held = {names[name]: value for name, value in own.items()}

    def load_into_module() -> None:
        module.load_state_dict({name: held[plain] for name, plain in names.items()})

    return held, load_into_module
