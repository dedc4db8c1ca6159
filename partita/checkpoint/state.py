"""States: the named tensors and values in nested dicts and lists, and where they go back to.

An object with `state_dict` and `load_state_dict` (a module, an optimizer, a scheduler, a data
loader) stands for its state dict. Names and paths are those of torch.distributed.checkpoint:
`{"a": {"b": [x]}}` has x as "a.b.0".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from partita.tensor import DTensor

from .named_optimizer import name_parameters, open_optimizer, strip_wrapper_names

if TYPE_CHECKING:
    from partita.comm.dcp_format import Metadata

__all__ = ["Leaf", "OpenedState", "Path", "open_module", "open_state"]

Path = tuple[str | int, ...]


@dataclass
class Leaf:
    """A tensor or value in a state.

    Attributes:
        path: the keys on the way to it, as text, and indices in lists.
        holder, key: it is `holder[key]`, of a dict or list.
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
    """A state whose objects have been replaced by their state dicts.

    Attributes:
        leaves: by name, such as "optimizer.state.0.weight.exp_avg".
        load_back: functions that load the leaves into the objects, to be called in order.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    load_back: list[Callable[[], None]] = field(default_factory=list)


def open_state(state: Mapping[str, Any], stored: Metadata | None = None) -> OpenedState:
    """The leaves of `state`.

    Args:
        stored: the metadata of the checkpoint that will be read into it: an optimizer that has not
            stepped yet gets the tensors that the checkpoint has for it.

    Raises:
        ValueError: two leaves have one name; a DTensor in a tuple or set; `state` is no dict.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state is a dict, and this is a {type(state).__name__}: "
            'write {"model": model, "optimizer": optimizer, "step": step}'
        )
    out = OpenedState()
    modules = list(_find_modules(state, ()))

    def open_value(value: Any, path: Path, holder: Any, key: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            names = name_parameters(value, modules)
            value, load_back = open_optimizer(value, names, path, stored)
            out.load_back.append(load_back)
        elif isinstance(value, torch.nn.Module):
            value, load_back = open_module(value)
            out.load_back.append(load_back)
        elif _is_stateful(value):
            owner, value = value, value.state_dict()
            out.load_back.append(lambda: owner.load_state_dict(value))
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
    """Is a list one value? Not if it holds tensors, dicts or objects with a state dict."""
    if isinstance(value, list):
        return all(_is_one_value(v) for v in value)
    return not (isinstance(value, (torch.Tensor, Mapping)) or _is_stateful(value))


def _hides_a_dtensor(value: Any) -> bool:
    if isinstance(value, (tuple, set, frozenset)):
        return any(isinstance(v, DTensor) or _hides_a_dtensor(v) for v in value)
    return False


def _find_modules(value: Any, path: Path) -> Iterator[tuple[Path, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _find_modules(v, (*path, str(k)))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _find_modules(v, (*path, i))


def open_module(module: torch.nn.Module) -> tuple[dict[str, Any], Callable[[], None]]:
    """(Its state dict, by names without torch.compile's parts; a function that loads this back.)"""
    own = module.state_dict()
    names = {name: strip_wrapper_names(name) for name in own}
    held = {names[name]: value for name, value in own.items()}

    def load_into_module() -> None:
        module.load_state_dict({name: held[plain] for name, plain in names.items()})

    return held, load_into_module
