"""Built programs: the function that was compiled of a program or loaded, with its metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.schedule import Memory

__all__ = ["Built"]


@dataclass(frozen=True, eq=False)
class Built:
    """A program that is ready to run.

    Attributes:
        call: runs the program, over its inputs.
        loaded: whether it came from the store; else it was compiled here.
        seconds: of compiling or loading, without waiting for other ranks.
        key: of the artifact in the store: of the program and of what it is compiled for.
        metadata: of the artifact: what it is, when and in how many seconds it was compiled.
        schedule: computes its memory schedule, where that is not in the metadata.
        sections: the different sections that it calls, where it was cut.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    loaded: bool
    seconds: float
    key: str
    metadata: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[[], Memory] | None = None
    sections: tuple[Built, ...] = ()

    def __str__(self) -> str:
        how = "loaded" if self.loaded else "compiled"
        if self.sections:
            many = sum(not one.loaded for one in self.sections)
            how = f"{len(self.sections)} sections, {many} of them compiled,"
        return f"{how} in {self.seconds:.1f} s"
