"""Random state: what must a run save to draw the same random numbers after it is resumed?"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """torch's default generators, as something that a checkpoint can hold.

        state = {"model": model, "optimizer": optimizer, "random": pt.RandomState()}

    DTensors draw from these generators, which all ranks seed alike. Those of Python and numpy are
    not in it: where a program uses them, ranks often differ.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as they are now: of the CPU, and of the current CUDA device if one is used."""
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have torch's generators draw what they would have drawn when `state` was taken."""
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])
