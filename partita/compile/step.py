"""What does `pt.compile(step)` give?

A function like `step`. Its first call captures a graph, compiles it and runs it; later calls run
it. A call that differs in what the graph was made for (shapes, layouts, modes, Python values that
the step reads) is another program, which is captured in its turn; how many are kept is bounded, and
each says why it was made.
"""

from __future__ import annotations

import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from partita.comm import GroupWire

from .errors import CaptureError
from .optimizers import prime, unprime
from .state import State, state_of, tensors_of_call

if TYPE_CHECKING:
    from .graph import Graph
    from .program import Program

__all__ = ["CompiledStep", "compile"]

BACKENDS = ("inductor", "graph")


def compile(
    step: Callable[..., Any] | None = None,
    *,
    state: Iterable[Any] = (),
    backend: str = "inductor",
    fallback: str | None = None,
    without: Iterable[str] = (),
    keep: int = 8,
) -> Any:
    """Capture a training step, forward, loss, backward and update, into one compiled graph.

    Args:
        step: an ordinary function over DTensors (or plain tensors). Modules, optimizers and tensors
            that it reaches by name (closure, globals, `self`) or is given are found; all that it
            writes into them is written by the graph. Gradients that a step clears, makes and
            updates by do not outlive it.
        state: modules, optimizers, and lists, dictionaries and objects that hold tensors, that it
            reaches in another way.
        backend: "inductor", or "graph" to run the graph node by node without compiling it, which
            is also done where ranks are no processes (`pt.ranks`, a dry mesh).
        fallback: "eager" to run a step that cannot be captured as it is.
        without: passes that are left out: "dedupe", "cancel", "regather", "bucket".
        keep: how many programs are kept.

    Raises:
        ValueError: an unknown backend or fallback. The call raises CaptureError where the step does
            what a graph cannot say, unless there is a fallback.
    """
    if backend not in BACKENDS:
        raise ValueError(f"compile: backend is one of {', '.join(BACKENDS)}, not {backend!r}")
    if fallback not in (None, "eager"):
        raise ValueError(f'compile: fallback is "eager" or None, not {fallback!r}')
    options = {
        "state": tuple(state),
        "backend": backend,
        "fallback": fallback,
        "without": tuple(without),
        "keep": keep,
    }
    if step is None:
        return lambda f: CompiledStep(f, **options)
    return CompiledStep(step, **options)


class CompiledStep:
    """A step that runs as a graph.

    Attributes:
        reasons: for each capture, why it was made.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: tuple[Any, ...],
        backend: str,
        fallback: str | None,
        without: tuple[str, ...],
        keep: int,
    ):
        functools.update_wrapper(self, step)
        self.step, self._given, self.backend, self.fallback = step, state, backend, fallback
        self.without, self.keep = without, max(1, keep)
        self.reasons: list[str] = []
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._eager: set[Any] = set()
        self._state: State | None = None
        self._last: Program | None = None

    @property
    def program(self) -> Program:
        """What ran last.

        Raises:
            ValueError: nothing was captured yet.
        """
        if self._last is None:
            raise ValueError("this step has not been captured: call it first")
        return self._last

    @property
    def graph(self) -> Graph:
        """What ran last, to be printed: a line for each node. Raises as `program`."""
        from .graph import Graph

        return Graph(self.program)

    def explain(self) -> str:
        """What each pass did to what ran last. Raises as `program`."""
        return "\n".join(map(str, self.program.changes))

    @property
    def key(self) -> str:
        """The key of what ran last: equal for equal programs, on every rank and in every run."""
        return self.program.key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.step(*args, **kwargs)  # part of a step that is being captured
        state = self._state
        if state is None:
            state = self._state = state_of(self.step, self._given, args, kwargs)
        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        signature = self._signature(state, tensors, (args, kwargs))
        if signature in self._eager:
            return self.step(*args, **kwargs)
        program = self._programs.get(signature)
        if program is None:
            return self._first(signature, args, kwargs)
        self._programs.move_to_end(signature)
        self._last = program
        return program.run(tensors)

    def _first(self, signature: Any, args: Any, kwargs: Any) -> Any:
        """Capture, and run for the first time."""
        state = self._state = state_of(self.step, self._given, args, kwargs)
        primed = prime(state.optimizers)
        try:
            program = self._captured(state, args, kwargs)
        except BaseException as error:
            unprime(primed, lambda t: False)
            if self.fallback is None or not isinstance(error, CaptureError):
                raise
            warnings.warn(f"runs eagerly: {error}", stacklevel=3)
            self._eager.add(signature)
            return self.step(*args, **kwargs)
        inputs = {id(i.tensor) for i in program.inputs}
        unprime(primed, lambda t: id(t) in inputs)
        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        signature = self._signature(state, tensors, (args, kwargs))
        program.compare(tensors)
        self.reasons.append(self._reason(signature))
        while len(self._programs) >= self.keep:
            self._programs.popitem(last=False)
        self._programs[signature] = self._last = program
        program.call = self._call_of(program)
        return program.run(tensors)

    def _captured(self, state: State, args: Any, kwargs: Any) -> Program:
        """The program of a call, the same on all ranks.

        Raises:
            CaptureError: it cannot be captured, on any rank.
            LayoutError: the ranks' programs differ.
        """
        from .capture import capture  # it takes seconds to import what makes graphs
        from .graph import canonical
        from .key import agree, key_of, versions
        from .notes import note_of
        from .passes import run_passes
        from .verify import verify

        slots = [*state.slots, *state.optimizer_slots()]
        tensors = tensors_of_call(slots, args, kwargs)
        wires = dict.fromkeys(t._spec.wire for t in tensors if hasattr(t, "_spec"))
        failed, lines, where = None, [], []
        try:
            program = capture(self.step, args, kwargs, state)
            verify(program, "capture")
            program.changes = run_passes(program, self.without)
            lines = [*canonical(program), *versions(), *self._options()]
            where = [note_of(n).source for n in program.graph.graph.nodes]
        except Exception as error:  # the other ranks are waiting to compare
            failed, lines = error, [f"error: {error}"]
        for wire in wires:
            agree(lines, where, wire)
        if failed is not None:
            raise failed
        program.key = key_of(lines)
        return program

    def _options(self) -> list[str]:
        """What of how it is compiled makes another program of it."""
        return [f"backend {self.backend}", f"without {sorted(self.without)}"]

    def _call_of(self, program: Program) -> Any:
        from .lower import lowered
        from .run import interpreted

        # Compiled code finds process groups by name; other wires are only known to Python.
        wires = {wire for wire, _ in program.groups.values()}
        if self.backend == "inductor" and all(isinstance(w, GroupWire) for w in wires):
            return lowered(program)
        return interpreted(program.graph, program.groups)

    # -- which program -----------------------------------------------------------------------------

    def _signature(self, state: State, tensors: list[Any], call: Any) -> tuple[Any, ...]:
        """All that a graph is made for, as a hashable value: name and value of each part."""
        first: dict[int, int] = {}
        parts: list[Any] = [("structure", str(pytree.tree_structure(call)))]
        for i, t in enumerate(tensors):
            if not isinstance(t, torch.Tensor):
                parts.append((f"value {i}", _hashable(t)))
                continue
            same = first.setdefault(id(t), i)
            grad = t.grad if t.requires_grad and t.is_leaf else None
            parts.append((f"tensor {i}", same, _kind(t), None if grad is None else _kind(grad)))
        parts += [(name, _hashable(value)) for name, value in state.settings()]
        casts = tuple(
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        )
        parts.append(("modes", torch.is_grad_enabled(), casts, torch.get_default_dtype()))
        return tuple(parts)

    def _reason(self, signature: tuple[Any, ...]) -> str:
        if not self._programs:
            return "the first call"
        last = next(reversed(self._programs))
        known = {part[0]: part[1:] for part in last}
        for name, *rest in signature:
            if known.get(name) != tuple(rest):
                return f"{name}: {known.get(name)} became {tuple(rest)}"
        return "something is no longer there"


def _kind(t: torch.Tensor) -> tuple[Any, ...]:
    spec = getattr(t, "_spec", None)
    return (spec or t.shape, t.dtype, t.requires_grad, t.device)


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return (type(value), value)
