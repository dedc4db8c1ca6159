"""Full state dicts: a model's and an optimizer's whole values as plain tensors, and back into pieces.

For whatever knows no layouts: files of other programs, a copy on one device. One tensor is gathered
after the other, so that no rank holds more of the model than it is asked to return.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Everyone, everyone, teach_state_dicts, user_line
from partita.layout import Fix, LayoutError
from partita.tensor import DTensor
from partita.tensor.construct import piece_of
from partita.tensor.dtensor import tagged
from partita.tensor.plain import admit

from ..parameters import held_by, put_in_place
from .fitting import NO_TENSOR, Loaded, Misfits, agreed, described_tensor, misfits
from .loading import destination
from .named_optimizer import named_parameters_of, opened_optimizer, without_wrapper
from .state import State, opened

__all__ = ["full_state_dict", "give_memory", "load_full_state_dict", "tied_names"]


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = "cpu",
) -> Any:
    """The state dict that the model would have on one device: whole plain tensors, copied.

    Every rank calls this. Names are those of `model.state_dict()` (without what torch.compile puts
    into them), and parameters that are one tensor are one tensor here. Tensors are gathered one after
    the other.

    Args:
        optimizer: its state, too, by the names of its parameters in `model`, as
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` has it.
        rank0_only: only rank 0 gets the values, and the others empty dicts.
        device: where the values lie; None: where the model does.

    Returns:
        The model's state dict; with an optimizer `(model's, optimizer's)`.

    Raises:
        LayoutError: a parameter is on the meta device.
    """
    keeps = not rank0_only or everyone().rank == 0
    copies = _Copies(keeps, device)
    state = {
        without_wrapper(name): copies.of(value, name)
        for name, value in model.state_dict(keep_vars=True).items()
    }
    if optimizer is None:
        return state if keeps else {}
    names = named_parameters_of(optimizer, [((), model)])
    of_optimizer = copies.of(opened_optimizer(optimizer, names, (), None)[0], "optimizer")
    return (state, of_optimizer) if keeps else ({}, {})


@dataclass
class _Copies:
    """Whole copies of tensors: of the same tensor the same copy."""

    keeps: bool
    device: torch.device | str | None
    made: dict[int, torch.Tensor] = field(default_factory=dict)

    def of(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, dict):
            return {k: self.of(v, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(v, f"{name}.{i}") for i, v in enumerate(value))
        return copy.deepcopy(value) if self.keeps else None

    @torch.no_grad()
    def _tensor(self, x: torch.Tensor, name: str) -> torch.Tensor | None:
        if id(x) in self.made:
            return self.made[id(x)]
        if x.is_meta:
            raise LayoutError(
                f"full_state_dict: {name} is on the meta device: it has no values",
                place=user_line(),
                fixes=(Fix("pt.materialize(model)"), Fix("pt.load_safetensors(model, path)")),
            )
        whole = _whole(x)
        if not self.keeps:
            return None
        out = self.made[id(x)] = whole.to(self.device or whole.device, copy=True)
        return out


def _whole(x: torch.Tensor) -> torch.Tensor:
    """The value of `x` on every rank, which may share its memory."""
    with torch.no_grad():
        x = x.detach()
        return x.full_tensor() if isinstance(x, DTensor) else x


# -- and back --------------------------------------------------------------------------------------


def load_full_state_dict(
    model: nn.Module,
    state: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    rank0_only: bool = False,
) -> Loaded:
    """Write whole values into a model, in place, each rank its own pieces: undoes `full_state_dict`.

    Every rank calls this. What of the model is on the meta device gets memory first. A parameter that
    has several names needs one of them. An optimizer that has not stepped yet gets the state that is
    there for it.

    Args:
        state: what `full_state_dict` returned, or a state dict of a model of one device; with an
            optimizer `(model's, optimizer's)`.
        strict: whether names that only one side has are errors.
        rank0_only: only rank 0 has the values, and sends them, one after the other; what the others
            pass is not looked at.

    Returns:
        The names that were passed over.

    Raises:
        LayoutError: everything that does not fit, in one error, on every rank. Nothing has changed.
    """
    ranks, line = everyone(), user_line()
    give_memory(model)
    sends = not rank0_only or ranks.rank == 0
    values: dict[str, Any] = {}
    target = State()
    told: _Described | Exception
    try:
        values = _flat(state, optimizer is not None) if sends else {}
        told = _Described.of(values)
    except Exception as error:
        told = error
    if rank0_only:
        told = ranks.decide(told, lambda brought: [brought[0]] * len(brought))
    try:
        if isinstance(told, Exception):
            raise told
        inside = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
        target = opened(inside, told)  # type: ignore[arg-type]
        held = {name: leaf.value for name, leaf in target.leaves.items()}
        found: Misfits | Exception = misfits(held, _with_ties(told.texts, model), strict)
    except Exception as error:
        found = error
    passed_over = agreed(ranks, found, "of whole values", line)
    if not rank0_only:
        _compare(values, ranks, line)
    failed: Exception | None = None
    try:
        for name, leaf in target.leaves.items():
            if name in told.texts:
                value = values.get(name)
                if rank0_only:
                    value = _from_rank0(leaf.value, value, told.state_dict_metadata[name], ranks)
                _write(leaf, value)
        for close in target.closing:
            close()
    except Exception as error:
        failed = error
    ranks.decide(failed, lambda brought: brought)
    return Loaded(_of_model(passed_over.missing_keys), _of_model(passed_over.unexpected_keys))


@dataclass(frozen=True)
class _Size:
    """A tensor's size and dtype, or a value, named as checkpoints name them."""

    size: torch.Size | None
    dtype: torch.dtype | None

    @property
    def properties(self) -> _Size:
        return self


@dataclass(frozen=True)
class _Described:
    """What there is to load, as `opened` asks a checkpoint for it."""

    planner_data: dict[str, Path]
    state_dict_metadata: dict[str, _Size]

    @staticmethod
    def of(values: dict[str, Any]) -> _Described:
        return _Described(
            {name: leaf.path for name, leaf in values.items()},
            {name: _size(leaf.value) for name, leaf in values.items()},
        )

    @property
    def texts(self) -> dict[str, str]:
        """By name, `described_tensor` or NO_TENSOR."""
        return {
            name: NO_TENSOR if one.size is None else described_tensor(one.size, one.dtype)
            for name, one in self.state_dict_metadata.items()
        }
