"""Random state: torch's generators as something that a checkpoint can hold."""

from __future__ import annotations

from typing import Any

import torch

from partita.comm.device import default_generator, generators_in_use

__all__ = ["RandomState"]


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
