"""What does the code that Inductor generated allocate, and when does it let go?

The code is run over tensors without memory, its kernels doing nothing: its own allocations, reuses
and `del`s then say when each buffer is made and when it is gone, with Python's own counting of
references. So nothing about Inductor's plans has to be known, and nothing is estimated.
"""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .constants import constants_of
from .memory import Buffer, Memory
from .notes import Note, note_of
from .program import Program
from .storages import held_by, made_at_entry
from .workspace import staging, workspace

__all__ = ["code_of", "memory_of_code"]

_FILE = "<generated>"
_WAIT = torch.ops._c10d_functional.wait_tensor.default


@contextmanager
def code_of() -> Iterator[Callable[[], list[str]]]:
    """Within, what Inductor generates is noted; what is given reads it.

    Private torch: the hook is there for torch's own tests, which read generated code by it.
    """
    from torch._inductor.graph import GraphLowering

    found: list[str] = []
    hook: Any = GraphLowering
    before = hook.save_output_code
    hook.save_output_code = staticmethod(found.append)
    try:
        yield lambda: found
    finally:
        hook.save_output_code = before


def memory_of_code(sources: Sequence[str], program: Program) -> Memory:
    """The schedule of a program that runs as generated code.

    Args:
        sources: the code; one, unless Inductor had to split the graph.

    Raises:
        ValueError: the code is not as this torch's is known to be.
    """
    if len(sources) != 1:
        raise ValueError(f"Inductor generated {len(sources)} programs for one graph")
    (source,) = sources
    run = _Run(source, program)
    try:
        run.call(program.example())
    except Exception as error:
        raise ValueError(f"generated code, line {run.line()}: {error}") from error
    return run.memory()


class _Run(TorchDispatchMode):
    """One run of generated code over tensors without memory."""

    def __init__(self, source: str, program: Program):
        super().__init__()
        self.program, self.lines = program, source.split("\n")
        self.tree = ast.parse(source)
        self.notes = {n.name: note_of(n) for n in program.graph.graph.nodes}
        self.buffers: dict[int, Buffer] = {}
        self.done: list[Buffer] = []
        self._kept: dict[int, Any] = {}
        self._under_way: dict[int, Any] = {}
        self._last = 0

    def call(self, examples: Sequence[torch.Tensor]) -> None:
        function, first = self._function()
        mode = next(m for x in examples if (m := getattr(x, "fake_mode", None)) is not None)
        inputs = [*examples, *map(mode.from_tensor, constants_of(self.program.graph))]
        self._ours = {id(x.untyped_storage()) for x in inputs}
        with torch.no_grad(), mode, self:
            out = function(*first, inputs)
        self._last = self._end
        del out

    def line(self) -> int:
        """The line that runs now, from 1; after the run the last."""
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == _FILE:
                self._last = frame.f_lineno
                return int(frame.f_lineno)
            frame = frame.f_back
        return self._last

    def memory(self) -> Memory:
        """The schedule, a place for each line of the function."""
        buffers = sorted([*self.done, *self.buffers.values()], key=lambda b: b.birth)
        places = [self.lines[i].strip()[:80] for i in range(self._begin, self._end)]
        first = made_at_entry(self.program, len(places))
        return Memory(tuple(places), (*first, *buffers), tuple(held_by(self.program)))

    # -- the code ----------------------------------------------------------------------------------

    def _function(self) -> tuple[Callable[..., Any], list[Any]]:
        """Its `call`, alone, among names that stand for what the code imports and compiles."""
        defs = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        called = [n for n in defs if n.name == "call"]
        if len(called) != 1:
            raise ValueError("generated code has no one function `call`")
        (made,) = called
        self._begin, self._end = made.lineno, made.end_lineno or made.lineno
        module = ast.Module([made], [])
        names = _Names(self)
        exec(compile(module, _FILE, "exec"), names)
        return names["call"], [None] * (len(made.args.args) - 1)

    # -- what happens ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _WAIT:  # which says of tensors without memory that it makes another
            self._under_way.pop(id(args[0].untyped_storage()), None)
            return args[0]
        out = func(*args, **(kwargs or {}))
        made = self.made(out, str(getattr(func, "_opname", func)))
        extra = workspace(func, args, out)
        if getattr(func, "namespace", "") in ("_c10d_functional", "partita"):
            extra += staging(func, args, out, self.program.groups, compiled=True)
            if (
                func.namespace == "_c10d_functional" and made
            ):  # it reads them until it is waited for
                self._under_way[id(out.untyped_storage())] = args
        if extra:
            at = self.line() - self._begin - 1
            note = self._note(str(getattr(func, "_opname", func)))
            self.done.append(self._buffer(extra, at, at + 1, str(func), note, passing=True))
        return out

    def made(self, value: Any, by: str) -> int:
        """Note the storages of `value` that are new: how many."""
        count = 0
        for t in pytree.tree_leaves(value):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = id(storage)
                if key not in self._kept and key not in self._ours:
                    at = self.line() - self._begin - 1
                    self._kept[key] = weakref.ref(storage, lambda _, key=key: self._gone(key))
                    self.buffers[key] = self._buffer(
                        storage.nbytes(), at, self._end - self._begin, by, self._note(by)
                    )
                    count += 1
        return count

    def _gone(self, key: int) -> None:
        self._kept.pop(key)
        found = self.buffers.pop(key)
        at = max(self.line() - self._begin - 1, found.birth)
        self.done.append(Buffer(**{**vars(found), "death": at}))

    def _buffer(
        self, nbytes: int, birth: int, death: int, by: str, note: Note, passing: bool = False
    ) -> Buffer:
        name = self.lines[self.line() - 1].strip().split(" ", 1)[0]
        return Buffer(
            name,
            nbytes,
            birth,
            death,
            (),
            by,
            note.source,
            note.phase,
            note.layout,
            note.reason,
            passing,
        )

    def _note(self, by: str) -> Note:
        """Of the graph's nodes that the code says it does next, the last."""
        for line in self.lines[self.line() - 1 :][:3]:
            found = re.search(r"Source Nodes: \[([^]]*)\]", line)
            if found:
                return self._noted(found)
        for line in reversed(self.lines[max(0, self.line() - 4) : self.line()]):
            found = re.search(r"Source Nodes: \[([^]]*)\]", line)
            if found:
                return self._noted(found)
        return Note(phase="")

    def _noted(self, found: re.Match[str]) -> Note:
        names = [name.strip() for name in found[1].split(",")]
        return next((self.notes[n] for n in reversed(names) if n in self.notes), Note(phase=""))


class _Names(dict[str, Any]):
    """The globals of generated code. What it compiled, and what it only checks, does nothing."""

    def __init__(self, run: _Run):
        super().__init__(
            torch=torch,
            aten=torch.ops.aten,
            inductor_ops=torch.ops.inductor,
            device=torch.device,
            empty_strided=torch.empty_strided,
            reinterpret_tensor=torch.as_strided,
            extern_kernels=_Extern(),
            __builtins__=__builtins__,
        )
        for kind in ("cpu", "cuda", "xpu", "mtia"):
            self[f"empty_strided_{kind}"] = _empty(kind)
        self["empty_strided_cpu_pinned"] = _empty("cpu")

    def __missing__(self, name: str) -> Any:
        if hasattr(__import__("builtins"), name):
            raise KeyError(name)
        return _Nothing()


class _Nothing:
    """A kernel, or what checks something."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getattr__(self, name: str) -> _Nothing:
        return self


class _Extern:
    """Kernels of torch's that generated code calls by name; most write into what they are given."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            return out if out is not None else getattr(torch, name)(*args, **kwargs)

        return call


def _empty(kind: str) -> Callable[..., torch.Tensor]:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=kind)

    return empty
