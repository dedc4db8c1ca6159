"""Meshes of a job: `init_device_mesh`, the wire of each mesh, and `join`, which connects the ranks.

Meshes that arrange the same ranks in the same way share one wire.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.device_mesh import init_device_mesh as _init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from partita.layout import Fix, LayoutError, Placement

from .backends import prepare_control
from .device import HOST
from .groups import GroupWire
from .ledger import user_line
from .ranks import RankWire, running_wire
from .trace import active_wire
from .waiting import forget_histories
from .wire import MeshHandle, Wire, find_handle


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[Any, Any] | None = None,
) -> DeviceMesh:
    """Returns a mesh over all ranks of the job, like torch's function of this name.

    It initializes process groups if there are none. A process without a launcher such as torchrun
    is a job of one rank. Inside `pt.ranks` it returns the mesh of the simulated ranks, so the same
    program runs both ways.

    Args:
        device_type: "cpu" or "cuda".
        mesh_shape: the size of each axis, outermost first. Their product is the number of ranks.
        mesh_dim_names: a name for each axis.
        backend_override: the backend of the groups of each axis, by its name or index, as in torch.

    Raises:
        LayoutError: the product is not the number of ranks of the job (raised on every rank). For
            a mesh over some of the ranks, use `DeviceMesh(device_type, ranks)`.
        TypeError: sizes that are not integers, or a number of names that differs from theirs.
    """
    _check_mesh_arguments(device_type, mesh_shape, mesh_dim_names)
    running = running_wire()
    if running is not None:
        return _mesh_of_world(running, tuple(mesh_shape), mesh_dim_names)
    world = count_ranks()
    if world is not None and world != math.prod(mesh_shape):
        wanted = math.prod(mesh_shape)
        sizes = " x ".join(map(str, mesh_shape))
        raise LayoutError(
            f"init_device_mesh: a mesh of {sizes} needs {wanted} ranks, and the job has {world}",
            place=user_line(),
            operands=(f"mesh_shape  {tuple(mesh_shape)}", f"mesh_dim_names  {mesh_dim_names}"),
            reason="every rank of the job has one position in the mesh",
            fixes=(
                Fix(f"mesh_shape={_fit_sizes_to_world(tuple(mesh_shape), world)}"),
                Fix(f"torchrun --nproc-per-node {wanted} ..."),
            ),
        )
    if world is None and math.prod(mesh_shape) == 1:
        prepare_control(os.environ, LOOPBACK)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not dist.is_initialized():
        join()  # torch would, too, but after a restart it reads keys that dead ranks have left
    options = {} if backend_override is None else {"backend_override": backend_override}
    mesh = _init_device_mesh(
        device_type, tuple(mesh_shape), mesh_dim_names=mesh_dim_names, **options
    )
    wire = wire_of(mesh)  # `find_saved_wire` finds the wire from now on
    if isinstance(wire, GroupWire):
        wire.make_control()  # here, because all ranks call this
    return mesh


def init_mesh_of_all_ranks(device_type: str | None = None) -> Any:
    """Returns a mesh of one axis over all ranks of the job.

    Args:
        device_type: "cpu" or "cuda". None: the accelerator if there is one, otherwise the CPU.

    Raises:
        LayoutError: there are no ranks: no process group, no torchrun, no `pt.ranks`.
    """
    running = running_wire()
    if running is not None:
        return _mesh_of_world(running, (running.mesh.size(),), None)
    world = count_ranks()
    if world is None:
        raise LayoutError(
            "no mesh is given, and no process group is initialized",
            place=user_line(),
            fixes=(
                Fix("mesh=pt.init_device_mesh(...)"),
                Fix("torch.distributed.init_process_group()", "first, under torchrun"),
            ),
        )
    if device_type is None:
        here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = here.type if here else HOST.type
    return init_device_mesh(device_type, (world,))


def _check_mesh_arguments(device_type: Any, sizes: Any, names: Any) -> None:
    """Raise TypeError if these are not a device, the axes' sizes and, if given, their names."""
    is_sizes = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not is_sizes or not all(hasattr(n, "__index__") and n > 0 for n in sizes):
        takes, given, fix = "the size, at least 1, of each mesh axis", sizes, '("cpu", (2,))'
    elif isinstance(names, str) or (names is not None and len(names) != len(sizes)):
        takes, given, fix = "a name for each mesh axis", names, '(..., mesh_dim_names=("dp",))'
    elif not isinstance(device_type, str):
        takes, given, fix = "a type of device", device_type, '("cpu", (2,))'
    else:
        return
    place = user_line()
    raise TypeError(
        f"init_device_mesh takes {takes}, not {given!r}{f' (at {place})' if place else ''}: "
        f"pt.init_device_mesh{fix}"
    )


def _mesh_of_world(wire: RankWire, sizes: tuple[int, ...], names: Sequence[str] | None) -> Any:
    mesh = wire.mesh
    if sizes == mesh.sizes and (names is None or tuple(names) == mesh.names):
        return wire.device_mesh
    given = names or [f"dim{i}" for i in range(len(sizes))]
    wanted = ", ".join(f"{name}={n}" for name, n in zip(given, sizes, strict=False))
    raise LayoutError(
        f"init_device_mesh: these ranks in one process have the mesh {mesh}",
        place=user_line(),
        operands=(f"mesh_shape  {sizes}", f"mesh_dim_names  {names}"),
        fixes=(Fix(f"pt.ranks({wanted})"),),
    )


def count_ranks() -> int | None:
    """Returns the number of ranks of the job; None if there is no job."""
    if dist.is_initialized():
        return dist.get_world_size()
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else None


def _fit_sizes_to_world(sizes: tuple[int, ...], world: int) -> tuple[int, ...]:
    """Returns sizes whose product is `world`: with one size changed, or all on the first axis."""
    for i in range(len(sizes)):
        rest = math.prod(sizes[:i] + sizes[i + 1 :])
        if rest and world % rest == 0:
            return sizes[:i] + (world // rest,) + sizes[i + 1 :]
    return (world,) + (1,) * (len(sizes) - 1)


# -- wires -----------------------------------------------------------------------------------------

_wires: dict[DeviceMesh, GroupWire] = {}
"""The wire of each mesh; meshes that arrange the same ranks alike are equal. Strong references, as
long as the process groups stand: whether two ranks use the same groups must not depend on when
either collects garbage."""
_world: object = None


def _are_placements(value: object) -> bool:
    each = value if isinstance(value, (list, tuple)) else [value]
    return bool(each) and all(isinstance(one, Placement) for one in each)


def wire_of(device_mesh: object) -> Wire:
    """Returns this rank's wire, its connection to the ranks of a mesh. Equal meshes share one wire.

    Args:
        device_mesh: a `torch.distributed.DeviceMesh` (axes without names are called "dim0", "dim1",
            ...), or the mesh of `ranks` or `dry_mesh`.

    Raises:
        LayoutError: not a mesh, a mesh without this rank, or a mesh with more ranks than the world.
    """
    global _world
    if isinstance(device_mesh, MeshHandle):
        return active_wire(device_mesh.wire)
    if not isinstance(device_mesh, DeviceMesh):
        raise LayoutError(
            f"device_mesh is {device_mesh!r}, which is not a mesh",
            place=user_line(),
            fixes=(
                *[Fix(f"placements={device_mesh!r}")] * _are_placements(device_mesh),
                Fix("pt.init_device_mesh(device, sizes, mesh_dim_names=names)"),
            ),
        )
    if not dist.is_initialized():
        raise LayoutError(
            f"{device_mesh} has no process groups: none are initialized",
            place=user_line(),
            fixes=(Fix("pt.init_device_mesh(...)", "initializes them under torchrun"),),
        )
    if _world is not dist.group.WORLD:  # the groups were destroyed, and new ones made
        _wires.clear()
        forget_histories()
        _world = dist.group.WORLD
    found = _wires.get(device_mesh)
    if found is None:
        found = _wires[device_mesh] = GroupWire(device_mesh)
    return active_wire(found)


def sizes_of_mesh(device_mesh: object) -> dict[str, int] | None:
    """Returns the size of each axis of `device_mesh`, outermost first; None if it is no mesh."""
    if not isinstance(device_mesh, MeshHandle | DeviceMesh):
        return None
    names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(device_mesh.ndim))
    return dict(zip(names, device_mesh.shape, strict=True))


def ranks_of_mesh(wire: Wire) -> list[int]:
    """Returns the global ranks of a wire's mesh, in mesh order."""
    mesh: Any = wire.device_mesh
    with _disable_current_modes():
        return mesh.mesh.flatten().tolist()  # type: ignore[no-any-return]


def is_part_of_mesh(part: object, device_mesh: object) -> bool:
    """True if `part` is `device_mesh`, or a sub-mesh such as `device_mesh["dp"]`."""
    if isinstance(device_mesh, MeshHandle):
        return device_mesh.has_part(part)
    if part == device_mesh:
        return True
    if not isinstance(device_mesh, DeviceMesh) or not isinstance(part, DeviceMesh):
        return False
    names = part.mesh_dim_names or ()
    # Meshes over process groups are equal if they have the same ranks in the same arrangement.
    return {*names} <= {*(device_mesh.mesh_dim_names or ())} and part == device_mesh[names]


def find_root_mesh(part: Any) -> Any:
    """Returns the whole mesh of `part`, a sub-mesh (`mesh["dp"]`) or the whole mesh itself.

    Private torch: nothing public names the root of a sub-mesh.
    """
    if isinstance(part, MeshHandle):
        return part.root
    root = part._get_root_mesh() if isinstance(part, DeviceMesh) else part
    return root if is_part_of_mesh(part, root) else part


def find_context_mesh() -> Any:
    """Returns the mesh of the innermost `with mesh:` around the call, or None.

    Private torch: no public function returns it.
    """
    stack = _mesh_resources.mesh_stack
    return stack[-1] if stack else None


def describe_saved_mesh(wire: Wire) -> tuple[Any, ...]:
    """Returns plain values that identify the mesh of a wire: they are pickled with each DTensor.

    `("here", number)` for a `MeshHandle`, otherwise `(device type, ranks, axis names)`.
    `find_saved_wire` finds the wire again.
    """
    mesh = wire.device_mesh
    if isinstance(mesh, MeshHandle):
        return ("here", mesh.number)
    assert isinstance(mesh, DeviceMesh)
    return (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names)


def find_saved_wire(saved: tuple[Any, ...]) -> Wire:
    """Returns the wire of the mesh `saved`, for unpickling.

    Args:
        saved: the values that `describe_saved_mesh` returned.

    Raises:
        LayoutError: this process has no mesh with these values. It is not made here, because all
            ranks must make a mesh together.
    """
    if saved[0] == "here":
        return find_handle(saved[1]).wire
    kind, ranks, names = saved
    for mesh, wire in _wires.items():
        if (mesh.device_type, mesh.mesh.tolist(), mesh.mesh_dim_names) == (kind, ranks, names):
            return wire
    sizes = tuple(torch.tensor(ranks).shape)
    raise LayoutError(
        f"a tensor was saved on a mesh that this process lacks: {names or 'no names'} {sizes}",
        place=user_line(),
        operands=(f"ranks  {ranks}",),
        reason="all ranks must make a mesh together before they load a tensor on it",
        fixes=(
            Fix(f"pt.init_device_mesh({kind!r}, {sizes}, mesh_dim_names={names})", "before"),
            Fix("pt.load(state, path)", "to load on another mesh, after pt.save"),
        ),
    )


# -- how ranks find each other ---------------------------------------------------------------------

MEETING = "PARTITA_MEETING"
"""The environment's name for the file in which the ranks of one machine meet."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The network interface that no other machine can reach."""

_LOOK_INTO_STORE = 0.02  # seconds between two reads of the store


def join(backend: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Initializes torch.distributed from the environment variables that torchrun sets.

    Args:
        backend: the name of a backend in torch. None: a backend that works for every device.
        timeout: the time limit for the connection and for later collectives.

    Raises:
        TimeoutError: the other ranks did not connect within `timeout`.
    """
    prepare_control(os.environ, LOOPBACK)
    if (meeting := os.environ.get(MEETING)) is not None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        file = dist.FileStore(meeting, world)
        dist.init_process_group(backend, store=file, rank=rank, world_size=world, timeout=timeout)
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    fresh = dist.PrefixStore(_agree_on_round_name(store, rank, world, timeout), store)
    dist.init_process_group(backend, store=fresh, rank=rank, world_size=world, timeout=timeout)


def _agree_on_round_name(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """Returns a name that all ranks of this round share, and that no earlier round had.

    torchrun's store outlives the ranks (torch issue 135712). After a restart it still has the
    addresses of the old ranks, and a rank that reads one too early waits forever.
    TORCHELASTIC_RESTART_COUNT does not distinguish the rounds, because each machine counts its own.
    So rank 0 names the round, and continues when every rank has confirmed that name.
    """
    until = time.monotonic() + timeout.total_seconds()
    me = uuid.uuid4().hex
    name = me  # of rank 0
    if rank == 0:
        store.set("partita/round", name)
    while time.monotonic() < until:
        if rank == 0:
            answers = [f"partita/{name}/{other}" for other in range(1, world)]
            if not answers or store.check(answers):
                store.set(
                    f"partita/{name}/all", json.dumps([store.get(a).decode() for a in answers])
                )
                return name
        elif store.check(["partita/round"]):
            name = store.get("partita/round").decode()  # perhaps of a round without me
            store.set(f"partita/{name}/{rank}", me)
            everyone = f"partita/{name}/all"
            if store.check([everyone]) and me in json.loads(store.get(everyone)):
                return name
        time.sleep(_LOOK_INTO_STORE)
    raise TimeoutError(f"rank {rank} of {world} waited {timeout} for the other ranks to start")
