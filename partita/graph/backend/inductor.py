"""Inductor: compiles a program to machine code that other processes can load.

All ranks call `build` together, and one rank of each host compiles:
1. Each rank loads what is in the store.
2. If ranks of a host miss a program, the first of them compiles it and puts it into the store.
   Several programs are divided among the ranks, which compile at the same time. A rank lowers all
   of its programs, while a pool of workers compiles their kernels. Then it waits for the kernels.
3. The others load it. If the store does not work, they compile it themselves.

If one rank fails, all raise the same error, so that no rank waits for it. A graph is cut into
sections if that saves time, or if it checks a value: a compiler might drop the check.

Inductor itself saves generated Python and the binaries of Triton kernels, but compiles C++ kernels
again at each load. So a payload contains Inductor's result, reduced to what is needed to run, and
the libraries of its C++ kernels. Loading it needs no compiler and none of Inductor's caches.
`digest_of_compiler` identifies the machine, versions and settings that a payload was made for.
"""

from __future__ import annotations

import atexit
import copy
import functools
import hashlib
import os
import pickle
import pkgutil
import platform
import re
import shutil
import sys
import tempfile
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing

from partita.comm import Wire, gather_texts, user_line
from partita.comm.collective import ALL_TO_ALL, all_to_all
from partita.comm.device import describe_hardware
from partita.layout import Fix, LayoutError
from partita.versions import INPUT_CHECK, __version__

from ..fake_values import fake_mode_of
from ..graph_nodes import NOTE, Subgraph, checks_value, subgraph_of
from ..program import Built, Call, Program
from .codegen_memory import memory_of_code
from .cpp_kernels import CollectedKernel, KernelCompiler, provide_kernels, set_attribute
from .executor import (
    SectionCall,
    Sections,
    constants_as_inputs,
    constants_of,
    make_graph_function,
    with_constants,
)
from .section_cutter import sections_of
from .store import Artifact, Store, Untrusted, check_folder, default_store

NoteSection = Callable[[int, int], None]


def build(
    program: Program,
    what: str,
    wires: Iterable[Wire],
    sections: bool | None = None,
    note_section: NoteSection = lambda number, count: None,
) -> Built:
    """Returns a program compiled by Inductor, or loaded. All ranks of `wires` must call this.

    Args:
        program: the program, which is the same on all ranks and has its key.
        what: a title of the program, for messages.
        wires: the wires of the program's meshes.
        sections: whether to cut the program into sections: see `cut_into_sections`.
        note_section: a function to call before a section is compiled, with its number from 1 and
            the number of different sections.

    Raises:
        LayoutError: compilation failed on a rank; the error is the same on all ranks of the wires.
    """
    wires = sorted(wires, key=lambda w: -w.mesh.size())
    facts = _describe_build(program, what)
    cut = cut_into_sections(program, sections)
    if cut is not None:
        return _build_sections(program, cut, facts, wires, note_section)
    flat = program.flat()
    (built,) = build_together([_BuildRequest(flat, facts)], wires, note_section)
    code = built.metadata["code"]
    return replace(
        built,
        call=with_constants(built.call, flat.graph),
        schedule=functools.cache(lambda: memory_of_code({flat: code}, flat, None)),
    )


def cut_into_sections(program: Program, sections: bool | None) -> Sections | None:
    """Returns a program's graph cut into sections; None if it should be compiled in one piece.

    A graph that checks a value is always cut, with the check between two sections. A compiler might
    drop the check, or run it after the calls that it must prevent. If blocks are calls of sections,
    the graph is cut between these, too.

    Args:
        sections: True cuts it. False cuts it only if it checks a value. None cuts it if that saves
            compile time (`sections_of`).
    """
    nodes = program.graph.graph.nodes
    checks = any(map(checks_value, nodes))
    if sections is False and not checks:
        return None
    has_sections = any(subgraph_of(node) is not None for node in nodes)
    return sections_of(program, always=checks or has_sections or sections is True)


def _build_sections(
    program: Program,
    cut: Sections,
    facts: dict[str, Any],
    wires: Sequence[Wire],
    note_section: NoteSection,
) -> Built:
    """Builds each different section as a program of its own, and the code that calls them."""
    wanted = []
    for i, section in enumerate(cut.different):
        what = f"{facts['what']}, section {i + 1} of {len(cut.different)}"
        nodes = len(section.graph.graph.nodes)
        wanted.append(_BuildRequest(section, facts | {"what": what, "nodes": nodes}))
    built = dict(zip(cut.different, build_together(wanted, wires, note_section), strict=True))
    calls = {section: its.call for section, its in built.items()}
    sources = {section: its.metadata["code"] for section, its in built.items()}
    return replace(
        Built.of_parts(make_graph_function(cut.outer, None, calls), program.key, built.values()),
        metadata=facts,
        schedule=functools.cache(lambda: memory_of_code(sources, program, cut)),
    )


def _describe_build(program: Program, what: str) -> dict[str, Any]:
    meshes = dict.fromkeys(str(i.spec.wire.mesh) for i in program.inputs if i.spec is not None)
    return {
        "what": what,
        "mesh": ", ".join(meshes) or "one process",
        "program": program.key,
        "nodes": len(program.graph.graph.nodes),
        "torch": torch.__version__,
        "partita": __version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "system": sys.platform,
        "made": time.time(),
    }


# -- turns of the ranks ----------------------------------------------------------------------------


def build_together(
    wanted: Sequence[_BuildRequest], wires: Sequence[Wire], note_section: NoteSection
) -> list[Built]:
    """Loads or compiles programs, on all ranks of the wires together. Returns each `Built`.

    Args:
        wanted: the programs to build, equal on all ranks and in the same order.
        wires: the wires of the programs' meshes, the one with most ranks first.
        note_section: a function to call before a program is compiled, with its number from 1 and
            the number of programs.

    Raises:
        LayoutError: something could not be compiled on some rank; the same on all.
    """
    for program in wanted:
        program.attempt(program.load)
    turns = _assign_turns(wanted, wires[0]) if wires else [0] * len(wanted)
    numbers = {program: number for number, program in enumerate(wanted, 1)}
    mine = [program for program, turn in zip(wanted, turns, strict=True) if turn == 0]
    _compile_all(mine, lambda program: note_section(numbers[program], len(wanted)))
    _raise_together(wanted, wires)
    others = [program for program, turn in zip(wanted, turns, strict=True) if turn > 0]
    for program in others:
        program.attempt(program.load)
    _compile_all(others)
    _raise_together(wanted, wires)
    return [program.built for program in wanted if program.built is not None]


def _compile_all(
    programs: Iterable[_BuildRequest], note: Callable[[_BuildRequest], None] = lambda program: None
) -> None:
    """Compiles the missing programs: first lowers all, then waits for all their kernels."""
    missing = [program for program in programs if program.is_missing]
    with KernelCompiler() as kernels:
        for program in missing:
            note(program)
            program.attempt(lambda program=program: program.lower(kernels))  # type: ignore[misc]
        for program in missing:
            program.attempt(program.finish)


def _assign_turns(wanted: Sequence[_BuildRequest], wire: Wire) -> list[int]:
    """Returns this rank's turn for each program, among the ranks of the host that lack it.

    The turn is -1 if this rank has the program. The rank with turn 0 compiles it. Turns rotate from
    program to program, so that ranks compile equally many.
    """
    keys = " ".join(program.key for program in wanted)
    place = f"{_identify_host()} {keys} {wanted[0].store and wanted[0].store.folder}"
    host = int.from_bytes(hashlib.sha256(place.encode()).digest()[:7], "big")
    by_rank = wire.gather_ints(
        (host, *(int(program.is_missing) for program in wanted)), "what is compiled already"
    )
    found = []
    for i in range(len(wanted)):
        there = [r for r, (where, *missing) in enumerate(by_rank) if where == host and missing[i]]
        is_missing = wire.rank in there
        found.append((there.index(wire.rank) - i) % len(there) if is_missing else -1)
    return found


def _raise_together(wanted: Sequence[_BuildRequest], wires: Sequence[Wire]) -> None:
    """Raises the same LayoutError on all ranks if any rank has failed."""
    error = next((program.error for program in wanted if program.error is not None), None)
    text = ""
    if error is not None:
        kind = "" if isinstance(error, LayoutError) else f"{type(error).__name__}: "
        text = f"on rank {wires[0].rank if wires else 0}: {kind}{error}"
    for wire in wires:
        texts = gather_texts(text, wire, "waits for code that another rank compiles")
        text = next(filter(None, texts), "")
    if text:
        raise LayoutError(
            "compile: the program could not be compiled",
            place=user_line(),
            reason=text,
            fixes=(Fix('pt.compile(step, backend="graph")', "runs the graph as it is"),),
        ) from error


class _BuildRequest:
    """A program that this rank has to load or compile.

    Args:
        program: the program to build, or a section, which is called with a list.
        facts: metadata of the artifact.

    Attributes:
        built: the program, once it is loaded or compiled.
        error: the error of a failed attempt, after which nothing more is attempted.
        key: the key of the program and of the compiler, in the store.
    """

    def __init__(self, program: Program | Subgraph, facts: dict[str, Any]):
        self.program, self.facts = program, facts
        self.built: Built | None = None
        self.error: Exception | None = None
        self.key = ""
        self.store: Store | None = None
        self._is_boxed = isinstance(program, Subgraph)
        self._lowered: LoweredProgram | None = None
        self._seconds = 0.0
        self.attempt(self._find_key_and_store)

    def _find_key_and_store(self) -> None:
        devices = {x.device for x in self.program.example()}
        self.key = f"{self.program.key}-{digest_of_compiler(devices)}"
        self.store = default_store()

    @property
    def is_missing(self) -> bool:
        """True if the program is still to be built: it has neither been built nor failed."""
        return self.built is None and self.error is None

    def attempt(self, do: Callable[[], None]) -> None:
        """Calls `do` if the program is still missing; stores an error instead of raising it.

        Other ranks wait for this one, so all ranks raise the error later, together.
        """
        if self.is_missing:
            try:
                do()
            except Exception as error:
                self.error = error

    def load(self) -> None:
        """Loads the program from the store. Does nothing if it is not there or cannot be loaded."""
        assert self.store is not None
        found = self.store.get(self.key)
        if found is None:
            return
        begin = time.perf_counter()
        try:
            call = load(found.payload, self._is_boxed)
        except Exception as error:
            path, text = self.store.path(self.key), f"{type(error).__name__}: {error}"
            warnings.warn(f"{path} is compiled again: {text}", RuntimeWarning, stacklevel=2)
            return
        seconds = time.perf_counter() - begin
        self.built = Built(call, True, seconds, self.key, found.metadata)

    def lower(self, kernels: KernelCompiler) -> None:
        """Generates the program's code with Inductor, while its kernels are compiled."""
        begin = time.perf_counter()
        self._lowered = lower_program(self.program, kernels)
        self._seconds = time.perf_counter() - begin

    def finish(self) -> None:
        """Waits for the kernels of a lowered program, and puts the result into the store."""
        assert self.store is not None and self._lowered is not None
        begin, code = time.perf_counter(), self._lowered.code
        call, payload = self._lowered.finish()
        self._lowered = None
        if payload is not None:
            call = load(payload, self._is_boxed)
        elif self._is_boxed:
            call = _call_with_list(call)
        seconds = self._seconds + time.perf_counter() - begin
        # The code is saved too: from it, ranks that load the artifact find the section's memory
        # schedule, which depends on the inputs that their callers hold.
        metadata = self.facts | {"seconds": seconds, "code": code}
        if payload is not None:
            self.store.put(self.key, Artifact(payload, metadata))
        self.built = Built(call, False, seconds, self.key, metadata)


def _call_with_list(call: Call) -> SectionCall:
    return lambda taken: call(*taken)


def _identify_host() -> str:
    """Returns a text that is equal for processes of one machine, and for no others."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = str(uuid.getnode())
    return f"{platform.node()} {started}"


# -- compiling one program -------------------------------------------------------------------------


CONFIG: dict[str, Any] = {
    # Torch's own kernels draw random numbers, so that they are those of eager code.
    "fallback_random": True,
    # Code reads the number of threads at run time, so that one artifact serves any number. Its
    # loops are divided as for 16: for one thread, Inductor would have each thread do all the work.
    "cpp.dynamic_threads": True,
    "cpp.threads": 16,
    # The passes have already ordered the calls for a low memory peak
    # (`inductor_scheduling.UpdateOrder`).
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
}
"""Settings of Inductor, all in the digest of the compiler: plain values only. No setting may make
ranks communicate (spmd_check, estimates aligned between ranks, distributed autotuning), since one
rank compiles while others wait."""

_aten = torch.ops.aten

_FORMAT = 5  # the version of a payload's format
# Files that decide what is compiled of a graph, and the schedule of its memory.
_FILES_OF_COMPILER = (
    "versions.py",
    "graph/graph_nodes.py",  # `order_by_needs`
    "graph/memory.py",
    *(f"graph/backend/{name}.py" for name in ("codegen_memory", "cpp_kernels", "executor")),
    *(f"graph/backend/{name}.py" for name in ("inductor", "inductor_scheduling")),
    "graph/backend/section_cutter.py",
)
# Settings of where and how fast something is compiled, which do not change the code.
_IRRELEVANT_SETTINGS = re.compile(
    r"(_dir|path)$|cache|debug|^trace|log|worker|compile_threads|cpp\.(cxx|threads)$"
)


def lower_program(program: Program | Subgraph, kernels: KernelCompiler) -> LoweredProgram:
    """Returns a program or a section lowered to code by Inductor, on this rank alone.

    Args:
        kernels: compiles the C++ kernels of the code. Inductor's own workers compile others.

    Raises:
        Exception: any exception of Inductor if it cannot compile.
    """
    from torch._inductor.graph import GraphLowering

    from .inductor_scheduling import mark_origin

    graph = copy.deepcopy(program.graph)
    constants_as_inputs(graph)
    for node in graph.graph.nodes:
        mark_origin(node)
    for node in graph.graph.nodes:
        node.meta.pop(NOTE, None)
        if node.target is _aten.view.dtype and node.meta["val"].dtype is torch.bool:
            # Process groups carry bools as bytes. Inductor's vector code for this view does not
            # compile.
            node.target, node.args = _aten.ne.Scalar, (node.args[0], 0)
        if node.target is _aten._assert_async.default:
            # This occurs only in a graph that cannot be cut. Without a message, torch.fx drops it.
            message = "Expected Tensor with single nonzero value, but got zero"
            node.target, node.args = _aten._assert_async.msg, (*node.args, message)
        if node.target is all_to_all:
            # For torch's own all-to-all, Inductor keeps the operand until the wait.
            x, n, name = node.args
            even = [node.meta["val"].shape[0] // n] * n
            node.target, node.args = ALL_TO_ALL, (x, even, even, name)
        if node.target is _aten.bernoulli.p and not node.users:
            warnings.warn(
                "Inductor skips the random numbers of an unused dropout, so later random numbers "
                'differ from eager; with backend="graph" they are the same',
                stacklevel=2,
            )
    examples: list[Any] = list(program.example())
    mode = fake_mode_of(examples)
    examples += map(mode.from_tensor, constants_of(program.graph))
    use_private_cache()
    with ExitStack() as stack:
        _silence_torch(stack)
        stack.enter_context(tracing(TracingContext(mode)))
        _configure_inductor(stack, program.key)
        names, waits = kernels.collect_kernels(stack), _postpone_waits(stack)
        code: list[str] = []
        # Private torch: a hook of torch's own tests.
        set_attribute(stack, GraphLowering, "save_output_code", staticmethod(code.append))
        # Private torch, though vLLM relies on it: the one way to a result that can be saved.
        artifact: Any = torch._inductor.standalone_compile(
            graph, examples, dynamic_shapes="from_tracing_context", aot=True
        )
        result = None
        try:
            saved = artifact.serialize()
            if _has_checked_inputs(program):
                saved = remove_input_checks(saved)
            result = remove_compiler_data(saved), _runs_by_itself(saved)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            warnings.warn(f"a compiled program cannot be saved: {text}", stacklevel=2)
    return LoweredProgram(artifact, code, result, kernels, names, waits)


@dataclass
class LoweredProgram:
    """A program whose code Inductor has generated, and whose kernels are being compiled.

    Attributes:
        artifact: a function of the program's inputs and constants, once `finish` was called.
        code: the generated code.
        saved: the result in a form for the store, and whether the code can be called directly;
            None if this torch cannot save it.
        kernels, names: the compiler of the code's C++ kernels, and their names in it.
        waits: the postponed calls that wait for kernels.
    """

    artifact: Call
    code: list[str]
    saved: tuple[bytes, bool] | None
    kernels: KernelCompiler
    names: list[str]
    waits: list[Callable[[], None]]

    def finish(self) -> tuple[Call, bytes | None]:
        """Waits for the kernels. Returns the artifact, and a payload for `load` or None.

        Raises:
            Exception: any exception of a compiler.
        """
        self.kernels.begin_library()
        with ExitStack() as stack:
            _silence_torch(stack)
            if self.saved is None:
                for wait in self.waits:
                    wait()
                return self.artifact, None
            result, runs_by_itself = self.saved
            result = add_triton_kernels(result, self.waits)
        parts = _FORMAT, result, self.kernels.libraries_of(self.names), runs_by_itself
        return self.artifact, zlib.compress(pickle.dumps(parts), 1)


# Private torch: the generated code ends its imports with `AsyncCompile().wait(globals())`.


def _postpone_waits(stack: ExitStack) -> list[Callable[[], None]]:
    """Makes generated code not wait for its kernels, until `stack` is closed.

    Returns a list of the postponed waits, which grows.
    """
    from torch._inductor.async_compile import AsyncCompile

    wait, found = AsyncCompile.wait, list[Callable[[], None]]()

    def postpone(compiler: Any, scope: dict[str, Any]) -> None:
        if "__file__" in scope:
            found.append(functools.partial(_load_kernels_of_code, wait, compiler, scope))
        else:  # code that Inductor runs while it lowers
            _load_kernels_of_code(wait, compiler, scope)

    set_attribute(stack, AsyncCompile, "wait", postpone)
    return found


def _load_kernels_of_code(
    wait: Callable[[Any, dict[str, Any]], None], compiler: Any, scope: dict[str, Any]
) -> None:
    for name, kernel in scope.items():
        if isinstance(kernel, CollectedKernel):
            scope[name] = kernel.load_kernel()
    wait(compiler, scope)


def add_triton_kernels(saved: bytes, waits: Iterable[Callable[[], None]]) -> bytes:
    """Calls `waits` for Triton kernels, and returns the pickled Inductor result with them."""
    from torch._inductor.triton_bundler import TritonBundler

    TritonBundler.begin_compile()
    try:
        for wait in waits:
            wait()
        made, _ = TritonBundler.collect()
    finally:
        TritonBundler.end_compile()
    if not made.kernel_artifacts:
        return saved
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    if code._triton_bundle is not None:  # of kernels for which Inductor waited at once
        made.kernel_artifacts.extend(code._triton_bundle.kernel_artifacts)
        made.static_autotuners.extend(code._triton_bundle.static_autotuners)
    code._triton_bundle = made
    return pickle.dumps((entry, *rest))


_UNCHECKED = ("cotangent", "saved", "kept")
"""Kinds of inputs whose shapes and strides neither guards nor the signature check before a call."""


def _has_checked_inputs(program: Program | Subgraph) -> bool:
    return isinstance(program, Program) and all(i.kind not in _UNCHECKED for i in program.inputs)


def load(payload: bytes, is_boxed: bool = False) -> Call:
    """Returns the compiled function in a payload that `LoweredProgram.finish` has made.

    The payload is executed, so it must come from a file that only this user can write.

    Args:
        is_boxed: True if the function takes its inputs in a list, which it empties to free them
            early. Inductor's generated function is then called directly (private torch). This skips
            torch's runtime for outputs that are views of inputs, and for written inputs. Sections
            have neither.

    Raises:
        Exception: any exception if the payload is not for this torch or this machine.
    """
    version, result, libraries, whole = pickle.loads(zlib.decompress(payload))
    if version != _FORMAT:
        raise ValueError(f"its format is {version}, not {_FORMAT}")
    use_private_cache()
    with ExitStack() as stack:
        _silence_torch(stack)
        provide_kernels(stack, libraries)
        loaded = _keep_compiler_away(stack)
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        call: Call = AOTCompiledArtifact.deserialize(result)
    (code,) = loaded
    boxed: SectionCall = code.current_callable
    if is_boxed:
        return boxed
    return (lambda *inputs: boxed([*inputs])) if whole else call


def digest_of_compiler(devices: set[torch.device]) -> str:
    """Returns a digest (16 hex digits) of all that affects generated code besides the program.

    It covers the machine and its processor, versions, Inductor's settings, and a GPU's index. It
    does not cover the number of threads, paths or the host's name.

    Args:
        devices: the devices of the program's tensors.
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
    """Returns the processor's features, for which C++ code is compiled."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("flags", "features")):
                return " ".join(sorted(line.partition(":")[2].split()))
    except OSError:
        pass
    return platform.processor()


# -- settings of torch -----------------------------------------------------------------------------


def use_private_cache() -> None:
    """Makes Inductor keep its files, which it executes, in a folder that only this user can write.

    The default is a folder with a known name in /tmp, which another user may have made.
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
    warnings.simplefilter("ignore", DeprecationWarning)  # warnings of torch about its own code


def _configure_inductor(stack: ExitStack, key: str) -> None:
    import torch._functorch.config as functorch
    from torch._inductor import config
    from torch._inductor.virtualized import V

    from .inductor_scheduling import FusionChoices, UpdateOrder, lowering_buckets

    # A thread keeps the choices of its first compile, so they are set here; the setting is only for
    # the cache's keys. Before the setting, so that the user's choices are restored in the end.
    stack.enter_context(V.set_choices_handler(FusionChoices()))
    stack.enter_context(config.patch(CONFIG))
    if hasattr(config, "combo_kernel_max_num_args"):  # `inductor_scheduling` counts them
        stack.enter_context(config.patch(combo_kernel_max_num_args=1 << 14))
    hooks = {"_post_fusion_custom_pass": UpdateOrder(), "inductor_choices_class": FusionChoices}
    stack.enter_context(config.patch(hooks))
    stack.enter_context(lowering_buckets())
    # So torch's own cache returns results of this program only, not of a similar one.
    stack.enter_context(torch.compiler.config.patch(cache_key_tag=key))  # type: ignore[attr-defined]
    if hasattr(functorch, "bypass_autograd_cache_key"):
        # Torch does not save a result without a cache key.
        stack.enter_context(functorch.patch(bypass_autograd_cache_key=True))


# -- saving results --------------------------------------------------------------------------------

_LINES = {
    f"from torch._inductor.{theirs}\n": f"from partita.graph.backend.inductor import {ours}\n"
    for theirs, ours in (
        ("select_algorithm import extern_kernels", "extern_kernels"),
        ("codegen.memory_planning import _align as align", "align"),
    )
}
_TEXTS = ("runnable_graph_str", "inductor_post_grad_graph_str")


def remove_compiler_data(saved: bytes) -> bytes:
    """Returns a pickled result of Inductor without data for the compiler, so that it loads faster.

    Torch saves data to compile the result again, and generated code imports the compiler for a few
    names. These names are replaced (`_LINES`). This uses torch's private format. If a new torch
    writes a part differently, that part stays as it is.
    """
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    for line, ours in _LINES.items():
        code.source_code = code.source_code.replace(line, ours, 1)
    # Torch finds generated code in its cache folder by this name; the unchanged code is there, too.
    code.cache_key = "c" + hashlib.sha256(code.source_code.encode()).hexdigest()[:51]
    code.fx_kwargs.pop("get_decomp_fn", None)
    for name in _TEXTS:
        if isinstance(getattr(code, name, None), str):
            setattr(code, name, "")
    entry.aot_forward_graph_str = None
    return pickle.dumps((entry, *rest))


def remove_input_checks(saved: bytes) -> bytes:
    """Returns a pickled result of Inductor whose code does not check input shapes and strides.

    The checks are not needed, because guards check the same. In a tiny step they take as long as
    the kernels.
    """
    entry, *rest = pickle.loads(saved)
    code = entry.compiled_fw.result
    code.source_code = INPUT_CHECK.sub("", code.source_code)
    return pickle.dumps((entry, *rest))


def _runs_by_itself(saved: bytes) -> bool:
    """True if generated code can be called directly, without torch's runtime around it.

    The runtime is needed if an output is an input or a view of one, or if it must write an input.
    Private torch: the metadata of its runtime.
    """
    entry, *_ = pickle.loads(saved)
    known = entry.runtime_metadata
    try:
        return (
            entry.compiled_bw is None
            and entry.maybe_subclass_meta is None
            and not any(around.needs_post_compile for around in entry.dispatch_wrappers)
            and not (known.mutated_inp_runtime_indices or known.tokens or known.dynamic_outputs)
            and not (known.num_intermediate_bases or known.is_rng_op_functionalized)
            and known.grad_enabled_mutation is None
            and all(out.output_type.name == "non_alias" for out in known.output_info)
        )
    except AttributeError:  # of another torch
        return False


def _keep_compiler_away(stack: ExitStack) -> list[Any]:
    """Makes results load without an import of the compiler, until `stack` is closed.

    Returns a list to which each loaded `CompiledFxGraph` is added. Results with Triton kernels need
    the compiler anyway. Private torch: `FxGraphCache.cache_hit_post_compile`.
    """
    import torch._inductor.debug  # noqa: F401  each call of a result reads its trace settings
    from torch._inductor.codecache import FxGraphCache

    whole, loaded = FxGraphCache.cache_hit_post_compile, list[Any]()

    def load_ready_code(code: Any, info: Any, constants: Any) -> Any:
        bundle = code._triton_bundle
        if bundle is not None and bundle.kernel_artifacts:
            code, info = whole(code, info, constants)
        else:
            code.after_deserialization(constants)
        loaded.append(code)
        return code, info

    hook = staticmethod(load_ready_code)
    set_attribute(stack, FxGraphCache, "cache_hit_post_compile", hook)
    return loaded


class _ExternKernels:
    """Torch's functions that generated code calls. Rare ones are imported from the compiler."""

    def __getattr__(self, name: str) -> Any:
        if name in ("mm", "addmm", "bmm", "baddbmm", "convolution"):
            found = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as all_kernels

            found = getattr(all_kernels, name)
        setattr(self, name, found)
        return found


extern_kernels = _ExternKernels()


def align(nbytes: Any) -> Any:
    """Rounds `nbytes`, a size in bytes, up as Inductor does for buffers in its memory pools."""
    from torch._inductor.codegen.memory_planning import _align

    return _align(nbytes)
