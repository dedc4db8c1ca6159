"""FSDP2's names over `pt.zero`: a script of `torch.distributed.fsdp` changes its imports.

    from partita.fsdp import MixedPrecisionPolicy, fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

One thing differs: an input is a DTensor that holds the rows of all ranks (`pt.distribute_batch`),
and the loss is the mean over all these rows. If forward gets a plain tensor with one rank's rows,
it raises an error that shows the line to write.

Options that change how FSDP2 overlaps or allocates, but no number, are accepted and have no effect:
partita frees each gathered parameter after its last use and prefetches the next block by itself.
Options that partita cannot honor raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from partita.comm import (
    find_root_mesh,
    init_mesh_of_all_ranks,
    sizes_of_mesh,
    user_line,
    wire_of,
)
from partita.layout import Fix, LayoutError
from partita.parallel.batch import find_instances, replace_instances
from partita.parallel.fsdp_group import MixedPrecision, ZeroState
from partita.parallel.zero import zero
from partita.tensor.dtensor import DTensor
from partita.tensor.tensor_state import HERE, keep_in_class, make_argument_error, state_of

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "get_mesh",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a step, with FSDP2's names.

    Attributes:
        param_dtype: the dtype of gathered parameters and of the computation. None: the
            parameters' own dtype.
        reduce_dtype: the dtype in which gradients are sent and summed. None: `param_dtype`.
        output_dtype: the dtype to which the module's floating-point outputs are cast. None: they
            are not cast.
        cast_forward_inputs: True casts the module's floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def _to_partita(self) -> MixedPrecision:
        sums = self.reduce_dtype or self.param_dtype
        return MixedPrecision(self.param_dtype, sums, sums, cast_inputs=self.cast_forward_inputs)


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading: parameters, gradients and optimizer state stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Offloading to host memory, pinned or not. `fully_shard` raises an error for it."""

    pin_memory: bool = True


class UnshardHandle:
    """The result of `FSDPModule.unshard(async_op=True)`."""

    def wait(self) -> None:
        """Returns immediately: parameters are gathered when they are used."""


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shards a module's parameters, gradients and optimizer state in place, as ZeRO-3 does.

    Apply it to the blocks first and to the model last, as with FSDP2. Each module to which it was
    applied is gathered and reduced as one group.

    Args:
        module: a module, or a list of modules.
        mesh: one dimension shards over it. Of two dimensions, the first replicates and the second
            shards. A sub-mesh such as `mesh["dp"]` names the dimensions of the mesh that it was
            taken from. None takes all ranks.
        reshard_after_forward: False keeps gathered parameters until the optimizer has changed them,
            if it is passed for the model and all its blocks. Otherwise each block is freed after
            its last use. An integer raises an error.
        shard_placement_fn: must return `Shard(0)` or None; partita shards dimension 0.
        mp_policy: must be equal for the model and its blocks, except for `output_dtype`.
        offload_policy: must be `OffloadPolicy()`.
        ignored_params: must be empty.

    Returns:
        `module`, whose class is now also a subclass of `FSDPModule`.

    Raises:
        LayoutError: the model and its blocks are on different meshes or have different policies.
        ValueError: an option that partita does not have.
    """
    if isinstance(module, (list, tuple)):
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": reshard_after_forward,
            "shard_placement_fn": shard_placement_fn,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
            "ignored_params": ignored_params,
        }
        own = [set(m.parameters()) for m in module]
        for i, m in enumerate(module):
            if own[i] and own[i] <= set().union(*own[:i]):  # tied to modules before it
                _take_names(m, reshard_after_forward, mp_policy)
            else:
                fully_shard(m, **options)
        return module
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _has_forward(module):
        raise ValueError(
            f"fully_shard: a {type(module).__name__} has no forward; "
            "apply fully_shard to the modules in it"
        )
    _refuse_other_options(
        module, reshard_after_forward, shard_placement_fn, offload_policy, ignored_params
    )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        takes = "a partita.fsdp.MixedPrecisionPolicy as mp_policy"
        fix = "from partita.fsdp import MixedPrecisionPolicy"
        raise make_argument_error("fully_shard", takes, mp_policy, fix)
    part = init_mesh_of_all_ranks() if mesh is None else mesh
    whole = find_root_mesh(part)
    replicate, shard = _name_axes(part)
    inner = [m for m in module.modules() if isinstance(m, FSDPModule)]
    keeps = reshard_after_forward is False and all(m._keeps_gathered for m in inner)
    zero(module, whole, shard, precision=mp_policy._to_partita(), persistent=keeps)
    wire = wire_of(whole)
    wire.data_axes = (*wire.data_axes, *(a for a in replicate if a not in wire.data_axes))
    return _take_names(module, reshard_after_forward, mp_policy)


def _take_names(module: Any, reshard_after_forward: Any, mp_policy: MixedPrecisionPolicy) -> Any:
    """Gives a sharded module the class and the hooks of an `FSDPModule`. Returns the module."""
    if not isinstance(module, FSDPModule):
        kind: Any = type(module)
        module.__class__ = _derive_class(kind)
        module.register_forward_pre_hook(_refuse_rows_of_one_rank, prepend=True, with_kwargs=True)
    if mp_policy.param_dtype is not None and mp_policy.cast_forward_inputs:
        cast = partial(_cast_inputs, mp_policy.param_dtype)
        module.register_forward_pre_hook(cast, with_kwargs=True)
    if mp_policy.output_dtype is not None:
        module.register_forward_hook(partial(_cast_output, mp_policy.output_dtype))
    module._keeps_gathered = reshard_after_forward is False
    return module


def get_mesh(model: nn.Module) -> Any:
    """Returns the mesh of a sharded model, for `pt.distribute_batch(batch, mesh, ...)`.

    Raises:
        ValueError: no parameter of the model is a DTensor.
    """
    mesh = _find_mesh(model)
    if mesh is None:
        raise ValueError("get_mesh: no parameter of the model is a DTensor; call fully_shard first")
    return mesh


def _find_mesh(model: nn.Module) -> Any:
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """No effect: in partita every method can use sharded parameters, not only `forward`.

    Raises:
        ValueError: the module has no method with the name `method_name`.
    """
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")


def share_comm_ctx(modules: Sequence[nn.Module]) -> None:
    """No effect: partita chooses streams itself. In FSDP2, several models then share streams."""


class FSDPModule:
    """A module to which `fully_shard` was applied, with the methods of FSDP2.

    Methods that change only how FSDP2 overlaps or allocates have no effect, and ignore their
    arguments.
    """

    _keeps_gathered = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A slice of a container is made by calling its class. It is a plain container.
        made: Any = _plain_class(cls).__new__(_plain_class(cls), *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the next backward passes reduce gradients, or accumulate them locally.

        Accumulated gradients are reduced by the next backward pass that reduces. Call this on the
        model. A call on a block must pass the same value. `recurse` has no effect.

        Args:
            requires_gradient_sync: True reduces, False accumulates.

        Raises:
            ValueError: a block's value differs from the model's.
        """
        state = _state_of(self)
        if state is not None:
            if not requires_gradient_sync:
                HERE.trace.refuse_no_sync()
            state.keeps_partial_gradients = not requires_gradient_sync
            return
        for model in _owners_of(self):
            if model.keeps_partial_gradients == bool(requires_gradient_sync):
                raise ValueError(
                    "set_requires_gradient_sync: the gradients of a model are kept or sent "
                    "together; call it on the model"
                )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """No effect: gradients are all-reduced over replicas once, in the optimizer's step."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: each backward pass waits for its reductions when it ends."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether gathered parameters are freed after their last use.

        Call it on the model, for all its blocks. On a block it has no effect: a block keeps or
        frees its parameters as the model does. Results do not change.

        Args:
            reshard_after_forward: True frees them. False keeps them until a parameter changes.
            recurse: ignored.
        """
        _refuse_other_options(self, reshard_after_forward)
        state = _state_of(self)
        if state is not None:
            state.persistent = self._keeps_gathered = not reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether gathered parameters are freed after use.

        `set_reshard_after_forward(reshard_after_backward)` makes the same setting. `recurse` is
        ignored.
        """
        self.set_reshard_after_forward(reshard_after_backward, recurse)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """No effect: parameters are DTensors of the full shape, gathered when they are used.

        Returns an `UnshardHandle` if `async_op`, and otherwise None.
        """
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """No effect: gathered parameters are freed after their last use."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """No effect: blocks are prefetched in the order in which the last step used them."""
        _check_modules("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """No effect: blocks are prefetched in the order in which the last step used them."""
        _check_modules("set_modules_to_backward_prefetch", modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: backward gathers a block only if it needs the block's weights."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: partita always reduces gradients with a sum."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: partita allocates the buffers of collectives itself."""

    def set_symm_mem_for_comm(self, backend: Any = None) -> None:
        """No effect: partita allocates the buffers of collectives itself."""

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: partita chooses process groups itself."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """No effect: partita limits the running reductions to one block, and much smaller ones."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """No effect: an error is raised if only some ranks have a gradient of a parameter."""

    def reset_iter_state(self) -> None:
        """No effect: a forward or backward pass that raised an error leaves no state behind."""

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: gathers wait for the stream on which the optimizer ran."""

    def set_gradient_divide_factor(self, factor: float) -> NoReturn:
        """Raises NotImplementedError: partita does not divide gradients. Scale the loss."""
        raise _make_scale_error("set_gradient_divide_factor")

    def set_reduce_scatter_divide_factor(self, factor: float) -> NoReturn:
        """Raises NotImplementedError: partita does not divide gradients. Scale the loss."""
        raise _make_scale_error("set_reduce_scatter_divide_factor")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> NoReturn:
        """Raises NotImplementedError: use `Tensor.register_post_accumulate_grad_hook`."""
        raise NotImplementedError(
            "set_all_reduce_hook: partita reduces in the optimizer's step; "
            "p.register_post_accumulate_grad_hook(hook) sees each gradient"
        )

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        """Raises NotImplementedError: partita runs its own collectives, which `ledger` records."""
        raise NotImplementedError("set_custom_all_gather: partita runs its own collectives")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        """Raises NotImplementedError: partita runs its own collectives, which `ledger` records."""
        raise NotImplementedError("set_custom_reduce_scatter: partita runs its own collectives")

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class was made here, so that pickle does not find it by name.
        plain = _plain_class(type(self))
        return (_make_empty, (plain,), *super().__reduce_ex__(protocol)[2:])


def _plain_class(kind: type) -> Any:
    return next(k for k in kind.__mro__ if not issubclass(k, FSDPModule))


@keep_in_class
def _derive_class(kind: Any) -> Any:
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})


def _make_empty(kind: type) -> Any:
    return object.__new__(_derive_class(kind))


def _state_of(module: Any) -> ZeroState | None:
    """Returns the state of a model that is sharded as a whole; None for a block within one."""
    state: ZeroState | None = module.__dict__.get("_zero")
    return state


def _owners_of(module: Any) -> set[ZeroState]:
    """Returns the states of the models that hold the parameters of a block."""
    all_layouts = (state_of(p).zero_layouts for p in module.parameters())
    return {layouts.owner for layouts in all_layouts if layouts is not None}


def _name_axes(mesh: Any) -> tuple[tuple[str, ...], str]:
    """Returns the axes of a mesh that replicate, and the one that shards."""
    names = (*(sizes_of_mesh(mesh) or wire_of(mesh).mesh.names),)  # wire_of refuses other objects
    if len(names) > 2:
        raise LayoutError(
            f"fully_shard: the mesh has {len(names)} dimensions: {' '.join(names)}",
            place=user_line(),
            reason="one dimension shards, and one before it may replicate",
            fixes=(Fix(f"fully_shard(module, mesh=mesh[{names[0]!r}])", "the data dimension"),),
        )
    return names[:-1], names[-1]


def _refuse_other_options(
    module: Any,
    reshard_after_forward: Any = None,
    shard_placement_fn: Any = None,
    offload_policy: Any = None,
    ignored_params: Any = None,
) -> None:
    if not (reshard_after_forward is None or isinstance(reshard_after_forward, bool)):
        raise ValueError(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r}: parameters are sharded "
            "over one dimension or gathered; give True or False, or a mesh of two dimensions"
        )
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise ValueError(
            f"fully_shard: {offload_policy!r}: partita keeps state on the device; "
            "offload_policy=OffloadPolicy()"
        )
    if ignored_params:
        raise ValueError(
            f"fully_shard: {len(ignored_params)} ignored_params: partita shards all parameters of "
            "a model; apply fully_shard to modules without them"
        )
    for name, p in module.named_parameters():
        if hasattr(p, "fsdp_pre_all_gather"):
            raise ValueError(
                f"fully_shard: {name} has fsdp_pre_all_gather, an all-gather of its own: partita "
                "gathers parameters itself; make it a plain parameter"
            )
        wanted = None if shard_placement_fn is None else shard_placement_fn(p)
        if wanted is not None and getattr(wanted, "dim", None) not in (0, -p.ndim):
            raise ValueError(
                f"fully_shard: shard_placement_fn wants {wanted} for {name}: partita shards "
                "dimension 0 of parameters"
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return _cast(dtype, (args, kwargs))


def _cast_output(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(dtype, output)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return replace_instances(value, torch.Tensor, cast, copies={})


def _check_modules(method: str, modules: Any) -> None:
    if not all(isinstance(m, FSDPModule) for m in modules):
        raise ValueError(f"{method}: apply fully_shard to these modules first")


def _make_scale_error(method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{method}: the loss is the mean of all ranks' rows, and so is its gradient; "
        "multiply the loss: (loss * factor).backward()"
    )


def _refuse_rows_of_one_rank(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Raises if a sharded model gets plain tensors: rows would differ between ranks unnoticed."""
    state, mesh = _state_of(module), _find_mesh(module)
    if state is None or mesh is None or not any(wire_of(mesh).mesh.size(a) > 1 for a in state.axes):
        return
    given = [t for t in find_instances((args, kwargs), torch.Tensor) if t.ndim]
    if not given or any(isinstance(t, DTensor) for t in given):
        return
    shapes = ", ".join(str([*t.shape]) for t in given)
    raise LayoutError(
        f"{type(module).__name__} is sharded, and its input is a plain tensor of this rank alone",
        place=user_line(),
        operands=(f"input  {shapes}",),
        reason="a loss and a gradient are of all ranks' rows, so the rows must form one batch",
        fixes=(
            Fix(
                'batch = pt.distribute_batch(batch, mesh, each_rank_has="piece")',
                "each rank has read its own rows",
            ),
            Fix("batch = pt.distribute_batch(batch, mesh)", "each rank has read all rows"),
        ),
    )
