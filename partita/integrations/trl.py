"""A patch of TRL's fused output layer, so that it runs on a rank's rows.

TRL's trainers compute log-probabilities by an `autograd.Function` that writes into plain buffers.
The patched layer runs on each rank's rows, with the whole weight.
"""

from __future__ import annotations

from typing import Any

import trl.trainer.utils
from trl.kernels import ChunkedLogProbFunction

from partita.comm import wire_of
from partita.layout import Replicate, Shard
from partita.parallel.batch import find_data_axes
from partita.tensor.construct import local_map
from partita.tensor.dtensor import DTensor

_REQUESTED = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _LogProbsOfRows:
    """`ChunkedLogProbFunction`, whose `apply` also takes DTensors."""

    @staticmethod
    def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *options: Any) -> Any:
        if not isinstance(hidden, DTensor):
            return ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *options)
        mesh = wire_of(hidden.device_mesh).mesh
        data = find_data_axes(wire_of(hidden.device_mesh))
        rows = [Shard(0) if axis in data else Replicate() for axis in mesh.names]
        whole = [Replicate() for _ in mesh.names]
        wanted = ("log_probs", *_REQUESTED)
        given = [name == "log_probs" or name in options[-1] for name in wanted]

        def compute(hidden: Any, weight: Any, bias: Any, targets: Any) -> tuple[Any, ...]:
            found = ChunkedLogProbFunction.apply(hidden, weight, bias, targets, *options)
            return tuple(x for x, there in zip(found, given, strict=True) if there)

        on_rows = local_map(
            compute,
            out_placements=tuple(rows for there in given if there),
            in_placements=(rows, whole, None if bias is None else whole, rows),
            redistribute_inputs=True,
        )
        found = iter(
            on_rows(hidden, weight, bias, _place_whole(targets, hidden.device_mesh, whole))
        )
        return tuple(next(found) if there else None for there in given)


def _place_whole(value: Any, mesh: Any, placements: Any) -> Any:
    """Returns `value` if it is a DTensor; otherwise a DTensor of the whole plain tensor."""
    if isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, placements)


def patch_output_layer() -> None:
    """Patch the fused output layer of TRL's trainers, so that it accepts DTensors."""
    names, name = vars(trl.trainer.utils), "_ChunkedLogProbFunction"  # private names of trl
    if name not in names:
        raise ImportError(f"this version of TRL has no {name}: pip install 'trl<2'")
    names[name] = _LogProbsOfRows
