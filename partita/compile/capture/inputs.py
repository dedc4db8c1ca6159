"""Inputs of a graph: what are the inputs of a graph, and what stands for each while it is made?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from partita.comm import Wire, is_uneven
from partita.layout import Fix

from ..errors import not_captured
from ..guards.codes import is_of_users
from ..program import Input
from .fakes import device_at_capture, fake_mode, local_of
from .state import names_of_call, tensors_of_call
from .state_slots import Slot

__all__ = ["GraphInputs"]


class GraphInputs:
    """The inputs of one capture.

    Attributes:
        all: in the graph's order: coordinates, tensors, gradients, numbers.
        fakes: for each, what stands for it: a tensor without memory.
        identities: the fakes, by identity.
        leaves: of the call, as `tensors_of_call` gives them.

    Args:
        unmarked: places of the leaves that have no gradient and are given none to read.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        args: Any,
        kwargs: Any,
        unmarked: set[int],
    ):
        self.mode = fake_mode()
        self.all: list[Input] = []
        self.fakes: list[torch.Tensor] = []
        self.identities = _Identities()
        self._standing: dict[int, torch.Tensor] = {}
        self._places: dict[tuple[Wire, str], torch.Tensor] = {}
        self._of: dict[int, Input] = {}
        self._stood_for: dict[int, torch.Tensor] = {}
        names = names_of_call(slots, args, kwargs)
        self.leaves = tensors = tensors_of_call(slots, args, kwargs)
        self._add_coordinates(tensors)
        for i, (t, (name, kind)) in enumerate(zip(tensors, names, strict=True)):
            if isinstance(t, torch.Tensor) and id(t) not in self._standing:
                _check_class(t, name)
                self._of[i] = self._add(Input(name, kind, t, i))
        for given in list(self._of.values()):
            if not given.tensor.is_leaf:  # a step has no gradient of it, and must not make one
                continue
            grad = given.tensor.grad if given.tensor.requires_grad else None
            name = given.name + ".grad"
            if grad is not None:
                self._add(Input(name, "gradient", grad, given.index))
            elif given.index not in unmarked and given.tensor.requires_grad:
                self._add(Input(name, "mark", given.tensor, given.index))

    def _add_coordinates(self, tensors: Sequence[Any]) -> None:
        wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
        for wire in wires:
            for axis, at in zip(wire.mesh.names, wire.at, strict=True):
                if wire.mesh.size(axis) > 1:
                    self._add(Input(f"at {axis}", "coordinate", torch.tensor(at)))
                    self._places[(wire, axis)] = self.fakes[-1]

    def _add(self, given: Input) -> Input:
        local = local_of(given.tensor)
        spec = given.spec
        device = device_at_capture(local)
        if spec is not None and is_uneven(spec.layout, spec.wire.mesh):
            with self.mode:
                fake = torch.empty(spec.padded_shape, dtype=local.dtype, device=device)
        elif given.kind == "mark" or device != local.device:
            with self.mode:
                fake = torch.empty_strided(
                    local.shape, local.stride(), dtype=local.dtype, device=device
                )
        else:
            fake = self.mode.from_tensor(local, static_shapes=True)
        if given.kind not in ("coordinate", "mark"):
            self._standing[id(given.tensor)] = fake
        self.all.append(given)
        self.fakes.append(fake)
        self.identities.add(fake)
        return given

    def add_made(self, given: Input) -> None:
        """An input that the capture itself has made; nothing of the program stands for it."""
        self.all.append(given)
        self.fakes.append(given.tensor)

    # -- what stands for what ----------------------------------------------------------------------

    def stand_in(self, value: Any) -> Any:
        """What stands for `value`, where that is an input; itself otherwise."""
        return self._standing.get(id(value), value) if isinstance(value, torch.Tensor) else value

    def stood_for(self, fake: torch.Tensor) -> torch.Tensor | None:
        """The tensor for which `fake` stands, if for any."""
        if not self._stood_for:
            for given in self._of.values():
                self._stood_for[id(self._standing[id(given.tensor)])] = given.tensor
        return self._stood_for.get(id(fake))

    def rates(self) -> list[tuple[str, torch.Tensor]]:
        """Of the learning rates that are inputs, names and what stands for them."""
        pairs = zip(self.all, self.fakes, strict=True)
        return [(given.name, fake) for given, fake in pairs if given.kind == "rate"]

    def places(self, wire: Wire) -> dict[str, torch.Tensor]:
        """What stands for the rank's coordinate on each axis of more than one rank."""
        return {axis: fake for (w, axis), fake in self._places.items() if w is wire}

    def place_of(self, fake: torch.Tensor) -> int:
        """Where the tensor for which `fake` itself stands is among those of a call; else -1."""
        found = [i for i, given in self._of.items() if self._standing[id(given.tensor)] is fake]
        return found[0] if found else -1

    def name_of(self, index: int) -> str:
        """The name of the input that is the tensor at a place of a call."""
        return self._of[index].name

    def owner(self, gradient: Input) -> torch.Tensor:
        """What stands for the tensor whose gradient an input is."""
        return self._standing[id(self._of[gradient.index].tensor)]


def _check_class(t: torch.Tensor, name: str) -> None:
    """Raise CaptureError if `t` is of a class of the user's: what stands for it is not."""
    kind = type(t)
    if is_of_users(kind.__module__) and not isinstance(t, torch.nn.Parameter):
        raise not_captured(
            f"the step takes {name}, which is of a class of its own ({kind.__name__})",
            "what stands for a tensor in a graph has not its methods, nor its __torch_function__",
            Fix(f"{name}.as_subclass(torch.Tensor)", "is a plain tensor of the same memory"),
        )


class _Identities:
    def __init__(self) -> None:
        self._ids: set[int] = set()

    def add(self, value: Any) -> None:
        self._ids.add(id(value))

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._ids
