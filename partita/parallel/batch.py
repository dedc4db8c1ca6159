"""Batches, and other tensors in tuples, lists, dicts and dataclasses: found, replaced, spread.

`distribute_batch` makes DTensors of what ranks have read: either each rank has read the whole batch
and keeps its piece, or each has read its own piece. What ranks must have alike is compared, by
checksums, the first time at each line of the program.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from partita.comm import (
    Wire,
    agree,
    agree_first,
    call_site,
    is_agreed,
    remember_agreed,
    user_line,
    wire_of,
)
from partita.layout import Fix, Layout, LayoutError, Shard
from partita.tensor.construct import piece_of
from partita.tensor.dtensor import DTensor, checksum, tagged
from partita.tensor.tensor_state import Spec, spec_of

from .parallelize import Places, in_range


def distribute_batch(
    batch: Any,
    device_mesh: Any,
    places: Places | None = None,
    *,
    each_rank_has: Literal["whole", "piece"] = "whole",
) -> Any:
    """Make DTensors of a batch's tensors, split as `places` says.

        inputs, targets = pt.distribute_batch((inputs, targets), mesh)
        tokens = pt.distribute_batch(tokens, mesh, {"dp": pt.Shard(0), "cp": pt.Shard(1)})

    Args:
        batch: a tensor, or tensors in dicts, lists and tuples; all else in it is left as it is.
        places: by mesh axis; axes that are not named hold the whole. By default the rows are split
            over "dp", where the mesh has such an axis.
        each_rank_has: "whole": every rank has read the whole batch and keeps its piece; nothing is
            sent. "piece": each rank has read its own piece (and ranks along other axes the same
            one); the ranks tell each other their sizes, a few bytes, and the pieces are one batch.
            Either way what ranks must have alike is compared the first time at each place of the
            program, and each time under `check_ranks()`.

    Returns:
        What `batch` is, with DTensors for tensors.

    Raises:
        LayoutError: an axis that the mesh lacks, a dimension that a tensor lacks, or pieces that
            do not go together as torch.chunk cuts, or ranks that have read other rows than they
            say: on every rank, naming the rank.
    """
    wire = wire_of(device_mesh)
    if places is None:
        places = {"dp": Shard(0)} if "dp" in wire.mesh.names else {}
    for axis, placement in places.items():
        if axis not in wire.mesh.names:
            raise LayoutError(
                f"distribute_batch: the mesh ({wire.mesh}) has no axis {axis!r}", place=user_line()
            )
        if placement.is_partial():
            raise LayoutError(
                f"distribute_batch: {placement} on {axis!r}: a batch is values, not shares",
                place=user_line(),
            )
    if each_rank_has not in ("whole", "piece"):
        raise ValueError(f'each_rank_has is "whole" or "piece", not {each_rank_has!r}')
    tensors = _find_tensors(batch)
    if each_rank_has == "whole":
        _agree_whole(batch, tensors, wire)
        specs = [_spec(tuple(t.shape), places, wire) for t in tensors]
        pieces = [piece_of(t.detach(), s) for t, s in zip(tensors, specs, strict=True)]
    else:
        _agree_kinds(batch, wire)
        shapes = _find_global_shapes(tensors, places, wire)
        specs = [_spec(shape, places, wire) for shape in shapes]
        _agree_pieces(tensors, specs, wire)
        pieces = [t.detach() for t in tensors]
    spread = [
        tagged(piece, spec).requires_grad_(t.requires_grad)
        for t, piece, spec in zip(tensors, pieces, specs, strict=True)
    ]
    return _replace_tensors(batch, iter(spread))


def _agree_whole(batch: Any, tensors: list[torch.Tensor], wire: Wire) -> None:
    """Raise on all ranks unless all have read one batch."""
    fixes = (
        Fix('each_rank_has="piece"', "where each rank has read its own rows"),
        Fix("one order of rows on every rank", "the same seed, and no DistributedSampler"),
    )
    said: dict[str, Any] = {
        "fact": "the ranks have not read the same batch",
        "reason": 'each_rank_has="whole": each rank keeps its part of what all of them have',
        "fixes": fixes,
    }
    shapes = _describe_batch(batch, lambda t: str(list(t.shape)))
    agree_first("distribute_batch", shapes, wire, **said)
    key = (call_site(), "distribute_batch", "whole")
    if is_agreed(wire, key):
        return
    sums = " ".join(f"{checksum(t.detach())[-1]:x}" for t in tensors)
    agree("distribute_batch", f"{shapes}, checksum {sums}", wire, **said)
    remember_agreed(wire, key)


def _agree_kinds(batch: Any, wire: Wire) -> None:
    """Raise on all ranks unless all have equally many tensors, of the same keys and dtypes."""
    agree_first(
        "distribute_batch",
        _describe_batch(batch, lambda t: f" of {t.dim()} dimensions"),
        wire,
        fact="the ranks' pieces are not of one batch",
    )


def _agree_pieces(tensors: list[torch.Tensor], specs: list[Spec], wire: Wire) -> None:
    """Raise on all ranks unless ranks that hold the same piece have read the same values."""
    key = (call_site(), "distribute_batch", "piece")
    if is_agreed(wire, key):
        return
    told = wire.gather_ints(tuple(n for t in tensors for n in checksum(t.detach())))
    coordinates = wire.mesh.coordinates()
    for i, spec in enumerate(specs):
        first: dict[object, int] = {}
        for rank, at in enumerate(coordinates):
            same = first.setdefault(spec.layout.local_region(wire.mesh, at), rank)
            if told[rank][3 * i : 3 * i + 3] != told[same][3 * i : 3 * i + 3]:
                raise LayoutError(
                    f"distribute_batch: ranks {same} and {rank} have not read the same rows",
                    place=user_line(),
                    operands=(
                        f"rank {same}  at {coordinates[same]}, checksum {told[same][3 * i + 2]:x}",
                        f"rank {rank}  at {coordinates[rank]}, checksum {told[rank][3 * i + 2]:x}",
                    ),
                    reason=f"tensor {i}: {spec.layout.brief()} on {wire.mesh} gives both one piece",
                    fixes=(
                        Fix(
                            'DistributedSampler(data, mesh.size("dp"), mesh.get_local_rank("dp"))',
                            "with the axes that the rows are split over, not all ranks",
                        ),
                    ),
                )
    remember_agreed(wire, key)


def _spec(shape: tuple[int, ...], places: Places, wire: Wire) -> Spec:
    layout = Layout(shape)
    for axis, placement in places.items():
        try:
            layout = layout.put(axis, in_range(placement, shape, axis))
        except LayoutError as error:
            raise LayoutError(f"distribute_batch: {error.fact}", place=user_line()) from None
    return spec_of(layout, wire)


def _find_global_shapes(
    tensors: list[torch.Tensor], places: Places, wire: Wire
) -> list[tuple[int, ...]]:
    """The global shapes of tensors of which each rank has read its piece; equal on all ranks."""
    mine = [n for t in tensors for n in t.shape]
    told = wire.gather_ints(tuple(mine)) if mine else []
    mesh, start, shapes = wire.mesh, 0, []
    for t in tensors:
        sizes = {
            at: told[i][start : start + t.dim()] for i, at in enumerate(mesh.coordinates()) if mine
        }
        start += t.dim()
        split = _spec((math.prod(mesh.sizes),) * t.dim(), places, wire).layout.shards
        shape = []
        for dim, axes in enumerate(split):
            members = mesh.group(axes, (0,) * mesh.ndim)
            shape.append(sum(sizes[at][dim] for at in members))
        layout = _spec(tuple(shape), places, wire).layout
        for rank, (at, has) in enumerate(sizes.items()):
            if layout.local_shape(mesh, at) != tuple(has):
                raise LayoutError(
                    f"distribute_batch: rank {rank}'s piece does not go with the others",
                    place=user_line(),
                    operands=(
                        f"rank {rank} has {tuple(has)}",
                        f"{layout.brief()} gives it {layout.local_shape(mesh, at)}",
                    ),
                    reason="pieces are cut as torch.chunk cuts: equal ones first, then the rest",
                    fixes=(Fix('each_rank_has="whole"', "where every rank can read the batch"),),
                )
        shapes.append(tuple(shape))
    return shapes


# -- tensors of a batch ----------------------------------------------------------------------------


def _find_tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, DTensor):
        raise LayoutError("distribute_batch of a DTensor: it has a layout", place=user_line())
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return (
        [t for part in batch for t in _find_tensors(part)]
        if isinstance(batch, list | tuple)
        else []
    )


def _describe_batch(batch: Any, shape: Callable[[torch.Tensor], str]) -> str:
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype).removeprefix("torch.") + shape(batch)
    if isinstance(batch, Mapping):
        return ", ".join(f"{key}: {_describe_batch(part, shape)}" for key, part in batch.items())
    parts = batch if isinstance(batch, (list, tuple)) else []
    return ", ".join(text for text in (_describe_batch(part, shape) for part in parts) if text)


def _replace_tensors(batch: Any, new: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return next(new)
    if isinstance(batch, Mapping):
        return type(batch)({key: _replace_tensors(part, new) for key, part in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        parts = [_replace_tensors(part, new) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


# -- tensors in nested values ----------------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value: through tuples, lists, dicts and dataclasses."""
    return find_instances(value, torch.Tensor)


def find_instances(value: Any, kind: type) -> Iterator[Any]:
    """The instances of `kind` in tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from find_instances(v, kind)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from find_instances(v, kind)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from find_instances(getattr(value, field.name), kind)


def replace_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of `value` in which each instance of `kind` is changed, in order.

    Dataclasses are not called, so that what they check of a tensor need not hold.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        new = copy.copy(value)  # what makes a dictionary of its class may ask for more than items
        for k, v in value.items():
            new[k] = replace_instances(v, kind, change)
        return new
    if isinstance(value, (tuple, list)):
        each = [replace_instances(v, kind, change) for v in value]
        return type(value)(*each) if hasattr(value, "_fields") else type(value)(each)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)  # type: ignore[arg-type]
        for field in dataclasses.fields(value):
            v = replace_instances(getattr(value, field.name), kind, change)
            object.__setattr__(new, field.name, v)
        return new
    return value
