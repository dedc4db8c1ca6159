"""Rehearsals: run calls and steps on tensors without memory, which compute and send nothing.

Fake tensors with the same layouts replace parameters, buffers and arguments, and a dry wire, which
sends nothing, replaces each wire. So dispatch makes the same plans as in a real run. Everything is
restored afterwards. A call is a function with its arguments, or text such as `F.linear(f32[8@dp,
16], f32[32@tp, 16])`.

For `pt.eager_memory` a step is created and run unchanged, with all its hooks, on a dry mesh. A
schedule records each storage that a kernel allocates, that autograd frees or that ZeRO resizes. It
has the same form as the schedule of a compiled step.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from partita.capture.capture_context import (
    FakeRunHooks,
    attribute_set,
    compiling,
    hidden_from_watchers,
    slots_swapped,
    taking_turns,
)
from partita.comm import DryWire, Wire, substitute_wires, user_line, user_line_of_error, wire_of
from partita.compile import CompiledStep
from partita.graph.errors import user_line_of
from partita.graph.memory import Buffer, HeldInput, Memory, workspace
from partita.graph.program import local_of
from partita.guards.inputs import State, find_state, names_of_call, tensors_of_call
from partita.guards.outputs import ModuleAttributes
from partita.layout import Fix, Layout, LayoutError
from partita.remat.counters import HeldStorage, MemoryCount, resize_listener
from partita.remat.watched_calls import KernelMode
from partita.tensor.dtensor import DTYPES, DTensor, as_dtensor
from partita.tensor.tensor_state import HERE, in_backward, spec_of

VALUE_READ_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
_RUNS_NOTHING = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@contextmanager
def run_on_fakes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    make_wire: Callable[[Wire], Wire] = DryWire.from_wire,
) -> Iterator[tuple[Callable[[], Any], State]]:
    """Yields a function that runs `fn` on tensors without memory. Restores everything at the end.

    Args:
        fn, args, kwargs: the function and its arguments.
        make_wire: a function that makes the replacement for the wire of a mesh.

    Yields:
        A function that runs `fn(*args, **kwargs)` in this way, and the state that `fn` uses.

    Raises:
        LayoutError: `fn` reads the value of a tensor, or steps an optimizer.
    """
    state = find_state(fn, (), args, kwargs)
    fakes = _Fakes(make_wire)
    leaves = tensors_of_call(state.slots, args, kwargs)
    with ExitStack() as stack:
        stack.enter_context(taking_turns())
        for wire in dict.fromkeys(t._spec.wire for t in leaves if isinstance(t, DTensor)):
            fakes.replace_wire(wire)
        stack.enter_context(substitute_wires(dict(fakes.wires), fakes.replace_wire))
        stack.enter_context(compiling())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(hidden_from_watchers())
        stack.enter_context(attribute_set(HERE, "trace", FakeRunHooks()))
        for optimizer in state.optimizers.values():  # whose state has no fakes
            stack.enter_context(optimizer.register_step_pre_hook(_refuse_step))
        stack.enter_context(ModuleAttributes(state).restored())
        stack.enter_context(slots_swapped(state.slots, fakes.replace_tensor))
        given, named = pytree.tree_map(fakes.replace_tensor, (args, kwargs))
        stack.enter_context(HERE.breaking_off())
        stack.enter_context(fakes.mode)

        def run() -> Any:
            try:
                return fn(*given, **named)
            except VALUE_READ_ERRORS as error:
                raise make_value_read_error(error) from None

        yield run, state


def runs_nothing(fn: Callable[..., Any]) -> bool:
    """True if a call of `fn` does not run its body: it is a generator or coroutine function."""
    fn = fn.step if isinstance(fn, CompiledStep) else fn
    fn = fn.forward if isinstance(fn, torch.nn.Module) else fn
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not inspect.isroutine(fn):
        fn = getattr(type(fn).__call__, "__func__", type(fn).__call__)
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    return code is not None and bool(code.co_flags & _RUNS_NOTHING)


class LocalFakes(FakeTensorMode):
    """A fake tensor mode in which kernels see the local shape and strides of DTensors."""

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        with local_ops():
            return super().__torch_dispatch__(*args, **kwargs)


class _Fakes:
    """The replacements of tensors and wires. Equal objects get the same replacement."""

    def __init__(self, make_wire: Callable[[Wire], Wire]):
        self.mode = LocalFakes(static_shapes=True)
        self.wires: dict[Wire, Wire] = {}
        self._make_wire = make_wire
        self._standing: dict[int, torch.Tensor] = {}

    def replace_wire(self, wire: Wire) -> Wire:
        if wire not in self.wires:
            self.wires[wire] = self._make_wire(wire)
        return self.wires[wire]

    def replace_tensor(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = self._standing.get(id(value))
        if found is None:
            found = self._standing[id(value)] = self._make_fake(value)
        return found

    def _make_fake(self, value: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = self.mode.from_tensor(local_of(value), static_shapes=True)
        if isinstance(value, DTensor):
            spec = value._spec
            fake = as_dtensor(fake, spec_of(spec.layout, self.wires[spec.wire]))
        with local_ops():
            fake.requires_grad_(value.requires_grad)
        fake._is_param = isinstance(value, torch.nn.Parameter)  # type: ignore[attr-defined]
        return fake


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise make_refusal(
        "the explained function steps an optimizer",
        ("pt.explain(model, x)", "forward, or a function that ends in backward()"),
        ("pt.compile(step)", "then step.explain() and step.memory"),
        reason="explain plans calls on tensors; a captured step shows an update",
    )


def make_refusal(
    fact: str, *fixes: str | tuple[str, str], reason: str = "", place: str | None = None
) -> LayoutError:
    """Returns the error for a request that is impossible, with fixes.

    Args:
        fact: what is impossible.
        fixes: the fixes; each is the code to write, or a tuple of the code and an explanation.
        reason: why it is impossible; "" leaves the reason out.
        place: the file and line. None: the user's line.
    """
    listed = (Fix(fix) if isinstance(fix, str) else Fix(*fix) for fix in fixes)
    place = user_line() if place is None else place
    return LayoutError(fact, place=place, reason=reason, fixes=tuple(listed))


def make_value_read_error(error: Exception) -> LayoutError:
    """Returns the error for a function that reads a tensor's value although nothing is computed."""
    return make_refusal(
        "the function reads the value of a tensor",
        ("give the part before it", "and the part after it by itself"),
        reason="nothing is computed, so no value is known",
        place=user_line_of(error),
    )


# -- calls as text ---------------------------------------------------------------------------------

_HOMES = {"F": torch.nn.functional, "torch": torch, "Tensor": torch.Tensor}
_DIGITS = 20  # the most digits of a number of ranks
_CALL = re.compile(r"\s*(?P<name>[\w.:]+)\s*(?:\((?P<args>.*)\))?\s*", re.DOTALL)
_LAYOUT = re.compile(r"[a-z]+\d*\[[^\]]*\](\s*\{[^}]*\})?")


def read_mesh(text: str) -> dict[str, int]:
    """Reads a mesh from a text: "dp=2,tp=4" gives `{"dp": 2, "tp": 4}`.

    Raises:
        LayoutError: the text cannot be read. The error names the part that is wrong.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        is_number = size.isascii() and size.isdecimal()
        if not name.isidentifier() or not is_number or name in axes or len(size) > _DIGITS:
            raise make_refusal(
                f"cannot read {part.strip()[:40]!r} in the mesh {text[:80]!r}",
                "--mesh dp=2,tp=4",
                reason="a mesh names each of its axes once, with its number of ranks",
                place="",
            )
        if int(size) < 1:
            fact = f"{name}={size} in the mesh {text!r} has no rank"
            reason = "an axis has at least one rank"
            raise make_refusal(fact, f"{name}=1", "a mesh without it", reason=reason, place="")
        axes[name] = int(size)
    return axes


def read_call(text: str, arguments: str, mesh: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Reads a call from text, and returns the function, the positional and the keyword arguments.

    Args:
        text: a function of torch ("F.linear", "torch.matmul", "Tensor.sum") or of yours
            ("module:function"), and its arguments in parentheses if they are not in `arguments`.
        arguments: the arguments without parentheses; the comma after a tensor may be omitted.
        mesh: the mesh of the tensors, which have no memory. Floating-point tensors require grad.

    Raises:
        LayoutError: the function does not exist, or a part cannot be read; or a layout does not fit
            the mesh.
    """
    match = _CALL.fullmatch(text)
    if match is None:
        usage = '"F.linear(f32[8@dp, 16], f32[32@tp, 16])"'
        raise make_refusal(f"cannot read the call {text!r}", usage, place="")
    inside = ", ".join(filter(None, [match["args"], arguments]))
    args, kwargs = _read_arguments(inside, mesh)
    return _find_function(match["name"]), args, kwargs


def _find_function(name: str) -> Callable[..., Any]:
    module, colon, inner = name.partition(":")
    if colon:
        try:
            home: Any = importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except ModuleNotFoundError as error:
            raise _no_function(name, str(error)) from None
        except BaseException as error:  # importing a module may raise anything, even SystemExit
            said = describe_raised(f"importing {module}", error, is_user_s=True)
            raise _no_function(name, said) from None
    else:
        first, _, inner = name.partition(".")
        home = _HOMES.get(first)
        if home is None or not inner:
            raise _no_function(name, "a function is given with its module")
    for part in inner.split("."):
        home = getattr(home, part, None)
    if not callable(home):
        raise _no_function(name, f"there is nothing callable at {inner}")
    return home  # type: ignore[no-any-return]


def describe_raised(what: str, error: BaseException, *, is_user_s: bool) -> str:
    """Returns a text about an exception: what raised it, its message, and the user's line.

    Args:
        what: a text that names what raised it.
        error: the exception.
        is_user_s: True if the user's code raised it, or called the code that did.
    """
    said, _, _ = str(error).partition("\nException raised from")  # frames of C++
    # The message of a SyntaxError contains its place.
    has_line = is_user_s and not isinstance(error, SyntaxError)
    line = user_line_of_error(error) if has_line else ""
    at = f" (at {line})" if line else ""
    return f"{what} raised {type(error).__name__}{at}: {said.strip()}"


def _no_function(name: str, reason: str) -> LayoutError:
    fixes = ("F.linear", "torch.matmul", "Tensor.sum", "my_module:my_function")
    return make_refusal(f"no function {name!r}", *fixes, reason=reason, place="")


def _read_arguments(text: str, mesh: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments in a text: layouts, lists of layouts, Python's literals."""
    tensors: dict[str, DTensor] = {}

    def name_tensor(match: re.Match[str]) -> str:
        name = f"tensor_{len(tensors)}"
        tensors[name] = _make_tensor(match[0], mesh)
        return f" {name} "

    def value_of(node: ast.expr) -> Any:
        if isinstance(node, ast.Name) and node.id in tensors:
            return tensors[node.id]
        if isinstance(node, ast.List):
            return [value_of(one) for one in node.elts]
        if isinstance(node, ast.Tuple):
            return tuple(value_of(one) for one in node.elts)
        try:
            return ast.literal_eval(node)
        except ValueError:
            said = ast.unparse(node)
            raise _unreadable(
                said, text, "it is not a layout, a number, text, a list or None"
            ) from None

    named = _LAYOUT.sub(name_tensor, text)
    separated = re.sub(r"(\btensor_\d+)\s+(?=[^\s,\])])", r"\1, ", named)
    try:
        call = ast.parse(f"f({separated})", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise _unreadable(text, text, getattr(error, "msg", str(error))) from None
    if not isinstance(call, ast.Call) or any(one.arg is None for one in call.keywords):
        raise _unreadable(text, text, "these are not the arguments of one call")
    args = [value_of(one) for one in call.args]
    return args, {str(one.arg): value_of(one.value) for one in call.keywords}


def _unreadable(part: str, text: str, reason: str) -> LayoutError:
    fact = f"cannot read {part.strip()!r} in the arguments {text!r}"
    return make_refusal(fact, '"f32[8@dp, 16], dim=1"', reason=reason, place="")


def _make_tensor(text: str, mesh: Any) -> DTensor:
    layout = Layout.parse(text)
    if layout.dtype not in DTYPES:
        fact = f"cannot read the dtype {layout.dtype!r} of {text!r}"
        raise make_refusal(fact, *DTYPES, place="")
    dtype, wire = DTYPES[layout.dtype], wire_of(mesh)
    layout.check_axes(wire.mesh)
    spec = spec_of(Layout(layout.shape, layout.shards, layout.partial, layout.invariant), wire)
    found = as_dtensor(torch.empty(spec.local_shape, dtype=dtype, device="meta"), spec)
    return found.requires_grad_() if dtype.is_floating_point else found


# -- the memory of a step that is run eagerly ------------------------------------------------------

_read_number = torch.ops.aten._local_scalar_dense.default


def eager_memory(make: Callable[[], tuple[Callable[..., Any], Sequence[Any]]]) -> Memory:
    """Predicts the memory of a rank during an eager training step, without running the step.

        def make():
            mesh = pt.dry_mesh(dp=64)
            model = pt.zero(GPT(), mesh, stage=3)
            ...
            return step, (x, y)

        print(pt.eager_memory(make).peak)      # the most bytes that the step allocates at one time

    Tensors that `make` creates have no memory, whatever their size. The step is traced twice: the
    first run makes the optimizer's state, and the second is counted. The workspace of kernels is
    counted if torch's CPU kernels use a fixed amount. The buffers of collectives are counted if the
    dry mesh has a `backend`.

    Args:
        make: a function that creates model, optimizer and batch on a `pt.dry_mesh`. It returns a
            step that is not compiled, and its arguments.

    Returns:
        A schedule like `step.memory` of a compiled step. It has one point in time for each kernel,
        and one for each time that ZeRO allocates or frees gathered memory. Gradients that existed
        before the step and are freed in it are not included.

    Raises:
        LayoutError: the step reads the value of a tensor, or uses a tensor that `make` did not
            create.
    """
    schedule = _Schedule()
    with _EagerFakes(schedule), schedule.watching_optimizers(), _errors_explained():
        step, args = make()
        step(*args)
        with _disable_current_modes():
            held = tuple(_list_held(find_state(step, (), args, {}), args))
        with _ScheduleMode(schedule), resize_listener(schedule.note_resized):
            result = step(*args)
        found = schedule.memory_with(held)
        del result  # only now, because the caller of a step keeps the result alive
    return found


class _Schedule(MemoryCount):
    """A count of live bytes that also records each buffer, with its first and last place.

    Attributes:
        stepping: the optimizer whose step is running, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stepping: Optimizer | None = None
        self._places: list[str] = []
        self._buffers: list[Buffer] = []
        self._of: dict[int, int] = {}  # by the id of a storage, the number of its last buffer
        self._made_by = self._source = ""

    def counts(self, t: torch.Tensor) -> bool:
        """True if `t` is a step counter in the state of the optimizer that is stepping now."""
        state = {} if self.stepping is None else self.stepping.state
        return any(own.get("step") is t for own in state.values())

    def begin_place(self, made_by: str) -> None:
        """Begins the next place (point in time), at which the op `made_by` runs.

        Later changes of memory belong to it.
        """
        self._made_by, self._source = made_by, user_line()
        self._places.append(f"{made_by}_{len(self._places)} {made_by}")

    def note_resized(self, storage: torch.UntypedStorage) -> HeldStorage:
        self.begin_place("resize_")
        return super().note_resized(storage)

    def changed(self, held: HeldStorage, more: int) -> None:
        super().changed(held, more)
        at, number = len(self._places) - 1, self._of.pop(id(held), None)
        if number is not None:
            self._buffers[number] = replace(self._buffers[number], death=at + 1)
        if more > 0:
            self._of[id(held)] = len(self._buffers)
            self._buffers.append(self._make_buffer(held.nbytes, at))

    def add_workspace(self, nbytes: int) -> None:
        """Records temporary memory of `nbytes` bytes that a kernel needs while it runs."""
        at = len(self._places) - 1
        self._buffers.append(replace(self._make_buffer(nbytes, at), death=at + 1, passing=True))

    def _make_buffer(self, nbytes: int, at: int) -> Buffer:
        phase = "backward" if in_backward() else "forward"
        phase = phase if self.stepping is None else "update"
        about: dict[str, Any] = {"made_by": self._made_by, "source": self._source, "phase": phase}
        return Buffer(f"{self._made_by}_{at}", nbytes, at, _NEVER, **about)

    def memory_with(self, held: tuple[HeldInput, ...]) -> Memory:
        """Returns the memory schedule that was recorded so far, with the step's inputs `held`."""
        end = len(self._places)
        buffers = (replace(b, death=min(b.death, end)) for b in self._buffers if b.nbytes)
        return Memory(tuple(self._places), tuple(buffers), held)

    @contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Sets `stepping` to the optimizer of this thread that steps, inside the `with` block."""
        thread = threading.get_ident()  # torch calls the hooks of all threads' optimizers

        def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                self.stepping = optimizer

        def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if threading.get_ident() == thread:
                self.stepping = None
                # Writing through `detach()` of a fake does not increase its version.
                increment_version([p for group in optimizer.param_groups for p in group["params"]])

        with register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end):
            yield


_NEVER = 1 << 60
"""The death of a buffer that is alive."""


class _ScheduleMode(KernelMode):
    """A mode that makes each kernel a place of a schedule."""

    def __init__(self, schedule: _Schedule):
        super().__init__()
        self._schedule = schedule

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self._schedule.begin_place(func._opname)
        self._schedule.after_op(args, kwargs, out)
        if extra := workspace(func, args, out):
            self._schedule.add_workspace(extra)
        return out


class _EagerFakes(LocalFakes):
    """Fakes for an eager step. A step count that an optimizer reads has the value 1."""

    def __init__(self, schedule: _Schedule):
        super().__init__(static_shapes=True)
        self._schedule = schedule
        # Private torch: with the cache, a result that is a view of an operand gets new memory.
        self.cache_enabled = False

    def __torch_dispatch__(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        if func is _read_number and self._schedule.counts(args[1][0]):
            return 1
        try:
            return super().__torch_dispatch__(func, *args, **kwargs)
        finally:
            # Private torch: its memo has weak references to parameters, and `Module.to` fails then.
            self.fake_tensor_converter.meta_converter.tensor_memo.clear()


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Explains torch's errors about fake tensors that occur inside the `with` block."""
    try:
        yield
    except VALUE_READ_ERRORS as error:
        raise make_value_read_error(error) from None
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise make_refusal(
            "the step computes with a tensor that has memory",
            ("create it in make()", "model, optimizer and batch, on a dry mesh"),
            reason="only tensors that make() created run without memory",
            place=user_line_of(error),
        ) from None


def _list_held(state: State, args: Sequence[Any]) -> Iterator[HeldInput]:
    """Yields the memory that exists between steps, each storage once.

    These are parameters, buffers, the optimizer's state, and arguments.
    """
    slots = [*state.slots, *state.optimizer_slots()]
    tensors, names = tensors_of_call(slots, args, {}), names_of_call(slots, args, {})
    seen = set()
    for tensor, (name, kind) in zip(tensors, names, strict=True):
        if isinstance(tensor, torch.Tensor):
            storage = local_of(tensor).untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                yield HeldInput(name, kind, storage.nbytes())
