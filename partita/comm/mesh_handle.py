"""Mesh handles: what stands for a `DeviceMesh` where there are no process groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from partita.layout import Coordinate, LayoutError, Mesh

from .device import HOST
from .source import user_line
from .wire import Wire

__all__ = ["MeshHandle"]

_number = itertools.count()
_known: weakref.WeakValueDictionary[int, MeshHandle] = weakref.WeakValueDictionary()

MakeWire = Callable[["MeshHandle", tuple[int, ...]], Wire]


class MeshHandle:
    """One rank's mesh in one process: answers what `torch.distributed.DeviceMesh` answers.

    Compared and hashed by identity: each rank has its own. A deep copy is the handle itself, and so
    is what pickle brings back within the process that wrote it.

    Attributes:
        mesh: the ranks' numbers in the world, an integer tensor of the mesh's shape.
        wire: of this rank on this mesh.
    """

    device_type = HOST.type

    def __init__(self, layout: Mesh, at: Coordinate, ranks: torch.Tensor, make_wire: MakeWire):
        self._layout, self._at, self.mesh, self._make_wire = layout, at, ranks, make_wire
        self._parts: dict[tuple[str, ...], MeshHandle] = {}
        self._number = next(_number)
        _known[self._number] = self
        self.wire = make_wire(self, tuple(ranks.flatten().tolist()))

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        return self._layout.names

    @property
    def ndim(self) -> int:
        return self._layout.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        return self._layout.sizes

    @property
    def number(self) -> int:
        """The number by which `find_handle` finds it in this process."""
        return self._number

    def size(self, mesh_dim: int | str | None = None) -> int:
        """The number of ranks along one axis, by number or by name; of all ranks where None."""
        return (
            self._layout.size()
            if mesh_dim is None
            else self.shape[self._resolve_mesh_dim(mesh_dim)]
        )

    def get_coordinate(self) -> list[int]:
        return list(self._at)

    def get_rank(self) -> int:
        """This rank's number in the world."""
        return int(self.mesh[self._at])

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's position along one axis, which may be left out where there is only one."""
        if mesh_dim is None:
            if self.ndim > 1:
                raise LayoutError(f"get_local_rank needs an axis on mesh {self._layout}")
            mesh_dim = 0
        return self._at[self._resolve_mesh_dim(mesh_dim)]

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshHandle:
        """The mesh of the ranks that differ from this along `names` only, axes in that order."""
        names = (names,) if isinstance(names, str) else tuple(names)
        if names == self.mesh_dim_names:
            return self
        if names not in self._parts:
            where = [self._resolve_mesh_dim(a) for a in names]
            part = Mesh(names, tuple(self.shape[i] for i in where))
            line = tuple(slice(None) if i in where else self._at[i] for i in range(self.ndim))
            ordered = sorted(where)  # indexing leaves the axes in the order of this mesh
            ranks = self.mesh[line].permute([ordered.index(i) for i in where])
            at = tuple(self._at[i] for i in where)
            self._parts[names] = MeshHandle(part, at, ranks, self._make_wire)
        return self._parts[names]

    def _resolve_mesh_dim(self, mesh_dim: int | str) -> int:
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim
        try:
            return self._layout.index(mesh_dim)  # type: ignore[arg-type]  # a bad one is named
        except LayoutError as error:
            raise error.located(user_line()) from None

    def __copy__(self) -> MeshHandle:
        return self

    def __deepcopy__(self, memo: object) -> MeshHandle:
        return self

    def __reduce__(self) -> tuple[Callable[[int], MeshHandle], tuple[int]]:
        return find_handle, (self._number,)

    def __repr__(self) -> str:
        return f"MeshHandle({self._layout}, rank {self.get_rank()})"


def find_handle(number: int) -> MeshHandle:
    """The handle that was pickled as this number, if it still lives in this process."""
    try:
        return _known[number]
    except KeyError:
        raise LayoutError(
            "this tensor was saved on a mesh of one process that is gone",
            reason="only meshes of process groups can be restored in another process",
        ) from None


# `torch.load(weights_only=True)` calls only functions that were declared safe.
torch.serialization.add_safe_globals([find_handle])
