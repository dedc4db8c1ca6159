"""How is a checkpoint read into a state that may live on another mesh, in other layouts?

Each rank reads what it holds, in place. What does not fit is found from the metadata, before
anything is read, and raised as one error, the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import everyone, user_line
from partita.layout import Fix, LayoutError
from partita.tensor import DTensor
from partita.tensor.pieces import piece_held

from .folder import standing
from .state import State, opened

if TYPE_CHECKING:
    from partita.comm.dcp import Metadata, Piece

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """What `load(strict=False)` passed over, on this rank.

    Attributes:
        missing_keys: names in the state that the checkpoint does not have.
        unexpected_keys: names in the checkpoint that the state does not have.
    """

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


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
        ValueError: there is no checkpoint; a value needs `weights_only=False`; parameters of one
            group of an optimizer were in several.
    """
    from partita.comm.dcp import LoadPieces, Reader

    all_ranks = everyone()
    all_ranks.wait()
    line = user_line()
    try:
        reader = Reader(standing(Path(os.path.abspath(path))))
        metadata = reader.read_metadata()
        inside = opened(state, metadata)
        passed_over, found = _compared(inside, metadata, strict)
    except Exception as error:
        found = error

    def agree(brought: list[list[str]]) -> list[None]:
        lines = tuple(dict.fromkeys(line for one in brought for line in one))
        if lines:
            raise _does_not_fit(path, line, lines, strict)
        return [None] * len(brought)

    all_ranks.decide(found, agree)
    failed: Exception | None = None
    try:
        pieces, values = _destinations(inside, metadata)
        planner = LoadPieces(pieces, values, metadata, weights_only)
        reader.read_data(planner.create_local_plan(), planner).wait()
        for name, value in planner.values.items():
            inside.leaves[name].value = value
        for close in inside.closing:
            close()
    except Exception as error:
        failed = error
    all_ranks.decide(failed, lambda brought: brought)
    return passed_over


def _destinations(state: State, metadata: Metadata) -> tuple[dict[str, Piece], list[str]]:
    """The memory to read tensors into, and the names of the values to read."""
    from partita.comm.dcp import Piece

    pieces, values = {}, []
    for name, leaf in state.leaves.items():
        if name not in metadata.state_dict_metadata:
            continue
        x = leaf.value
        if not isinstance(x, torch.Tensor):
            values.append(name)
        elif not isinstance(x, DTensor) or not x._spec.is_pending:
            pieces[name] = piece_held(x)
        else:  # of a pending sum the first rank takes the value, and the others hold nothing
            spec = x._spec
            mesh, at = spec.wire.mesh, spec.wire.at
            with Local(), torch.no_grad():
                local = x.detach()
                if any(op == "sum" and at[mesh.index(a)] for a, op in spec.layout.partial):
                    local.zero_()
                else:
                    pieces[name] = Piece(local, tuple(spec.shape), spec.region)
    return pieces, values


# -- what does not fit -----------------------------------------------------------------------------


def _compared(state: State, metadata: Metadata, strict: bool) -> tuple[Loaded, list[str]]:
    stored = metadata.state_dict_metadata
    missing = tuple(name for name in state.leaves if name not in stored)
    extra = tuple(name for name in stored if name not in state.leaves)
    problems = []
    for name, leaf in state.leaves.items():
        if name in stored:
            there, here = _described(stored[name]), _described(leaf.value)
            if there != here:
                problems.append(f"{name}: {there} in the checkpoint, {here} in the state")
            elif isinstance(leaf.value, torch.Tensor) and leaf.value.is_meta:
                problems.append(f"{name}: on the meta device, where there is nothing to load into")
    if strict:
        problems += [f"{name}: in the state, not in the checkpoint" for name in missing]
        problems += [f"{name}: in the checkpoint, not in the state" for name in extra]
    return Loaded(missing, extra), problems


def _described(thing: Any) -> str:
    """A stored or a given thing, in words that are equal if one can become the other."""
    from partita.comm.dcp import TensorStorageMetadata, describe

    if isinstance(thing, TensorStorageMetadata):
        return describe(thing.size, thing.properties.dtype)
    if isinstance(thing, torch.Tensor):
        return describe(thing.shape, thing.dtype)
    return "no tensor"


def _does_not_fit(path: Any, line: str, lines: tuple[str, ...], strict: bool) -> LayoutError:
    fixes = [Fix("load into a state of the shapes and dtypes that were saved, and cast then")]
    if strict:
        fixes.append(Fix("pt.load(state, path, strict=False)", "loads the names that both have"))
    return LayoutError(
        f"the checkpoint {os.fspath(path)} does not fit the state",
        place=line,
        operands=lines,
        fixes=tuple(fixes),
    )
