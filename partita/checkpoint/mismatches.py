"""Mismatches: what of a checkpoint does not fit the state that it is to be loaded into.

They are found before anything is read, and raised as one error, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from partita.comm import ControlPlane, message
from partita.layout import Fix, LayoutError

__all__ = [
    "NO_TENSOR",
    "Loaded",
    "Mismatches",
    "agree_on_mismatches",
    "describe_tensor",
    "find_mismatches",
]

NO_TENSOR = "no tensor"


@message
@dataclass(frozen=True)
class Loaded:
    """What `load(strict=False)` passed over, on this rank.

    Attributes:
        missing_keys: names in the state that the checkpoint does not have.
        unexpected_keys: names in the checkpoint that the state does not have.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


@message
@dataclass(frozen=True)
class Mismatches:
    """The mismatches that one rank found.

    Attributes:
        values: tensors of another shape or dtype, tensors in place of values, a line each.
        keys: names that only one side has, a line each; empty unless that is an error.
        passed_over: the same names.
        which: distinguishes a checkpoint from another that had its name before.
    """

    values: tuple[str, ...]
    keys: tuple[str, ...]
    passed_over: Loaded
    which: str = ""

    @property
    def wrong(self) -> bool:
        """Are there any that are errors?"""
        return bool(self.values or self.keys)


def describe_tensor(size: Sequence[int], dtype: torch.dtype) -> str:
    """`float32 (8, 16)`."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(size)}"


def find_mismatches(
    held: Mapping[str, Any],
    there: Mapping[str, str],
    strict: bool,
    which: str = "",
    gives_memory: bool = False,
) -> Mismatches:
    """Compare a state with a checkpoint.

    Args:
        held: by name, the tensors and values of the state.
        there: by name, `describe_tensor` of what the checkpoint has, or NO_TENSOR.
        strict: names that only one side has are errors.
        which: distinguishes the checkpoint from another that had its name before.
        gives_memory: tensors on the meta device will get memory before they are loaded.
    """
    values = []
    for name, value in held.items():
        if name not in there:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        here = describe_tensor(value.shape, value.dtype) if is_tensor else NO_TENSOR
        if here != there[name]:
            values.append(f"{name}: {there[name]} in the checkpoint, {here} in the state")
        elif is_tensor and value.is_meta and not gives_memory:
            values.append(f"{name}: on the meta device, where there is nothing to load into")
    missing = tuple(name for name in held if name not in there)
    extra = tuple(name for name in there if name not in held)
    keys = [f"{name}: in the state, not in the checkpoint" for name in missing]
    keys += [f"{name}: in the checkpoint, not in the state" for name in extra]
    return Mismatches(tuple(values), tuple(keys) if strict else (), Loaded(missing, extra), which)


def agree_on_mismatches(
    ranks: ControlPlane, found: Mismatches | Exception, path: str, line: str
) -> Loaded:
    """The names that this rank passes over, if all ranks can load.

    Raises:
        LayoutError: the mismatches of all ranks; on every rank.
        ValueError: ranks have read different checkpoints of that name.
    """

    def merge_misfits(brought: list[Mismatches]) -> list[Loaded]:
        values = tuple(dict.fromkeys(one for rank in brought for one in rank.values))
        keys = tuple(dict.fromkeys(one for rank in brought for one in rank.keys))
        fixes = []
        if values:
            fixes.append(Fix("load into the shapes and dtypes that were saved, then cast"))
        if keys:
            fixes.append(Fix("strict=False", "loads the names that both have"))
        if fixes:
            raise LayoutError(
                f"the checkpoint {path} does not fit the state",
                place=line,
                operands=values + keys,
                fixes=tuple(fixes),
            )
        if len({rank.which for rank in brought}) > 1:
            raise ValueError(f"{path} was replaced while the ranks began to read it: load it again")
        return [rank.passed_over for rank in brought]

    result: Loaded = ranks.decide(found, merge_misfits)
    return result
