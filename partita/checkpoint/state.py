"""States: the named tensors and values in nested dicts and lists, and where they go back to.

An object with `state_dict` and `load_state_dict` (a module, an optimizer, a scheduler, a data
loader) stands for its state dict. Names and paths are those of torch.distributed.checkpoint:
`{"a": {"b": [x]}}` has x as "a.b.0". An optimizer's state goes by the names that a module in the
same state gives its parameters, so that it loads into another mesh, order and process:

    {"state": {name: {...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import message
from partita.comm.device import default_generator, generators_in_use
from partita.layout import Layout
from partita.tensor import DTensor
from partita.tensor.dtensor import tagged
from partita.tensor.dtensor_gradients import update_spec
from partita.tensor.tensor_state import spec_of
from partita.tensor.uneven_pieces import empty_with_room

KeyPath = tuple[str | int, ...]


@message
@dataclass(frozen=True)
class Stored:
    """What a checkpoint has by some name, without its values.

    Attributes:
        path: the keys on the way to it.
        size, dtype: of a tensor; None of a value.
    """

    path: KeyPath = ()
    size: tuple[int, ...] | None = None
    dtype: Any = None

    @classmethod
    def of(cls, value: Any, path: KeyPath = ()) -> Stored:
        """How `value` would be stored."""
        if isinstance(value, torch.Tensor):
            return cls(path, tuple(value.shape), value.dtype)
        return cls(path)

    def __str__(self) -> str:
        if self.size is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.size)}"


@dataclass
class Leaf:
    """A tensor or value in a state.

    Attributes:
        path: the keys on the way to it, as text, and indices in lists.
        holder, key: it is `holder[key]`, of a dict or list.
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
    """A state whose objects have been replaced by their state dicts.

    Attributes:
        leaves: by name, such as "optimizer.state.0.weight.exp_avg".
        load_back: functions that load the leaves into the objects, to be called in order.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    load_back: list[Callable[[], None]] = field(default_factory=list)


def open_state(state: Mapping[str, Any], stored: Mapping[str, Stored] | None = None) -> OpenedState:
    """The leaves of `state`.

    Args:
        stored: what the checkpoint has that will be read into it: an optimizer that has not
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

    def open_value(value: Any, path: KeyPath, holder: Any, key: Any) -> None:
        if isinstance(value, torch.optim.Optimizer):
            names = name_parameters(value, modules)
            value, load_back = open_optimizer(value, names, path, stored)
            out.load_back.append(load_back)
        elif isinstance(value, torch.nn.Module):
            value, load_back = _open_module(value)
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


def _find_modules(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, torch.nn.Module]]:
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _find_modules(v, (*path, str(k)))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            yield from _find_modules(v, (*path, i))


def _open_module(module: torch.nn.Module) -> tuple[dict[str, Any], Callable[[], None]]:
    """(Its state dict, by names without torch.compile's parts; a function that loads this back.)"""
    own = module.state_dict()
    names = {name: strip_wrapper_names(name) for name in own}
    held = {names[name]: value for name, value in own.items()}

    def load_into_module() -> None:
        module.load_state_dict({name: held[plain] for name, plain in names.items()})

    return held, load_into_module


# -- optimizers by name ----------------------------------------------------------------------------

Names = dict[int, str]
"""For the id of each parameter of an optimizer, its name."""


def strip_wrapper_names(name: str) -> str:
    """A parameter's name without the parts that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def name_parameters(
    optimizer: torch.optim.Optimizer, modules: Sequence[tuple[KeyPath, torch.nn.Module]]
) -> Names:
    """A name for each parameter: that in its module, after the module's path if there are several.

    Where some parameter is in no module: the names that the optimizer was made with
    (`AdamW(model.named_parameters())`), else the numbers that torch.optim gives.
    """
    found: dict[int, tuple[KeyPath, str]] = {}
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
    optimizer: torch.optim.Optimizer,
    names: Names,
    path: KeyPath,
    stored: Mapping[str, Stored] | None,
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
            for key, one in there.get(name, {}).items():
                of_name = state.setdefault(name, {})
                if key not in of_name:
                    of_name[key] = _allocate_state(params[i], key, one)
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


def _group_of(names: list[str], groups: list[dict[str, Any]], path: KeyPath) -> dict[str, Any]:
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


def _stored_by_parameter(
    stored: Mapping[str, Stored], path: KeyPath
) -> dict[Any, dict[Any, Stored]]:
    """For each parameter's name, what the checkpoint has of its state, by key."""
    found: dict[Any, dict[Any, Stored]] = {}
    for one in stored.values():
        if len(one.path) == len(path) + 2 and one.path[: len(path)] == path:
            found.setdefault(one.path[-2], {})[one.path[-1]] = one
    return found


def _allocate_state(p: torch.Tensor, key: str, stored: Stored) -> torch.Tensor | None:
    """Memory for the state `key` of `p`, laid out as its optimizer would lay it out."""
    size, dtype = stored.size, stored.dtype
    if size is None:  # a value and no tensor: it comes whole
        return None
    if key == "step":  # counted on the CPU, or where the optimizer then moves it
        return torch.empty(size, dtype=dtype)
    if not isinstance(p, DTensor):
        return torch.empty(size, dtype=dtype, device=p.device)
    # State of the parameter's shape lies where each element is updated; other state is whole.
    spec = update_spec(p)
    if size != tuple(spec.shape):
        spec = spec_of(Layout(size), spec.wire)
    with Local():
        return tagged(empty_with_room(spec, dtype, p.device), spec)


# -- random generators -----------------------------------------------------------------------------


class RandomState:
    """torch's default generators, as something that a checkpoint can hold.

        state = {"model": model, "optimizer": optimizer, "random": pt.RandomState()}

    DTensors draw from these generators, which all ranks seed alike. The generators of Python and
    NumPy are not included: programs often seed them differently on each rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as they are now: of the CPU, and of the current CUDA device if one is used."""
        return {g.device.type: g.get_state() for g in generators_in_use()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have torch's generators draw what they would have drawn when `state` was taken."""
        for kind, drawn in state.items():
            default_generator(torch.device(kind)).set_state(drawn)
