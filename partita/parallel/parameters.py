"""Parameters of modules: which modules hold one, under which names, and its exchange for another.

A parameter that several modules share is exchanged in all of them at once, so that it stays one.
The one that is given up is marked: an optimizer that still holds it would train nothing, and raises
at its step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from partita.comm import user_line
from partita.comm.device import HOST
from partita.layout import Fix, LayoutError
from partita.tensor.construct import can_hold, hold_value
from partita.tensor.dtensor import DTensor, tagged
from partita.tensor.dtensor_gradients import is_watched
from partita.tensor.tensor_state import OURS, own_state, state_of
from partita.tensor.uneven_pieces import empty_with_room

__all__ = [
    "HeldParameter",
    "allocate_tensor",
    "find_parameters_and_buffers",
    "has_hooks",
    "plain_name",
    "refuse_given_up",
    "replace_tensor",
]

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))
"""What torch.compile and torch's checkpoint wrapper put into the names of what they wrap."""


@dataclass
class HeldParameter:
    """A parameter or buffer, and the modules that hold it.

    Attributes:
        names: all its names in the model, without the parts that wrappers add.
        homes: `(module, attribute)` of each module that holds it.
    """

    tensor: torch.Tensor
    names: list[str] = field(default_factory=list)
    homes: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


def find_parameters_and_buffers(
    model: nn.Module,
) -> tuple[list[HeldParameter], list[HeldParameter]]:
    """The parameters and the buffers of `model`, each once, in the order of their first names."""
    parameters: dict[int, HeldParameter] = {}
    buffers: dict[int, HeldParameter] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for found, members in (
            (parameters, module.named_parameters(recurse=False, remove_duplicate=False)),
            (buffers, module.named_buffers(recurse=False, remove_duplicate=False)),
        ):
            for key, tensor in members:
                held = found.setdefault(id(tensor), HeldParameter(tensor))
                held.names.append(plain_name(f"{prefix}.{key}" if prefix else key))
                if not any(home is module and k == key for home, k in held.homes):
                    held.homes.append((module, key))
    return list(parameters.values()), list(buffers.values())


def plain_name(name: str) -> str:
    """`name` without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def has_hooks(p: torch.Tensor) -> bool:
    """Has the user registered hooks on this tensor?"""
    # There is no public way to ask. A hook of ours watches a tensor whose gradient was reduced.
    hooks = len(p._backward_hooks or ()) - is_watched(p)
    return hooks > 0 or bool(getattr(p, "_post_accumulate_grad_hooks", None))


def replace_tensor(held: HeldParameter, new: torch.Tensor, *, by: str) -> None:
    """Replace a tensor by `new` in all modules that hold it, with its attributes and requires_grad.

    A parameter stays the object that it is, unless its device changes.

    Args:
        new: a leaf without requires_grad that nothing else holds. Where `zero` has sharded the old
            one's state, it has the old one's layout.
        by: the function that does it, for the error of an optimizer that holds the old one.
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
    rest = state_of(old).rest
    if rest is not None:  # whoever shards the training state knows it by identity
        rest.owner.replaced(old, new)
    for module, key in held.homes:
        setattr(module, key, new)
    held.tensor = new
    own_state(old).given_up = (held.name, by)


def allocate_tensor(held: HeldParameter, *, by: str) -> None:
    """Replace a tensor on the meta device by an uninitialized one on its mesh's device, or the
    CPU."""
    x = held.tensor
    if isinstance(x, DTensor):
        spec = x._spec
        new = empty_with_room(spec, x.dtype, spec.wire.device)
        replace_tensor(held, tagged(new, spec), by=by)
    else:
        replace_tensor(held, torch.empty_like(x, device=HOST), by=by)


def refuse_given_up(params: Iterable[torch.Tensor]) -> None:
    """Raise if an optimizer holds parameters that their model has given up.

    Raises:
        LayoutError: naming the first of them.
    """
    lost = [found for p in params if (found := state_of(p).given_up) is not None]
    if lost:
        name, by = lost[0]
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise LayoutError(
            f"this optimizer was made before {by}: the model no longer has its {name}{more}",
            place=user_line(),
            reason="it would update parameters that nothing computes with",
            fixes=(Fix(f"optimizer = ...(model.parameters()) after {by}"),),
        )
