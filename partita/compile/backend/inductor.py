"""Inductor: compiling a graph to machine code that another process can load.

What Inductor saves of a result is generated Python and the binaries of Triton's kernels; C++
kernels it compiles again wherever the result is loaded. So a payload here holds Inductor's result
and the libraries of its C++ kernels, and loading it takes neither a compiler nor anything in
Inductor's caches. `digest_of_compiler` identifies the machine, versions and settings that it was
made for.
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

from partita.comm.collective import ALL_TO_ALL, all_to_all
from partita.comm.device import describe_hardware

from ..capture.fakes import fake_mode_of
from ..graph_nodes import NOTE
from ..memory.codegen_memory import code_of
from ..program import Program
from ..section import Section
from .artifact_slimming import (
    remove_compiler_data,
    remove_input_checks,
    runs_by_itself,
    without_compiler,
)
from .constants import constants_as_inputs, constants_of
from .file_trust import Untrusted, check_folder
from .sections import SectionCall
from .stale_library_cleanup import cleaning_up_libraries

__all__ = [
    "CONFIG",
    "compile_program",
    "digest_of_compiler",
    "load",
    "load_boxed",
    "use_private_cache",
]

Call = Callable[..., Sequence[torch.Tensor]]

CONFIG: dict[str, Any] = {
    # Torch's own kernels draw random numbers, so that they are those of eager code.
    "fallback_random": True,
    # Code reads the number of threads at run time, so that one artifact serves any number. Its
    # loops are divided as for 16: for one thread, Inductor would have each thread do all the work.
    "cpp.dynamic_threads": True,
    "cpp.threads": 16,
    # The order is that of the passes, which know the memory peak
    # (`inductor_scheduling.InOrder`).
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}
"""Settings of Inductor, all in the digest of the compiler: plain values only. No setting may make
ranks communicate (spmd_check, estimates aligned between ranks, distributed autotuning), since one
rank compiles while others wait."""

_aten = torch.ops.aten

_FORMAT = 4  # of a payload
# Files that decide what is compiled of a graph, and the schedule of its memory.
_FILES_OF_COMPILER = (
    "versions.py",
    "compile/ordering.py",
    *(f"compile/memory/{name}.py" for name in ("codegen_memory", "workspace")),
    *(f"compile/backend/{name}.py" for name in ("artifact_slimming", "constants", "cut")),
    *(f"compile/backend/{name}.py" for name in ("inductor", "inductor_scheduling", "sections")),
)
# Settings of where and how fast something is compiled, which do not change the code.
_IRRELEVANT_SETTINGS = re.compile(
    r"(_dir|path)$|cache|debug|^trace|log|worker|compile_threads|cpp\.(cxx|threads)$"
)


def compile_program(
    program: Program | Section, note_code: Callable[[list[str]], None]
) -> tuple[Call, bytes | None]:
    """Compile a program to a function of its inputs and constants, and a payload for `load`.

    The payload is None, with a warning, where this torch cannot save the result.

    Args:
        note_code: is given the code that Inductor generated.

    Raises:
        Exception: of any kind, where Inductor cannot compile.
    """
    from .inductor_scheduling import mark

    graph = copy.deepcopy(program.graph)
    constants_as_inputs(graph)
    for node in graph.graph.nodes:
        mark(node)
        node.meta.pop(NOTE, None)
        if node.target is _aten.view.dtype and node.meta["val"].dtype is torch.bool:
            # Of bytes, as which process groups carry bools: Inductor's vector code does not
            # compile.
            node.target, node.args = _aten.ne.Scalar, (node.args[0], 0)
        if node.target is _aten._assert_async.default:
            # Only in a graph that cannot be cut. Without a message, torch.fx drops it.
            message = "Expected Tensor with single nonzero value, but got zero"
            node.target, node.args = _aten._assert_async.msg, (*node.args, message)
        if node.target is all_to_all:
            # Inductor knows of torch's own that its operand is read until it is waited for.
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
        stack.enter_context(cleaning_up_libraries())
        stack.enter_context(tracing(TracingContext(mode)))
        _configure_inductor(stack, program.key)
        libraries = stack.enter_context(_record_libraries())
        code = stack.enter_context(code_of())
        # Private torch, though vLLM relies on it: the one way to a result that can be saved.
        artifact: Any = torch._inductor.standalone_compile(
            graph, examples, dynamic_shapes="from_tracing_context", aot=True
        )
        note_code(code())
        try:
            saved = artifact.serialize()
            if _has_checked_inputs(program):
                saved = remove_input_checks(saved)
            whole = runs_by_itself(saved)
            parts = _FORMAT, remove_compiler_data(saved), libraries(), whole
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            warnings.warn(f"a compiled program cannot be saved: {text}", stacklevel=2)
            return artifact, None
    payload = zlib.compress(pickle.dumps(parts), 1)
    return (load(payload) if whole else artifact), payload


# Kinds of inputs whose shapes and strides guards and signature check before a call.
_CHECKED_KINDS = frozenset(
    "parameter buffer optimizer value argument gradient number coordinate".split()
)


def _has_checked_inputs(program: Program | Section) -> bool:
    return isinstance(program, Program) and all(i.kind in _CHECKED_KINDS for i in program.inputs)


def load_boxed(payload: bytes) -> SectionCall:
    """As `load`, but the function takes its inputs in a list, which it empties to free them early.

    Private torch: the function that Inductor generated is called directly, without the runtime that
    handles outputs that are views of inputs, and inputs that are written. Sections have none.
    """
    _, code, _ = _load_payload(payload)
    call: SectionCall = code.current_callable
    return call


def load(payload: bytes) -> Call:
    """The function of a payload that `compile_program` has made, maybe in another process.

    The payload is executed: it must come from a file that only this user can have written.

    Raises:
        Exception: of any kind, where it is not for this torch or this machine.
    """
    call, code, whole = _load_payload(payload)
    return (lambda *inputs: code.current_callable([*inputs])) if whole else call


def _load_payload(payload: bytes) -> tuple[Call, Any, bool]:
    """Torch's function of a payload; its `CompiledFxGraph`; whether that runs by itself."""
    version, result, libraries, whole = pickle.loads(zlib.decompress(payload))
    if version != _FORMAT:
        raise ValueError(f"its format is {version}, not {_FORMAT}")
    use_private_cache()
    loaded: list[Any] = []
    with ExitStack() as stack:
        _silence_torch(stack)
        stack.enter_context(_provide_libraries(libraries))
        stack.enter_context(without_compiler(loaded.append))
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        call: Call = AOTCompiledArtifact.deserialize(result)
    (code,) = loaded
    return call, code, whole


def digest_of_compiler(devices: set[torch.device]) -> str:
    """A digest of all that decides, besides the program, what code is made of it: 16 hex digits.

    The machine and its processor, versions, Inductor's settings, and on a GPU its index. Not the
    number of threads, paths or the host's name.
    """
    from torch._inductor import config

    lines = [
        f"format {_FORMAT}, torch {torch.__version__} {torch.version.git_version}",
        f"{sys.implementation.cache_tag} {sys.platform} {platform.machine()}",
        f"processor {torch.backends.cpu.get_cpu_capability()} {_find_cpu_features()}",
        *(f"{name} = {value!r}" for name, value in sorted(CONFIG.items())),
        # Read as files: importing them would import the compiler.
        *(f"{name} {_digest_of_file(name)}" for name in _FILES_OF_COMPILER),
    ]
    # Settings of the user, in code or by environment variables.
    for name, value in sorted(config.save_config_portable().items()):
        if name not in CONFIG and not _IRRELEVANT_SETTINGS.search(name):
            lines.append(re.sub(" at 0x[0-9a-f]+", "", f"{name} = {value!r}"))
    for device in sorted(devices, key=str):
        if hardware := describe_hardware(device):  # generated code has the device's index
            lines.append(hardware)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _digest_of_file(name: str) -> str:
    return hashlib.sha256(pkgutil.get_data("partita", name) or b"").hexdigest()


def _find_cpu_features() -> str:
    """The processor's features: C++ is compiled for all of them, not for its vector units alone."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


# -- how torch is set ------------------------------------------------------------------------------


def use_private_cache() -> None:
    """Have Inductor use a cache folder that only this user can write to: it executes files of it.

    Its default is a folder of a known name in /tmp, which another user may have made first.
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
    from torch._inductor.virtualized import V

    from .inductor_scheduling import Choices, InOrder

    # A thread keeps the choices of its first compile, whatever the setting says then: the setting
    # is for the cache's keys alone. Before it is made, so that the user's are there again after.
    stack.enter_context(V.set_choices_handler(Choices()))
    stack.enter_context(config.patch(CONFIG))
    hooks = {"_post_fusion_custom_pass": InOrder(), "inductor_choices_class": Choices}
    stack.enter_context(config.patch(hooks))
    # A result in torch's own cache then is of this program, not of one that looks like it.
    stack.enter_context(torch.compiler.config.patch(cache_key_tag=key))  # type: ignore[attr-defined]
    if hasattr(functorch, "bypass_autograd_cache_key"):
        # Torch does not save a result that it has no cache key for.
        stack.enter_context(functorch.patch(bypass_autograd_cache_key=True))


# -- libraries of C++ kernels ----------------------------------------------------------------------
# Private torch: generated code gets each kernel of `AsyncCompile.cpp_pybinding(types, source)`.


@contextmanager
def _record_libraries() -> Iterator[Callable[[], dict[str, bytes]]]:
    """Within, compiled libraries are kept; yields a function that returns their bytes by name."""
    made: dict[str, Any] = {}

    def note(compile: Any, self: Any, argtypes: list[str], source: str) -> Any:
        made[_name_of_library(argtypes, source)] = found = compile(self, argtypes, source)
        return found

    def libraries() -> dict[str, bytes]:
        # Each kernel is a function, or a future of one, of an extension module of its own.
        kernels = {k: f.result() if hasattr(f, "result") else f for k, f in made.items()}
        return {k: Path(f.__self__.__file__).read_bytes() for k, f in kernels.items()}

    with _patch_kernel_compiler(note):
        yield libraries


@contextmanager
def _provide_libraries(libraries: dict[str, bytes]) -> Iterator[None]:
    """Within, these libraries are loaded instead of compiled."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with tempfile.TemporaryDirectory(dir=cache_dir(), ignore_cleanup_errors=True) as folder:

        def provide(compile: Any, self: Any, argtypes: list[str], source: str) -> Any:
            name = _name_of_library(argtypes, source)
            if name not in libraries:
                return compile(self, argtypes, source)
            path = Path(folder, name + ".so")
            path.write_bytes(libraries[name])
            # A mapped library no longer needs its file.
            return CppPythonBindingsCodeCache._load_library(str(path), name).kernel

        with _patch_kernel_compiler(provide):
            yield


@contextmanager
def _patch_kernel_compiler(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within, `replacement(compile, self, types, source)` gives C++ kernels."""
    from torch._inductor.async_compile import AsyncCompile

    compile = AsyncCompile.cpp_pybinding
    AsyncCompile.cpp_pybinding = lambda *args: replacement(compile, *args)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.cpp_pybinding = compile  # type: ignore[method-assign]


def _name_of_library(argtypes: Sequence[str], source: str) -> str:
    return "partita_" + hashlib.sha256(repr((list(argtypes), source)).encode()).hexdigest()[:40]
