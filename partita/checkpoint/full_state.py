"""Full state dicts of a model and its optimizer, with whole plain tensors, and safetensors files.

They serve to exchange weights with programs without layouts, and for `save_pretrained` of
transformers, diffusers, peft and hub mixins. Tensors are gathered one after the other. So a rank
never holds more than the tensors that it returns, its own shards, and the one that is being
gathered.

`save_pretrained` must be called on all ranks. The original `save_pretrained` runs on one rank,
where the model then holds whole tensors. The other ranks wait.

A safetensors file is eight bytes with the length of a header, the header (JSON: for each name the
dtype, the shape and the position of its bytes) and the bytes
(https://github.com/huggingface/safetensors). It is written tensor by tensor, which the safetensors
package cannot do, and read with the package. Files written here have checksums in the header's
metadata: a CRC-32 of each tensor, and one of the header, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import os
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import (
    ControlPlane,
    Decide,
    Piece,
    Reading,
    Wire,
    after_import,
    check_equal_on_ranks,
    control_plane,
    pack,
    patch_state_dicts,
    unpack,
    user_line,
)
from partita.comm.device import HOST, view_bytes
from partita.layout import Fix, LayoutError
from partita.parallel.parameters import (
    ParameterSlot,
    allocate_tensor,
    find_parameters_and_buffers,
    initialize_missing,
)
from partita.tensor import DTensor
from partita.tensor.arguments import check_plain_tensor
from partita.tensor.construct import copy_attributes, piece_of, refuse_lazy
from partita.tensor.dtensor import as_dtensor, checksum, destination, piece_held
from partita.tensor.tensor_state import make_argument_error

from .folder import Replacement, compute_crcs, lock_for_reading
from .object_state import Stored, pack_containers, unpack_containers
from .optimizer_state import name_parameters, open_optimizer, strip_wrapper_names
from .save_and_load import (
    Loaded,
    LoadTargets,
    Mismatches,
    Strict,
    agree_on_mismatches,
    attempt,
    find_mismatches,
)
from .state import Leaf, open_state


def full_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = HOST.type,
) -> Any:
    """Returns the state dict that the model would have on one device, with whole plain tensors.

    Must be called on all ranks. Names are the names in `model.state_dict()`, without prefixes that
    torch.compile adds. Parameters that share one tensor in the model share one in the result.
    Tensors are copies, gathered one after the other.

    Args:
        optimizer: adds its state, by parameter names, in the form of
            `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
        rank0_only: True: rank 0 gets the values, the other ranks get empty dicts.
        device: the device of the result. None: the model's.

    Returns:
        The model's state dict. With an optimizer: `(model's, optimizer's)`.

    Raises:
        LayoutError: a parameter is on the meta device.
    """
    refuse_lazy(model, "full_state_dict")
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        fix = "pt.full_state_dict(model, optimizer)"
        raise make_argument_error("full_state_dict", "an optimizer", optimizer, fix)
    keeps = not rank0_only or control_plane().rank == 0
    copies, tensors = _FullCopies(keeps, device), collect_model_tensors(model)
    _agree_on_layouts(tensors, "full_state_dict")
    state = {name: copies.of(value, name) for name, value in tensors.items()}
    if optimizer is None:
        return state if keeps else {}
    names = name_parameters(optimizer, [((), model)])
    of_optimizer = unpack_containers(copies.of(open_optimizer(optimizer, names).tree, "optimizer"))
    return (state, of_optimizer) if keeps else ({}, {})


@dataclass
class _FullCopies:
    """Whole copies of tensors, each made once. All ranks make them together.

    Attributes:
        keeps: True if this rank gets them; otherwise it only takes part in gathering.
        device: the device of the copies; None: the device of each tensor.
        made: the copies so far, by the ids of the tensors.
    """

    keeps: bool
    device: torch.device | str | None
    made: dict[int, torch.Tensor | None] = field(default_factory=dict)

    def of(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_full_tensor(value, name)
        if isinstance(value, dict):
            return {k: self.of(v, f"{name}.{k}") for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(v, f"{name}.{i}") for i, v in enumerate(value))
        return copy.deepcopy(value) if self.keeps else None

    @torch.no_grad()
    def _copy_full_tensor(self, x: torch.Tensor, name: str) -> torch.Tensor | None:
        if id(x) in self.made:
            return self.made[id(x)]
        _refuse_meta(x, name, "full_state_dict")
        whole = gather_full_value(x)
        out = whole.to(self.device or whole.device, copy=True) if self.keeps else None
        self.made[id(x)] = out  # a tensor with two names is gathered once, on all ranks
        return out


def gather_full_value(x: torch.Tensor) -> torch.Tensor:
    """Returns the whole value of `x`, on every rank. It may share the memory of `x`."""
    with torch.no_grad():
        x = x.detach()
        return x.full_tensor() if isinstance(x, DTensor) else x


def stream_full(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, whole tensor) for each entry of the model's state dict, one after the other.

        for name, weight in pt.stream_full(model):
            server.update_weight(name, weight)

    Every rank must iterate to the end. Each tensor is gathered when it is yielded, on the model's
    device. So a rank holds one whole tensor beside its pieces. Do not change the tensor: if the
    rank holds it whole, it is not copied. A tensor with several names is yielded under each name.
    Names are the names in `model.state_dict()`, without prefixes that torch.compile adds. Entries
    that are not tensors are skipped.

    Raises:
        LayoutError: a parameter is on the meta device; ranks have different names or layouts.
    """
    refuse_lazy(model, "stream_full")
    tensors = {n: x for n, x in collect_model_tensors(model).items() if torch.is_tensor(x)}
    for name, x in tensors.items():
        _refuse_meta(x, name, "stream_full")
    _agree_on_layouts(tensors, "stream_full")
    names = {id(x): [n for n, y in tensors.items() if y is x] for x in tensors.values()}
    for x in {id(x): x for x in tensors.values()}.values():
        whole = gather_full_value(x)
        for name in names[id(x)]:
            yield name, whole


def _agree_on_layouts(tensors: Mapping[str, Any], call: str) -> None:
    """Raise unless all ranks gather the same tensors."""
    spread = {name: x for name, x in tensors.items() if isinstance(x, DTensor)}
    for wire in dict.fromkeys(x._spec.wire for x in spread.values()):
        text = ", ".join(f"{name} {x.layout_over_mesh}" for name, x in spread.items())
        check_equal_on_ranks(f"whole values (pt.{call})", text, wire)


def _refuse_meta(x: torch.Tensor, name: str, call: str) -> None:
    if x.is_meta:
        raise LayoutError(
            f"{call}: {name} is on the meta device: it has no values",
            place=user_line(),
            fixes=(Fix("pt.materialize(model)"), Fix("pt.load_safetensors(model, path)")),
        )


# -- loading of whole values -----------------------------------------------------------------------


def load_full_state_dict(
    model: nn.Module,
    state: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: Strict = True,
    rank0_only: bool = False,
) -> Loaded:
    """Load a state dict of whole tensors into a model, in place. The inverse of `full_state_dict`.

    Must be called on all ranks; each rank keeps its pieces. Tensors of the model that are on the
    meta device get memory; those that `state` lacks stay there. If a parameter has several names,
    `state` needs only one of them. An optimizer that has not stepped yet gets the saved state.

    Args:
        state: the result of `full_state_dict`, or the state dict of a model on one device. With an
            optimizer: `(model's, optimizer's)`.
        strict: True: names that only the model or only `state` has are errors.
        rank0_only: True: only rank 0 needs to pass the values. It sends them one after the other.
            The `state` of other ranks is ignored.

    Returns:
        The names that were skipped.

    Raises:
        LayoutError: one error on every rank that lists what does not fit. Nothing has changed.
    """
    ranks, line = control_plane(), user_line()
    decide = ranks.decide_on("loads whole values (pt.load_full_state_dict)")
    brings = not rank0_only or ranks.rank == 0
    given = attempt(lambda: _flatten_states(state, optimizer) if brings else {})
    description = given if isinstance(given, Exception) else _describe_leaves(given)
    if rank0_only:
        description = decide(
            description if brings else None, lambda gathered: gathered[:1] * len(gathered)
        )
    job = _WriteJob(model, optimizer, description)

    def check() -> Loaded:
        found = attempt(lambda: job.check(strict))
        return agree_on_mismatches(decide, found, "of whole values", line)

    skipped = check()
    if not rank0_only:
        _refuse_different(given, decide, line)
    if job.allocate():
        check()
    decide(attempt(lambda: job.write(given, rank0_only)), lambda gathered: gathered)
    both = skipped.missing_keys, skipped.unexpected_keys
    return Loaded(*(tuple(name.removeprefix("model.") for name in names) for names in both))


def _describe_leaves(given: dict[str, Leaf]) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Returns a description of what can be loaded, without the tensors; and the values."""
    values = {n: x.value for n, x in given.items() if not isinstance(x.value, torch.Tensor)}
    return {name: Stored.of(leaf.value, leaf.path) for name, leaf in given.items()}, values


class _WriteJob:
    """One rank's part of loading whole values: all is checked before anything changes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, description: Any):
        self._model, self._optimizer, self._description = model, optimizer, description
        self._gives_memory = True

    def check(self, strict: Strict) -> Mismatches:
        """Returns how the state dict differs from the model. Raises the error of rank 0, if any.

        Args:
            strict: True: names that only the model or only the state dict has are errors.
        """
        if isinstance(self._description, Exception):
            raise self._description
        self._there, self._values = self._description
        states = _join_states(self._model, self._optimizer)
        self._target = open_state(states, self._there, self._values)
        held = {name: leaf.value for name, leaf in self._target.leaves.items()}
        tensors = {f"model.{name}": x for name, x in collect_model_tensors(self._model).items()}
        return find_mismatches(
            held,
            self._there,
            strict,
            gives_memory=self._gives_memory,
            tied=tensors,
            of_optimizers=self._target,
        )

    def allocate(self) -> bool:
        """Gives memory to tensors that will be written. Returns True if `check` must run again.

        This is so if tensors were on the meta device, because new ones have replaced them.
        """
        self._gives_memory = False
        leaves = [leaf.value for leaf in self._target.leaves.values()]
        if not any(isinstance(x, torch.Tensor) and x.is_meta for x in leaves):
            return False
        before = dict(self._model.named_parameters(remove_duplicate=False))
        names = {name.removeprefix("model.") for name in self._there}
        allocate_meta_tensors(self._model, names)
        if self._optimizer is not None:
            now = dict(self._model.named_parameters(remove_duplicate=False))
            _exchange_parameters(self._optimizer, {id(p): now[n] for n, p in before.items()})
        return True

    def write(self, given: dict[str, Leaf], rank0_only: bool) -> None:
        """Write the values into the model's tensors. With `rank0_only`, rank 0 sends them.

        Args:
            given: the state dict's tensors and values by name.
        """
        send = _TensorSender(self._model) if rank0_only else None
        targets = LoadTargets()
        for name, leaf in self._target.leaves.items():
            if name not in self._there:
                continue
            value = given[name].value if name in given else self._values.get(name)
            if send is not None and isinstance(leaf.value, torch.Tensor):
                value = send(value, self._there[name])
            _write_leaf(leaf, value, targets)
        targets.finish()
        for load_back in self._target.load_back:
            load_back()


def _join_states(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}


def _flatten_states(state: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Leaf]:
    """Returns all leaves of `state`, by the names that a checkpoint would give them.

    Raises:
        ValueError: `state` is no state dict, or with an optimizer no pair of them.
    """
    pair = (state, None) if optimizer is None else state
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise ValueError(
            "with an optimizer, load_full_state_dict takes a pair, as full_state_dict returns it: "
            f"the model's state dict and the optimizer's. This is a {type(state).__name__}"
        )
    for one in pair if optimizer is not None else pair[:1]:
        if not isinstance(one, Mapping):
            raise ValueError(f"a state dict is a dict, and this is a {type(one).__name__}")
        for name, x in one.items():
            if isinstance(x, DTensor):
                raise ValueError(f"{name} is a DTensor: load it with model.load_state_dict")
    of_model, of_optimizer = pair
    packed = None if of_optimizer is None else pack_containers(of_optimizer)
    return open_state(_join_states(of_model, packed)).leaves


def collect_model_tensors(model: nn.Module) -> dict[str, Any]:
    """Returns the entries of the model's state dict by name. Tensors are the model's own, not
    detached.

    Names have no prefixes of torch.compile.
    """
    state = model.state_dict(keep_vars=True)
    return {plain: state[name] for name, plain in strip_wrapper_names(state).items()}


def _refuse_different(given: dict[str, Leaf], decide: Decide, line: str) -> None:
    """Raise unless all ranks pass equal values. Each rank keeps its pieces of them."""
    tensors = {name: one.value for name, one in given.items() if torch.is_tensor(one.value)}

    def compare_checksums(gathered: list[dict[str, Any]]) -> list[None]:
        for rank, theirs in enumerate(gathered):
            for name in dict.fromkeys((*gathered[0], *theirs)):
                if theirs.get(name) != gathered[0].get(name):
                    raise LayoutError(
                        f"load_full_state_dict: ranks 0 and {rank} pass different values of {name}",
                        place=line,
                        reason="every rank must pass the same whole value, and keeps its piece",
                        fixes=(Fix("rank0_only=True", "sends rank 0's value to the others"),),
                    )
        return [None] * len(gathered)

    decide({name: checksum(x) for name, x in tensors.items()}, compare_checksums)


class _TensorSender:
    """Sends whole tensors from rank 0, one after the other, over the model's own mesh."""

    def __init__(self, model: nn.Module):
        spread = [x for x in collect_model_tensors(model).values() if isinstance(x, DTensor)]
        self._wire = spread[0]._spec.wire if spread else None
        here = None if self._wire is None else self._wire.rank
        decide = control_plane().decide_on("loads whole values (pt.load_full_state_dict)")
        self._src, size = decide(
            here, lambda gathered: [(gathered[0], len(gathered))] * len(gathered)
        )
        if size > 1 and (self._wire is None or self._wire.mesh.size() != size):
            raise LayoutError(
                "rank0_only needs a model with a DTensor on a mesh of all ranks",
                place=user_line(),
                reason="rank 0 sends over its mesh",
                fixes=(Fix("rank0_only=False", "with the values on every rank"),),
            )

    def __call__(self, value: torch.Tensor | None, stored: Stored) -> torch.Tensor:
        if self._wire is None:
            assert value is not None
            return value
        device = self._wire.device
        if value is None:
            assert stored.size is not None
            value = torch.empty(stored.size, dtype=stored.dtype, device=device)
        return self._wire.from_first(value.detach().to(device), self._src)


def _write_leaf(leaf: Leaf, value: Any, targets: LoadTargets) -> None:
    """Write into a tensor its piece of `value`, in place; into a dict or list the value."""
    if not isinstance(leaf.value, torch.Tensor):
        leaf.value = value
        return
    target = targets.add(leaf.value)
    piece = destination(target)
    with local_ops(), torch.no_grad():
        if piece is None:
            target.detach().zero_()
        else:
            box = tuple(slice(at, at + length) for at, length in piece.region)
            piece.local.copy_(value.detach()[box])


def _exchange_parameters(optimizer: torch.optim.Optimizer, new: Mapping[int, nn.Parameter]) -> None:
    """Replace an optimizer's parameters by the new ones in `new`, whose keys are ids."""
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(p), p) for p in group["params"]]


def allocate_meta_tensors(model: nn.Module, names: Container[str] | None = None) -> None:
    """Allocate memory for the tensors `names` of a model, if they are on the meta device.

    None: for all tensors in its state dict.
    """
    known = collect_model_tensors(model)
    named = {id(x) for name, x in known.items() if names is None or name in names}
    for held in find_parameters_and_buffers(model):
        if held.tensor.is_meta and id(held.tensor) in named:
            allocate_tensor(held, by="load")


# -- for torch.distributed.checkpoint.state_dict ---------------------------------------------------


class _SpreadTensors:
    """The functions on DTensors that `patch_state_dicts` needs."""

    def is_spread(self, x: Any) -> bool:
        return isinstance(x, DTensor)

    def whole(self, x: DTensor) -> torch.Tensor:
        return gather_full_value(x)

    def piece_like(self, x: DTensor, whole: torch.Tensor) -> torch.Tensor:
        whole = whole.detach()
        check_plain_tensor(whole, x._spec.wire, "set_state_dict")
        with torch.no_grad():
            return as_dtensor(piece_of(whole.to(x.device), x._spec), x._spec)

    def empty_like(self, x: DTensor) -> torch.Tensor:
        with local_ops(), torch.no_grad():
            return as_dtensor(torch.empty_like(x.detach(), device=HOST), x._spec)

    def copy_on_cpu(self, x: DTensor) -> torch.Tensor:
        copied = self.empty_like(x)
        with local_ops(), torch.no_grad():
            copied.copy_(x.detach())
        return copied

    def give_memory(self, model: nn.Module, names: Sequence[str] | None) -> None:
        known = collect_model_tensors(model)
        meta = {id(x): n for n, x in known.items() if isinstance(x, DTensor) and x.is_meta}
        if not meta:
            return
        given = strip_wrapper_names(known if names is None else names).values()
        lacking = meta.keys() - {id(known[name]) for name in given if name in known}
        error = LayoutError(
            "set_model_state_dict: tensors would get memory without values",
            place=user_line(),
            operands=tuple(meta[i] for i in meta if i in lacking),
            reason="they are on the meta device, and the state dict lacks them",
            fixes=(Fix("pt.load_full_state_dict(..., strict=False)", "leaves them there"),),
        )
        why = "loads a state dict (set_model_state_dict)"
        control_plane().decide(why, error if lacking else None, lambda gathered: gathered)
        allocate_meta_tensors(model)


patch_state_dicts(_SpreadTensors())

# -- models that save themselves -------------------------------------------------------------------

_PATCHED_CLASSES = {
    "transformers.modeling_utils": "PreTrainedModel",
    "diffusers.models.modeling_utils": "ModelMixin",
    "peft.peft_model": "PeftModel",
    "huggingface_hub.hub_mixin": "ModelHubMixin",
}
"""Maps a module to the class whose `save_pretrained` the library's models inherit."""
_NAME = "save_pretrained"


def patch_save_pretrained(kind: type) -> None:
    """Patch a library's `kind.save_pretrained`. For a model of DTensors, one rank writes it."""
    plain: Callable[..., Any] = kind.save_pretrained  # type: ignore[attr-defined]
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        spread = _spread_tensors(args[0], _find_argument(call, "state_dict"))
        if not spread:
            return plain(*args, **kwargs)
        return _save_once(plain, args[0], call, spread)

    kind.save_pretrained = save_pretrained  # type: ignore[attr-defined]


def _find_argument(call: inspect.BoundArguments, name: str, default: Any = None) -> Any:
    """Returns an argument of a call: a parameter, or one that `**kwargs` accepts."""
    return call.arguments.get(name, call.kwargs.get(name, default))


def _spread_tensors(model: Any, state: Mapping[str, Any] | None) -> dict[int, DTensor]:
    """Returns the DTensors of the model, or of the state dict that is to be saved, by id."""
    if not isinstance(model, nn.Module):
        return {}
    if state is None:
        found = {id(held.tensor): held.tensor for held in find_parameters_and_buffers(model)}
    else:
        ids = _find_tensor_ids(model, state)
        found = {ids[name]: x for name, x in state.items()}
    return {key: x for key, x in found.items() if isinstance(x, DTensor)}


def _find_tensor_ids(model: nn.Module, state: Mapping[str, Any]) -> dict[str, int]:
    """Returns the id of the model's tensor of each name, which is equal for tied names.

    For names that the model lacks: the id of the value in `state`.
    """
    known = collect_model_tensors(model)
    return {name: id(known.get(name, x)) for name, x in state.items()}


def _save_once(
    plain: Callable[..., Any],
    model: nn.Module,
    call: inspect.BoundArguments,
    spread: Mapping[int, DTensor],
) -> Any:
    """Gather the DTensors in `spread`, and call `plain` on the rank that writes.

    Raises:
        LayoutError: other ranks do not call it; a tensor has no value.
        Exception: what `plain` raised, on every rank.
    """
    wires: list[Wire] = [x._spec.wire for x in spread.values()]
    wire = max(wires, key=lambda one: one.mesh.size())
    is_main = bool(_find_argument(call, "is_main_process", True))
    roles = wire.meet_readers(Reading(_NAME), b"\1" if is_main else b"\0")
    # If every rank passes is_main_process=True (the default), the first rank writes.
    writes = wire.rank == 0 if set(roles) == {b"\1"} else is_main
    copies = _FullCopies(writes, HOST)
    whole = {key: copies.of(x, f"{_NAME}: a tensor") for key, x in spread.items()}

    def write_whole() -> Any:
        if (state := _find_argument(call, "state_dict")) is not None:
            ids = _find_tensor_ids(model, state)
            full = {name: whole.get(ids[name], x) for name, x in state.items()}
            # A parameter of the method, or an argument that `**kwargs` accepts.
            own = [call.arguments, *(x for x in call.arguments.values() if type(x) is dict)]
            next(one for one in own if one.get("state_dict") is state)["state_dict"] = full
        with _held_whole(model, whole):
            return plain(*call.args, **call.kwargs)

    result = attempt(write_whole) if writes else None
    failed = result if isinstance(result, Exception) else None
    # All ranks wait, so that every rank finds the files afterwards.
    errors = wire.exchange(f"has saved a model ({_NAME})", pack(failed))
    if failed is not None:
        raise failed
    for raised in filter(None, map(unpack, errors)):
        raise raised
    return result


@contextmanager
def _held_whole(model: nn.Module, whole: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replaces tensors of the modules by whole values (by id) inside the `with` block."""
    before: list[tuple[ParameterSlot, torch.Tensor]] = []
    for held in find_parameters_and_buffers(model):
        value = whole.get(id(held.tensor))
        if value is None:
            continue
        if isinstance(held.tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=held.tensor.requires_grad)
        copy_attributes(value, held.tensor)
        for home in held.homes:
            before.append((home, held.tensor))
            home.put(value)
    try:
        yield
    finally:
        for home, tensor in before:
            home.put(tensor)


for _module, _class in _PATCHED_CLASSES.items():
    after_import(
        _module,
        lambda module, _class=_class: patch_save_pretrained(  # type: ignore[misc]
            getattr(module, _class)
        ),
    )


# -- safetensors files -----------------------------------------------------------------------------

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CHECKSUMS = "partita_crc32"
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def save_safetensors(model: nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write all tensors of `model`, whole, into the safetensors file `path`.

    Must be called on all ranks; rank 0 writes. Tensors are gathered one after the other, so a rank
    holds at most one whole tensor beside its own pieces. The file appears when it is complete.

    Args:
        model: a module, or nested dicts of tensors. Keys of nested dicts are joined by dots.
        path: the file to write.

    Raises:
        ValueError: a value is not a tensor, or has a dtype that the format lacks.
        OSError: writing failed; every rank raises it.
    """
    home = Path(os.path.abspath(path))
    decide = control_plane().decide_on("saves a model (pt.save_safetensors)", f" to {home}")
    tensors = _tensors_by_name(model)
    problem = next((p for name, x in tensors.items() if (p := _find_problem(name, x))), None)

    new: list[Replacement] = []  # on rank 0

    def start_replacement(gathered: list[None]) -> list[None]:
        new.append(Replacement(home))
        return gathered

    def publish_replacement(gathered: list[None]) -> list[None]:
        new[0].publish()
        return gathered

    decide(ValueError(problem) if problem else None, start_replacement)
    try:
        # Wide elements first, so that each tensor is aligned to its element size.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header = _make_header({name: tensors[name] for name in order})
        contents = (view_bytes(_copy_full_to_cpu(tensors[name])) for name in order)
        failed = attempt(lambda: _write_file(new[0].written, header, contents)) if new else None
        for _ in contents:  # gathering needs all ranks, also those that do not write
            pass
        decide(failed, publish_replacement)
    finally:
        for one in new:
            one.discard()


def load_safetensors(
    model: nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    strict: Strict = True,
    init_fn: Callable[[nn.Module], Any] | None = None,
) -> Loaded:
    """Load tensors from safetensors files into `model`, in place. Each rank reads only its pieces.

    Must be called on all ranks. Needs the package safetensors (`pip install safetensors`).

    Tensors of a module that are on the meta device get memory for this rank's pieces. Some tensors
    may be in no file: buffers that are not persistent and, with `strict=False`, missing parameters.
    They are initialized by the first of these functions that exists: `init_fn`, called with the
    module that holds them; that module's `reset_parameters`; `_init_weights` of a module that
    contains it.

    Args:
        model: a module, or nested dicts of tensors. Keys of nested dicts are joined by dots.
        path: a file, an index of several files (`model.safetensors.index.json`), or a folder that
            contains either.
        strict: True: names that only `model` or only the files have are errors. The files need only
            one of the names of a shared parameter.
        init_fn: initializes a module's tensors that are in no file; see above.

    Returns:
        The names that were skipped.

    Raises:
        LayoutError: one error on every rank that lists what does not fit. Nothing has changed.
        LayoutError: after everything else is loaded: tensors on the meta device that no file
            contains and nothing initialized.
        OSError: the file does not exist.
        ValueError: the file is not a safetensors file, or is damaged; a tensor of `model` is
            Partial. Nothing has changed. Damage is found in files that `save_safetensors` wrote.
    """
    with contextlib.ExitStack() as held:
        skipped = _load_files(model, Path(os.path.abspath(path)), strict, held)
    if isinstance(model, nn.Module):
        initialize_missing(model, init_fn)
    return skipped


def _load_files(
    model: nn.Module | Mapping[str, Any], path: Path, strict: Strict, held: contextlib.ExitStack
) -> Loaded:
    ranks, line = control_plane(), user_line()
    files: dict[str, Any] = {}

    def compare_files() -> Mismatches:
        files.update(_open_files(path, held, ranks))
        there = {name: _describe_stored(file.get_slice(name)) for name, file in files.items()}
        objects = _tensors_by_name(model)
        is_module = isinstance(model, nn.Module)
        return find_mismatches(objects, there, strict, gives_memory=is_module, tied=objects)

    def read_tensors() -> None:
        if isinstance(model, nn.Module):
            allocate_meta_tensors(model, files)
        targets = LoadTargets()
        for name, x in _tensors_by_name(model).items():
            if name in files:
                _read_piece(files[name], name, piece_held(targets.add(x)))
        targets.finish()

    decide = ranks.decide_on("loads a model (pt.load_safetensors)", f" from {path}")
    skipped = agree_on_mismatches(decide, attempt(compare_files), os.fspath(path), line)
    decide(attempt(read_tensors), lambda gathered: gathered)
    return skipped


def _open_files(path: Path, held: contextlib.ExitStack, ranks: ControlPlane) -> dict[str, Any]:
    """Returns the file of each tensor by name. The ranks divide the check of checksums.

    Args:
        held: holds the locks that keep the files from being replaced.

    Raises:
        OSError: there is nothing; the index names a file that does not exist.
        ValueError: it is not a safetensors file, or is damaged; or it is not an index.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for one, names in _listed_files(path):
        if os.access(one.parent, os.W_OK):  # otherwise no job here can replace the file
            held.enter_context(lock_for_reading(one))
        try:
            file = safe_open(os.fspath(one), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{one} is not a safetensors file: {error}") from None
        has = list(file.keys())
        lost = [name for name in names or () if name not in has]
        if lost:
            raise ValueError(f"{one} has no {lost[0]}, though the index says so")
        found.update(dict.fromkeys(has if names is None else names, file))
        _check_file(one, ranks.rank, ranks.size)
    return found


def _read_piece(file: Any, name: str, piece: Piece) -> None:
    """Read the region of `piece` from the tensor `name` in a file into the piece's memory."""
    with torch.no_grad():
        if not piece.shape:
            piece.local.copy_(file.get_tensor(name))
        elif piece.local.numel():
            box = tuple(slice(at, at + length) for at, length in piece.region)
            piece.local.copy_(file.get_slice(name)[box])


def _listed_files(path: Path) -> list[tuple[Path, list[str] | None]]:
    """Returns the files at `path`, each with the names to read; None: all names in it."""
    if path.is_dir():
        indices = sorted(path.glob("*.safetensors.index.json"))
        files = sorted(path.glob("*.safetensors"))
        if len(indices) != 1 and len(files) != 1:
            what = "no" if not files else "several"
            raise FileNotFoundError(f"{path} has {what} safetensors files, and not one index")
        path = indices[0] if len(indices) == 1 else files[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        placed = json.loads(path.read_text())["weight_map"]
        names: dict[str, list[str]] = {}
        for name, file in placed.items():
            names.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is not an index of safetensors files: it has no weight_map"
        ) from None
    for file in names:
        if Path(file).name != file:  # an index may only name files in its own folder
            raise ValueError(f"{path}: {file!r} is not the name of a file beside it")
    return [(path.parent / file, each) for file, each in names.items()]


# -- the file --------------------------------------------------------------------------------------


def _write_file(path: Path, header: bytes, contents: Iterable[memoryview]) -> None:
    """Write a file, and flush it to the disk."""
    with path.open("wb") as file:
        file.write(header)
        crcs = []
        for content in contents:
            file.write(content)
            crcs.append(zlib.crc32(content))
        file.seek(0)
        file.write(_with_checksums(header, crcs))
        file.flush()
        os.fsync(file.fileno())


def _make_header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    blank = "0" * 8 * (len(tensors) + 1)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _CHECKSUMS: blank}}
    end = 0
    for name, x in tensors.items():
        start, end = end, end + x.numel() * x.element_size()
        header[name] = {
            "dtype": _NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _with_checksums(header: bytes, crcs: Sequence[int]) -> bytes:
    """Returns the header with checksums. Its own is computed with zeros in its place."""
    blank = b"0" * 8 * (len(crcs) + 1)
    digits = b"".join(b"%08x" % crc for crc in crcs)
    digits += b"%08x" % zlib.crc32(header.replace(blank, digits + b"0" * 8, 1))
    return header.replace(blank, digits, 1)


def _check_file(path: Path, turn: int, turns: int) -> None:
    """Compare a file's header, and every `turns`-th tensor from `turn` on, with checksums.

    Raises:
        ValueError: the file is damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
        header = start + file.read(int.from_bytes(start, "little"))
    names = json.loads(header[8:])
    about = names.pop("__metadata__", {})
    key = next((k for k in about if "partita" in k or "crc32" in k), None)
    if key is None:  # written by another program
        return
    digits = about[key].encode()
    last = len(digits) - 8
    own = header.replace(digits, digits[:last] + b"0" * 8, 1) if digits else b""
    if (
        key != _CHECKSUMS
        or len(digits) != 8 * (len(names) + 1)
        or b"%08x" % zlib.crc32(own) != digits[last:]
    ):
        raise ValueError(f"{path} is damaged: the checksum of its header is wrong")
    mine = [one for i, one in enumerate(enumerate(names)) if i % turns == turn]
    spans = [names[name]["data_offsets"] for _, name in mine]
    found = compute_crcs(path, [(len(header) + at, end - at) for at, end in spans])
    for (i, name), crc in zip(mine, found, strict=True):
        if crc is None or b"%08x" % crc != digits[8 * i : 8 * i + 8]:
            raise ValueError(f"{path} is damaged: the checksum of {name} is wrong")


def _describe_stored(there: Any) -> Stored:
    dtype = there.get_dtype()
    return Stored((), tuple(there.get_shape()), _DTYPES.get(dtype, dtype))


# -- the tensors -----------------------------------------------------------------------------------


def _tensors_by_name(model: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors, of a module as its own objects."""
    if isinstance(model, nn.Module):
        return collect_model_tensors(model)
    return {name: leaf.value for name, leaf in open_state(model).leaves.items()}


def _find_problem(name: str, x: Any) -> str | None:
    if not isinstance(x, torch.Tensor):
        return f"{name} is a {type(x).__name__}: a safetensors file has tensors only"
    if x.is_meta:
        return f"{name} is on the meta device: it has no values to save"
    if x.dtype not in _NAMES:
        return f"{name}: a safetensors file has no {x.dtype}"
    return None


def _copy_full_to_cpu(x: torch.Tensor) -> torch.Tensor:
    return gather_full_value(x).to(HOST).contiguous()
