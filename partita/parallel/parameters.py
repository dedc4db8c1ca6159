"""Parameters of a model: finds and replaces them, groups them into blocks, and gives initial
values.

A parameter that several modules share is replaced in all of them at once, so that it stays shared.
The old parameter is marked. An optimizer that still refers to it would train nothing, so the
optimizer's step raises an error.

A model on the meta device gets memory for this rank's shards, and values from its own init
functions. These draw the same random numbers as on one device, so the values are the same as if the
model was made on one device with the same seed. A rank never holds more than one whole parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import user_line
from partita.comm.device import HOST
from partita.layout import Fix, LayoutError
from partita.tensor.construct import can_hold, hold_value, refuse_all_but_modules, spread
from partita.tensor.dtensor import DTensor, as_dtensor
from partita.tensor.dtensor_gradients import hooks_of_backward, hooks_of_gradient, user_hooks_of
from partita.tensor.tensor_state import (
    OURS,
    count_writes,
    make_argument_error,
    own_state,
    state_of,
    states_of,
    was_written_since,
)
from partita.tensor.uneven_pieces import empty_padded

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""Parts of names that torch.compile and torch's checkpoint wrapper add."""


@dataclass(frozen=True)
class ParameterSlot:
    """The place of a parameter or buffer in a model: the attribute `attr` of `owner`."""

    owner: nn.Module
    attr: str

    @property
    def parameter(self) -> Any:
        """The parameter that is the module's attribute now.

        Raises:
            LayoutError: the attribute is not a parameter any more, because something replaced it.
        """
        found = self.owner._parameters.get(self.attr)
        if found is None:
            raise LayoutError(
                f"a {type(self.owner).__name__} no longer has the parameter {self.attr} that "
                "pt.zero has sharded",
                place=user_line(),
                reason="pt.zero shards the parameters that the model had when it was called",
                fixes=(Fix("pt.zero(model, mesh)", "last: after parametrizations, pruning, ..."),),
            )
        return found

    def put(self, value: Any) -> None:
        """Set the module's parameter or buffer to `value`, which may have any type."""
        owner = self.owner
        table = owner._parameters if self.attr in owner._parameters else owner._buffers
        table[self.attr] = value


@dataclass
class HeldParameter:
    """A parameter or buffer, with all modules that have it. A shared one is in several modules.

    Attributes:
        tensor: the parameter or buffer.
        is_buffer: True for a buffer.
        names: all its names in the model, without the parts that wrappers add.
        homes: the module and the attribute of each use.
    """

    tensor: torch.Tensor
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    homes: list[ParameterSlot] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def find_parameters_and_buffers(model: nn.Module) -> list[HeldParameter]:
    """Returns the parameters and then the buffers of `model`, each once, in order."""
    found: dict[tuple[bool, int], HeldParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for is_buffer, members in (
            (False, module.named_parameters(recurse=False, remove_duplicate=False)),
            (True, module.named_buffers(recurse=False, remove_duplicate=False)),
        ):
            for key, tensor in members:
                held = found.setdefault((is_buffer, id(tensor)), HeldParameter(tensor, is_buffer))
                held.names.append(plain_name(f"{prefix}.{key}" if prefix else key))
                if (home := ParameterSlot(module, key)) not in held.homes:
                    held.homes.append(home)
    return sorted(found.values(), key=lambda held: held.is_buffer)


def plain_name(name: str) -> str:
    """Returns a parameter's name without the parts that wrappers such as torch.compile add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def find_hooked(tensors: Sequence[Any]) -> list[Any]:
    """Returns those of `tensors` on which a user has registered backward hooks of any kind."""
    # Called in each step, where hardly any tensor has a hook.
    with local_ops():
        maybe = [
            t
            for t, state in zip(tensors, states_of(tensors), strict=True)
            if hooks_of_backward(t) or hooks_of_gradient(t) or state.has_node_hooks
        ]
    return [t for t in maybe if state_of(t).has_node_hooks or user_hooks_of(t)]


def replace_tensor(held: HeldParameter, new: torch.Tensor, *, by: str) -> None:
    """Replaces a parameter or buffer by `new` in all modules. Keeps attributes and requires_grad.

    A parameter stays the same object, unless its device changes.

    Args:
        held: the parameter or buffer, with its modules.
        new: a leaf without requires_grad to which nothing else refers. A replacement for a
            parameter under `zero` must have the old layout.
        by: the calling function, for the error of an optimizer that refers to the old tensor.
    """
    old = held.tensor
    if isinstance(old, nn.Parameter) and isinstance(new, DTensor) and can_hold(old, new):
        hold_value(old, new)
        return
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for key, value in old.__dict__.items():
        if key not in OURS:
            new.__dict__[key] = value
    layouts = state_of(old).zero_layouts
    if layouts is not None:  # the owner refers to parameters by identity
        layouts.owner.register_replacement(old, new)
    for home in held.homes:
        setattr(home.owner, home.attr, new)
    held.tensor = new
    own_state(old).replaced_in_model = (held.name, by)


def allocate_tensor(
    held: HeldParameter, *, by: str, device: torch.device | str | None = None
) -> None:
    """Replaces a parameter or buffer on the meta device by an uninitialized one.

    Args:
        held: the parameter or buffer, with its modules.
        by: the calling function, for errors.
        device: the new device. None: the device of its mesh, or the CPU for a plain tensor.
    """
    x = held.tensor
    if isinstance(x, DTensor):
        spec = x._spec
        new: Any = as_dtensor(empty_padded(spec, x.dtype, device or spec.wire.device), spec)
    else:
        new = torch.empty_like(x, device=device or HOST)
    replace_tensor(held, new, by=by)


def refuse_replaced_parameters(params: Iterable[torch.Tensor]) -> None:
    """Raises an error if an optimizer's `params` contain a parameter that its model no longer has.

    It was replaced in the model (by `materialize`, for example), so the optimizer's steps would not
    change the model.

    Raises:
        LayoutError: names the first replaced parameter.
    """
    lost = [found for p in params if (found := state_of(p).replaced_in_model) is not None]
    if lost:
        name, by = lost[0]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise LayoutError(
            f"this optimizer was made before {by}: the model no longer has its {name}{more}",
            place=user_line(),
            reason="it would update parameters that are not used",
            fixes=(Fix(f"optimizer = ...(model.parameters()) after {by}"),),
        )


# -- blocks gathered together ----------------------------------------------------------------------

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (*_WITHOUT_FORWARD, nn.Sequential)


@dataclass
class Block:
    """A unit of a model whose parameters are gathered together, because one forward uses them.

    A block is usually a layer of a ModuleList or a Sequential, found automatically or named by the
    user. Parameters outside of all blocks (an embedding, a final norm, a head) are grouped by the
    modules that own them: each such group is a block, too. A tied weight is gathered for each
    module that uses it.

    Attributes:
        name: the name of its module in the model.
        modules: the modules whose forward needs the parameters; usually one.
        slots: for each parameter, the modules and attributes that have it: several if it is tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    slots: list[list[ParameterSlot]] = field(default_factory=list)


Blocks = Iterable[str | nn.Module] | str | nn.Module | None
"""Modules, or patterns of their names; one, or several."""


def find_blocks(model: nn.Module, chosen: Blocks = None) -> list[Block]:
    """Returns the blocks of `model`, in the order of its modules. They have all but its 0-d
    parameters.

    Args:
        chosen: the modules that become blocks, one or several, or patterns of names. If a pattern
            matches a module and another one inside it, the outer one becomes a block. "*" means
            each child of the model, and the children of a ModuleList. By default: the children of
            the outermost ModuleLists and Sequentials.

    Raises:
        ValueError: a pattern matches no module, or only lists of modules; or a module is not in the
            model, or is inside another block.
    """
    names = {module: name for name, module in model.named_modules()}
    home: dict[nn.Module, nn.Module] = {}
    for root in block_modules(model, chosen):
        for module in root.modules():
            if module in home and chosen is not None:
                raise ValueError(
                    f"blocks: {names[module]} lies within the block {names[home[module]]} "
                    f"and within {names[root]}; name one of the two"
                )
            home.setdefault(module, root)
    blocks: dict[tuple[nn.Module, ...], Block] = {}
    for held in find_parameters_and_buffers(model):
        if held.is_buffer or not held.tensor.ndim:
            continue
        key = tuple({home.get(s.owner, s.owner): None for s in held.homes})
        name = " and ".join(names[m] or "model" for m in key)
        blocks.setdefault(key, Block(name, key)).slots.append(held.homes)
    return list(blocks.values())


def block_modules(model: nn.Module, chosen: Blocks = None) -> list[nn.Module]:
    """Returns the modules of `model` that become blocks: `chosen`, or the default ones.

    `find_blocks` describes `chosen` and the default.
    """
    if chosen is None:
        return list(_children_of_lists(model))
    if isinstance(chosen, str) or not isinstance(chosen, Iterable):
        chosen = [chosen]
    names = {module: name for name, module in model.named_modules()}
    found: dict[nn.Module, None] = {}
    for one in chosen:
        if isinstance(one, str):
            found.update(dict.fromkeys(_find_matching_modules(names, one)))
        elif one not in names:
            raise ValueError(f"blocks: {type(one).__name__} {one!r:.60} is not in the model")
        else:
            found[one] = None
    return list(found)


def _children_of_lists(module: nn.Module) -> Iterable[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _WITHOUT_FORWARD):
            yield child
        else:
            yield from _children_of_lists(child)


def _find_matching_modules(names: dict[nn.Module, str], pattern: str) -> list[nn.Module]:
    """Returns the matching modules that are not inside another one. "*" matches dots, too."""
    # The model itself has no name, and a list of modules has no forward.
    called = [m for m, name in names.items() if name and fnmatchcase(name, pattern)]
    matching = [m for m in called if not isinstance(m, _WITHOUT_FORWARD)]
    if not matching:
        some = ", ".join([*names.values()][1:6])
        what = f"no module is called {pattern!r}; there are {some}, ..."
        if called:
            what = f"{pattern!r} has no forward, but what is in it: '{pattern}.*'"
        raise ValueError(f"blocks: {what}")
    within = {child for m in matching for child in m.modules() if child is not m}
    return [m for m in matching if m not in within]


# -- materialization of a model --------------------------------------------------------------------


def materialize(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Allocate and initialize a model on the meta device, in place. Each rank gets its pieces.

        with torch.device("meta"):
            model = GPT(...)
        pt.parallelize(model, mesh, plan)
        torch.manual_seed(0)
        pt.materialize(model)       # as if GPT(...) had been called with this seed

    Shared parameters stay shared. Tensors that are not on the meta device do not change. By
    default, nothing is called on a module if any parameter or buffer in it is not on the meta
    device.

    Args:
        model: the model.
        device: the device of the new memory. None: the device of the mesh; the CPU for plain
            tensors.
        init_fn: called as `init_fn(model)` after the allocation; it must write every parameter and
            buffer. By default each module's `reset_parameters` is called, children first, as
            constructors do. Then the outermost modules that have `init_weights` call it.

    Returns:
        `model`.

    Raises:
        LayoutError: some parameters or buffers were not given values. The error names them.
    """
    refuse_all_but_modules(model, "materialize")
    if not isinstance(device, (torch.device, str, type(None))):
        fix = 'pt.materialize(model, device="cuda")'
        raise make_argument_error("materialize", "a device, or none for the mesh's", device, fix)
    if init_fn is not None and not callable(init_fn):
        fix = "pt.materialize(model, init_fn=function)"
        raise make_argument_error("materialize", "a function of the model as init_fn", init_fn, fix)
    bare = [held for held in find_parameters_and_buffers(model) if held.tensor.is_meta]
    if not bare:
        return model
    specs = {h.name: h.tensor._spec for h in bare if isinstance(h.tensor, DTensor)}
    writes = _allocate_tensors(bare, "materialize", device)
    if init_fn is None:
        _run_initializers(model, {*writes})
    else:
        init_fn(model)
    _refuse_without_values(
        model,
        writes,
        fact="materialize: nothing initialized these",
        reason="no reset_parameters and no init_weights wrote them, and new memory is not zero",
        fixes=(
            Fix("pt.materialize(model, init_fn=...)", "a function that writes all of them"),
            Fix("def init_weights(self): ...", "in the model, called by its constructor too"),
        ),
    )
    for held in find_parameters_and_buffers(model):
        spec = specs.get(held.name)  # the init function has assigned a new tensor
        if spec is not None and not isinstance(held.tensor, DTensor):
            replace_tensor(held, spread(held.tensor, spec), by="materialize")
    return model


def _allocate_tensors(
    bare: Iterable[HeldParameter], by: str, device: torch.device | str | None = None
) -> dict[int, int]:
    """Allocate tensors. Returns how often each new tensor has been written so far, by its id."""
    writes = {}
    for held in bare:
        allocate_tensor(held, by=by, device=device)
        writes[id(held.tensor)] = count_writes(held.tensor)
    return writes


def _run_initializers(model: nn.Module, bare: set[int]) -> None:
    """Run what the constructors of the modules ran, in their order: children come first."""
    seen: set[nn.Module] = set()

    def is_new(module: nn.Module) -> bool:
        return all(id(t) in bare for t in (*module.parameters(), *module.buffers()))

    def reset_new_parameters(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            reset_new_parameters(child)
        reset = _find_reset(module)
        if reset is not None and is_new(module):
            reset()

    def init_new_weights(module: nn.Module) -> None:
        own = getattr(module, "init_weights", None)
        if callable(own) and is_new(module):
            own()
            return
        for child in module.children():
            init_new_weights(child)

    reset_new_parameters(model)
    init_new_weights(model)


def _refuse_without_values(
    model: nn.Module, writes: dict[int, int], *, fact: str, reason: str, fixes: tuple[Fix, ...]
) -> None:
    """Raise LayoutError where a tensor of `writes` was not written since, nor replaced.

    Args:
        writes: the write counts of the tensors that got memory at that time, by id.
    """
    left = []
    for held in find_parameters_and_buffers(model):
        count = writes.get(id(held.tensor))
        if count is not None and not was_written_since(held.tensor, count) and held.tensor.numel():
            left.append(held.name)
    if left:
        place = user_line()
        raise LayoutError(fact, place=place, operands=tuple(left), reason=reason, fixes=fixes)


def _find_reset(module: nn.Module) -> Callable[[], Any] | None:
    """Returns the function that initializes a module's own parameters.

    Modules of torch use either of two names for it.
    """
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            return reset  # type: ignore[no-any-return]
    return None


# -- initial values of tensors that no file has ----------------------------------------------------


def initialize_missing(model: nn.Module, init_fn: Callable[[nn.Module], Any] | None) -> None:
    """Allocate and initialize the parts of a loaded model that are still on the meta device.

    It uses the init function of the module that holds these tensors (see `load_safetensors`). Other
    tensors of that module keep their loaded values.

    Args:
        init_fn: a function that gets a module and writes its tensors; None uses the module's own.

    Raises:
        LayoutError: some tensors still have no value. The error names them.
    """
    rest = [held for held in find_parameters_and_buffers(model) if held.tensor.is_meta]
    writes = _allocate_tensors(rest, "load")
    names = {module: name for name, module in model.named_modules()}
    for module in dict.fromkeys(home.owner for held in rest for home in held.homes):
        parts = names[module].split(".") if names[module] else []
        around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
        if (initialize := _find_initializer(module, around, init_fn)) is not None:
            _initialize_module(module, initialize, writes)
    _refuse_without_values(
        model,
        writes,
        fact="load_safetensors: no file has these, and nothing initialized them",
        reason="a model on the meta device has no values of its own",
        fixes=(
            Fix("load_safetensors(..., init_fn=...)", "called with the module that has them"),
            Fix("def reset_parameters(self): ...", "in that module"),
        ),
    )


def _find_initializer(
    module: nn.Module, around: list[nn.Module], init_fn: Callable[[nn.Module], Any] | None
) -> Callable[[], Any] | None:
    if init_fn is not None:
        return partial(init_fn, module)
    if (reset := _find_reset(module)) is not None:
        return reset
    for outer in reversed(around):  # Hugging Face transformers has `_init_weights`
        own = getattr(outer, "_init_weights", None)
        if callable(own):
            return partial(own, module)
    return None


def _initialize_module(
    module: nn.Module, initialize: Callable[[], Any], rest: Container[int]
) -> None:
    """Run one module's initializer; its loaded tensors keep their values."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    held = [t for t in own if id(t) not in rest and not t.is_meta]
    with local_ops(), torch.no_grad():
        kept = [t.detach().clone() for t in held]
    initialize()
    with local_ops(), torch.no_grad():
        for t, value in zip(held, kept, strict=True):
            t.detach().copy_(value)
