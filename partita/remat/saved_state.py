"""Saved state: what a remat region keeps from its forward (first run) for recomputation (second
run).

- the arguments
- the states of random generators, autocast, context variables and the default device, and old
  values of buffers that the region wrote
- the results that its policy keeps

For a function of torch the outputs of its kernels are kept, below autograd: the second run makes
the call again, but its kernels return the kept outputs. An *opaque* call (a compiled region, an
`autograd.Function`, a user's function) is skipped in the second run. Its outputs and the tensors
that autograd saved inside it are kept.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as local_ops

from partita.comm import read_autocast_state, use_autocast_state
from partita.comm.device import generators_in_use
from partita.parallel.batch import find_instances, replace_instances, tensors_in
from partita.tensor.dtensor import DTensor, as_dtensor
from partita.tensor.op_facts import facts_of, facts_of_function
from partita.tensor.tensor_state import Spec, current

from .watched_calls import KernelMode, RematError, TensorProducers, make_local_alias

States = list[tuple[torch.Generator, torch.Tensor]]


# -- random numbers --------------------------------------------------------------------------------


def is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a call of the op `name` with the arguments `args`, `kwargs` draws random numbers."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
    return facts_of_function(name).draws or "generator" in kwargs


class RandomStates:
    """The states of the random generators before and after a call, to repeat its draws."""

    def __init__(self, tensors: Iterable[torch.Tensor], kwargs: dict[str, Any] | None = None):
        generators = generators_in_use(t.device for t in tensors)
        own = (kwargs or {}).get("generator")
        if own is not None:
            generators.append(own)
        self.before: States = [(g, g.get_state()) for g in generators]
        self.after: States = []

    def over(self) -> bool:
        """Records the generators' states after the call. Returns True if it drew random numbers."""
        now = [(g, g.get_state()) for g, _ in self.before]
        self.after = [
            (g, state)
            for (g, state), (_, first) in zip(now, self.before, strict=True)
            if not torch.equal(state, first)
        ]
        return bool(self.after)


# -- buffers that a run writes ---------------------------------------------------------------------


class _BufferWrites:
    """The buffers from outside of a region that it writes, with their values from before."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def note(self, t: torch.Tensor) -> None:
        """Saves a copy of `t` before the run writes it for the first time."""
        if not self.has(t):
            with local_ops(), torch.no_grad():
                self._before[id(t)] = (weakref.ref(t), t.detach().clone())

    def has(self, t: torch.Tensor) -> bool:
        """True if the run has written `t`."""
        known = self._before.get(id(t))
        return known is not None and known[0]() is t

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Restores the buffers' values from before the first run, inside the `with` block."""
        found = [(ref(), before) for ref, before in self._before.values()]
        written = [(t, before) for t, before in found if t is not None]
        with local_ops(), torch.no_grad():
            now = [(t, t.detach().clone()) for t, _ in written]
        try:
            _set_values(written)
            yield
        finally:
            _set_values(now)


def _set_values(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    # `.data`, so that autograd does not count this as a write: the value is restored later.
    data: Any = torch._C.TensorBase.data  # type: ignore[attr-defined]
    with local_ops(), torch.no_grad():
        for t, value in values:
            data.__get__(t).copy_(value)


# -- ambient state ---------------------------------------------------------------------------------


class AmbientState:
    """The settings and states around a region's first run, which are restored for its second run.

    They are random generators, autocast, context variables, the default device, and buffers.
    """

    def __init__(self, devices: Iterable[torch.device]):
        devices = set(devices)
        self._states: States = [(g, g.get_state()) for g in generators_in_use(devices)]
        self._casting = read_autocast_state()
        self._cached = torch.is_autocast_cache_enabled()
        self._device = torch.empty(0).device
        self._context = contextvars.copy_context()
        self.writes = _BufferWrites()
        self._touched: dict[torch.Generator, torch.Tensor] = {}

    @contextmanager
    def restored(self) -> Iterator[contextvars.Context]:
        """Sets the recorded settings inside the `with` block. Yields the second run's context."""
        self._touched = {}
        with ExitStack() as modes:
            modes.enter_context(use_autocast_state(self._casting, cache=self._cached))
            if torch.empty(0).device != self._device:
                modes.enter_context(self._device)
            modes.enter_context(self.writes.undone())
            modes.callback(self._put_back)
            self.draw_as(self._states)
            modes.enter_context(torch.enable_grad())
            yield self._context.copy()

    def draw_as(self, states: States) -> None:
        """Sets random generators to the states before a call of the first run.

        They keep these states until the second run has ended.

        Args:
            states: the states of the generators before the call.
        """
        for generator, state in states:
            if generator not in self._touched:
                self._touched[generator] = generator.get_state()
            generator.set_state(state)

    def _put_back(self) -> None:
        for generator, state in self._touched.items():
            generator.set_state(state)
        self._touched = {}


# -- inputs of a region ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _InputPlace:
    """A placeholder in the arguments for the tensor with this index."""

    number: int


class _SaveInputs(torch.autograd.Function):
    """A node that saves tensors and does nothing else."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing is computed from this node")


class RegionInputs:
    """The arguments of one call of a remat region. Lists, tuples and dicts are copied.

    Tensors are saved by autograd. So an outer region may recompute them, and autograd checks that
    they are not changed in place later.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], producers: TensorProducers):
        tensors: list[torch.Tensor] = []

        def put_away(t: torch.Tensor) -> _InputPlace:
            for i, known in enumerate(tensors):
                if known is t:
                    return _InputPlace(i)
            producers.note(t, ("input", len(tensors)))
            tensors.append(t)
            return _InputPlace(len(tensors) - 1)

        self._emptied = replace_instances((args, kwargs), torch.Tensor, put_away)
        tensors = [current(t) for t in tensors]  # a view copy may be out of date
        self._meta = [(_spec_of(t), t.requires_grad) for t in tensors]
        with local_ops():
            graded = torch.empty(0, requires_grad=True)
            # Torch 2.11 frees them if the attribute does not keep the result alive.
            self._saver: Any = _SaveInputs.apply(graded, *tensors)

    def rebuild(self, producers: TensorProducers) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments for the second run: the same memory, without autograd history.

        Args:
            producers: the map of the second run. The inputs are added to it.

        Raises:
            RuntimeError: a tensor was changed in place after the first run.
        """
        # Not inside `local_ops`: this may run an enclosing region again, as an ordinary program.
        packed = self._saver.grad_fn.saved_tensors
        with local_ops():
            saved = [t.detach() for t in packed]
        for i, (t, (spec, requires_grad)) in enumerate(zip(saved, self._meta, strict=True)):
            with local_ops():
                t.requires_grad_(requires_grad)
            if spec is not None:
                as_dtensor(t, spec)
            producers.note(t, ("input", i))
        args, kwargs = replace_instances(
            self._emptied, _InputPlace, lambda place: saved[place.number]
        )
        return args, kwargs


def _spec_of(t: torch.Tensor) -> Spec | None:
    return t._spec if isinstance(t, DTensor) else None


# -- kept results ----------------------------------------------------------------------------------

Place = tuple[Any, int]
"""A kernel run of one call: (op, number among the runs of this op in the call)."""

_CARRIED: Place = ("carried", 0)


def storage_id(t: torch.Tensor) -> int:
    """Returns a number that identifies the storage of `t` while the storage is alive.

    The address is not sufficient, because all empty storages have the same address. A rank with an
    empty shard must find the same calls as other ranks. Private torch: no public name exists.
    """
    with local_ops():
        return t.untyped_storage()._cdata


class _KeptResult:
    """The kept result of one call, which returned `out`. It detects later writes to `out`.

    Attributes:
        copied: True if copies are kept, because the program wrote to the results.
    """

    def __init__(self, out: Any):
        with local_ops():
            # An alias has the same version counter as the result, but no grad_fn.
            self._versions = [(t.detach(), t._version) for t in tensors_in(out)]
        self.copied = False

    def copy(self) -> None:
        """Copies the kept result, because the program is about to write the original in place."""
        if not self.copied:
            with local_ops(), torch.no_grad():
                self._replace_by_copies()
            self.copied = True

    def _replace_by_copies(self) -> None:
        raise NotImplementedError

    def changed(self) -> bool:
        return not self.copied and any(t._version != version for t, version in self._versions)


# -- kept results of functions of torch ------------------------------------------------------------


class KernelsOfCall(KernelMode):
    """A dispatch mode that intercepts and counts the ATen kernels that one call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self._counts: dict[Any, int] = {}

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Stops intercepting kernels inside the `with` block, for a redistribution."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def count_run(self, op: Any) -> Place:
        n = self._counts[op] = self._counts.get(op, -1) + 1
        return op, n


class KeepMode(KernelsOfCall):
    """A dispatch mode that records the results of the ATen kernels that one call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Place, bool, Any]] = []

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if not self.paused:
            had = {storage_id(t) for t in tensors_in((args, kwargs))}
            fresh = not any(storage_id(t) in had for t in tensors_in(out))
            place = self.count_run(func)
            if fresh or getattr(func, "_schema", None) is None or facts_of(func).writes:
                self.made.append((place, fresh, out))
        return out

    def note_redistributed(self, x: torch.Tensor) -> None:
        """Records `x`, the result of a redistribution in the call, like a kernel's result."""
        self.made.append((self.count_run("carried"), True, x))

    def kernels(self, out: Any) -> KeptKernels | None:
        """Returns the kernels' results from which the second run can make `out`; None if they
        cannot be kept.

        They cannot be if no kernel made `out`, or if it was written in place after it was made.
        """
        wanted = {storage_id(t) for t in tensors_in(out)}
        found: dict[Place, Any] = {}
        for place, fresh, made in reversed(self.made):
            here = {storage_id(t) for t in tensors_in(made)} & wanted
            if not here:
                continue
            if not fresh:
                return None  # written in place after it was made: the writes must run again
            wanted -= here
            found[place] = replace_instances(made, torch.Tensor, make_local_alias)
        return KeptKernels(found, out) if found else None


class KeptKernels(_KeptResult):
    """The kept results of the kernels that one call of a torch function ran.

    The second run makes the call again, with its casts, redistributions and views. So autograd
    builds the same nodes and saves the same tensors. Only the kernels are not run.

    Attributes:
        made: the kernels' outputs, as plain tensors.
    """

    def __init__(self, made: dict[Place, Any], out: Any):
        super().__init__(out)
        self.made = made

    @classmethod
    def of_redistributed(cls, x: torch.Tensor) -> KeptKernels:
        """Makes an object that keeps `x`, the result of a redistribution."""
        return cls({_CARRIED: make_local_alias(x)}, x)

    @property
    def nbytes(self) -> int:
        return sum(_sizes_of_storages(tensors_in(self.made)).values())

    def starts(self) -> set[int]:
        return {storage_id(t) for t in tensors_in(self.made)}

    def _replace_by_copies(self) -> None:
        self.made = replace_instances(self.made, torch.Tensor, torch.clone)

    def give(self, place: Place = _CARRIED) -> Any:
        """Returns the kept results of the kernel run `place`, or None if they were not kept.

        They are new aliases, because autograd sets attributes on them. If the program has written
        to them, they are copies, because the second run writes to them again.
        """
        if place not in self.made:
            return None
        with torch._C.DisableTorchFunction():  # a region records the program's calls alone
            own = torch.clone if self.copied else torch.Tensor.detach
            return replace_instances(self.made[place], torch.Tensor, own)


class ReplayMode(KernelsOfCall):
    """A dispatch mode of the second run: kernels are not run if their results were kept."""

    def __init__(self, kept: KeptKernels):
        super().__init__()
        self._kept = kept

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.paused:
            given = self._kept.give(self.count_run(func))
            if given is not None:
                return given
        return func(*args, **kwargs)

    def give_redistributed(self) -> torch.Tensor | None:
        """Returns the kept result of the call's next redistribution, or None if it was not kept."""
        given: torch.Tensor | None = self._kept.give(self.count_run("carried"))
        return given


# -- kept results of opaque calls ------------------------------------------------------------------


@dataclass(frozen=True)
class _Result:
    """A tensor that an opaque call returned, with its spec and `requires_grad`."""

    held: torch.Tensor
    spec: Spec | None
    requires_grad: bool


class _KeptOutputs(torch.autograd.Function):
    """The autograd node that connects kept results in the second run to the call's inputs."""

    @staticmethod
    def forward(ctx: Any, what: str, outs: Sequence[torch.Tensor], *ins: torch.Tensor) -> Any:
        ctx.what = what
        ctx.mark_non_differentiable(*[t for t in outs if not t.is_floating_point()])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RematError(
            f"{ctx.what} was kept, and is differentiated within the region that recomputes it",
            reason="a kept opaque call does not run again, so it has no autograd graph",
            fixes=(),
        )


class KeptCall(_KeptResult):
    """The kept result of an *opaque* call, which is kept or run as a whole.

    Attributes:
        out: the call's result, with a `_Result` in place of each tensor.
        inside: the tensors that autograd saved during the call.
    """

    def __init__(self, out: Any, inside: list[torch.Tensor]):
        super().__init__(out)
        self.inside = inside

        def detach_result(t: torch.Tensor) -> Any:
            with local_ops():
                return _Result(t.detach(), _spec_of(t), t.requires_grad)

        self.out = replace_instances(out, torch.Tensor, detach_result)

    @property
    def results(self) -> list[_Result]:
        return list(find_instances(self.out, _Result))

    @property
    def nbytes(self) -> int:
        return sum(_sizes_of_storages([r.held for r in self.results] + self.inside).values())

    def starts(self) -> set[int]:
        return {storage_id(r.held) for r in self.results}

    def _replace_by_copies(self) -> None:
        self.out = replace_instances(
            self.out, _Result, lambda r: _Result(r.held.clone(), r.spec, r.requires_grad)
        )

    def restore_output(self, what: str, ins: Sequence[torch.Tensor]) -> Any:
        """Returns the kept result in the second run, connected to the call's inputs in autograd.

        Args:
            what: the call's name, for errors.
            ins: the tensors that the call reads.
        """
        with local_ops():
            graded = [t for t in ins if t.requires_grad]
            results = self.results
            # If only a parameter inside requires grad, the results must require grad, too.
            if not graded and any(r.requires_grad for r in results):
                graded = [torch.empty(0, requires_grad=True)]
            outs = [r.held.clone() if self.copied else r.held.detach() for r in results]
            tied = iter(_KeptOutputs.apply(what, outs, *graded) if graded and outs else outs)

        def restore_result(r: _Result) -> torch.Tensor:
            with local_ops():
                t = next(tied)
                if not r.requires_grad:
                    t = t.detach()
            return t if r.spec is None else as_dtensor(t, r.spec)

        return replace_instances(self.out, _Result, restore_result)


def _sizes_of_storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Returns the bytes of the storages of tensors, by `storage_id`."""
    with local_ops():
        return {storage_id(t): t.untyped_storage().nbytes() for t in tensors}


# -- what autograd saves in opaque calls ----------------------------------------------------------


class SavedInOpaque:
    """A tensor that autograd saved inside a kept opaque call.

    Attributes:
        hooks: the saved-tensor hooks of a region around the call's own region, or None.
        packed: the tensor; with hooks, what they made of it.
    """

    __slots__ = ("hooks", "packed")

    def __init__(self, t: torch.Tensor, hooks: tuple[Any, Any] | None):
        self.hooks = hooks
        self.packed = make_local_alias(t) if hooks is None else hooks[0](make_local_alias(t))

    def take(self) -> torch.Tensor:
        return self.packed if self.hooks is None else self.hooks[1](self.packed)


class OpaqueSaves:
    """The tensors that autograd saves inside an opaque call, such as a compiled function.

    Views of the call's inputs are not among them, because the second run has the inputs.
    """

    def __init__(self, inputs: list[torch.Tensor], keeps: bool):
        self.own: list[torch.Tensor] = []
        self._sizes: dict[int, int] = {}
        self._keeps = keeps
        self._starts = {(storage_id(t), t.dtype): i for i, t in enumerate(inputs)}

    def place_of(self, t: torch.Tensor) -> tuple[Any, ...] | None:
        """Returns `(input, size, stride, offset)` if `t` is a view of an input, else None."""
        i = self._starts.get((storage_id(t), t.dtype))
        return None if i is None else (i, t.size(), t.stride(), t.storage_offset())

    def record_saved(self, t: torch.Tensor) -> bool:
        """Records `t`, which autograd saves inside the call, if the call's result is kept.

        Returns True if it was recorded.
        """
        if self._keeps:
            self.own.append(make_local_alias(t))
        self._sizes |= _sizes_of_storages([t])
        return self._keeps

    def fresh(self, out: Any) -> list[torch.Tensor]:
        """Returns those tensors in `out` that share no memory with an input of the call."""
        return [t for t in tensors_in(out) if (storage_id(t), t.dtype) not in self._starts]

    def nbytes(self, out: Any) -> int:
        """Returns the bytes that a kept call takes: its result `out` and its saved tensors."""
        return sum((self._sizes | _sizes_of_storages(tensors_in(out))).values())


# -- named results ---------------------------------------------------------------------------------

_Calls = tuple[Any, tuple[int, ...]]
"""(function, call site): all calls of one function from one call site."""


class LearnedNames:
    """The names (`checkpoint_name`) of a region's results, in all runs so far.

    In a later run, they show which name a result will get. So the region can decide early if it
    keeps the result.

    Attributes:
        seen: the calls, by function and call site, that have occurred.
        named: the names of results, by the calls that make them.
    """

    def __init__(self) -> None:
        self.seen: set[_Calls] = set()
        self.named: dict[_Calls, str] = {}

    def __reduce__(self) -> Any:
        return LearnedNames, ()  # call sites are only valid in one process


@dataclass(frozen=True)
class _PlaceInStorage:
    """The position of a tensor in a storage, without a reference to the storage."""

    start: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class ResultsToName:
    """The results of a region's run that the program may still name with `checkpoint_name`.

    The program names a result after the call that made it has returned. Until then this object
    stores how to keep the result.
    """

    def __init__(self, names: LearnedNames):
        self._names = names
        self._makers: dict[int, Any] = {}  # by storage: the call that made it
        self._offers: dict[Any, Any] = {}  # by call: what to keep, without its memory

    def name_of(self, event: Any) -> str | None:
        """Returns the name that an earlier run gave to the result of the call `event`, or None."""
        return self._names.named.get(event.key[:2])

    def is_new(self, event: Any) -> bool:
        """True if no earlier run made the call `event`, so that its result may still get a name."""
        return event.key[:2] not in self._names.seen

    def note_maker(self, event: Any, out: Any) -> None:
        """Records that the call `event` made the tensors in `out`."""
        self._makers |= {storage_id(t): event for t in tensors_in(out)}

    def note_name(self, x: torch.Tensor, name: str) -> Any:
        """Records that the program names `x` by `name`. Returns the call that made `x`, or None."""
        event = self._makers.get(storage_id(x))
        if event is not None:
            self._names.named[event.key[:2]] = name
        return event

    def offer(self, event: Any, kept: KeptKernels, out: Any) -> None:
        """Stores how to keep the result of a call, in case the program names it later.

        This does not keep the result alive: its tensors are stored as positions in their storage.

        Args:
            event: the call.
            kept: its kernel results.
            out: its result.
        """
        own = {storage_id(t) for t in tensors_in(out)}

        def reference_weakly(t: torch.Tensor) -> Any:
            start = storage_id(t)
            if start not in own:
                return t
            return _PlaceInStorage(start, t.dtype, t.size(), t.stride(), t.storage_offset())  # type: ignore[arg-type]

        self._offers[event] = replace_instances(kept.made, torch.Tensor, reference_weakly)

    def take_offer(self, event: Any, x: torch.Tensor) -> KeptKernels | None:
        """Returns the kernel results that `offer` stored for a call. Its result now has a name.

        Returns None if they are not all in the storage of `x`.

        Args:
            event: the call.
            x: the result.
        """
        offer, start = self._offers.pop(event, None), storage_id(x)
        if offer is None or any(w.start != start for w in find_instances(offer, _PlaceInStorage)):
            return None
        with local_ops():
            storage = x.untyped_storage()

            def view_storage(w: _PlaceInStorage) -> torch.Tensor:
                view = torch.empty(0, dtype=w.dtype, device=x.device)
                return view.set_(storage, w.offset, w.size, w.stride)

            return KeptKernels(replace_instances(offer, _PlaceInStorage, view_storage), x)

    def close(self, events: Iterable[Any]) -> None:
        """Ends the run: records which calls it made, and drops stored results that got no name.

        Args:
            events: the run's calls, as `RecordedCall`s.
        """
        self._names.seen.update(e.key[:2] for e in events)
        self._makers, self._offers = {}, {}
