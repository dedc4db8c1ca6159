"""Memory of generated code: the schedule of the allocations in Inductor's generated code.

The code is run over fake tensors, with kernels that do nothing. Python's reference counts then show
when the code allocates, reuses and frees each buffer. So this needs no knowledge of Inductor's
memory planning, and estimates nothing.
"""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from partita.comm.collective import WAIT, all_gather

from ..fake_values import fake_mode_of
from ..graph_nodes import Note, lazy_graph_module, note_of
from ..memory import (
    Buffer,
    Memory,
    held_inputs,
    made_at_entry,
    make_buffer,
    name_of_op,
    staging,
    workspace,
)
from ..program import Program
from .executor import FILE as OUTER_FILE
from .executor import (
    FIRST_LINE,
    GraphWriter,
    SectionCall,
    Sections,
    constants_of,
    names_of_constants,
)


def memory_of_code(
    sources: Mapping[Any, Sequence[str]], program: Program, cut: Sections | None
) -> Memory:
    """Returns the memory schedule (buffers, lifetimes, peak) of Inductor's generated code.

    Args:
        sources: the generated code of the program, or of each different section. Each has one text,
            unless Inductor had to split the graph.
        program: the program, after the passes.
        cut: the program as calls of separately compiled sections; None if it was compiled in one
            piece.

    Raises:
        ValueError: the code has an unknown form.
    """
    run = _FakeRun(program)
    calls = {part: run.make_call(code, part.graph) for part, code in sources.items()}
    if cut is not None:
        return run.schedule_of(run.make_outer_call(cut, calls), constants_of(cut.outer))
    call = calls[program]
    return run.schedule_of(lambda inputs: call([*inputs]), constants_of(program.graph))


class _GeneratedCode:
    """The function `call` in the code that was generated for a graph."""

    def __init__(self, sources: Sequence[str], graph: fx.GraphModule):
        if len(sources) != 1:
            raise ValueError(f"Inductor generated {len(sources)} programs for one graph")
        (source,) = sources
        self.file = f"<generated {id(self)}>"
        self.lines = source.split("\n")
        self.notes = {n.name: note_of(n) for n in graph.graph.nodes}
        defs = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
        called = [n for n in defs if n.name == "call"]
        if len(called) != 1:
            raise ValueError("generated code must have exactly one function `call`")
        (self._def,) = called
        self.begin, self.end = self._def.lineno, self._def.end_lineno or self._def.lineno

    def function(self) -> Callable[[list[Any]], Any]:
        """Returns the generated function, in which imported and compiled kernels do nothing."""
        names = GeneratedGlobals()
        exec(compile(ast.Module([self._def], []), self.file, "exec"), names)
        first = [None] * (len(self._def.args.args) - 1)
        return partial(names["call"], *first)

    @property
    def places(self) -> list[str]:
        """The lines of the generated function as texts: the points in time of a memory schedule."""
        return [self.lines[i].strip()[:80] for i in range(self.begin, self.end)]

    def name_at(self, line: int) -> str:
        """Returns the name of the variable that a line assigns. Lines are counted from 1."""
        return self.lines[line - 1].strip().split(" ", 1)[0]

    def note_at(self, line: int) -> Note:
        """Returns the note (user's line, phase) of the node from which a line was generated.

        Inductor's comments name the nodes. The last node of the nearest comment is taken.
        """
        for text in (*self.lines[line - 1 :][:3], *reversed(self.lines[max(0, line - 4) : line])):
            found = re.search(r"Source Nodes: \[([^]]*)\]", text)
            if found:
                names = [name.strip() for name in found[1].split(",")]
                return next((self.notes[n] for n in reversed(names) if n in self.notes), _NONE)
        return _NONE


_NONE = Note(phase="")
_ALLOCATES = "empty_strided_"
"""The prefix of generated code's functions that allocate; a kind of device follows."""


class _FakeRun(TorchDispatchMode):
    """One run of generated code over fake tensors.

    Attributes:
        places: the texts of the lines that have run, or are in the code that is called now.
        buffers: the buffers that are allocated now, by the id of their storage.
        done: the buffers that were freed.
    """

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.places: list[str] = []
        self.buffers: dict[int, Buffer] = {}
        self.done: list[Buffer] = []
        # By file, with the place where it begins.
        self._codes: dict[str, tuple[_GeneratedCode, int]] = {}
        self._outer: dict[int, fx.Node] = {}  # by line
        self._outer_line = 0
        self._kept: dict[int, Any] = {}
        self._under_way: dict[int, Any] = {}

    def schedule_of(
        self, call: Callable[[Sequence[Any]], Any], constants: Sequence[torch.Tensor]
    ) -> Memory:
        """Runs `call` over fake inputs and constants. Returns the memory schedule.

        Args:
            call: a function of the inputs, followed by the constants.
            constants: the constants of the graph.
        """
        examples = self.program.example()
        mode = fake_mode_of(examples)
        inputs = [*examples, *map(mode.from_tensor, constants)]
        self._ours = {id(x.untyped_storage()) for x in inputs}
        try:
            with torch.no_grad(), mode, self:
                out = call(inputs)
        except Exception as error:
            raise ValueError(f"generated code, at {self.places[-1:]}: {error}") from error
        end = len(self.places)
        left = [replace(buffer, death=end) for buffer in self.buffers.values()]
        self._kept.clear()
        del out
        buffers = sorted([*self.done, *left], key=lambda b: b.birth)
        first = made_at_entry(self.program, end)
        return Memory(tuple(self.places), (*first, *buffers), tuple(held_inputs(self.program)))

    # -- the code ----------------------------------------------------------------------------------

    def make_call(self, source: Sequence[str], graph: fx.GraphModule) -> SectionCall:
        """Returns a function that runs generated code over fake tensors.

        The function may be called several times: each call adds its lines to the schedule.

        Args:
            source: the generated code.
            graph: the graph from which it was generated.
        """
        code = _GeneratedCode(source, graph)
        function = code.function()

        def call(taken: list[Any]) -> Any:
            self._codes[code.file] = code, len(self.places)
            self.places += code.places
            return function(taken)

        return call

    def make_outer_call(
        self, sections: Sections, calls: Mapping[Any, SectionCall]
    ) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that runs a graph which calls sections.

        It takes the inputs, followed by the constants.

        Args:
            sections: the graph, cut into sections.
            calls: the function of each section.
        """
        names = names_of_constants(sections.outer)

        def call(inputs: Sequence[Any]) -> Any:
            given, held = len(inputs) - len(names), torch.nn.Module()
            for name, constant in zip(names, inputs[given:], strict=True):
                setattr(held, name, constant)
            outer = lazy_graph_module(held, sections.outer.graph)
            written = GraphWriter(outer, None, calls)
            run = written.function()
            self._outer = dict(enumerate(written.nodes, FIRST_LINE))
            return run(inputs[:given])

        return call

    def _find_position(self) -> tuple[_GeneratedCode | fx.Node | None, int, int]:
        """Returns the code or outer node that runs now, its line, and its place."""
        frame: Any = sys._getframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._codes:
                code, begin = self._codes[file]
                return code, frame.f_lineno, begin + frame.f_lineno - code.begin - 1
            if file == OUTER_FILE and self._outer:
                return self._outer.get(frame.f_lineno), frame.f_lineno, len(self.places)
            frame = frame.f_back
        return None, 0, len(self.places)

    # -- what happens ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is WAIT:  # it returns its operand, but over fake tensors a new one
            self._under_way.pop(id(args[0].untyped_storage()), None)
            return args[0]
        out = func(*args, **(kwargs or {}))
        made = self.note_new_storages(out, str(getattr(func, "_opname", func)))
        extra = workspace(func, args, out)
        if getattr(func, "namespace", "") in ("_c10d_functional", "partita"):
            extra += staging(func, args, out, self.program.groups, compiled=True)
            # It reads them until it is waited for.
            if func is not all_gather and made:
                self._under_way[id(out.untyped_storage())] = args
        if extra:
            self.done.append(self._make_buffer(extra, str(func), passing=True))
        return out

    def note_new_storages(self, value: Any, by: str) -> int:
        """Records the storages in `value` that are new, and returns their number.

        Args:
            by: the name of the variable or kernel that allocated them.
        """
        count = 0
        for t in pytree.tree_leaves(value):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = id(storage)
                if key not in self._kept and key not in self._ours:
                    self._kept[key] = weakref.ref(storage, lambda _, key=key: self._note_freed(key))  # type: ignore[misc]
                    self.buffers[key] = self._make_buffer(storage.nbytes(), by)
                    count += 1
        return count

    def _note_freed(self, key: int) -> None:
        if self._kept.pop(key, None) is not None:
            found = self.buffers.pop(key)
            self.done.append(replace(found, death=max(self._find_position()[2], found.birth)))

    def _make_buffer(self, nbytes: int, by: str, passing: bool = False) -> Buffer:
        """Returns a buffer that is made now. Its end is the next place, until it is known."""
        what, line, at = self._find_position()
        if isinstance(what, fx.Node):
            name, note = what.name, note_of(what)
            if line != self._outer_line:
                self.places.append(f"{name} {name_of_op(what)}")
                self._outer_line = line
            at = len(self.places) - 1
        elif what is not None:
            name, note = what.name_at(line), what.note_at(line)
        else:
            name, note = "", _NONE
        return make_buffer(note, name, by, nbytes, birth=at, death=at + 1, passing=passing)


class GeneratedGlobals(dict[str, Any]):
    """The globals of generated code: torch's names, and replacements for kernels and checks.

    Kernels of torch run over fake tensors. All other kernels and checks do nothing.
    """

    def __init__(self) -> None:
        super().__init__(
            torch=torch,
            aten=torch.ops.aten,
            inductor_ops=torch.ops.inductor,
            device=torch.device,
            empty_strided=torch.empty_strided,
            reinterpret_tensor=torch.as_strided,
            extern_kernels=_TorchKernels(),
            copy_if_misaligned=_copy_if_misaligned,
            __builtins__=__builtins__,
        )

    def __missing__(self, name: str) -> Any:
        if name.startswith(_ALLOCATES):
            kind = name.removeprefix(_ALLOCATES).removesuffix("_pinned")
            return partial(_make_empty, kind)
        if hasattr(__import__("builtins"), name):
            raise KeyError(name)
        return _NoOp()


_ALIGNMENT = 16  # bytes, as Inductor's: `torch._inductor.utils.ALIGNMENT`


def _copy_if_misaligned(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a GPU kernel's operand if its first element is not aligned in memory."""
    return x if x.storage_offset() * x.element_size() % _ALIGNMENT == 0 else x.clone()


class _NoOp:
    """A replacement of a kernel, or of a function that checks something, which does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> _NoOp:
        return self


class _TorchKernels:
    """Kernels of torch that generated code calls by name; most write into `out`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(_run_kernel, name)


def _run_kernel(name: str, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    return out if out is not None else getattr(torch, name)(*args, **kwargs)


def _make_empty(kind: str, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=kind)
