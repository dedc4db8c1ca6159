"""Models that save themselves: `save_pretrained` of transformers, diffusers, peft and hub mixins.

These libraries write the memory of a model's tensors, and know no layouts. So all ranks call the
method, and the values are gathered tensor by tensor; on one rank they stand in the model in place
of its pieces while the library's own method runs, and the others wait until it has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from partita.comm import Wire, after_import, pack, unpack
from partita.comm.device import HOST
from partita.parallel.parameters import find_parameters_and_buffers
from partita.tensor import DTensor
from partita.tensor.construct import stand_for

from .full_state import FullCopies, collect_model_tensors

__all__: list[str] = []

_PATCHED_CLASSES = {
    "transformers.modeling_utils": "PreTrainedModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "peft.peft_model": "PeftModel",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}
"""By module, the class whose `save_pretrained` the models of a library inherit."""
_NAME = "save_pretrained"


def _patch_save_pretrained(kind: type) -> None:
    """Patch `kind.save_pretrained` to write whole values of a model on a mesh, on one rank."""
    plain: Callable[..., Any] = kind.save_pretrained  # type: ignore[attr-defined]
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        spread = _spread_tensors(args[0], _argument_of_call(call, "state_dict"))
        if not spread:
            return plain(*args, **kwargs)
        return _save_once(plain, call, args[0], spread)

    kind.save_pretrained = save_pretrained  # type: ignore[attr-defined]


def _argument_of_call(call: inspect.BoundArguments, name: str, default: Any = None) -> Any:
    return call.arguments.get(name, call.kwargs.get(name, default))


def _spread_tensors(model: Any, state: Mapping[str, Any] | None) -> dict[int, DTensor]:
    """The DTensors of the model, or of the state dict that is to be saved, by id."""
    if not isinstance(model, nn.Module):
        return {}
    if state is None:
        found = {
            id(x): x
            for kind in find_parameters_and_buffers(model)
            for x in [h.tensor for h in kind]
        }
    else:
        known = collect_model_tensors(model)
        found = {_find_tensor_id(name, x, known): x for name, x in state.items()}
    return {key: x for key, x in found.items() if isinstance(x, DTensor)}


def _find_tensor_id(name: str, x: Any, known: Mapping[str, Any]) -> int:
    """The id of the model's own tensor of that name, which is one for tied names, or of `x`."""
    return id(known.get(name, x))


def _save_once(
    plain: Callable[..., Any],
    call: inspect.BoundArguments,
    model: nn.Module,
    spread: Mapping[int, DTensor],
) -> Any:
    """Gather what is `spread`, and call `plain` on the rank that writes.

    Raises:
        LayoutError: other ranks do not call it; a tensor has no value.
        Exception: what `plain` raised, on every rank.
    """
    wires: list[Wire] = [x._spec.wire for x in spread.values()]
    wire = max(wires, key=lambda one: one.mesh.size())
    writes = _is_writer(wire, bool(_argument_of_call(call, "is_main_process", True)))
    copies = FullCopies(writes, HOST)
    whole = {key: copies.of(x, f"{_NAME}: a tensor") for key, x in spread.items()}
    result, failed = None, None
    if writes:
        try:
            _put_whole_state(call, model, whole)
            with _held_whole(model, whole):
                result = plain(*call.args, **call.kwargs)
        except Exception as error:
            failed = error
    # All ranks wait, so that any of them finds the files afterwards.
    told = wire.exchange(f"has saved a model ({_NAME})", pack(failed))
    if failed is not None:
        raise failed
    for raised in filter(None, map(unpack, told)):
        raise raised
    return result


def _is_writer(wire: Wire, is_main: bool) -> bool:
    """Does this rank write? The first one does, where all say that they are the main process."""
    told = wire.meet_readers(_NAME, b"\1" if is_main else b"\0")
    return wire.rank == 0 if all(one == b"\1" for one in told) else is_main


def _put_whole_state(
    call: inspect.BoundArguments, model: nn.Module, whole: Mapping[int, torch.Tensor]
) -> None:
    """Put whole values into the state dict of a call, if it has one."""
    state = _argument_of_call(call, "state_dict")
    if state is None:
        return
    known = collect_model_tensors(model)
    new = {name: whole.get(_find_tensor_id(name, x, known), x) for name, x in state.items()}
    if "state_dict" in call.arguments:
        call.arguments["state_dict"] = new
    else:
        named = inspect.Parameter.VAR_KEYWORD
        (rest,) = [p.name for p in call.signature.parameters.values() if p.kind is named]
        call.arguments[rest] = {**call.arguments[rest], "state_dict": new}


@contextmanager
def _held_whole(model: nn.Module, whole: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Within, modules hold the values of `whole`, by the ids of their tensors, in place of
    these."""
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for held in (found for kind in find_parameters_and_buffers(model) for found in kind):
        value = whole.get(id(held.tensor))
        if value is None:
            continue
        if isinstance(held.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=held.tensor.requires_grad)
        stand_for(value, held.tensor)
        for module, key in held.homes:
            table: dict[str, Any] = (
                module._parameters if key in module._parameters else module._buffers
            )
            before.append((table, key, held.tensor))
            table[key] = value
    try:
        yield
    finally:
        for table, key, tensor in before:
            table[key] = tensor


for _module, _class in _PATCHED_CLASSES.items():
    after_import(
        _module,
        lambda module, _class=_class: _patch_save_pretrained(  # type: ignore[misc]
            getattr(module, _class)
        ),
    )
