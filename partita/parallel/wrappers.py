"""Errors for torch's wrappers (DDP, FSDP, ...) around a model of DTensors.

These wrappers treat each rank's parameters and gradients as whole values. DDP's first broadcast
would overwrite all shards with rank 0's, and every gradient would be reduced twice. So a wrapper
raises an error for a model that has DTensors, and `zero` and `parallelize` raise one for a wrapped
model.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from partita.comm import (
    Wire,
    check_equal_on_ranks,
    find_torch_dtensor_mesh,
    inspect_wrappers,
    is_wrapper,
    on_first_wire,
    ranks_of_mesh,
    user_line,
)
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import DTensor

_wrapped: WeakKeyDictionary[nn.Module, tuple[str, Callable[[], Any]]] = WeakKeyDictionary()
"""Wrapped models: the wrapper's name, and a function that returns None once the wrapper is
freed."""


def _refuse_to_wrap(wrapper: str, models: Sequence[nn.Module], ranks: Sequence[int]) -> None:
    """Raise if a model has DTensors whose parts are on several of `ranks`.

    Args:
        ranks: the ranks with which the wrapper exchanges values, by their numbers in the job; empty
            means any.
    """
    for model in models:
        for name, p in model.named_parameters():
            if isinstance(p, DTensor) and _has_parts(p, ranks):
                raise LayoutError(
                    f"{wrapper}: {name} is a DTensor of partita",
                    place=user_line(),
                    operands=(f"{name}  {p._spec.layout.brief()} on {p._spec.wire.mesh}",),
                    reason=f"{wrapper} would exchange its pieces and reduce its gradients again: "
                    "partita has done so",
                    fixes=(
                        Fix(
                            f"no {wrapper}",
                            "after pt.zero or pt.parallelize: train the model as it is",
                        ),
                        *_list_trainer_fixes(),
                        Fix(f"{wrapper} alone", "without pt.zero and pt.parallelize"),
                    ),
                )


def _list_trainer_fixes() -> list[Fix]:
    """Returns fixes for the program's imports of trainers: the imports to write instead."""
    trainers = {
        "transformers.trainer": "from partita.integrations.trainer import Trainer",
        "accelerate": "from partita.integrations.accelerate import Accelerator",
        "lightning": "from partita.integrations.lightning import MeshStrategy",
        "pytorch_lightning": "from partita.integrations.lightning import MeshStrategy",
    }
    found = {line: name for name, line in trainers.items() if name in sys.modules}
    return [Fix(line, f"with {name.partition('.')[0]}") for line, name in found.items()]


def _has_parts(p: DTensor, ranks: Sequence[int]) -> bool:
    return not ranks or len({*ranks} & {*ranks_of_mesh(p._spec.wire)}) > 1


def refuse_wrapped(model: nn.Module, what: str, wire: Wire) -> None:
    """Raises if DDP, FSDP or another wrapper of torch contains `model` or a part of it.

    Also raises if a parameter is a DTensor of torch. The ranks compare what they found, because a
    wrapper may be alive only on some of them.

    Args:
        what: the name of the calling function, for the error.
        wire: the wire of the model's mesh.
    """
    found = ""
    for name, module in model.named_modules():
        wrapper, is_there = _wrapped.get(module, ("", lambda: None))
        if is_wrapper(module) or is_there() is not None:
            found = f"{name or 'the model'} is wrapped by {wrapper or type(module).__name__}"
            break
    else:
        for name, p in model.named_parameters():
            if (mesh := find_torch_dtensor_mesh(p)) is not None:
                found = f"{name} is a DTensor of torch on {mesh}: fully_shard has sharded it"
                break
    reason = "both would exchange the parameters and reduce the gradients"
    fixes = (
        Fix(f"pt.{what}(model, mesh)", "of the plain model, without the other"),
        Fix("pt.from_torch(p)", "a DTensor of partita of each parameter of torch's"),
    )
    check_equal_on_ranks(
        what,
        found or "the model is not wrapped",
        wire,
        fact="the model is wrapped on some ranks",
        reason=reason,
        fixes=(*fixes, Fix("del wrapper; gc.collect()", "on every rank")),
    )
    if found:
        raise LayoutError(f"{what}: {found}", place=user_line(), reason=reason, fixes=fixes)


def _inspect(wrapper: str, models: Any, ranks: Sequence[int], instance: Any) -> None:
    given = models if isinstance(models, (list, tuple)) else (models,)
    found = [m for m in given if isinstance(m, nn.Module)]
    _refuse_to_wrap(wrapper, found, ranks)
    for model in found:
        _wrapped[model] = wrapper, (lambda: True) if instance is None else weakref.ref(instance)


on_first_wire(lambda: inspect_wrappers(_inspect))
