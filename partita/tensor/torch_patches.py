"""Patches of torch: functions that do not call `__torch_function__` of a DTensor.

They would silently treat this rank's local tensor as the whole tensor. Each is replaced, under its
public name, by a function that checks for DTensors. It gives the right result if that is defined,
and raises otherwise. Some patches are in the file of their topic: `Function.apply` in
`dtensor_gradients`, an operator of ATen in `tensor_overrides`, lists of types in `foreach`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as torchs
import torch.utils.dlpack
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._C import _EnableTorchFunction, _len_torch_function_stack
from torch._C import _is_torch_function_enabled as _global_view
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import _builtins
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.modules import module as torch_module
from torch.overrides import handle_torch_function
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import _CheckpointFrame
from torch.utils.hooks import BackwardHook

from partita.comm import after_import, on_first_wire
from partita.layout import Fix, Partial, Replicate
from partita.rules import RULES, Arg, Kernel, KernelCall, KernelRule
from partita.rules.rule import builtin_rule as rule
from partita.rules.rule import own_op
from partita.versions import frames_hold_inputs, name_of_checkpoint_generator

from .arguments import OpCall, make_transform_error
from .dispatch import run_gathered
from .dtensor import DTensor, alias_without_base, move_local
from .dtensor_gradients import drop_references, specs_of_values, type_gradient, type_pieces
from .op_facts import OVERRIDES, copy_function, form_of
from .reruns import Rerunnable
from .tensor_state import (
    HERE,
    Function,
    HooksWithoutRerun,
    Kwargs,
    Spec,
    count_unseen_writes,
    make_layout_error,
    note_other_memory,
    own_state,
    state_of,
)


def holds_dtensor(value: Any) -> bool:
    """True if `value` is a DTensor, or a module, list or dictionary that contains one."""
    if isinstance(value, DTensor):
        return True
    if isinstance(value, torch.nn.Module):
        value = [*value.parameters(), *value.buffers()]
    elif isinstance(value, dict):
        value = [*value.values()]
    return isinstance(value, (tuple, list)) and any(map(holds_dtensor, value))


def put_in_place_of(name: str, function: Function, *homes: Any) -> Any:
    """Replaces a public function of torch by `function`, also for pickle and TorchScript.

    Args:
        name: the function's name.
        homes: the modules or classes that have it as an attribute.

    Returns:
        The original function.
    """
    replaced = getattr(homes[0], name)
    functools.update_wrapper(function, replaced)
    function.__module__, function.__qualname__ = homes[0].__name__, name
    del function.__wrapped__  # type: ignore[attr-defined]  # a compiler would go round it
    with contextlib.suppress(ValueError):  # a builtin may have no signature
        function.__signature__ = inspect.signature(replaced)  # type: ignore[attr-defined]
    for home in homes:
        setattr(home, name, function)
    # C looks up methods by name, and finds `function`. So `function` gets the replaced one's rule.
    if replaced in RULES:
        RULES[function] = RULES[replaced]
    if replaced in OVERRIDES:
        OVERRIDES[function] = OVERRIDES[replaced]
    # TorchScript looks up its builtins by the function object, not by the name.
    builtin = _builtins._find_builtin(replaced)
    if builtin is not None:
        _builtins._register_builtin(function, builtin)
    return replaced


# -- tensors that exchange their contents ----------------------------------------------------------


_base: Any = torch._C.TensorBase
_TABLES_OF_HOOKS = [
    (slot.__get__, slot.__set__)
    for slot in (_base._backward_hooks, _base._post_accumulate_grad_hooks)
]
"""Functions that read and set a tensor's dictionaries of hooks. Private torch."""


def _swap_tensors(t1: torch.Tensor, t2: torch.Tensor) -> None:
    if HERE.trace.swap_contents(t1, t2):
        return
    # torch swaps no tensor that has weak references, so ours are removed and made again. If ZeRO
    # shards a parameter, it continues to shard the object that is in the model.
    before = [t._spec if isinstance(t, DTensor) else None for t in (t1, t2)]
    all_layouts = [state_of(t).zero_layouts for t in (t1, t2)]
    if before[0] is not before[1] and any(all_layouts):
        raise make_layout_error(
            "swap_tensors: a parameter that zero has sharded, and a tensor laid out otherwise",
            Fix("p.data.copy_(t)", "with a whole value t: p stays the same DTensor"),
            operands=tuple("plain" if s is None else s.layout.brief() for s in before),
        )
    if not any(isinstance(t, DTensor) for t in (t1, t2)):
        _plain_swap(t1, t2)
        return
    renewals = [drop_references(t) if isinstance(t, DTensor) else None for t in (t1, t2)]
    hooks = [[get(t) for get, _ in _TABLES_OF_HOOKS] for t in (t2, t1)]
    writes = max(count_unseen_writes(t) for t in (t1, t2))
    try:
        _plain_swap(t1, t2)
    except BaseException:
        renewals.reverse()  # each refers to its former tensor again
        raise
    else:
        for t, layouts, its_hooks in zip((t1, t2), all_layouts, hooks, strict=True):
            # torch does not swap the dictionaries of hooks, but then calls the other tensor's
            # hooks.
            for (_, put), known in zip(_TABLES_OF_HOOKS, its_hooks, strict=True):
                put(t, known)
            if isinstance(t, DTensor):
                state = own_state(t)
                state.data, state.unseen_writes, state.zero_layouts = None, writes, layouts
                note_other_memory(t)
                if layouts is not None:
                    layouts.owner.register_replacement(t, t)
    finally:
        for t, refer_to in zip((t2, t1), renewals, strict=True):
            if refer_to is not None:
                refer_to(t)  # type: ignore[arg-type]


_plain_swap = put_in_place_of("swap_tensors", _swap_tensors, torch.utils)


# -- memory that was not written -------------------------------------------------------------------
# A plain tensor that is written with DTensors is one whole value, so that ranks compare what it
# holds. What an allocation leaves in memory differs between ranks and means nothing. So it is made
# zero: then ranks compare only what the program has written.


def _clear_unwritten(made: Any) -> Any:
    """Fills the new tensor `made` with zeros, and returns it. Fakes stay as they are."""
    if type(made) is not torch.Tensor or made.is_quantized or made.is_meta:
        return made
    if not is_functorch_wrapped_tensor(made):
        made.data.zero_()  # counts no version
    return made


def _clear_results_of(name: str, home: Any) -> Function:
    """Make a torch function that allocates return zeros, except when partita calls it.

    Returns:
        torch's original function.
    """

    def allocate(*args: Any, **options: Any) -> Any:
        made = plain(*args, **options)
        if torch.compiler.is_dynamo_compiling():
            return made
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return made if caller.startswith("partita.") else _clear_unwritten(made)

    plain: Function = put_in_place_of(name, allocate, home)
    return plain


def _resize_and_clear(self: torch.Tensor, *size: Any, **options: Any) -> Any:
    compiles = torch.compiler.is_dynamo_compiling()
    if compiles or type(self) is not torch.Tensor or self.is_meta:
        return _plain_resize(self, *size, **options)
    held = self.untyped_storage().nbytes()
    made = _plain_resize(self, *size, **options)
    grown = self.untyped_storage()
    if grown.nbytes() > held:
        memory = torch.tensor((), dtype=torch.uint8, device=self.device).set_(grown)  # type: ignore[call-overload]
        memory[held:].zero_()
    return made


_plain_resize = torch.Tensor.resize_


def _clear_allocations() -> None:
    # `with torch.device(...)` gives a device to torch's own constructors, which C calls.
    constructors = ("empty", "empty_strided", "empty_permuted")
    _device_constructors().update([_clear_results_of(name, torch) for name in constructors])
    _clear_results_of("empty_like", torch)
    for name in ("new_empty", "new_empty_strided"):
        _clear_results_of(name, torch.Tensor)
    put_in_place_of("resize_", _resize_and_clear, torch.Tensor)


on_first_wire(_clear_allocations)


# -- functions that refuse DTensors ----------------------------------------------------------------


_plain_to_dlpack = torch.utils.dlpack.to_dlpack


def _to_dlpack(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor):
        return tensor.__dlpack__()  # raises the error
    return _plain_to_dlpack(tensor)


put_in_place_of("to_dlpack", _to_dlpack, torch, torch.utils.dlpack)
OVERRIDES[torch.Tensor.__dlpack_device__] = lambda x: x.__dlpack__()


_plain_gradient_edge = torch.autograd.graph.get_gradient_edge


def _get_gradient_edge(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, DTensor) and _global_view():
        raise make_layout_error(
            "get_gradient_edge of a DTensor",
            Fix("torch.autograd.grad(loss, x)", "x itself: its gradient is a DTensor"),
            reason="autograd computes on pieces, and an edge does not record their tensor",
        )
    return _plain_gradient_edge(tensor)


put_in_place_of("get_gradient_edge", _get_gradient_edge, torch.autograd.graph)


def _refuse_piece(name: str, x: Any) -> None:
    """Raise if this rank has only a part of the DTensor `x`: `name` would use the local memory."""
    if isinstance(x, DTensor) and _global_view() and not x._spec.is_whole:
        raise make_layout_error(
            f"{name} of a DTensor: this rank holds only a piece of it",
            Fix("x.detach()", "another tensor of the same values"),
            Fix("x.full_tensor()", "the whole value, plain"),
            Fix("x.to_local()", "this rank's piece, plain"),
            operands=(f"x  {x._spec.layout.brief()} on {x._spec.wire.mesh}",),
            reason="it makes a plain tensor of this rank's memory, and x is more than that",
        )


# A class takes its arguments itself. `nn.Parameter` and other classes of tensors come here, too.
def _refuse_piece_operands(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    for value in args:
        _refuse_piece(f"{type(self).__name__}(x)", value)
    if args and all(isinstance(n, (int, torch.Size)) for n in args):  # sizes
        _clear_unwritten(self)


def _check_new_tensors() -> None:
    torch.Tensor.__init__ = _refuse_piece_operands  # type: ignore[method-assign,assignment]


on_first_wire(_check_new_tensors)  # each tensor of a subclass would pay for it


# -- TorchScript -----------------------------------------------------------------------------------


def _refuse_dtensors(what: str, given: Any) -> None:
    """Raise LayoutError if an argument of `what` contains a DTensor."""
    if _global_view() and holds_dtensor(given):
        raise make_layout_error(
            f"{what} cannot take a DTensor",
            Fix("x.full_tensor()", "the whole value, as a plain tensor"),
            reason="it would take this rank's piece for the whole tensor",
        )


def _refuse_calls(kind: type) -> None:
    """Make a function or method of TorchScript refuse DTensors."""
    base = kind.__call__  # type: ignore[operator]

    @functools.wraps(base)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_dtensors(f"TorchScript {self.name}", (args, kwargs))
        return base(self, *args, **kwargs)

    kind.__call__ = __call__  # type: ignore[method-assign, operator]


_refuse_calls(torch.jit.ScriptFunction)
_refuse_calls(torch._C.ScriptMethod)


def _trace_or_refuse(func: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    _refuse_dtensors("torch.jit.trace", (func, example_inputs, kwargs))
    return _plain_trace(func, example_inputs, *args, **kwargs)


def _create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_dtensors(f"torch.jit of {type(nn_module).__name__}", nn_module)
    return _plain_script_module(nn_module, *args, **kwargs)


_plain_trace = put_in_place_of("trace", _trace_or_refuse, torch.jit)
_plain_script_module = put_in_place_of(
    "create_script_module", _create_script_module, torch.jit._recursive
)


# torch.autograd.forward_ad is refused here, as is jvp.
def _make_dual(*_: Any, **__: Any) -> Any:
    raise make_transform_error("jvp")


OVERRIDES[torch._VF._make_dual] = _make_dual  # type: ignore[attr-defined]

# -- constructors ----------------------------------------------------------------------------------
# They do not call `__torch_function__` of their arguments. `torch.tensor` copies a tensor. Old
# constructors, which would take a tensor's memory, refuse a DTensor. A number (a size, a bound, a
# value to fill with) is read on all ranks, by the operator that `tensor_overrides` replaces.

_LEAVES = frozenset((int, float, bool, complex))


def _read_nested_values(data: Any) -> Any:
    """Returns a list, with the value of each DTensor in it."""
    if isinstance(data, DTensor):
        return data.tolist()
    if isinstance(data, (list, tuple)) and not _LEAVES.issuperset(map(type, data)):
        return [_read_nested_values(d) for d in data]
    return data


def _make_tensor(data: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_make_tensor, (), data, **options)
    if not isinstance(data, DTensor):
        return _plain_tensor(_read_nested_values(data), **options)
    requires_grad, pinned = options.pop("requires_grad", False), options.pop("pin_memory", False)
    copy = data.detach().clone().to(**options) if options else data.detach().clone()
    return (copy.pin_memory() if pinned else copy).requires_grad_(requires_grad)


def _as_tensor(data: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_as_tensor, (), data, **options)
    if isinstance(data, DTensor):
        return data.to(**options) if options else data
    return _plain_as_tensor(_read_nested_values(data), **options)


def _convert_to_tensor(obj: Any, **options: Any) -> torch.Tensor:
    if _len_torch_function_stack():
        return handle_torch_function(_convert_to_tensor, (), obj, **options)
    if not isinstance(obj, DTensor):
        return _plain_asarray(_read_nested_values(obj), **options)
    copies, requires_grad = options.pop("copy", None), options.pop("requires_grad", None)
    made = obj.to(**options) if options else obj
    if made is obj and copies:
        made = obj.clone()
    return made if requires_grad is None else made.detach().requires_grad_(requires_grad)


_plain_tensor = put_in_place_of("tensor", _make_tensor, torch)
_plain_as_tensor = put_in_place_of("as_tensor", _as_tensor, torch)
_plain_asarray = put_in_place_of("asarray", _convert_to_tensor, torch)


# -- old constructors ------------------------------------------------------------------------------


class _LegacyType(type):
    """The class of the replacements of `torch.FloatTensor` and similar types."""

    plain: Any  # the type that it replaces

    # Calls the replaced type: torch's collectives of objects call these types.
    __call__ = property(operator.attrgetter("plain"))  # type: ignore[assignment]

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)

    # Code that got torch's type before it was replaced compares it with the replacement.

    def __eq__(cls, other: object) -> bool:
        return _plain_type(other) is cls.plain

    def __hash__(cls) -> int:
        return hash(cls.plain)

    def __subclasscheck__(cls, subclass: Any) -> bool:
        return issubclass(_plain_type(subclass), cls.plain)

    def __dir__(cls) -> list[str]:
        return dir(cls.plain)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.plain, name)

    def __repr__(cls) -> str:
        return repr(cls.plain)

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        # `x.type(torch.FloatTensor)` goes by the name in C, which has the module's too.
        return cls.plain.__name__


def _plain_type(kind: Any) -> Any:
    return kind.plain if isinstance(kind, _LegacyType) else kind


_PLAIN_TYPE = type(torch.FloatTensor)
# In `x.type(torch.FloatTensor)`, Dynamo recognizes the argument by the name of its class.
_LegacyType.__module__, _LegacyType.__qualname__ = _PLAIN_TYPE.__module__, _PLAIN_TYPE.__name__


def _replace_legacy_types(home: Any) -> None:
    for name, plain in list(vars(home).items()):
        if isinstance(plain, _PLAIN_TYPE):
            space = {"plain": plain, "__module__": home.__name__, "__qualname__": name}
            setattr(home, name, _LegacyType(f"{home.__name__}.{name}", (), space))


_set_default_type = torch.set_default_tensor_type


def _set_default_tensor_type(t: Any) -> None:
    if isinstance(t, str):  # C looks up the name in torch
        home, _, name = t.rpartition(".")
        t = getattr({"torch": torch, "torch.cuda": torch.cuda}.get(home), name, t)
    _set_default_type(_plain_type(t))


def _call_legacy_type(cls: _LegacyType, *args: Any, **options: Any) -> Any:
    _refuse_dtensors(f"torch.{cls.__name__}", (args, options))
    made = cls.plain(*args, **options)
    return made if any(map(_has_values, args)) else _clear_unwritten(made)


def _has_values(argument: Any) -> bool:
    return not isinstance(argument, (int, torch.Size))


def _install_legacy_refusals() -> None:
    _LegacyType.__call__ = _call_legacy_type  # type: ignore[assignment]


on_first_wire(_install_legacy_refusals)
for _home in (torch.cuda, torch):
    _replace_legacy_types(_home)
put_in_place_of("set_default_tensor_type", _set_default_tensor_type, torch)


# -- methods of plain tensors ----------------------------------------------------------------------


def _new(self: torch.Tensor, *args: Any, **options: Any) -> Any:
    if not isinstance(self, DTensor):
        _refuse_dtensors("x.new", (args, options))
    made = _plain_new(self, *args, **options)
    return made if any(map(_has_values, args)) else _clear_unwritten(made)


def _new_tensor(self: torch.Tensor, data: Any, **options: Any) -> Any:
    if not isinstance(self, DTensor):
        data = _read_nested_values(data)
    return _plain_new_tensor(self, data, **options)


def _replace_method(method: Function) -> Function:
    """Replace a method of torch.Tensor by `method`. DTensors run the original, gathered.

    Returns:
        The original method.
    """
    name = method.__name__[1:]
    plain: Function = getattr(torch.Tensor, name)
    setattr(torch.Tensor, name, functools.wraps(plain)(method))
    OVERRIDES[method] = lambda *args, **options: run_gathered(
        OpCall(form_of(plain), plain, args, options)
    )
    return plain


_plain_new, _plain_new_tensor = _replace_method(_new), _replace_method(_new_tensor)
torch.overrides.get_ignored_functions.cache_clear()
_device_constructors.cache_clear()  # `torch.set_default_device` uses this list

# -- backward hooks of modules ---------------------------------------------------------------------


class _TypedBackwardHook(BackwardHook):
    """A `BackwardHook` whose user hooks get and return the gradients of DTensors as DTensors.

    torch calls a module's backward hooks with the gradients at autograd nodes before and after the
    module. Those are local tensors. If the module takes or returns DTensors, hooks get them as
    DTensors, and the gradients that hooks return are redistributed. Other modules are unaffected.
    """

    def _apply_on_tensors(self, fn: Callable[[Any], None], args: Any) -> Any:
        specs = specs_of_values(a for a in args if isinstance(a, torch.Tensor))
        if not any(specs):
            return super()._apply_on_tensors(fn, args)
        return super()._apply_on_tensors(lambda node: fn(_TypedNode(node, specs)), args)


class _TypedNode:
    """A node of autograd whose hooks get DTensors."""

    def __init__(self, node: Any, specs: Sequence[Spec | None]):
        self.node, self.specs = node, specs

    def register_hook(self, hook: Function) -> Any:
        def call_typed_hook(*grads: tuple[Any, ...]) -> Any:  # of the inputs, and of the outputs
            out = hook(*[tuple(map(type_gradient, given, self.specs)) for given in grads])
            return None if out is None else tuple(map(_type_back, out, self.specs))

        return self.node.register_hook(call_typed_hook)


def _type_back(grad: Any, spec: Spec | None) -> Any:
    if spec is None or not isinstance(grad, DTensor):
        return grad
    return move_local(grad, grad._spec, spec.gradient, "hook", "gradient")


# Private torch: it makes its BackwardHooks by this name, and there is no public way.
torch_module.BackwardHook = _TypedBackwardHook  # type: ignore[misc]

# -- hooks of saved tensors ------------------------------------------------------------------------
# A hook that unpacks saved tensors may run a part of the program again, as a checkpoint does. That
# part reads the block's modules, so ZeRO-3 must find out if a block's backward may run such a hook.
# Torch has a stack of hooks, but does not count them.

_enter_hooks = saved_tensors_hooks.__enter__


def _count_and_enter(hooks: saved_tensors_hooks) -> None:
    HERE.rerunnable += not isinstance(hooks, HooksWithoutRerun)
    _enter_hooks(hooks)


saved_tensors_hooks.__enter__ = _count_and_enter  # type: ignore[method-assign]

# -- torch.utils.checkpoint ------------------------------------------------------------------------
# Torch runs a region again in backward, on its inputs, which it saves as autograd saves tensors. If
# hooks pack saved tensors (an offload, a sharded block), autograd returns them as plain tensors, so
# their layouts are stored, too. Torch also compares the metadata of the tensors that both runs have
# saved. For this it gets this rank's pieces. ZeRO-3 must find out which forward is run again
# (`reruns`), so the function that torch calls for it is wrapped. Releases without `save_inputs` and
# `get_inputs` save the inputs by an autograd.Function, whose results are DTensors anyway. Private
# torch: there is no public way. `checkpoint` makes a `_CheckpointFrame`, and calls the two
# functions that are replaced below by their names.

_Frame: Any = _CheckpointFrame


_begin_frame = _Frame.__init__


def _begin_watched(frame: Any, *args: Any, **kwargs: Any) -> None:
    _begin_frame(frame, *args, **kwargs)
    if frame.recompute_fn is not None:
        frame.recompute_fn = Rerunnable(frame.recompute_fn, has_run=True)
    if frame.metadata_fn is not None:
        frame.metadata_fn = partial(_describe_piece, frame.metadata_fn)


def _keep_layouts() -> None:
    save, get = _Frame.save_inputs, _Frame.get_inputs

    def save_inputs(frame: Any, *args: Any) -> None:
        save(frame, *args)
        frame._layouts = specs_of_values(args)

    def get_inputs(frame: Any) -> list[Any]:
        with torch.enable_grad():  # as when the region runs again, so that an alias has a history
            return list(type_pieces(get(frame), frame._layouts))

    _Frame.save_inputs, _Frame.get_inputs = save_inputs, get_inputs


def _describe_piece(describe: Any, x: torch.Tensor) -> Any:
    with local_ops():
        return describe(x)


_Frame.__init__ = _begin_watched
if frames_hold_inputs(_Frame):
    _keep_layouts()


# -- in a captured step ----------------------------------------------------------------------------
# A checkpoint of torch is captured as a region of `pt.remat`. Torch would run it again with the
# saved state of its generator, but a graph draws when it runs, so its second mask would differ. So
# capture runs the region once and marks it. A graph pass then chooses what backward recomputes, and
# keeps what was drawn.

BEGINS = name_of_checkpoint_generator(torchs)
"""The name of the generator that `checkpoint` runs around a function that it will rerun."""
_begin = getattr(torchs, BEGINS)


def _begin_or_mark(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
    return HERE.trace.run_region(lambda: _begin(function, *args, **kwargs), _mark_remat_region)


def _mark_remat_region() -> Iterator[None]:
    with HERE.trace.region(reads_again=True):
        yield


def _apply_or_mark(cls: type[Any], function: Any, preserve: bool, *args: Any) -> Any:
    def run_again() -> Any:
        again = Rerunnable(function, has_run=False)
        return super(torchs.CheckpointFunction, cls).apply(again, preserve, *args)

    def mark_region() -> Any:
        # The reentrant form runs forward without grad; its results require grad if an argument
        # does.
        trains = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        grad = torch.set_grad_enabled(trains and torch.is_grad_enabled())
        with HERE.trace.region(reads_again=True), grad:
            return function(*args)

    return HERE.trace.run_region(run_again, mark_region)


setattr(torchs, BEGINS, _begin_or_mark)
torchs.CheckpointFunction.apply = classmethod(_apply_or_mark)  # type: ignore[assignment]

# -- torch.compile ---------------------------------------------------------------------------------
# Dynamo must not trace a DTensor, because it would mix sizes of the piece with global ones. Before
# anything else, Dynamo reads an attribute of its own from a tensor (is its address static?). For a
# DTensor this raises an error. Then the frame, with all that it calls, runs as it would without
# `torch.compile`, with one warning. If a whole graph was requested, the error is raised. Dynamo
# traces only those functions of partita's own code that `_ENTERED` names.

F = TypeVar("F", bound=Callable[..., Any])

_SAID = (
    "torch.compile cannot compile code with a DTensor: such code runs as it is written "
    "(with fullgraph=True that is an error). pt.compile(step) compiles a step over DTensors"
)


_ENTERED = (
    *("tensor/torch_patches.py", "tensor/transforms.py", "tensor/trace_hooks.py"),
    *("parallel/optimizer.py", "remat/"),
    *("app/models/", "bench/"),
)
"""Files that Dynamo may enter. They are functions in torch's own places, where plain programs are
compiled, too; regions, which handle compilation themselves; and programs of plain PyTorch, which
are compiled like a user's: models, and benches with their rivals.
"""


def only_entered(function: F) -> F:
    """Makes Dynamo compile `function` only as a part of a caller, never by itself.

    If Dynamo compiled a function that calls `is_dynamo_compiling()` by itself, it would replace the
    call by True, and always run that branch. This uses private torch: the public `torch.compiler`
    can disable a function only together with everything that it calls.
    """
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def _skip_files(rules: Any) -> None:
    """Make Dynamo skip the frames of this package; `rules` is its module of files to skip."""
    package = Path(__file__).parents[1]
    rules.FORCE_SKIP_FILES.update(
        str(file)
        for file in package.rglob("*.py")
        if not file.relative_to(package).as_posix().startswith(_ENTERED)
    )


def _skip_dataclasses() -> None:
    """Make Dynamo skip methods that `dataclass` generates for classes of this package.

    They are in no file, so `_skip_files` does not find them.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("partita."):
            for known in vars(module).values():
                if isinstance(known, type) and dataclasses.is_dataclass(known):
                    only_entered(known.__init__)


on_first_wire(_skip_dataclasses)


WARNED: list[str] = []
"""The warning, after this process has issued it."""


def _refuse_dynamo(x: DTensor) -> Any:
    """Returns the attribute that Dynamo reads first: it raises what makes Dynamo skip the frame."""
    if torch._guards.TracingContext.try_get() is None:  # not Dynamo
        raise AttributeError("_dynamo_static_input_type")
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    if not WARNED:
        WARNED.append(_SAID)
        warnings.warn(_SAID, stacklevel=2)
    refusal = Unsupported(_SAID, "a DTensor of partita", skip_frame=True)
    refusal.frame_exec_strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    raise refusal


def _ignore_static_address(x: DTensor, kind: str) -> None:
    """Ignore `mark_static_address` of a DTensor, which compiled code never gets."""


DTensor._dynamo_static_input_type = property(_refuse_dynamo, _ignore_static_address)  # type: ignore[attr-defined]


def _answer_dynamo(function: Any) -> None:
    """Allow Dynamo to read attributes that users must not read.

    Dynamo reads the base of a view, and `x.to_local()` is a view of a DTensor.
    """
    refused = OVERRIDES[function]

    def answer_or_refuse(x: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch._guards.TracingContext.try_get() is None:
            return refused(x, *args, **kwargs)
        with local_ops():
            return function(x, *args, **kwargs)

    OVERRIDES[function] = answer_or_refuse


_answer_dynamo(torch.Tensor.untyped_storage)
_answer_dynamo(torch.Tensor.storage_offset)
after_import("torch._dynamo.trace_rules", _skip_files)  # not now: the import takes seconds


# -- flex_attention --------------------------------------------------------------------------------
# It has no torch-function hook, and uses Dynamo even if nothing is compiled. So the code of torch's
# function, which others may have imported, is replaced by code that checks for DTensors. Each rank
# runs the kernel, compiled if requested, on its samples and heads. Score and mask functions get
# global sample and head numbers, and a rank takes its part of a block mask. Queries, keys, values
# are not split along their sequence: such pieces are exchanged for samples or heads.

_found_flex: Any = flex_module.flex_attention
_plain_flex = copy_function(_found_flex, _found_flex.__globals__)
_PARAMETERS_OF_FLEX = inspect.signature(_plain_flex)


def _call_plain_or_spread(query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
    # Runs as torch's own function, with the globals of its module.
    which = _partita_plain  # type: ignore[name-defined]  # noqa: F821
    for x in (query, key, value):
        if isinstance(x, _partita_dtensor):  # type: ignore[name-defined]  # noqa: F821
            which = _partita_spread  # type: ignore[name-defined]  # noqa: F821
    return which(query, key, value, *more, **options)


def _run_on_dtensors(*args: Any, **kwargs: Any) -> Any:
    bound = _PARAMETERS_OF_FLEX.bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    query, key, value = (options.pop(name) for name in ("query", "key", "value"))
    aux, outputs = options["return_aux"], 1 + int(options["return_lse"])
    if aux is not None:
        outputs += bool(aux.lse) + bool(aux.max_scores)
    options["score_mod"] = _with_wholes(options["score_mod"])
    grouped = options.pop("enable_gqa")
    out = _on_pieces(query, key, value, grouped, outputs, _find_compiled_flex(), options)
    if aux is None:
        return out
    attended, *more = out if outputs > 1 else (out,)
    lse = more.pop(0) if aux.lse else None
    return attended, flex_module.AuxOutput(lse=lse, max_scores=more.pop(0) if more else None)


def _find_compiled_flex() -> Function:
    """Returns torch's function, compiled in the same way as the compiled function that calls it."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            context = frame.f_locals.get("self")
            return context(_plain_flex) if callable(context) else torch.compile(_plain_flex)
        frame = frame.f_back  # type: ignore[assignment]
    return _plain_flex


def _with_wholes(mod: Any) -> Any:
    """Returns a score function in whose closure each DTensor is a gathered plain tensor."""
    cells = getattr(mod, "__closure__", None) or ()
    if not any(isinstance(c.cell_contents, DTensor) for c in cells):
        return mod

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        axes = len(value.placements)
        value = value.redistribute(placements=[Replicate()] * axes)
        return value.to_local(grad_placements=[Partial()] * axes)

    return copy_function(
        mod, mod.__globals__, tuple(types.CellType(whole(c.cell_contents)) for c in cells)
    )


@own_op
def _on_pieces(
    query: Any, key: Any, value: Any, enable_gqa: bool, outputs: int, run: Any, options: Kwargs
) -> Any:
    raise NotImplementedError  # for plain tensors, torch's own function runs


@rule(_on_pieces)
def _derive_flex_rule(
    query: Arg, key: Arg, value: Arg, enable_gqa: bool, outputs: int
) -> KernelRule:
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    heads, group = ("(g r)", "g") if grouped else ("h", "h")
    batch = "1" if key.shape[0] == 1 != query.shape[0] else "b"
    linear = "+ " if outputs == 1 else ""
    terms = f"b {heads} q! d!, {batch} {group} k! d!, {linear}{batch} {group} k! e!"
    results = [f"b {heads} q! e!"] + [f"b {heads} q!"] * (outputs - 1)

    def local(call: KernelCall) -> Kernel:
        rows = call.pieces.get("b", (0, query.shape[0], query.shape[0]))
        some = call.pieces.get(group, (0, key.shape[1], key.shape[1]))
        times = query.shape[1] // key.shape[1]
        return _make_flex_kernel(rows[:2], (some[0] * times, some[1] * times))

    spread = heads.strip("()")
    work = (f"b {spread} q k d", f"b {spread} q k e")
    return KernelRule(f"{terms} -> {', '.join(results)}", local, work=work)


_Range = tuple[int, ...]
"""The start and number of a rank's samples or heads."""


def _make_flex_kernel(rows: _Range, heads: _Range) -> Kernel:
    def run_on_pieces(
        query: Any, key: Any, value: Any, enable_gqa: bool, outputs: int, flex: Any, options: Kwargs
    ) -> Any:
        mine = dict(options)
        if mine["score_mod"] is not None and (rows[0] or heads[0]):
            mine["score_mod"] = _shifted_score(mine["score_mod"], rows[0], heads[0])
        if mine["block_mask"] is not None:
            mine["block_mask"] = _slice_block_mask(mine["block_mask"], rows, heads)
        # Dynamo looks at what a tensor is a view of.
        pieces = [alias_without_base(x) for x in (query, key, value)]
        with _EnableTorchFunction():
            out = flex(*pieces, **mine, enable_gqa=enable_gqa)
        if mine["return_aux"] is None:
            return out
        found = [out[0], *(t for t in (out[1].lse, out[1].max_scores) if t is not None)]
        return tuple(found) if len(found) > 1 else found[0]

    return run_on_pieces


def _shifted_score(mod: Function, row: int, head: int) -> Function:
    def shifted(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod(score, b + row, h + head, q, k)

    return shifted


def _shifted_mask(mod: Function, row: int, head: int) -> Function:
    def shifted(b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod(b + row, h + head, q, k)

    return shifted


def _slice_block_mask(mask: BlockMask, rows: _Range, heads: _Range) -> BlockMask:
    """Returns the part of a block mask of a rank's samples and heads."""
    batch, count = mask.kv_num_blocks.shape[:2]
    if (
        (batch == 1 or rows == (0, batch))
        and (count == 1 or heads == (0, count))
        and not (rows[0] or heads[0])
    ):
        return mask

    def cut(t: torch.Tensor | None) -> torch.Tensor | None:
        if t is None:
            return None
        for dim, piece in enumerate((rows, heads)):
            if t.shape[dim] > 1:
                t = t.narrow(dim, *piece)
        return t

    # Made from its parts, because torch's `from_kv_blocks` would sort again.
    mod = mask.mask_mod
    return BlockMask(  # type: ignore[misc]
        mask.seq_lengths,
        *(  # type: ignore[arg-type]
            cut(getattr(mask, name))
            for name in (
                "kv_num_blocks kv_indices full_kv_num_blocks full_kv_indices q_num_blocks "
                "q_indices full_q_num_blocks full_q_indices"
            ).split()
        ),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=_shifted_mask(mod, rows[0], heads[0]) if rows[0] or heads[0] else mod,
    )


def _take_place() -> None:
    """Replace the code of torch's `flex_attention` by that of `_call_plain_or_spread`.

    Its name and file stay. The new code passes its arguments on.
    """
    vars(flex_module).update(
        _partita_plain=_plain_flex, _partita_dtensor=DTensor, _partita_spread=_run_on_dtensors
    )
    _found_flex.__code__ = _call_plain_or_spread.__code__.replace(
        co_name=_plain_flex.__code__.co_name, co_filename=_plain_flex.__code__.co_filename
    )
    _found_flex.__defaults__ = _found_flex.__kwdefaults__ = None
    _found_flex.__signature__ = _PARAMETERS_OF_FLEX  # type: ignore[attr-defined]


_take_place()
