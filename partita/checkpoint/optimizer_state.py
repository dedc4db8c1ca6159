"""Optimizer states by parameter names, so that they load into another mesh or parameter order.

    {"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}

A parameter's name is its name in a module that is saved in the same `pt.save`. An optimizer creates
most of its state in its first step, so a new optimizer has none yet. As with
`optimizer.load_state_dict`, a loaded optimizer has exactly the state of the checkpoint. Tensors
that it has already are reused if size and dtype fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.layout import Layout
from partita.tensor import DTensor
from partita.tensor.dtensor import as_dtensor
from partita.tensor.dtensor_gradients import update_spec
from partita.tensor.tensor_state import spec_of
from partita.tensor.uneven_pieces import empty_padded

from .object_state import (
    KIND,
    KeyPath,
    Stored,
    find_stored_tree,
    grow_from_checkpoint,
    pack_containers,
    unpack_containers,
)

Names = dict[int, str]
"""Maps the id of each parameter of an optimizer to its name."""


def strip_wrapper_names(names: Iterable[str]) -> dict[str, str]:
    """Maps each name to the same name without `_orig_mod`, which torch.compile adds.

    Raises:
        ValueError: two names become equal.
    """
    found = {name: name.replace("_orig_mod.", "") for name in names}
    first: dict[str, str] = {}
    for name, plain in found.items():
        if (other := first.setdefault(plain, name)) != name:
            raise ValueError(
                f"{other} and {name} have one name without `_orig_mod`, which torch.compile adds: "
                "rename the module's attribute `_orig_mod`"
            )
    return found


def name_parameters(
    optimizer: torch.optim.Optimizer, modules: Sequence[tuple[KeyPath, torch.nn.Module]]
) -> Names:
    """Returns the name under which a checkpoint stores each parameter of an optimizer.

    It is the parameter's name in its module, after the module's path if there are several modules.
    If some parameter is in no module, the optimizer's own names are used
    (`AdamW(model.named_parameters())`). If it has none, the names are torch.optim's indices.

    Args:
        modules: the modules of the state, each with the keys that lead to it.
    """
    found: dict[int, tuple[KeyPath, str]] = {}
    for path, module in reversed(modules):  # the first module that has a parameter names it
        named = dict(module.named_parameters())
        for name, plain in strip_wrapper_names(named).items():
            found[id(named[name])] = (path, plain)
    groups = getattr(optimizer, "param_groups", [])
    params = [p for group in groups for p in group["params"]]
    if not all(id(p) in found for p in params):
        given = [n for g in groups for n in g.get("param_names", ())]
        return dict(zip(map(id, params), given or map(str, range(len(params))), strict=True))
    several = len({found[id(p)][0] for p in params}) > 1
    names = {}
    for p in params:
        path, name = found[id(p)]
        names[id(p)] = ".".join([*map(str, path), name]) if several else name
    return names


# -- numbers and names -----------------------------------------------------------------------------

_OF_TORCH = ("state", "param_groups")

NamedGroups = list[list[str]]
"""The names of the parameters of each group."""


def _number_parameters(raw: Any, names: NamedGroups) -> dict[str, Any] | None:
    """Returns the index of each parameter in a state dict of torch's form; None for other dicts."""
    if not (isinstance(raw, Mapping) and set(_OF_TORCH) <= set(raw)):
        return None
    numbers = [g["params"] for g in raw["param_groups"]]
    if list(map(len, numbers)) != list(map(len, names)):
        return None
    return {
        name: number
        for mine, its in zip(names, numbers, strict=True)
        for name, number in zip(mine, its, strict=True)
    }


def _pack_by_name(raw: Any, names: NamedGroups) -> Any:
    """Returns an optimizer's packed state dict, with parameter names as keys; inner ones, too.

    Raises:
        ValueError: another key of the state equals a parameter's name, or is not a string.
    """
    number = _number_parameters(raw, names)
    if number is None:
        if isinstance(raw, Mapping) and raw and all(isinstance(k, str) for k in raw):
            return {k: _pack_by_name(v, names) for k, v in raw.items()}
        return pack_containers(raw)
    name_of = {n: name for name, n in number.items()}
    state: dict[str, Any] = {}
    for key, value in raw["state"].items():
        name = name_of.get(key, key)
        if not isinstance(name, str) or name in state:
            raise ValueError(f"an optimizer's state cannot be saved by the name {name!r}")
        if not (isinstance(value, Mapping) and not value):  # as if it had not stepped
            state[name] = pack_containers(value)
    groups = zip(raw["param_groups"], names, strict=True)
    rest = {k: _pack_by_name(v, names) for k, v in raw.items() if k not in _OF_TORCH}
    return {
        **rest,
        "state": state,
        "param_groups": [pack_containers({**g, "params": mine}) for g, mine in groups],
    }


def _unpack_by_number(tree: Any, raw: Any, names: NamedGroups) -> Any:
    """Undo `_pack_by_name` for an optimizer whose own state dict is `raw`.

    A group gets the saved options, and keeps its own options that were not saved.
    """
    if not isinstance(tree, Mapping) or not isinstance(raw, Mapping) or KIND in tree:
        return unpack_containers(tree)
    number = _number_parameters(raw, names)
    if number is None:
        return {k: _unpack_by_number(v, raw.get(k), names) for k, v in tree.items()}
    saved = unpack_containers(tree.get("param_groups", []))
    groups = []
    for group, mine in zip(raw["param_groups"], names, strict=True):
        having = (g for g in saved if not set(mine).isdisjoint(map(str, g["params"])))
        options = {k: v for k, v in next(having, {}).items() if k != "param_names"}
        groups.append({**group, **options, "params": group["params"]})
    state = {number.get(k, k): unpack_containers(v) for k, v in tree.get("state", {}).items()}
    own = _OF_TORCH
    rest = {k: _unpack_by_number(v, raw.get(k), names) for k, v in tree.items() if k not in own}
    return {**rest, "state": state, "param_groups": groups}


# -- opening ---------------------------------------------------------------------------------------


@dataclass
class OpenedOptimizer:
    """An optimizer's state dict with parameter names as keys, to be saved or to be loaded into.

    Attributes:
        tree: the state. It contains the optimizer's own tensors, and new tensors for state that the
            optimizer does not have yet.
        load_back: a function that loads the tree into the optimizer.
        missing: `PATH.state.NAME` of each parameter whose state neither the checkpoint nor the
            optimizer has.
        unexpected: `PATH.state.NAME` of each parameter that only the checkpoint has.
        wrong: lines about entries that cannot be loaded.
    """

    tree: Any
    load_back: Callable[[], None]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def open_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Names,
    path: KeyPath = (),
    stored: Mapping[str, Stored] | None = None,
    values: Mapping[str, Any] | None = None,
) -> OpenedOptimizer:
    """Returns the state of an optimizer by parameter names, to be saved or to be loaded into.

    To be loaded into, it has the checkpoint's entries, without parameters that the optimizer lacks.

    Args:
        names: the names of its parameters (`name_parameters`).
        path: the keys that lead to the optimizer in the state.
        stored: the metadata of the checkpoint's entries; None if the state is to be saved.
        values: the lists of parameters in the checkpoint, one for each group, by name.
    """
    groups = getattr(optimizer, "param_groups", [])  # which some wrappers lack
    of_groups = [[names[id(p)] for p in g["params"]] for g in groups]
    raw = optimizer.state_dict()
    live = _pack_by_name(raw, of_groups)
    there = find_stored_tree(stored, path)
    if not there:
        return OpenedOptimizer(live, lambda: optimizer.load_state_dict(raw))

    where = ".".join(map(str, path))
    params = {names[id(p)]: p for g in groups for p in g["params"]}
    found = _find_saved_groups(there, where, values or {}) if groups else []
    saved = [list(map(str, one)) for one in found]
    # A wrapper of an optimizer may keep its groups elsewhere; then they cannot be compared.
    known = {name for group in saved for name in group} or set(params)
    unexpected = [name for group in saved for name in group if name not in params]
    if "state" in there:
        there["state"] = {k: v for k, v in there["state"].items() if k not in unexpected}

    def allocate(at: KeyPath, one: Stored) -> torch.Tensor | None:
        return _allocate_state(at, one, _find_owner(at, one, groups, params))

    tree = grow_from_checkpoint(live, there, allocate, replace=True)
    # With strict=False, a parameter that the checkpoint does not have keeps its state.
    own = {k: v for k, v in live.get("state", {}).items() if k in params and k not in known}
    if own:
        tree["state"] = {**tree.get("state", {}), **own}

    def load_into_optimizer() -> None:
        loaded = _unpack_by_number(tree, raw, of_groups)
        optimizer.load_state_dict(loaded)
        number = _number_parameters(raw, of_groups) or {}
        _undo_casts(optimizer, {params[n]: loaded["state"].get(i) for n, i in number.items()})

    return OpenedOptimizer(
        tree,
        load_into_optimizer,
        tuple(f"{where}.state.{name}" for name in params if name not in known | set(own)),
        tuple(f"{where}.state.{name}" for name in unexpected),
        tuple(_find_split_groups(where, of_groups, saved)),
    )


def is_list_of_parameters(one: Stored) -> bool:
    """True if the entry `one` of a checkpoint is an optimizer group's list of parameter names."""
    return len(one.path) > 2 and (one.path[-3], one.path[-1]) == ("param_groups", "params")


def _find_saved_groups(there: Any, where: str, values: Mapping[str, Any]) -> list[list[Any]]:
    count = len(there.get("param_groups", ()))
    return [values.get(f"{where}.param_groups.{i}.params", []) for i in range(count)]


def _find_split_groups(where: str, groups: NamedGroups, saved: NamedGroups) -> Iterator[str]:
    """Yields a line for each group whose parameters were in several."""
    for names in groups:
        count = sum(not set(names).isdisjoint(one) for one in saved)
        if count > 1:
            yield (
                f"{where}: the parameters {', '.join(names)} are one group of this optimizer, and "
                f"were in {count} groups of the one that was saved"
            )


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Mapping[Any, Any]) -> None:
    """Restore values that torch casts to a parameter's dtype, or converts to another type.

    Not "step", whose device torch decides, and not entries that the optimizer itself makes with
    another type.
    """
    for p, values in loaded.items():
        held = optimizer.state.get(p, {})
        for key, value in values.items() if isinstance(values, dict) else ():
            if key != "step" and isinstance(held.get(key), type(value)):
                held[key] = value


# -- memory for what the optimizer lacks -----------------------------------------------------------


def _find_owner(
    at: KeyPath, one: Stored, groups: list[dict[str, Any]], params: Mapping[Any, torch.Tensor]
) -> torch.Tensor | None:
    """Returns the parameter to which state at a path within the optimizer belongs.

    Some optimizers count parameters in keys of their own: by (group, index), or through all groups.
    """
    for way, key in pairwise(at):
        if way == "state" and key in params:
            return params[key]
    counted = [p for g in groups for p in g["params"]]
    by_number = {str((i, j)): p for i, g in enumerate(groups) for j, p in enumerate(g["params"])}
    by_number |= {str(i): p for i, p in enumerate(counted)}
    owner = next((by_number[key] for key in at if key in by_number), None)
    return owner if owner is not None and tuple(owner.shape) == one.size else None


def _allocate_state(at: KeyPath, one: Stored, owner: torch.Tensor | None) -> torch.Tensor | None:
    """Returns memory for a tensor of an optimizer's state, in the optimizer's layout."""
    size, dtype = one.size, one.dtype
    if size is None:  # a value, not a tensor: it is stored whole
        return None
    # "step" is read on the CPU. If the optimizer keeps it elsewhere, it moves it.
    if owner is None or at[-1] == "step":
        return torch.empty(size, dtype=dtype)
    if not isinstance(owner, DTensor):
        return torch.empty(size, dtype=dtype, device=owner.device)
    # State with the parameter's shape has its layout; other state is whole.
    spec = update_spec(owner)
    if size != tuple(spec.shape):
        spec = spec_of(Layout(size), spec.wire)
    with local_ops():
        return as_dtensor(empty_padded(spec, dtype, owner.device), spec)
