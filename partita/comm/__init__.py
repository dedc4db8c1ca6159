"""Who carries bytes from rank to rank. The only room that knows of `torch.distributed`."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .checks import check_ranks, strict
from .dry import DryWire, dry_mesh
from .everyone import Aside, Decide, everyone
from .groups import GroupWire, wire_of
from .handle import MeshHandle
from .ledger import Ledger, Record, ledger
from .ranks import World, ranks
from .source import user_line
from .under_way import UnderWay
from .wire import Ask, Wire

__all__ = [
    "Aside",
    "Ask",
    "Decide",
    "DeviceMesh",
    "DryWire",
    "GroupWire",
    "Ledger",
    "MeshHandle",
    "Record",
    "UnderWay",
    "Wire",
    "World",
    "check_ranks",
    "dry_mesh",
    "everyone",
    "init_device_mesh",
    "ledger",
    "ranks",
    "strict",
    "user_line",
    "wire_of",
]
