"""Torch's own DTensors, and patches of torch's functions that may get a DTensor of partita.

Torch's DTensors are converted from and to local tensors without a copy. Functions that would treat
a DTensor of partita as a plain tensor are patched:

- A public collective would send local tensors as if each were the whole value. Its arguments are
  checked as soon as a process uses DTensors.
- Functions of state dicts would return this rank's piece. They are patched when the program imports
  torch's modules that contain them, because these imports take seconds.

`tests/tensor/test_private_torch.py` lists all private names of torch used here.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .waiting import watched_collective

TorchPlacement = tuple[str, Any]
"""A placement of torch as a pair: `("Shard", dim)`, `("Strided", (dim, factor))`, ..."""

ToLocal = Callable[[torch.Tensor, Sequence[Any]], torch.Tensor]
"""`to_local(gradient, placements)`: converts a local gradient from torch's placements to partita's
layout.
"""


def torch_mesh(mesh: Any) -> DeviceMesh | None:
    """Returns `mesh` if it is torch's DeviceMesh; None for `pt.ranks` and dry meshes."""
    return mesh if isinstance(mesh, DeviceMesh) else None


def read_torch_dtensor(x: Any) -> tuple[DeviceMesh, Sequence[Any], torch.Size, tuple[int, ...]]:
    """Returns the mesh, placements, shape and strides of one of torch's DTensors.

    Raises:
        TypeError: `x` is not a DTensor of torch.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor):
        raise TypeError(f"from_torch takes a torch.distributed.tensor.DTensor, not {type(x)}")
    return x.device_mesh, x.placements, x.shape, x.stride()


def make_torch_dtensor(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[TorchPlacement],
    shape: torch.Size,
    stride: tuple[int, ...],
    gradient: ToLocal,
) -> torch.Tensor:
    """Makes a DTensor of torch.distributed that shares the memory of `local`. Differentiable.

    Args:
        mesh, placements: the mesh and the placements of the result.
        shape, stride: the global shape and strides of the result, in elements.
        gradient: makes the gradient of `local` from the result's (see `ToLocal`).
    """
    theirs = tuple(map(_make_torch_placement, placements))
    out: torch.Tensor = _ToTorch.apply(local, mesh, theirs, shape, stride, gradient)
    return out


def local_of_torch_dtensor(
    x: Any,
    placements: Sequence[TorchPlacement],
    gradient: Callable[[torch.Tensor], torch.Tensor],
    divisor: int = 1,
) -> torch.Tensor:
    """Returns the local tensor of `x`, a DTensor of torch, divided by `divisor`. Differentiable.

    The result is an alias if `divisor` is 1.

    Args:
        placements: the placements of the gradient of `x`.
        gradient: a function from the gradient of the result to the local gradient of `x`.
        divisor: a number by which the local tensor is divided. The gradient is not divided.
    """
    theirs = tuple(map(_make_torch_placement, placements))
    out: torch.Tensor = _FromTorch.apply(x, theirs, gradient, divisor)
    return out


def _make_torch_placement(said: TorchPlacement) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    kind, value = said
    if kind == "Shard":
        return Shard(value)
    if kind == "Strided":
        return _StridedShard(value[0], split_factor=value[1])
    return Replicate() if kind == "Replicate" else Partial(value)


def _wait_for_tensor(local: Any) -> torch.Tensor:
    """Returns `local` after waiting for it: torch may return a collective's pending result."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _wrap_as_torch_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any
) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


class _ToTorch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        mesh: Any,
        placements: Any,
        shape: Any,
        stride: Any,
        gradient: ToLocal,
    ) -> Any:
        ctx.gradient = gradient
        return _wrap_as_torch_dtensor(local.detach(), mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        local = _wait_for_tensor(grad.to_local(grad_placements=grad.placements))
        return ctx.gradient(local, grad.placements), None, None, None, None, None


class _FromTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, placements: Any, gradient: Any, divisor: int) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.gradient = x.device_mesh, placements, gradient
        ctx.shape, ctx.stride = x.shape, x.stride()
        local = _wait_for_tensor(x.to_local()).detach()
        return local if divisor == 1 else local / divisor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        local = ctx.gradient(grad)
        return (
            _wrap_as_torch_dtensor(local, ctx.mesh, ctx.placements, ctx.shape, ctx.stride),
            None,
            None,
            None,
        )


# -- pieces of checkpoints -------------------------------------------------------------------------

Region = Sequence[tuple[int, int]]
"""`(offset, length)` in elements, per dimension of the whole tensor."""


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that one rank holds, as checkpoints save and load it.

    It is not in `dcp_format`, because importing that takes a second.

    Attributes:
        local: the values, a plain tensor.
        shape: the shape of the whole tensor.
        region: for each dimension `(offset, length)` of `local` in the whole tensor.
    """

    local: torch.Tensor
    shape: Sequence[int]
    region: Region


# -- public collectives ----------------------------------------------------------------------------
# Nothing is patched when partita is imported. The collectives are patched when this process makes
# its first wire, without which there is no DTensor. Their code is replaced in place, because
# programs have imported them under other names by then (`from torch.distributed import ...`), and
# because torch compares some of them by identity (`isend`, and those that Dynamo maps to functional
# ones).

COLLECTIVES = (
    """all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv broadcast
    broadcast_object_list gather gather_object irecv isend recv recv_object_list reduce
    reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list send
    send_object_list _all_gather_base _reduce_scatter_base"""
).split()
"""The names of torch's public collectives."""
_OF_TWO_RANKS = frozenset("batch_isend_irecv irecv isend recv send".split())
"""Collectives that ranks need not call equally often. Other ranks do not notice while they
block.
"""


def inspect_collectives(inspect: Callable[[str, Any], Any]) -> None:
    """Makes torch's public collectives call `inspect(name, (args, kwargs))` first.

    The collective gets the arguments that `inspect` returns. Collectives of partita itself are not
    inspected, because they use the process groups directly.
    """
    if not dist.is_available():
        return
    for name in COLLECTIVES:
        collective = getattr(dist.distributed_c10d, name, None)
        if collective is not None:  # a version of torch may lack it
            wrap_in_place(collective, partial(_make_inspected_collective, name, inspect=inspect))


def wrap_in_place(function: Any, wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    """Changes a Python function to `wrap(original)`, also for modules that have imported it.

    Returns:
        `original`: a function that does what `function` did.
    """
    original: types.FunctionType
    for cell in function.__closure__ or ():
        if isinstance(original := cell.cell_contents, types.FunctionType):
            cell.cell_contents = wrap(original)  # the function that torch's decorator calls
            return original
    name, code, space = function.__name__, function.__code__, function.__globals__
    original = types.FunctionType(code, space, name, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = inspect.signature(original)
    space[f"_partita_{name}"] = wrap(original)
    source = f"def {name}(*args, **kwargs): return _partita_{name}(*args, **kwargs)"
    made: dict[str, Any] = {}
    # Compiled under torch's file name, so that Dynamo traces it and `user_line` skips it.
    exec(compile(source, code.co_filename, "exec"), made)
    function.__code__ = made[name].__code__
    function.__defaults__ = function.__kwdefaults__ = None
    return original


def _make_inspected_collective(
    name: str, original: Callable[..., Any], *, inspect: Callable[[str, Any], Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def inspected_collective(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = inspect(name, (args, kwargs))
        if name == "batch_isend_irecv":
            lists = (*args, *kwargs.values())
            inspect(name, ([getattr(op, "tensor", None) for ops in lists for op in ops], {}))
        if name in _OF_TWO_RANKS or kwargs.get("async_op"):
            return original(*args, **kwargs)
        given = (*args, *kwargs.values())
        if any(x is dist.GroupMember.NON_GROUP_MEMBER for x in given):  # torch only warns then
            return original(*args, **kwargs)
        group = next((x for x in given if isinstance(x, dist.ProcessGroup)), None)
        with watched_collective(name, group):
            return original(*args, **kwargs)

    return inspected_collective


# -- wrappers of models ----------------------------------------------------------------------------

_WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.nn.parallel.data_parallel": "DataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch.distributed.fsdp._fully_shard._fully_shard": "fully_shard",
    "torch.distributed._composable.replicate": "replicate",
    "torch.distributed._composable.replicate_with_fsdp": "replicate",
}
"""Wrappers that replicate or shard a model, by their module."""


InspectWrapper = Callable[[str, Any, Sequence[int], Any], None]


def inspect_wrappers(inspect: InspectWrapper) -> None:
    """Make wrappers such as DDP call `inspect(name, model, ranks, wrapper)` first.

    `ranks` are the global ranks of the process group; empty if the wrapper gets a mesh. `wrapper`
    is the instance that is being made, or None for a function.
    """
    for home, name in _WRAPPERS.items() if dist.is_available() else ():
        after_import(home, partial(_inspect_wrapper, name, inspect))


def _inspect_wrapper(name: str, inspect: InspectWrapper, module: Any) -> None:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def inspected_wrapper(*args: Any, **kwargs: Any) -> Any:
            instance, given = (args[0], args[1:]) if isinstance(taker, type) else (None, args)
            models = [x for x in (*given, *kwargs.values()) if _is_model(x)]
            ranks: Sequence[int] = ()
            if name == "DistributedDataParallel" and dist.is_initialized():
                groups = (x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup))
                ranks = dist.get_process_group_ranks(next(groups, None))
            for model in models[:1]:
                inspect(name, model, ranks, instance)
            return original(*args, **kwargs)

        return inspected_wrapper

    taker = getattr(module, name)
    if isinstance(taker, type):
        taker.__init__ = wrap(taker.__init__)  # type: ignore[misc]
    else:
        wrap_in_place(taker, wrap)


def _is_model(x: Any) -> bool:
    several = isinstance(x, (list, tuple)) and x
    return isinstance(x[0] if several else x, torch.nn.Module)


def is_wrapper(module: torch.nn.Module) -> bool:
    """True if `module` is a wrapper of torch around a model, such as DDP."""
    kinds = (getattr(sys.modules.get(home), name, None) for home, name in _WRAPPERS.items())
    return isinstance(module, tuple(kind for kind in kinds if isinstance(kind, type)))


def find_torch_dtensor_mesh(x: torch.Tensor) -> DeviceMesh | None:
    """Returns the mesh of `x` if it is a DTensor of `torch.distributed`; None for other tensors."""
    theirs = sys.modules.get("torch.distributed.tensor")
    if theirs is None or not isinstance(x, theirs.DTensor):
        return None
    return x.device_mesh  # type: ignore[attr-defined, no-any-return]


# -- functions of state dicts ----------------------------------------------------------------------
# With `StateDictOptions(full_state_dict=True)` these functions gather only torch's DTensors and
# treat every other tensor as whole. A file of rank 0 would lack other ranks' pieces of our
# DTensors.

_STATE_DICT_UTILS = "torch.distributed._state_dict_utils"
_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"


def patch_state_dicts(tensors: Any) -> None:
    """Patch torch's functions of state dicts for DTensors, when torch's modules are imported.

    Args:
        tensors: an object with functions for DTensors, which this package must not import:
            `is_spread(x)`: True for a DTensor.
            `whole(x)`: its whole value; all ranks call it.
            `piece_like(x, whole)`: this rank's part of a whole value, with the layout of `x`.
            `empty_like(x)`: CPU memory for a copy.
            `copy_on_cpu(x)`: a copy of this rank's piece.
            `give_memory(model, names)`: allocates a model's DTensors that are on the meta device.
            (`names` are those in the state dict; None on ranks that do not know them.)
    """
    after_import(_STATE_DICT_UTILS, lambda module: _patch_state_dict_utils(module, tensors))
    after_import(_STATE_DICT, lambda module: _patch_state_dict_module(module, tensors))
    after_import(_STAGER, lambda module: _patch_stager(module.StateDictStager, tensors))


def _patch_state_dict_utils(module: Any, tensors: Any) -> None:
    iterate, broadcast = module._iterate_state_dict, module._broadcast_tensors

    @functools.wraps(iterate)
    def _iterate_state_dict(
        iter_object: Any, sharded_tensor_func: Any, dtensor_func: Any, *args: Any, **options: Any
    ) -> Any:
        if tensors.is_spread(iter_object):
            # The callback for torch's DTensors shows which function walks the state dict.
            asked_by = dtensor_func.__qualname__.partition(".")[0]
            if asked_by == "_gather_state_dict":
                iter_object = tensors.whole(iter_object)
            elif asked_by == "_create_cpu_state_dict":
                return tensors.empty_like(iter_object)
        return iterate(iter_object, sharded_tensor_func, dtensor_func, *args, **options)

    @functools.wraps(broadcast)
    def _broadcast_tensors(
        full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **options: Any
    ) -> None:
        ours = {key: local[key] for key in keys if tensors.is_spread(local.get(key))}
        broadcast(full, local, keys, *args, **options)
        for key, x in ours.items():
            local[key] = tensors.piece_like(x, local[key])

    module._iterate_state_dict = _iterate_state_dict
    module._broadcast_tensors = _broadcast_tensors


def _patch_state_dict_module(module: Any, tensors: Any) -> None:
    distribute, load = module._distribute_state_dict, module._load_model_state_dict

    @functools.wraps(distribute)
    def _distribute_state_dict(
        full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any
    ) -> None:
        ours = {
            key: value
            for key, value in full.items()
            if isinstance(value, torch.Tensor) and tensors.is_spread(local.get(key))
        }
        distribute({k: v for k, v in full.items() if k not in ours}, local, *args, **options)
        for key, whole in ours.items():
            local[key] = tensors.piece_like(local[key], whole)

    @functools.wraps(load)
    def _load_model_state_dict(model: torch.nn.Module, state_dict: Any, info: Any) -> Any:
        # Otherwise torch replaces meta parameters by whole tensors.
        is_sent = info.broadcast_from_rank0 and dist.get_rank() > 0
        tensors.give_memory(model, None if is_sent else [*state_dict])
        return load(model, state_dict, info)

    module._distribute_state_dict = _distribute_state_dict
    module._load_model_state_dict = _load_model_state_dict


def _patch_stager(stager: Any, tensors: Any) -> None:
    """Patch the stager, which `torch.distributed.checkpoint.async_save` copies storages with."""
    offload = stager._offload_tensor

    @functools.wraps(offload)
    def _offload_tensor(self: Any, x: Any, memo: Any, *args: Any, **options: Any) -> Any:
        if tensors.is_spread(x):
            memo[id(x)] = tensors.copy_on_cpu(x)
            return memo[id(x)]
        return offload(self, x, memo, *args, **options)

    stager._offload_tensor = _offload_tensor


# -- import hooks ----------------------------------------------------------------------------------


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call `act(module)` when the module `name` has been imported, or now if it already is."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _OnImport(name, act))


class _OnImport(importlib.abc.MetaPathFinder):
    """An import hook for one module, which calls a function after the module has been executed."""

    def __init__(self, name: str, act: Callable[[Any], None]):
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._act(module)

            loader.exec_module = exec_module
        return spec
