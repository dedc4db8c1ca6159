"""Communication: what moves bytes between ranks. The only room that knows `torch.distributed`.

In reading order:

- a move: `collective_request` (why a collective runs), `transport` (the collectives of one rank),
  `wire` (`carry`: a move on a transport), `move_steps` (each kind of move as a function) with
  `cuts`, `sides` and `splits` (which elements go where), `pending_work` (moves under way)
- transports: `groups` (process groups) with `backends/`, `ranks` and `world` (ranks that are
  threads of one process), `dry` (no peers), `trace` (nodes of a captured graph) with
  `padded_moves` and `graph_collectives`
- the record: `ledger`, `source` (the user's line), `checks` (`strict`, `check_ranks`)
- what ranks compare: `agreement` (text on a mesh) over `control_group`; `control_plane` (values,
  on all ranks of the job) with `messages` and `tensor_bytes`; `capture_barrier`
- ranks that wait or are gone: `waiting`, `deadlock`, `presence`
- how a job begins: `init_rendezvous`, `meshes`, `mesh_handle`
- devices: `device`, `autocast_state`
- torch's own: `dcp_reading`, `dcp_writing` and `checkpoint_piece` (checkpoints), `torch_dtensors`,
  `torch_state_dicts`, `torch_collectives`, `after_import`
"""

from torch.distributed.device_mesh import DeviceMesh

from .after_import import after_import
from .agreement import (
    agree,
    agree_first,
    digest_of_text,
    gather_texts,
    is_agreed,
    is_alone,
    make_disagreement_error,
    remember_agreed,
)
from .autocast_state import (
    AutocastState,
    enabled_autocast_dtypes,
    read_autocast_state,
    switch_off,
    use_autocast_state,
)
from .capture_barrier import explain_failed_collective, wait_for_all_ranks
from .checkpoint_piece import Piece, Region
from .checks import ON_CHECK, check_ranks, strict
from .collective_request import Request
from .control_plane import BackgroundResult, ControlPlane, Decide, control_plane
from .dry import DryWire, dry_mesh
from .groups import GroupWire
from .init_rendezvous import LOOPBACK, MEETING, join
from .ledger import Ledger, Record, ledger, recomputing
from .mesh_handle import MeshHandle
from .meshes import describe_saved_mesh, find_saved_wire, init_device_mesh, wire_of
from .messages import message, pack, unpack
from .move_steps import identity_of_reduction
from .padded_moves import Uneven, is_uneven, uneven
from .pending_work import PendingWork
from .presence import RankGoneError, find_ended, is_lost
from .ranks import World, ranks
from .source import (
    call_site,
    first_instruction,
    own_lines_shown,
    user_line,
    user_line_of_error,
)
from .torch_collectives import inspect_collectives
from .torch_dtensors import (
    local_of_torch_dtensor,
    make_torch_dtensor,
    read_torch_dtensor,
    torch_mesh,
)
from .torch_state_dicts import patch_state_dicts
from .trace import TraceWire, active_wire, substitute_wires
from .waiting import begin_graph, end_graph
from .wire import Wire

__all__ = [
    "LOOPBACK",
    "MEETING",
    "ON_CHECK",
    "AutocastState",
    "BackgroundResult",
    "ControlPlane",
    "Decide",
    "DeviceMesh",
    "DryWire",
    "GroupWire",
    "Ledger",
    "MeshHandle",
    "PendingWork",
    "Piece",
    "RankGoneError",
    "Record",
    "Region",
    "Request",
    "TraceWire",
    "Uneven",
    "Wire",
    "World",
    "active_wire",
    "after_import",
    "agree",
    "agree_first",
    "begin_graph",
    "call_site",
    "check_ranks",
    "control_plane",
    "describe_saved_mesh",
    "digest_of_text",
    "dry_mesh",
    "enabled_autocast_dtypes",
    "end_graph",
    "explain_failed_collective",
    "find_ended",
    "find_saved_wire",
    "first_instruction",
    "gather_texts",
    "identity_of_reduction",
    "init_device_mesh",
    "inspect_collectives",
    "is_agreed",
    "is_alone",
    "is_lost",
    "is_uneven",
    "join",
    "ledger",
    "local_of_torch_dtensor",
    "make_disagreement_error",
    "make_torch_dtensor",
    "message",
    "own_lines_shown",
    "pack",
    "patch_state_dicts",
    "ranks",
    "read_autocast_state",
    "read_torch_dtensor",
    "recomputing",
    "remember_agreed",
    "strict",
    "substitute_wires",
    "switch_off",
    "torch_mesh",
    "uneven",
    "unpack",
    "use_autocast_state",
    "user_line",
    "user_line_of_error",
    "wait_for_all_ranks",
    "wire_of",
]
