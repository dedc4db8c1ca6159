"""How is a checkpoint read into a state that may live on another mesh, in other layouts?

Each rank reads what it holds, in place. What does not fit is found from the metadata, before
anything is read, and raised as one error, the same on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass as Local

from partita.comm import Piece, everyone, user_line
from partita.tensor import DTensor
from partita.tensor.pieces import piece_held

from .fitting import NO_TENSOR, Loaded, Misfits, agreed, described_tensor, misfits
from .folder import standing
from .state import State, opened

if TYPE_CHECKING:
    from partita.comm.dcp import Metadata

__all__ = ["load"]


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
    found: Misfits | Exception
    try:
        reader = Reader(standing(Path(os.path.abspath(path))))
        metadata = reader.read_metadata()
        inside = opened(state, metadata)
        held = {name: leaf.value for name, leaf in inside.leaves.items()}
        there = {name: _described(one) for name, one in metadata.state_dict_metadata.items()}
        found = misfits(held, there, strict)
    except Exception as error:
        found = error
    passed_over = agreed(all_ranks, found, os.fspath(path), line)
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


def _described(stored: Any) -> str:
    from partita.comm.dcp import TensorStorageMetadata

    if isinstance(stored, TensorStorageMetadata):
        return described_tensor(stored.size, stored.properties.dtype)
    return NO_TENSOR
