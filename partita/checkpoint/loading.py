"""Loading of a checkpoint into a state that may live on another mesh, in other layouts.

Each rank reads what it holds, in place. Before anything is changed, mismatches are found from the
metadata and damage by the checksums, and raised as one error, the same on every rank. Checkpoints
of torch's own have no checksums: there each chunk is read twice.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import ControlPlane, Piece, control_plane, message, user_line
from partita.layout import Fix, LayoutError
from partita.tensor import DTensor
from partita.tensor.dtensor import piece_held

from .folder import NAME, Checksums, find_checkpoint, lock_for_reading
from .state import OpenedState, open_state

if TYPE_CHECKING:
    from partita.comm.dcp_format import Metadata


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
        passed_over = agree_on_mismatches(all_ranks, read.check(), os.fspath(path), line)
        all_ranks.decide(read.finish(), lambda brought: brought)
    return passed_over


class _LoadJob:
    """One rank's part of a load: everything is checked before anything of the state changes."""

    def __init__(self, state: Mapping[str, Any], home: Path, strict: bool, weights_only: bool):
        self._state, self._home = state, home
        self._strict, self._weights_only = strict, weights_only

    def check(self) -> Mismatches | Exception:
        """The mismatches, or the error of a damaged checkpoint."""
        try:
            folder = find_checkpoint(self._home)
            self._open_folder(folder)
            found = self._find_misfits()
            if not found.wrong:
                self._check_chunks(folder)
            return found
        except Exception as error:
            return error

    def finish(self) -> Exception | None:
        """Read the tensors in place, and put all into the state; the error, if there is one."""
        try:
            with Local(), torch.no_grad():
                for x in self._emptied:
                    x.zero_()
            self._planner.trial = False
            self._reader.read(self._tensors, self._planner)
            for name, value in self._planner.values.items():
                self._inside.leaves[name].value = value
            for load_back in self._inside.load_back:
                load_back()
        except Exception as error:
            return error
        return None

    def _open_folder(self, folder: Path) -> None:
        from partita.comm.dcp_format import Reader

        path = folder / ".metadata"
        content, self._checksums = path.read_bytes(), Checksums.read(folder)
        if self._checksums is not None:
            self._checksums.check_metadata(path, content)
        self._reader = Reader(folder, content, is_intact=self._checksums is not None)
        if self._reader.is_ours and self._checksums is None:
            raise ValueError(f"{folder / NAME} is missing: nothing says whether the rest is whole")
        self._which = f"{zlib.crc32(content):08x}"

    def _find_misfits(self) -> Mismatches:
        metadata = self._reader.metadata
        self._inside = open_state(self._state, metadata)
        held = {name: leaf.value for name, leaf in self._inside.leaves.items()}
        there = {name: _describe_stored(one) for name, one in metadata.state_dict_metadata.items()}
        return find_mismatches(held, there, self._strict, self._which)

    def _check_chunks(self, folder: Path) -> None:
        """Raise ValueError where a chunk is missing or damaged. Reads the values, but does not put
        them into the state yet.
        """
        from partita.comm.dcp_format import LoadPieces

        pieces, values, self._emptied = _find_destinations(self._inside, self._reader.metadata)
        planner = self._planner = LoadPieces(pieces, values, self._reader, self._weights_only)
        self._tensors, plan_of_values = planner.plan_tensors(), planner.plan_values()
        places = [self._reader.places(plan) for plan in (self._tensors, plan_of_values)]
        if self._checksums is not None:
            self._checksums.check_chunks(folder, [*places[0], *places[1]])
        else:
            planner.trial = True
            self._reader.read(self._tensors, planner)
        self._reader.read(plan_of_values, planner)


def _find_destinations(
    state: OpenedState, metadata: Metadata
) -> tuple[dict[str, Piece], list[str], list[torch.Tensor]]:
    """(The pieces to read tensors into, the names of values to read, the tensors to zero.)"""
    pieces, values, emptied = {}, [], []
    for name, leaf in state.leaves.items():
        if name not in metadata.state_dict_metadata:
            continue
        x = leaf.value
        if not isinstance(x, torch.Tensor):
            values.append(name)
        elif not isinstance(x, DTensor) or not x._spec.is_pending:
            pieces[name] = piece_held(x)
        else:  # of a partial sum the first rank takes the value, and the others zeros
            spec = x._spec
            mesh, at = spec.wire.mesh, spec.wire.at
            with Local(), torch.no_grad():
                local = x.detach()
            if any(op == "sum" and at[mesh.index(a)] for a, op in spec.layout.partial):
                emptied.append(local)
            else:
                pieces[name] = Piece(local, tuple(spec.shape), spec.region)
    return pieces, values, emptied


def _describe_stored(stored: Any) -> str:
    from partita.comm.dcp_format import TensorStorageMetadata

    if isinstance(stored, TensorStorageMetadata):
        return describe_tensor(stored.size, stored.properties.dtype)
    return NO_TENSOR


# -- mismatches ------------------------------------------------------------------------------------

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
