"""Batches: `distribute_batch`, and functions that find and replace tensors in nested containers.

`distribute_batch` converts the data that ranks have read to DTensors. Either each rank has read the
whole batch and keeps its piece, or each has read its own piece. Some values must be equal on
several ranks. Their checksums are compared in the first, second, fourth, eighth ... call of a line.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar, overload

import torch

from partita.comm import (
    Wire,
    call_site,
    check_equal_on_ranks,
    is_agreed,
    is_due,
    remember_agreed,
    user_line,
    wire_of,
)
from partita.layout import Coordinate, Fix, Layout, LayoutError, Placement, Shard, own_placement
from partita.tensor.construct import piece_of
from partita.tensor.dtensor import DTensor, as_dtensor, checksum
from partita.tensor.origins import note_origin
from partita.tensor.tensor_state import Spec, make_argument_error, spec_of

Batch = TypeVar("Batch")
Places = Mapping[str, Placement]
"""Maps mesh axes to placements. An activation keeps its placement on axes that are not named."""


@overload
def distribute_batch(
    batch: torch.Tensor,
    device_mesh: Any,
    places: Places | None = None,
    *,
    each_rank_has: Literal["whole", "piece"] = "whole",
) -> DTensor: ...


@overload
def distribute_batch(
    batch: Batch,
    device_mesh: Any,
    places: Places | None = None,
    *,
    each_rank_has: Literal["whole", "piece"] = "whole",
) -> Batch: ...


def distribute_batch(
    batch: Any,
    device_mesh: Any,
    places: Places | None = None,
    *,
    each_rank_has: Literal["whole", "piece"] = "whole",
) -> Any:
    """Convert the tensors of a batch to DTensors, sharded as `places` says.

        inputs, targets = pt.distribute_batch((inputs, targets), mesh)
        tokens = pt.distribute_batch(tokens, mesh, {"dp": pt.Shard(0), "cp": pt.Shard(1)})

    Args:
        batch: a tensor, or dicts, lists, tuples and dataclasses that contain tensors. Other values
            in it do not change.
        device_mesh: a `DeviceMesh`, or the mesh of `ranks` or `dry_mesh`.
        places: placements by mesh axis. Axes that are not named hold the whole value. By default
            rows are sharded over the data axes: "dp", and the axes of `pt.zero`. A mesh with a
            single axis shards rows over it.
        each_rank_has: what each rank passes. "whole": the whole batch. Each rank keeps its piece,
            and nothing is sent. "piece": only its own piece. The ranks exchange the sizes (a few
            bytes), and their pieces together are the batch. Ranks with the same coordinates on the
            sharded axes must pass the same piece.

    Returns:
        A copy of `batch` with DTensors in place of tensors.

    Raises:
        LayoutError: an axis that the mesh lacks, a dimension that a tensor lacks, a Partial
            placement, or a DTensor in the batch.
        LayoutError: pieces whose sizes differ from torch.chunk's, or data that differ between ranks
            although they must be equal. Every rank raises it. Data are compared by checksums, in
            the first, second, fourth, eighth ... call of a line of the program. Shapes are compared
            unless earlier calls had the same shapes in the same order. Under `check_ranks()` every
            call compares both.
    """
    wire = wire_of(device_mesh)
    if places is None:
        places = dict.fromkeys(find_data_axes(wire), Shard(0))
    if not isinstance(places, Mapping):
        fix = 'distribute_batch(batch, mesh, {"dp": pt.Shard(0)})'
        raise make_argument_error("distribute_batch", "placements by mesh axis", places, fix)
    for axis, placement in places.items():
        if axis not in wire.mesh.names:
            raise _make_error(f"the mesh ({wire.mesh}) has no axis {axis!r}")
        if placement.is_partial():
            raise _make_error(f"{placement} on {axis!r}: a batch is values, not shares")
    if each_rank_has not in ("whole", "piece"):
        raise ValueError(f'each_rank_has is "whole" or "piece", not {each_rank_has!r}')
    tensors = list(find_instances(batch, torch.Tensor, Mapping))
    if any(isinstance(t, DTensor) for t in tensors):
        raise _make_error("a DTensor in a batch has a layout already")
    if each_rank_has == "whole":
        _agree_whole(batch, tensors, wire)
        specs = [_spec(t.shape, places, wire) for t in tensors]
        pieces = [piece_of(t.detach(), s) for t, s in zip(tensors, specs, strict=True)]
    else:
        _agree_kind(_describe_batch(batch, lambda t: f" of {t.dim()} dimensions"), wire)
        specs = _find_global_specs(tensors, places, wire)
        _compare_equal_pieces(tensors, specs, wire)
        pieces = [t.detach() for t in tensors]
    spread = iter(zip(pieces, specs, strict=True))

    def spread_tensor(t: torch.Tensor) -> torch.Tensor:
        out = as_dtensor(*next(spread)).requires_grad_(t.requires_grad)
        note_origin(out, wire)
        return out

    return replace_instances(batch, torch.Tensor, spread_tensor, Mapping)


_AXES_OF_ONE_ROW = frozenset(("tp", "cp", "sp", "ep", "pp"))
"""Names of axes whose ranks work on the same rows."""


def find_data_axes(wire: Wire) -> tuple[str, ...]:
    """Returns the axes of `wire`'s mesh that shard the rows of a batch, in mesh order.

    These are "dp" and the axes over which `zero` has sharded a model. Axes whose ranks work on the
    same rows ("tp", "cp", "sp", "ep", "pp") are never among them. A mesh whose single axis has
    another name shards the rows over that axis.
    """
    names = wire.mesh.names
    over_rows = [a for a in names if a not in _AXES_OF_ONE_ROW]
    found = tuple(a for a in over_rows if a == "dp" or a in wire.data_axes)
    return found or (tuple(over_rows) if len(names) == 1 else ())


def _make_error(fact: str, **parts: Any) -> LayoutError:
    return LayoutError(f"distribute_batch: {fact}", place=user_line(), **parts)


def _describe_batch(batch: Any, shape: Callable[[torch.Tensor], str]) -> str:
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype).removeprefix("torch.") + shape(batch)
    parts = [(key, _describe_batch(part, shape)) for key, part in _parts_of(batch, Mapping)]
    if isinstance(batch, (tuple, list)):
        return ", ".join(text for _, text in parts if text)
    return ", ".join(f"{key}: {text}" for key, text in parts)


def _agree_whole(batch: Any, tensors: list[torch.Tensor], wire: Wire) -> None:
    """Raise on all ranks unless all ranks have read the same batch."""
    fixes = (
        Fix('each_rank_has="piece"', "where each rank has read its own rows"),
        Fix("the same order of rows on every rank", "the same seed, and no DistributedSampler"),
    )
    said: dict[str, Any] = {
        "fact": "the ranks have not read the same batch",
        "reason": 'each_rank_has="whole": each rank keeps its part of what all of them have',
        "fixes": fixes,
    }
    shapes = _describe_batch(batch, lambda t: str(list(t.shape)))
    line = (call_site(), "distribute_batch", "whole")
    compares_values = is_due(wire, line)
    if not compares_values and is_agreed(wire, line, shapes):
        return
    text = shapes
    if compares_values:
        text += ", checksum " + " ".join(f"{checksum(t.detach())[-1]:x}" for t in tensors)
    check_equal_on_ranks("distribute_batch", text, wire, **said)
    remember_agreed(wire, line, shapes)


def _agree_kind(kind: str, wire: Wire) -> None:
    """Raise on all ranks unless the pieces of all ranks have the same dtypes and dimensions."""
    line = (call_site(), "distribute_batch", "kind")
    if not is_agreed(wire, line, kind):
        fact = "the ranks' pieces are not of one batch"
        check_equal_on_ranks("distribute_batch", kind, wire, fact=fact)
        remember_agreed(wire, line, kind)


def _compare_equal_pieces(tensors: list[torch.Tensor], specs: list[Spec], wire: Wire) -> None:
    """Raise on all ranks unless ranks that hold the same piece have read the same values."""
    if not is_due(wire, (call_site(), "distribute_batch", "piece")):
        return
    gathered = wire.gather_ints(
        tuple(n for t in tensors for n in checksum(t.detach())), "pieces of a batch"
    )
    coordinates = wire.mesh.coordinates()
    for i, spec in enumerate(specs):
        first: dict[object, int] = {}
        for rank, at in enumerate(coordinates):
            same = first.setdefault(spec.layout.local_region(wire.mesh, at), rank)
            sums = {r: gathered[r][3 * i : 3 * i + 3] for r in (same, rank)}
            if sums[rank] != sums[same]:
                sampler = 'DistributedSampler(data, mesh.size("dp"), mesh.get_local_rank("dp"))'
                raise _make_error(
                    f"ranks {same} and {rank} have not read the same rows",
                    operands=tuple(
                        f"rank {r}  at {coordinates[r]}, checksum {found[2]:x}"
                        for r, found in sums.items()
                    ),
                    reason=f"tensor {i}: {spec.layout.brief()} on {wire.mesh} gives both one piece",
                    fixes=(
                        Fix(sampler, "with the axes that the rows are split over, not all ranks"),
                    ),
                )


def _spec(shape: Sequence[int], places: Places, wire: Wire) -> Spec:
    layout = Layout(tuple(shape))
    for axis, placement in places.items():
        try:
            layout = place_on_axis(layout, axis, placement)
        except LayoutError as error:
            raise _make_error(error.fact) from None
    return spec_of(layout, wire)


def _find_global_specs(tensors: list[torch.Tensor], places: Places, wire: Wire) -> list[Spec]:
    """Returns the specs of tensors whose pieces the ranks have read; equal on all ranks."""
    mesh = wire.mesh
    specs: list[Spec] = []
    mine = tuple(n for t in tensors for n in t.shape)
    gathered = (
        [iter(sizes) for sizes in wire.gather_ints(mine, "shapes of a batch")] if mine else []
    )
    for t in tensors:
        sizes = {
            at: tuple(islice(of_rank, t.dim()))
            for at, of_rank in zip(mesh.coordinates(), gathered, strict=bool(gathered))
        }
        split = _spec((math.prod(mesh.sizes),) * t.dim(), places, wire).layout.shards
        _refuse_other_lengths(sizes, split, len(specs))
        groups = [mesh.group(axes, (0,) * mesh.ndim) for axes in split]
        shape = [sum(sizes[at][dim] for at in group) for dim, group in enumerate(groups)]
        spec = _spec(shape, places, wire)
        specs.append(spec)
        for rank, (at, has) in enumerate(sizes.items()):
            due = spec.layout.local_shape(mesh, at)
            if due != has:
                raise _make_error(
                    f"rank {rank}'s piece does not go with the others",
                    operands=(f"rank {rank} has {has}", f"{spec.layout.brief()} gives it {due}"),
                    reason="pieces are cut as torch.chunk cuts: equal ones first, then the rest",
                    fixes=(Fix('each_rank_has="whole"', "where every rank can read the batch"),),
                )
    return specs


def _refuse_other_lengths(
    sizes: Mapping[Coordinate, Sequence[int]], split: Sequence[Sequence[str]], number: int
) -> None:
    """Raise unless the pieces of tensor `number` have equal lengths in unsharded dimensions."""
    for dim, axes in enumerate(split):
        lengths = [has[dim] for has in sizes.values()]
        if axes or len({*lengths}) == 1:
            continue
        other = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise _make_error(
            f"the ranks' pieces are {lengths[0]} and {lengths[other]} long in dimension {dim}",
            operands=tuple(f"rank {r} has {[*sizes.values()][r]}" for r in (0, other)),
            reason=f"tensor {number} is one tensor, of one length in a dimension that is not split",
            fixes=(
                Fix("pad to one length", 'a collator with padding="max_length", max_length=...'),
                Fix(f"places={{..., axis: pt.Shard({dim})}}", "if this dimension is the split one"),
            ),
        )


def place_on_axis(layout: Layout, axis: str, placement: Placement) -> Layout:
    """Returns a copy of `layout` that has `placement` on the mesh axis `axis`.

    The dimension of a Shard may be negative.

    Raises:
        LayoutError: a tensor of this shape lacks the dimension of a Shard.
    """
    placement, shape = own_placement(placement), layout.shape
    if isinstance(placement, Shard):
        dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(shape):
            raise LayoutError(
                f"Shard({placement.dim}) on axis {axis} is out of range for shape {shape}"
            )
        placement = Shard(dim)
    return layout if layout.placement(axis) == placement else layout.put(axis, placement)


# -- tensors in nested values ----------------------------------------------------------------------


def _parts_of(value: Any, mapping: type = dict) -> Iterable[tuple[Any, Any]]:
    """Returns `(key, part)` for each part of a container or dataclass; [] for other values."""
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, mapping):
        return value.items()  # type: ignore[attr-defined, no-any-return]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return ()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, also inside tuples, lists, dicts and dataclasses."""
    return find_instances(value, torch.Tensor)


def find_instances(value: Any, kind: type, mapping: type = dict) -> Iterator[Any]:
    """Yields the instances of `kind` in `value`: nested tuples, lists, dicts and dataclasses.

    Args:
        mapping: the type whose instances are treated as dicts.
    """
    if isinstance(value, kind):
        yield value
        return
    for _, part in _parts_of(value, mapping):
        yield from find_instances(part, kind, mapping)


def replace_instances(
    value: Any,
    kind: type,
    change: Callable[[Any], Any],
    mapping: type = dict,
    copies: dict[int, tuple[Any, Any]] | None = None,
) -> Any:
    """Returns a copy of the nested container `value`, with each instance of `kind` replaced.

    Tuples, lists, dicts and dataclasses are searched, in order. Dataclasses are copied without
    calling `__init__`, because it may check the type of a field.

    Args:
        change: a function that gets an instance and returns its replacement.
        copies: None copies all containers. A dict copies only containers in which something is
            replaced, and gets an entry `id(object): (object, replacement)` for each replaced
            object. An object that occurs several times has one replacement.
        mapping: the type whose instances are treated as dicts. An instance that is not a dict is
            made by calling its class with the items.
    """
    if copies is not None and id(value) in copies:
        return copies[id(value)][1]
    if isinstance(value, kind):
        new = change(value)
    else:
        before = dict(_parts_of(value, mapping))
        parts = {
            key: replace_instances(part, kind, change, mapping, copies)
            for key, part in before.items()
        }
        is_same = copies is not None and all(part is before[key] for key, part in parts.items())
        new = value if is_same else _remake_container(value, parts, mapping)
    if copies is not None and new is not value:
        copies[id(value)] = value, new
    return new


def _remake_container(value: Any, parts: dict[Any, Any], mapping: type) -> Any:
    """Returns a container of the type of `value` with other parts."""
    if isinstance(value, (tuple, list)):
        return remake_sequence(value, list(parts.values()))
    if isinstance(value, dict):
        new = copy.copy(value)  # the constructor of a subclass of dict may need other arguments
        for key, part in parts.items():
            new[key] = part
        return new
    if isinstance(value, mapping):
        return type(value)(parts)  # type: ignore[call-arg]
    if not parts:
        return value
    new = copy.copy(value)
    for key, part in parts.items():
        object.__setattr__(new, key, part)
    return new


def write_to_originals(copies: Collection[tuple[Any, Any]]) -> None:
    """Writes changes that were made to copied lists, dicts and dataclasses to the originals, too.

    Args:
        copies: pairs `(original, replacement)`: the values of `copies` of `replace_instances`.
    """
    originals = {id(new): old for old, new in copies}
    for old, new in copies:
        if isinstance(old, (torch.Tensor, tuple)):
            continue
        parts = {key: originals.get(id(part), part) for key, part in _parts_of(new)}
        if isinstance(old, list):
            old[:] = parts.values()
            continue
        before = dict(_parts_of(old))
        for key in before.keys() - parts.keys():
            del old[key]
        put = old.__setitem__ if isinstance(old, dict) else partial(object.__setattr__, old)
        for key, part in parts.items():
            if key not in before or before[key] is not part:
                put(key, part)


def remake_sequence(like: Any, parts: list[Any]) -> Any:
    """Returns a tuple, named tuple or list of the type of `like`, with the items `parts`."""
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
