"""Communication: what moves bytes between ranks. The only room that knows `torch.distributed`.

In reading order:

- a move: `collective` (what is asked for, what is under way, and the transports that do it),
  `move_steps` (which elements go where, and each kind of move as a function), `wire` (`carry`: a
  move on a transport; mesh handles)
- the record: `ledger` (moves, `strict`, `check_ranks`), `source` (the user's line)
- transports: `groups` (process groups, and what their ranks compare over) with `backends/`,
  `ranks` (ranks that are threads of one process), `dry` (no peers), `trace` (nodes of a captured
  graph, between padded pieces)
- what ranks agree on: `agreement` (texts on a mesh; messages; values on all ranks of the job)
- ranks that wait or are gone: `waiting`
- how a job begins: `meshes`; where it computes: `device`
- torch's own: `torch_distributed` (its DTensors, and its functions that meet ours), `dcp_format`
  (checkpoints)
"""

from torch.distributed.device_mesh import DeviceMesh

from .agreement import (
    BackgroundResult,
    ControlPlane,
    Decide,
    agree,
    agree_first,
    control_plane,
    digest_of_text,
    gather_texts,
    is_agreed,
    is_alone,
    make_disagreement_error,
    message,
    pack,
    remember_agreed,
    unpack,
)
from .collective import PendingWork, Request
from .device import (
    enabled_autocast_dtypes,
    read_autocast_state,
    switch_off,
    use_autocast_state,
)
from .dry import DryWire, dry_mesh
from .groups import GroupWire, explain_failed_collective, wait_for_all_ranks
from .ledger import ON_CHECK, Record, check_ranks, ledger, recomputing, strict
from .meshes import (
    LOOPBACK,
    MEETING,
    describe_saved_mesh,
    find_saved_wire,
    init_device_mesh,
    is_part_of_mesh,
    join,
    sizes_of_mesh,
    wire_of,
)
from .move_steps import identity_of_reduction
from .ranks import ranks
from .source import (
    call_site,
    first_instruction,
    own_lines_shown,
    user_line,
    user_line_of_error,
)
from .torch_distributed import (
    Piece,
    after_import,
    inspect_collectives,
    local_of_torch_dtensor,
    make_torch_dtensor,
    patch_state_dicts,
    read_torch_dtensor,
    torch_mesh,
)
from .trace import TraceWire, Uneven, is_uneven, substitute_wires, uneven
from .waiting import RankGoneError, begin_graph, end_graph, find_ended, is_lost
from .wire import Wire

__all__ = [
    "LOOPBACK",
    "MEETING",
    "ON_CHECK",
    "BackgroundResult",
    "ControlPlane",
    "Decide",
    "DeviceMesh",
    "DryWire",
    "GroupWire",
    "PendingWork",
    "Piece",
    "RankGoneError",
    "Record",
    "Request",
    "TraceWire",
    "Uneven",
    "Wire",
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
    "is_part_of_mesh",
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
    "sizes_of_mesh",
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
