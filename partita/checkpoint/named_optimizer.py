"""Named optimizer state, which loads into another mesh, order of parameters and process.

Parameters have the names that a module in the same state gives them, in the form of
torch.distributed.checkpoint.state_dict, and numbers as in torch.optim where no module does:

    {"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.layout import Layout
from partita.tensor import DTensor
from partita.tensor.dtensor import tagged
from partita.tensor.dtensor_gradients import update_spec
from partita.tensor.spec import spec_of
from partita.tensor.uneven_pieces import empty_with_room

if TYPE_CHECKING:
    from partita.comm.dcp_format import Metadata

__all__ = ["name_parameters", "open_optimizer", "strip_wrapper_names"]

Path = tuple[str | int, ...]
Names = dict[int, str]
"""For the id of each parameter of an optimizer, its name."""


def strip_wrapper_names(name: str) -> str:
    """A parameter's name without the parts that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def name_parameters(
    optimizer: torch.optim.Optimizer, modules: Sequence[tuple[Path, torch.nn.Module]]
) -> Names:
    """A name for each parameter: that in its module, after the module's path if there are several.

    Where some parameter is in no module: the names that the optimizer was made with
    (`AdamW(model.named_parameters())`), else the numbers that torch.optim gives.
    """
    found: dict[int, tuple[Path, str]] = {}
    for path, module in reversed(modules):  # the first module that has a parameter names it
        for name, p in module.named_parameters():
            found[id(p)] = (path, strip_wrapper_names(name))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(id(p) in found for p in params):
        given = [n for g in optimizer.param_groups for n in g.get("param_names", ())]
        return dict(zip(map(id, params), given or map(str, range(len(params))), strict=True))
    several = len({found[id(p)][0] for p in params}) > 1
    names = {}
    for p in params:
        path, name = found[id(p)]
        names[id(p)] = ".".join([*map(str, path), name]) if several else name
    return names


def open_optimizer(
    optimizer: torch.optim.Optimizer, names: Names, path: Path, stored: Metadata | None
) -> tuple[dict[str, Any], Callable[[], None]]:
    """(Its state by name, over its own tensors; a function that loads this into the optimizer.)"""
    raw = optimizer.state_dict()
    params: dict[Any, torch.Tensor] = {}  # by torch's numbers
    for group, packed in zip(optimizer.param_groups, raw["param_groups"], strict=True):
        params.update(zip(packed["params"], group["params"], strict=True))
    number = {names[id(p)]: i for i, p in params.items()}

    def name_of_param(i: Any) -> str:
        return names[id(params[i])] if i in params else str(i)

    state = {name_of_param(i): dict(held) for i, held in raw["state"].items()}
    groups = [{**g, "params": [name_of_param(i) for i in g["params"]]} for g in raw["param_groups"]]
    held = {**raw, "state": state, "param_groups": groups}
    if stored is not None:
        there = _stored_by_parameter(stored, (*path, "state"))
        for name, i in number.items():
            for key, metadata in there.get(name, {}).items():
                of_name = state.setdefault(name, {})
                if key not in of_name:
                    of_name[key] = _allocate_state(params[i], key, metadata)
    current = [list(g["params"]) for g in groups]

    def load_into_optimizer() -> None:
        by_number = {number.get(name, name): values for name, values in state.items() if values}
        loaded = [
            {**_group_of(mine, groups, path), "params": [number[n] for n in mine]}
            for mine in current
        ]
        optimizer.load_state_dict({**held, "state": by_number, "param_groups": loaded})
        _undo_casts(optimizer, {id(params[i]): by_number[i] for i in params if i in by_number})

    return held, load_into_optimizer


def _group_of(names: list[str], groups: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The loaded group that has the parameters of a group of this optimizer.

    Raises:
        ValueError: they were in several groups, or in none.
    """
    having = [g for g in groups if set(names) & set(g["params"])]
    if len(having) == 1 and set(names) <= set(having[0]["params"]):
        return having[0]
    where = ".".join(map(str, path))
    raise ValueError(
        f"{where}: the parameters {', '.join(names)} are one group of this optimizer, and were "
        f"in {len(having)} groups, or only in part, in the one that was saved"
    )


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: dict[int, dict[str, Any]]) -> None:
    """Restore the dtype of loaded state, which torch casts to the parameter's dtype."""
    for p, values in optimizer.state.items():
        for key, value in loaded.get(id(p), {}).items():
            held = values.get(key)
            if isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                values[key] = value


# -- an optimizer that has not stepped yet --------------------------------------------------------


def _stored_by_parameter(stored: Metadata, path: Path) -> dict[Any, dict[Any, Any]]:
    """For each parameter's name, the checkpoint's metadata of its state, by key."""
    found: dict[Any, dict[Any, Any]] = {}
    for name, at in (stored.planner_data or {}).items():
        if len(at) == len(path) + 2 and at[: len(path)] == path:
            found.setdefault(at[-2], {})[at[-1]] = stored.state_dict_metadata[name]
    return found


def _allocate_state(p: torch.Tensor, key: str, metadata: Any) -> torch.Tensor | None:
    """Memory for the state `key` of `p`, laid out as its optimizer would lay it out."""
    size = getattr(metadata, "size", None)
    if size is None:  # a value and no tensor: it comes whole
        return None
    dtype = metadata.properties.dtype
    if key == "step":  # counted on the CPU, or where the optimizer then moves it
        return torch.empty(size, dtype=dtype)
    if not isinstance(p, DTensor):
        return torch.empty(size, dtype=dtype, device=p.device)
    # State of the parameter's shape lies where each element is updated; other state is whole.
    spec = update_spec(p)
    if size != spec.shape:
        spec = spec_of(Layout(tuple(size)), spec.wire)
    with Local():
        return tagged(empty_with_room(spec, dtype, p.device), spec)
