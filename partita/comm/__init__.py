"""Who carries bytes from rank to rank. The only room that knows of `torch.distributed`.

In reading order: `collective_request` (what is asked, and why), `transport` (the collectives),
`wire` (moves on a transport) with `pieces`, `sides`, `cuts`, `splits` and `padded` (what goes
where), `groups` (process groups), `ranks` with `world` (threads of one process), `dry` (nobody),
`trace` (nodes of a graph), `ledger` and `source` (what was carried, and for which line), `checks`,
`agreement` and `messages` (what ranks compare), `control_plane`, `control`, `rendezvous`,
`capture_barrier`, `waiting`, `deadlock` and `presence` (ranks that wait, or are gone), `meshes`,
`handle` and `init_rendezvous` (how a job begins), `device` (whatever depends on a kind of device),
`casting` (how autocast is set), `pending_work`, `compiled`, `backends/`; `dcp`, `dcp_reading`,
`held`, `torch_dtensors`, `torch_state_dicts` and `collectives` (torch's own); `after_import`
(modules of torch that are imported late).
"""

from torch.distributed.device_mesh import DeviceMesh

from .after_import import after_import
from .agreement import (
    agree,
    agree_first,
    differing,
    digest_of_text,
    gather_texts,
    is_agreed,
    is_alone,
    remember_agreed,
)
from .autocast_state import Casting, cast_as, casting_now, dtypes_cast_to
from .capture_barrier import missed_call, roll_call
from .checkpoint_piece import Piece, Region
from .checks import ON_CHECK, check_ranks, strict
from .collective_request import Ask
from .control_plane import Aside, Decide, Everyone, everyone
from .dry import DryWire, dry_mesh
from .groups import GroupWire
from .init_rendezvous import LOOPBACK, MEETING, join
from .ledger import Ledger, Record, ledger, recomputing
from .mesh_handle import MeshHandle
from .meshes import init_device_mesh, saved_as, wire_of, wire_saved_as
from .messages import message, pack, unpack
from .move_steps import identity_of_reduction
from .padded_moves import Uneven, is_uneven, uneven
from .pending_work import UnderWay
from .presence import RankGoneError, find_ended, is_lost
from .ranks import World, ranks
from .source import call_site, first_instruction, user_line
from .torch_collectives import look_before_collectives
from .torch_dtensors import local_of_torch, made_of_torch, taken_from_torch, torch_mesh
from .torch_state_dicts import teach_state_dicts
from .trace import TraceWire, in_place_of, stand_ins
from .waiting import begin_graph, end_graph
from .wire import Wire

__all__ = [
    "LOOPBACK",
    "MEETING",
    "ON_CHECK",
    "Aside",
    "Ask",
    "Casting",
    "Decide",
    "DeviceMesh",
    "DryWire",
    "Everyone",
    "GroupWire",
    "Ledger",
    "MeshHandle",
    "Piece",
    "RankGoneError",
    "Record",
    "Region",
    "TraceWire",
    "UnderWay",
    "Uneven",
    "Wire",
    "World",
    "after_import",
    "agree",
    "agree_first",
    "begin_graph",
    "call_site",
    "cast_as",
    "casting_now",
    "check_ranks",
    "differing",
    "digest_of_text",
    "dry_mesh",
    "dtypes_cast_to",
    "end_graph",
    "everyone",
    "find_ended",
    "first_instruction",
    "gather_texts",
    "identity_of_reduction",
    "in_place_of",
    "init_device_mesh",
    "is_agreed",
    "is_alone",
    "is_lost",
    "is_uneven",
    "join",
    "ledger",
    "local_of_torch",
    "look_before_collectives",
    "made_of_torch",
    "message",
    "missed_call",
    "pack",
    "ranks",
    "recomputing",
    "remember_agreed",
    "roll_call",
    "saved_as",
    "stand_ins",
    "strict",
    "taken_from_torch",
    "teach_state_dicts",
    "torch_mesh",
    "uneven",
    "unpack",
    "user_line",
    "wire_of",
    "wire_saved_as",
]
