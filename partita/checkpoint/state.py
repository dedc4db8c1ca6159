"""States: the named tensors and values in nested dicts and lists of a checkpoint.

An object with `state_dict` and `load_state_dict` (a module, an optimizer, a scheduler, a data
loader) is represented by its state dict. Names and paths are the same as in
torch.distributed.checkpoint: in `{"a": {"b": [x]}}` the name of x is "a.b.0".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from partita.comm.device import default_generator, generators_in_use
from partita.layout.text import explain_calls

from .object_state import (
    KeyPath,
    Stored,
    find_stored_tree,
    grow_from_checkpoint,
    is_one_value,
    is_stateful,
    pack_containers,
    unpack_containers,
)
from .optimizer_state import name_parameters, open_optimizer, strip_wrapper_names


@dataclass
class Leaf:
    """Where a tensor or value is in a nested state, so that it can be read and replaced.

    Attributes:
        path: the keys (as text) and list indices that lead to it.
        holder, key: the dict or list that contains it, and its key: it is `holder[key]`.
    """

    path: KeyPath
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
    """A state to save or load, in which each object is replaced by its state dict.

    Attributes:
        leaves: its tensors and values, by names such as "optimizer.state.0.weight.exp_avg".
        load_back: functions that load the leaves into the objects, to be called in order.
        missing, unexpected: names of parameters that an optimizer has and the checkpoint lacks,
            and the reverse.
        wrong: lines about entries that cannot be loaded.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    load_back: list[Callable[[], None]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def open_state(
    state: Mapping[str, Any],
    stored: Mapping[str, Stored] | None = None,
    values: Mapping[str, Any] | None = None,
) -> OpenedState:
    """Returns `state` with each object in it (a module, an optimizer) replaced by its state dict.

    Args:
        stored: the metadata of the checkpoint that will be loaded; None if the state is to be
            saved. Entries that an object has not created yet are added.
        values: the checkpoint's lists of parameters, one for each parameter group, by name:
            "optimizer.param_groups.0.params".

    Raises:
        ValueError: two leaves have one name; an object's state dict has keys that a checkpoint
            cannot hold; or `state` is not a dict.
    """
    if not isinstance(state, Mapping):
        raise ValueError(
            f"a state is a dict, and this is a {type(state).__name__}: "
            'write {"model": model, "optimizer": optimizer, "step": step}'
        )
    out = OpenedState()
    modules = list(_find_modules(state, ()))

    def open_value(value: Any, path: KeyPath, holder: Any, key: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            names = name_parameters(value, modules)
            opened = open_optimizer(value, names, path, stored, values)
            out.load_back.append(opened.load_back)
            out.missing += opened.missing
            out.unexpected += opened.unexpected
            out.wrong += opened.wrong
            value = opened.tree
        elif isinstance(value, torch.nn.Module):
            value, load_back = _open_module(value)
            out.load_back.append(load_back)
        elif isinstance(value, TrainableState):  # its tensors are read in place
            value = value.state_dict()
        elif is_stateful(value):
            holder, load_back = _open_object(value, path, stored)
            out.load_back.append(load_back)
            key, value = 0, holder[0]
        if isinstance(value, Mapping):
            for k, v in value.items():
                open_value(v, (*path, str(k)), value, k)
        elif isinstance(value, list) and not is_one_value(value):
            for i, v in enumerate(value):
                open_value(v, (*path, i), value, i)
        else:
            name = ".".join(map(str, path))
            if name in out.leaves:
                raise ValueError(f"two entries of the state have the name {name}")
            out.leaves[name] = Leaf(path, holder, key)

    for key, value in state.items():
        open_value(value, (str(key),), state, key)
    return out


def _find_modules(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, torch.nn.Module]]:
    if isinstance(value, (torch.nn.Module, TrainableState)):
        yield path, value.model if isinstance(value, TrainableState) else value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _find_modules(v, (*path, str(k)))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _find_modules(v, (*path, i))


def _open_module(module: torch.nn.Module) -> tuple[dict[str, Any], Callable[[], None]]:
    """Returns the module's state dict, with plain names, and a function that loads it back."""
    own = module.state_dict()
    names = strip_wrapper_names(own)
    held = {names[name]: value for name, value in own.items()}

    def load_into_module() -> None:
        module.load_state_dict({name: held[plain] for name, plain in names.items()})

    return held, load_into_module


def _open_object(
    owner: Any, path: KeyPath, stored: Mapping[str, Stored] | None
) -> tuple[list[Any], Callable[[], None]]:
    """Returns the packed state dict of an object, in a list, and a function that loads this back.

    Entries that the object does not have yet become plain memory, because it defines no layout for
    them.
    """
    own = owner.state_dict()
    is_empty = isinstance(own, Mapping) and not own
    tree = {} if is_empty else pack_containers(own)
    if there := find_stored_tree(stored, path):
        tree = grow_from_checkpoint(tree, there, lambda _, one: _allocate_plain(one))
    box = [tree]
    return box, lambda: owner.load_state_dict(unpack_containers(box[0], own))


def _allocate_plain(one: Stored) -> torch.Tensor | None:
    return None if one.size is None else torch.empty(one.size, dtype=one.dtype)


class TrainableState:
    """The parameters of a model that require gradients, for use in a checkpoint.

        state = {"model": pt.TrainableState(model), "optimizer": optimizer}
        pt.save(state, "adapters")

    The checkpoint in this example has adapters and their optimizer state, not the frozen weights. A
    checkpoint of the whole model has the same names. So `pt.load(state, path, strict="state")`
    reads the trainable parameters of it, too.

    Args:
        model: a module. Each save contains the parameters that are trainable at that time, and no
            buffers.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the trainable parameters by name, detached, without a copy."""
        named = self.model.named_parameters(remove_duplicate=False)
        found = {name: p.detach() for name, p in named if p.requires_grad}
        return {plain: found[name] for name, plain in strip_wrapper_names(found).items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy `state` into the trainable parameters.

        Raises:
            ValueError: names differ. Nothing has been changed.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            other = sorted(own.keys() ^ state.keys())
            raise ValueError(
                f"only the model or only the state has the trainable parameters {', '.join(other)}"
            )
        for name, parameter in own.items():
            parameter.copy_(state[name])


# -- random generators -----------------------------------------------------------------------------


class RandomState:
    """The state of torch's default generators, for use in a checkpoint.

        state = {"model": model, "optimizer": optimizer, "random": pt.RandomState()}

    DTensors draw from these generators, which all ranks seed alike. The generators of Python and
    NumPy are not included: programs often seed them differently on each rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the CPU's generator, and of the current CUDA device's if used."""
        return {g.device.type: g.get_state() for g in generators_in_use()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore torch's generators to `state`."""
        for kind, drawn in state.items():
            default_generator(torch.device(kind)).set_state(drawn)


explain_calls(
    "partita.checkpoint",
    "pt.save(state, path) for files; pt.remat(module) or torch.utils.checkpoint.checkpoint to "
    "recompute in backward",
)
