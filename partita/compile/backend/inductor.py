"""Inductor: how does a graph become machine code, and machine code that another process can load?

Inductor compiles. What it can save of a result is generated Python and the binaries of Triton's
kernels; the kernels in C++ it would compile again wherever the result is loaded. So a payload here
is Inductor's own and the libraries beside it, and to load it takes neither a compiler nor anything
in Inductor's caches. What of this machine the code was made for, `digest_of_compiler` says.
"""

from __future__ import annotations

import atexit
import copy
import hashlib
import os
import pickle
import pkgutil
import platform
import re
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing

from partita.comm.device import describe_hardware
from partita.comm.graph_collectives import ALL_TO_ALL, all_to_all

from ..capture.fakes import fake_mode_of
from ..memory.codegen_memory import code_of
from ..node_metadata import NOTE
from ..program import Program
from .artifact_slimming import is_whole, lighter, without_compiler, without_input_checks
from .constants import constants_as_inputs, constants_of
from .file_trust import Untrusted, check_folder
from .sections import Section, SectionCall
from .stale_library_cleanup import without_unfinished

__all__ = ["CONFIG", "compiled", "digest_of_compiler", "load", "load_boxed", "use_private_cache"]

Call = Callable[..., Sequence[torch.Tensor]]

CONFIG: dict[str, Any] = {
    # Random numbers are drawn by torch's own kernels, so that they are those of eager.
    "fallback_random": True,
    # Code asks how many threads there are, so that one artifact serves any number. Its loops are
    # cut as for 16: for one, Inductor would have each thread do what one of them is to do.
    "cpp.dynamic_threads": True,
    "cpp.threads": 16,
    # The order is that of the passes, which know what holds the memory
    # (`inductor_scheduling.InOrder`).
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}
"""What Inductor is asked for. All of it is in the name of an artifact: plain values only. And one
rank compiles while others wait: nothing that has ranks talk to each other (spmd_check, estimates
that are aligned between ranks, distributed autotuning)."""

_aten = torch.ops.aten

_FORMAT = 4  # of a payload
# Of how a graph is compiled, and of what is said of its memory.
_PARTS = (
    *("backend/inductor.py", "backend/constants.py", "backend/artifact_slimming.py"),
    *("backend/inductor_scheduling.py", "ordering.py"),
    *("memory/codegen_memory.py", "memory/workspace.py", "backend/sections.py", "backend/cut.py"),
)
# Settings that say where and how fast something is compiled, not what.
_ELSEWHERE = re.compile(
    r"(_dir|path)$|cache|debug|^trace|log|worker|compile_threads|cpp\.(cxx|threads)$"
)


def compiled(
    program: Program | Section, noted: Callable[[list[str]], None]
) -> tuple[Call, bytes | None]:
    """A function of the program's inputs and constants that gives its outputs; what `load` takes.

    The latter is None, with a warning, where this torch cannot say it.

    Args:
        noted: is given what Inductor generated.

    Raises:
        Exception: whatever Inductor does where it cannot compile.
    """
    from .inductor_scheduling import mark

    graph = copy.deepcopy(program.graph)
    constants_as_inputs(graph)
    for node in graph.graph.nodes:
        mark(node)
        node.meta.pop(NOTE, None)
        if node.target is _aten.view.dtype and node.meta["val"].dtype is torch.bool:
            # Of bytes, as which groups carry bools: Inductor's vectors of them do not compile.
            node.target, node.args = _aten.ne.Scalar, (node.args[0], 0)
        if node.target is _aten._assert_async.default:
            # Only where a graph cannot be cut. Without a text, torch.fx drops it.
            said = "Expected Tensor with single nonzero value, but got zero"
            node.target, node.args = _aten._assert_async.msg, (*node.args, said)
        if node.target is all_to_all:
            # Of torch's own, Inductor knows that what is sent is read until it is waited for.
            x, n, name = node.args
            even = [node.meta["val"].shape[0] // n] * n
            node.target = ALL_TO_ALL
            node.args = (x, even, even, name)
        if node.target is _aten.bernoulli.p and not node.users:
            warnings.warn(
                "Inductor does not draw a dropout that nobody reads: what is drawn behind it is "
                'other than in eager; with backend="graph" it is the same',
                stacklevel=2,
            )
    examples: list[Any] = list(program.example())
    mode = fake_mode_of(examples)
    examples += map(mode.from_tensor, constants_of(program.graph))
    use_private_cache()
    with ExitStack() as stack:
        _silence_torch(stack)
        stack.enter_context(without_unfinished())
        stack.enter_context(tracing(TracingContext(mode)))
        _configure_inductor(stack, program.key)
        libraries = stack.enter_context(_record_libraries())
        code = stack.enter_context(code_of())
        # Private torch, though vLLM stands on it: the one way to a result that can be saved.
        artifact: Any = torch._inductor.standalone_compile(
            graph, examples, dynamic_shapes="from_tracing_context", aot=True
        )
        noted(code())
        try:
            saved = artifact.serialize()
            if _is_looked_at(program):
                saved = without_input_checks(saved)
            whole = is_whole(saved)
            parts = _FORMAT, lighter(saved), libraries(), whole
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            warnings.warn(f"a compiled program cannot be saved: {text}", stacklevel=2)
            return artifact, None
    payload = zlib.compress(pickle.dumps(parts), 1)
    return (load(payload) if whole else artifact), payload


# Whose shapes and strides are looked at before a call: by a call's guards and signature.
_LOOKED_AT = frozenset(
    "parameter buffer optimizer value argument gradient number coordinate".split()
)


def _is_looked_at(program: Program | Section) -> bool:
    return isinstance(program, Program) and all(i.kind in _LOOKED_AT for i in program.inputs)


def load_boxed(payload: bytes) -> SectionCall:
    """As `load`, but a function of a list, which it empties.

    So what it reads last can be gone when it has read that. Private torch: the function that
    Inductor generated is called itself, not by what would give outputs that are views of inputs,
    or inputs that are written, their places in autograd. Sections have none.
    """
    _, code, _ = _load_payload(payload)
    call: SectionCall = code.current_callable
    return call


def load(payload: bytes) -> Call:
    """What `compiled` has made, maybe in another process, from what it gave.

    The payload is run: it must come from where only the user can have put it.

    Raises:
        Exception: any, where it is not for this torch or this machine.
    """
    call, code, whole = _load_payload(payload)
    return (lambda *inputs: code.current_callable([*inputs])) if whole else call


def _load_payload(payload: bytes) -> tuple[Call, Any, bool]:
    """What torch has of a payload; Inductor's object within it; and whether its code is all."""
    number, result, libraries, whole = pickle.loads(zlib.decompress(payload))
    if number != _FORMAT:
        raise ValueError(f"its format is {number}, not {_FORMAT}")
    use_private_cache()
    seen: list[Any] = []
    with ExitStack() as stack:
        _silence_torch(stack)
        stack.enter_context(_provide_libraries(libraries))
        stack.enter_context(without_compiler(seen.append))
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        call: Call = AOTCompiledArtifact.deserialize(result)
    (code,) = seen
    return call, code, whole


def digest_of_compiler(devices: set[torch.device]) -> str:
    """What decides what code is made of a program, besides the program: 16 hexadecimal digits.

    The machine and its processor, versions, and how Inductor is set; on a GPU also its number. Not
    in it: how many threads there are, where files are, what the host is called.
    """
    from torch._inductor import config

    lines = [
        f"format {_FORMAT}, torch {torch.__version__} {torch.version.git_version}",
        f"{sys.implementation.cache_tag} {sys.platform} {platform.machine()}",
        f"processor {torch.backends.cpu.get_cpu_capability()} {_find_cpu_features()}",
        *(f"{name} = {value!r}" for name, value in sorted(CONFIG.items())),
        # As files: to import what has a part in compiling is to import the compiler.
        *(f"{name} {_digest_of_file(name)}" for name in _PARTS),
    ]
    # How the user has set it besides, in code or by environment variables.
    for name, value in sorted(config.save_config_portable().items()):
        if name not in CONFIG and not _ELSEWHERE.search(name):
            lines.append(re.sub(" at 0x[0-9a-f]+", "", f"{name} = {value!r}"))
    for device in sorted(devices, key=str):
        if hardware := describe_hardware(device):  # its number stands in generated code
            lines.append(hardware)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _digest_of_file(name: str) -> str:
    return hashlib.sha256(pkgutil.get_data("partita.compile", name) or b"").hexdigest()


def _find_cpu_features() -> str:
    """What the processor can do: C++ is compiled for all of it, not for its vector units alone."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


# -- how torch is set ------------------------------------------------------------------------------


def use_private_cache() -> None:
    """Have Inductor keep its files where nobody else could have put any: it runs what is there.

    Its own folder is one of a known name in /tmp, which whoever came first may have made.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.makedirs(default_cache_dir(), mode=0o700, exist_ok=True)
    folder = cache_dir()
    try:
        check_folder(Path(folder))
    except Untrusted as problem:
        own = tempfile.mkdtemp(prefix="partita-inductor-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own
        warnings.warn(f"Inductor's files in {folder} are not used: {problem}", stacklevel=3)


def _silence_torch(stack: ExitStack) -> None:
    stack.enter_context(torch.no_grad())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about itself


def _configure_inductor(stack: ExitStack, key: str) -> None:
    import torch._functorch.config as functorch
    from torch._inductor import config

    from .inductor_scheduling import Choices, InOrder

    stack.enter_context(config.patch(CONFIG))
    hooks = {"_post_fusion_custom_pass": InOrder(), "inductor_choices_class": Choices}
    stack.enter_context(config.patch(hooks))
    # Should torch find a result of its own, then of this program and not of one that looks like it.
    stack.enter_context(torch.compiler.config.patch(cache_key_tag=key))  # type: ignore[attr-defined]
    if hasattr(functorch, "bypass_autograd_cache_key"):
        # What torch cannot name in its own cache it would not let us save.
        stack.enter_context(functorch.patch(bypass_autograd_cache_key=True))


# -- libraries of C++ kernels ----------------------------------------------------------------------
# Private torch: generated code has each by `AsyncCompile.cpp_pybinding`, of types and a source.


@contextmanager
def _record_libraries() -> Iterator[Callable[[], dict[str, bytes]]]:
    """Within, the libraries that are compiled are noted; what is given reads them."""
    made: dict[str, Any] = {}

    def note(compile: Any, self: Any, argtypes: list[str], source: str) -> Any:
        made[_name(argtypes, source)] = found = compile(self, argtypes, source)
        return found

    def libraries() -> dict[str, bytes]:
        # Each is a function, or the promise of one, in an extension module of its own.
        kernels = {k: f.result() if hasattr(f, "result") else f for k, f in made.items()}
        return {k: Path(f.__self__.__file__).read_bytes() for k, f in kernels.items()}

    with _kernels_by(note):
        yield libraries


@contextmanager
def _provide_libraries(libraries: dict[str, bytes]) -> Iterator[None]:
    """Within, these libraries are loaded where they would be compiled."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with tempfile.TemporaryDirectory(dir=cache_dir(), ignore_cleanup_errors=True) as folder:

        def provide(compile: Any, self: Any, argtypes: list[str], source: str) -> Any:
            name = _name(argtypes, source)
            if name not in libraries:
                return compile(self, argtypes, source)
            path = Path(folder, name + ".so")
            path.write_bytes(libraries[name])
            # A library that is mapped needs no file.
            return CppPythonBindingsCodeCache._load_library(str(path), name).kernel

        with _kernels_by(provide):
            yield


@contextmanager
def _kernels_by(have: Callable[..., Any]) -> Iterator[None]:
    from torch._inductor.async_compile import AsyncCompile

    compile = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = lambda *args: have(compile, *args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = compile  # type: ignore[method-assign]


def _name(argtypes: Sequence[str], source: str) -> str:
    return "partita_" + hashlib.sha256(repr((list(argtypes), source)).encode()).hexdigest()[:40]
