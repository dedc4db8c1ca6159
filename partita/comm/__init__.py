"""Communication between ranks. This is the only package that imports `torch.distributed`.

A *wire* (class `Wire`) is one rank's connection to the other ranks of one mesh. It *carries* moves:
it runs each step of a redistribution on this rank's local tensor. The *ledger* records them.

In reading order:

- a move: `collective` (requests, pending work, and the interface of transports), `move_steps`
  (which elements each rank sends), `wire` (`carry`; mesh handles, and dry meshes, in which one rank
  runs)
- the record: `ledger` (moves, the user's lines that caused them, `strict`, `check_ranks`)
- transports: `groups` (process groups) with `backends/`, `ranks` (ranks that are threads of one
  process), `trace` (nodes of a captured graph)
- comparison of ranks: `agreement` (texts that must be equal; decisions of all ranks)
- ranks that wait or have ended: `waiting`
- how a job begins: `meshes`; where it computes: `device`
- torch.distributed: `torch_distributed` (its DTensors, and its functions that may get partita's)
"""

from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

from .agreement import BackgroundResult as BackgroundResult
from .agreement import ControlPlane as ControlPlane
from .agreement import Decide as Decide
from .agreement import RepeatedCall as RepeatedCall
from .agreement import check_equal_on_ranks as check_equal_on_ranks
from .agreement import control_plane as control_plane
from .agreement import digest_of_text as digest_of_text
from .agreement import gather_texts as gather_texts
from .agreement import is_agreed as is_agreed
from .agreement import is_alone as is_alone
from .agreement import is_due as is_due
from .agreement import make_disagreement_error as make_disagreement_error
from .agreement import message as message
from .agreement import pack as pack
from .agreement import remember_agreed as remember_agreed
from .agreement import unpack as unpack
from .collective import PendingWork as PendingWork
from .collective import Request as Request
from .device import enabled_autocast_dtypes as enabled_autocast_dtypes
from .device import read_autocast_state as read_autocast_state
from .device import switch_off as switch_off
from .device import use_autocast_state as use_autocast_state
from .groups import GroupWire as GroupWire
from .groups import explain_failed_collective as explain_failed_collective
from .groups import wait_for_all_ranks as wait_for_all_ranks
from .ledger import ON_CHECK as ON_CHECK
from .ledger import Record as Record
from .ledger import call_site as call_site
from .ledger import check_ranks as check_ranks
from .ledger import find_user_frame as find_user_frame
from .ledger import first_instruction as first_instruction
from .ledger import ledger as ledger
from .ledger import own_lines_shown as own_lines_shown
from .ledger import recomputing as recomputing
from .ledger import strict as strict
from .ledger import user_line as user_line
from .ledger import user_line_of_error as user_line_of_error
from .meshes import LOOPBACK as LOOPBACK
from .meshes import MEETING as MEETING
from .meshes import count_ranks as count_ranks
from .meshes import describe_saved_mesh as describe_saved_mesh
from .meshes import find_context_mesh as find_context_mesh
from .meshes import find_root_mesh as find_root_mesh
from .meshes import find_saved_wire as find_saved_wire
from .meshes import init_device_mesh as init_device_mesh
from .meshes import init_mesh_of_all_ranks as init_mesh_of_all_ranks
from .meshes import is_part_of_mesh as is_part_of_mesh
from .meshes import join as join
from .meshes import ranks_of_mesh as ranks_of_mesh
from .meshes import sizes_of_mesh as sizes_of_mesh
from .meshes import wire_of as wire_of
from .move_steps import has_empty as has_empty
from .move_steps import identity_of_reduction as identity_of_reduction
from .move_steps import zeros_signed_as as zeros_signed_as
from .ranks import ranks as ranks
from .ranks import run_in_one_process as run_in_one_process
from .torch_distributed import Piece as Piece
from .torch_distributed import Region as Region
from .torch_distributed import after_import as after_import
from .torch_distributed import find_torch_dtensor_mesh as find_torch_dtensor_mesh
from .torch_distributed import inspect_collectives as inspect_collectives
from .torch_distributed import inspect_wrappers as inspect_wrappers
from .torch_distributed import is_wrapper as is_wrapper
from .torch_distributed import local_of_torch_dtensor as local_of_torch_dtensor
from .torch_distributed import make_torch_dtensor as make_torch_dtensor
from .torch_distributed import patch_state_dicts as patch_state_dicts
from .torch_distributed import read_torch_dtensor as read_torch_dtensor
from .torch_distributed import torch_mesh as torch_mesh
from .trace import TraceWire as TraceWire
from .trace import Uneven as Uneven
from .trace import active_wire as active_wire
from .trace import is_uneven as is_uneven
from .trace import substitute_wires as substitute_wires
from .trace import uneven as uneven
from .waiting import RankGoneError as RankGoneError
from .waiting import begin_graph as begin_graph
from .waiting import end_graph as end_graph
from .waiting import find_ended as find_ended
from .waiting import is_lost as is_lost
from .wire import DryWire as DryWire
from .wire import Reading as Reading
from .wire import Wire as Wire
from .wire import dry_mesh as dry_mesh
from .wire import on_first_wire as on_first_wire
