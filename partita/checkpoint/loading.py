"""Loading of a checkpoint into a state that may live on another mesh, in other layouts.

Each rank reads what it holds, in place. Before anything is changed, mismatches are found from the
metadata and damage by the checksums, and raised as one error, the same on every rank. Checkpoints
of torch's own have no checksums: there each chunk is read twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import ControlPlane, control_plane, message, user_line
from partita.layout import Fix, LayoutError
from partita.tensor.dtensor import destination

from .folder import NAME, Checksums, find_checkpoint, lock_for_reading
from .state import Stored, open_state


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> Loaded:
    """Read the checkpoint `path` into `state`: its tensors in place, its values in its dicts.

    Every rank calls this. The state may have another mesh, other layouts and another number of
    ranks than the one that was saved; every element comes back bit for bit. A module, an optimizer,
    or anything else with `state_dict` and `load_state_dict` gets what it had. An optimizer that has
    not stepped yet gets the state that the checkpoint has for it.

    Args:
        state: of the form that was saved, here or by torch.distributed.checkpoint.
        strict: whether names that only one side has are errors.
        weights_only: read values as `torch.load(weights_only=True)` does, which runs no code.
            False: any pickle, which may run code of whoever wrote the checkpoint.

    Returns:
        The names that were passed over.

    Raises:
        LayoutError: everything that does not fit, in one error: names that are missing or too
            many, other shapes, other dtypes, tensors for values. Nothing has been changed.
        ValueError: there is no checkpoint; a file of it is damaged, which is named; a value needs
            `weights_only=False`. Nothing has been changed. Parameters of one group of an optimizer
            were in several.
    """
    all_ranks = control_plane()
    all_ranks.wait()
    line, home = user_line(), Path(os.path.abspath(path))
    with lock_for_reading(home):
        read = _LoadJob(state, home, strict, weights_only)
        passed_over = agree_on_mismatches(all_ranks, attempt(read.check), os.fspath(path), line)
        all_ranks.decide(attempt(read.finish), lambda brought: brought)
    return passed_over


class _LoadJob:
    """One rank's part of a load: everything is checked before anything of the state changes."""

    def __init__(self, state: Mapping[str, Any], home: Path, strict: bool, weights_only: bool):
        self._state, self._home = state, home
        self._strict, self._weights_only = strict, weights_only

    def check(self) -> Mismatches:
        """The mismatches.

        Raises:
            ValueError: the checkpoint is damaged.
        """
        from partita.comm.dcp_format import Reader

        folder = find_checkpoint(self._home)
        path = folder / ".metadata"
        content, checksums = path.read_bytes(), Checksums.read(folder)
        if checksums is not None:
            checksums.check_metadata(path, content)
        self._reader = reader = Reader(folder, content, is_intact=checksums is not None)
        if reader.is_ours and checksums is None:
            raise ValueError(f"{folder / NAME} is missing: nothing says whether the rest is whole")
        there = {name: Stored(*parts) for name, parts in reader.describe().items()}
        self._inside = open_state(self._state, there)
        held = {name: leaf.value for name, leaf in self._inside.leaves.items()}
        found = find_mismatches(held, there, self._strict, f"{zlib.crc32(content):08x}")
        if not found.wrong:
            self._check_chunks(folder, {n: x for n, x in held.items() if n in there}, checksums)
        return found

    def _check_chunks(
        self, folder: Path, wanted: dict[str, Any], checksums: Checksums | None
    ) -> None:
        """Raise ValueError where a chunk is missing or damaged. Reads the values, but does not put
        them into the state yet.
        """
        from partita.comm.dcp_format import LoadPieces

        tensors = {name: x for name, x in wanted.items() if isinstance(x, torch.Tensor)}
        destinations = {name: destination(x) for name, x in tensors.items()}
        # Of a partial sum the first rank takes the value, and the others zeros.
        self._emptied = [x for name, x in tensors.items() if destinations[name] is None]
        pieces = {name: piece for name, piece in destinations.items() if piece is not None}
        values = [name for name in wanted if name not in tensors]
        planner = self._planner = LoadPieces(pieces, values, self._reader, self._weights_only)
        self._tensors, plan_of_values = planner.plan_tensors(), planner.plan_values()
        places = [self._reader.places(plan) for plan in (self._tensors, plan_of_values)]
        if checksums is not None:
            checksums.check_chunks(folder, [*places[0], *places[1]])
        else:
            planner.trial = True
            self._reader.read(self._tensors, planner)
        self._reader.read(plan_of_values, planner)

    def finish(self) -> None:
        """Read the tensors in place, and put all into the state."""
        with Local(), torch.no_grad():
            for x in self._emptied:
                x.detach().zero_()
        self._planner.trial = False
        self._reader.read(self._tensors, self._planner)
        for name, value in self._planner.values.items():
            self._inside.leaves[name].value = value
        for load_back in self._inside.load_back:
            load_back()


# -- mismatches ------------------------------------------------------------------------------------


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


def find_mismatches(
    held: Mapping[str, Any],
    there: Mapping[str, Stored],
    strict: bool,
    which: str = "",
    gives_memory: bool = False,
) -> Mismatches:
    """Compare a state with a checkpoint.

    Args:
        held: by name, the tensors and values of the state.
        there: by name, what the checkpoint has.
        strict: names that only one side has are errors.
        which: distinguishes the checkpoint from another that had its name before.
        gives_memory: tensors on the meta device will get memory before they are loaded.
    """
    values = []
    for name, value in held.items():
        if name not in there:
            continue
        here, stored = str(Stored.of(value)), str(there[name])
        if here != stored:
            values.append(f"{name}: {stored} in the checkpoint, {here} in the state")
        elif isinstance(value, torch.Tensor) and value.is_meta and not gives_memory:
            values.append(f"{name}: on the meta device, where there is nothing to load into")
    missing = tuple(name for name in held if name not in there)
    extra = tuple(name for name in there if name not in held)
    keys = [f"{name}: in the state, not in the checkpoint" for name in missing]
    keys += [f"{name}: in the checkpoint, not in the state" for name in extra]
    return Mismatches(tuple(values), tuple(keys) if strict else (), Loaded(missing, extra), which)


def attempt(do: Callable[[], Any]) -> Any:
    """What `do` returns, or the error that it raises: what a rank brings to a decision of all."""
    try:
        return do()
    except Exception as error:
        return error


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
