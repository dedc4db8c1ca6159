"""C++ kernels of generated code: compiled several at a time, in the pool of Inductor's threads.

By default Inductor makes a library of each kernel when it loads the code that calls it, and waits
for it. Most of the compiler's work is then to read the same headers again. Here the kernels of
several programs are collected while these are lowered, and libraries of several kernels each are
compiled at the same time.

This uses private torch: generated code gets each kernel from `AsyncCompile.cpp_pybinding(types,
source)`, and `CppPythonBindingsCodeCache` compiles and loads it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_KERNEL = re.compile(r'extern "C"\s+void\s+kernel\(')
_INCLUDE = re.compile(r"^[ \t]*#include .*\n", re.MULTILINE)
_ALONE = re.compile(r"^[ \t]*#[ \t]*(?!include|pragma)|^[ \t]*using ", re.MULTILINE)
"""Lines that would change the kernels behind them in one file."""

_MOST_BYTES = 1 << 16
_MOST_KERNELS = 8
"""A library has at most so many kernels, and bytes of source unless it has one kernel, so that
processors share the work."""

Libraries = dict[str, tuple[bytes, list[str]]]
"""Maps the digest of each library to its file's bytes and the names of its kernels, in order."""


class KernelCompiler:
    """Compiles the C++ kernels of several programs together. A context manager.

    Example:
        with KernelCompiler() as kernels:
            for program in programs:
                with ExitStack() as stack:
                    names = kernels.collect_kernels(stack)
                    ...  # lower the program
            kernels.begin_library()
            libraries = kernels.libraries_of(names)
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._is_open = False
        self._waiting: dict[str, tuple[Sequence[str], str]] = {}
        self._library_of: dict[str, KernelLibrary] = {}

    def __enter__(self) -> KernelCompiler:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def collect_kernels(self, stack: ExitStack) -> list[str]:
        """Collects kernels instead of compiling each immediately, until `stack` is closed.

        Generated code gets a `CollectedKernel` in place of each.

        Returns:
            The names of the collected kernels. The list grows until `stack` is closed.
        """
        from torch._inductor.async_compile import AsyncCompile

        if not self._is_open:
            self._stack.enter_context(cleaning_up_libraries())
            self._is_open = True
        names = list[str]()

        def add_kernel(compiler: Any, argtypes: list[str], source: str) -> Any:
            name = name_of_kernel(argtypes, source)
            names.append(name)
            if name not in self._library_of and name not in self._waiting:
                self._add_kernel(name, argtypes, source)
            return CollectedKernel(self, name)

        set_attribute(stack, AsyncCompile, "cpp_pybinding", add_kernel)
        return names

    def _add_kernel(self, name: str, argtypes: Sequence[str], source: str) -> None:
        is_alone = _ALONE.search(source) or len(_KERNEL.findall(source)) != 1
        nbytes = sum(len(text) for _, text in self._waiting.values())
        if is_alone or nbytes + len(source) > _MOST_BYTES:
            self.begin_library()
        self._waiting[name] = argtypes, source
        if is_alone or len(self._waiting) == _MOST_KERNELS:
            self.begin_library()

    def begin_library(self) -> None:
        """Begins to compile the kernels that were collected since the last library."""
        if self._waiting:
            library = KernelLibrary(self._waiting)
            self._library_of |= dict.fromkeys(self._waiting, library)
            self._waiting = {}

    def libraries_of(self, names: Sequence[str]) -> Libraries:
        """Waits for the libraries that have the kernels `names`, and returns them.

        Raises:
            Exception: the compiler's error.
        """
        found = {id(self._library_of[name]): self._library_of[name] for name in names}
        return dict(library.read_file() for library in found.values())


@dataclass(frozen=True)
class CollectedKernel:
    """A kernel that is not compiled yet. Generated code has it in place of the compiled function.

    Attributes:
        compiler: the compiler that collected it.
        name: its name in the compiler.
    """

    compiler: KernelCompiler
    name: str

    def load_kernel(self) -> Callable[..., Any]:
        """Waits for the kernel and returns it."""
        self.compiler.begin_library()
        return load_kernels(self.compiler.libraries_of([self.name]))[self.name]


class KernelLibrary:
    """A library that a thread of Inductor's pool compiles.

    Each kernel has its own namespace, with torch's code to call it from Python.

    Args:
        kernels: maps a kernel's name to the C++ types of its arguments and its source.
    """

    def __init__(self, kernels: dict[str, tuple[Sequence[str], str]]):
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        self._names, bodies, includes = [*kernels], list[str](), dict[str, None]()
        is_one = len(kernels) == 1
        for i, (argtypes, source) in enumerate(kernels.values()):
            code = source + _write_binding(argtypes, _name_in_library(i))
            if is_one:
                bodies.append(code)
                continue
            includes |= dict.fromkeys(_INCLUDE.findall(code))
            body = _KERNEL.sub("static void kernel(", _INCLUDE.sub("", code))
            bodies.append(f"namespace {_name_in_library(i)} {{\n{body}\n}}\n")
        methods = {"cache": {}, "_load_library_inner": classmethod(_describe_library)}
        cache: Any = type("_Cache", (CppPythonBindingsCodeCache,), methods)
        source = "".join((*includes, *bodies))
        self._finish = cache.load_async(source, submit_fn=AsyncCompile.submit)

    def read_file(self) -> tuple[str, tuple[bytes, list[str]]]:
        """Waits for the library. Returns its digest, its file and the names of its kernels."""
        file = Path(self._finish().path).read_bytes()
        return hashlib.sha256(file).hexdigest()[:40], (file, self._names)


def _describe_library(cls: type, path: str, key: str) -> SimpleNamespace:
    return SimpleNamespace(path=path)


def _name_in_library(number: int) -> str:
    return f"kernel_{number}"


def _write_binding(argtypes: Sequence[str], name: str) -> str:
    """Returns torch's code of a Python module `name` with a function `name` that calls a kernel."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Torchs

    types = (argtype.replace("const ", "") for argtype in argtypes)
    given = ", ".join(f"parse_arg<{argtype}>(args, {n})" for n, argtype in enumerate(types))
    return Torchs.suffix_template.format(
        arg_len=len(argtypes),
        call_entry_func=Torchs.call_entry_function.format(given),
        entry_func=name,
        extra_parse_arg="",
    )


def name_of_kernel(argtypes: Sequence[str], source: str) -> str:
    """Returns a name that kernels share only if their C++ sources and argument types are equal."""
    return "partita_" + hashlib.sha256(repr((list(argtypes), source)).encode()).hexdigest()[:40]


def set_attribute(stack: ExitStack, owner: type, name: str, value: Any) -> None:
    """Sets the attribute `name` of the class `owner` to `value`, until `stack` is closed."""
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


# -- loading ---------------------------------------------------------------------------------------

_loaded: dict[str, dict[str, Callable[..., Any]]] = {}
"""The kernels of the libraries that were loaded: a process does not unload a library."""


def load_kernels(libraries: Libraries) -> dict[str, Callable[..., Any]]:
    """Returns the kernels of libraries, by name. Each library is loaded once in a process."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = dict[str, Callable[..., Any]]()
    for digest, (file, names) in libraries.items():
        if digest not in _loaded:
            with tempfile.TemporaryDirectory(dir=cache_dir(), ignore_cleanup_errors=True) as folder:
                # A mapped library no longer needs its file.
                path = Path(folder, f"partita_{digest}.so")
                path.write_bytes(file)
                _loaded[digest] = dict(zip(names, _load_all(path, len(names)), strict=True))
        found |= _loaded[digest]
    return found


def _load_all(path: Path, count: int) -> Iterator[Callable[..., Any]]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    for i in range(count):
        entry = {"entry_function": _name_in_library(i)}
        cache: Any = type("_Cache", (CppPythonBindingsCodeCache,), entry)
        yield getattr(cache._load_library(str(path), path.stem), _name_in_library(i))


def provide_kernels(stack: ExitStack, libraries: Libraries) -> None:
    """Makes Inductor load kernels instead of compiling them, until `stack` is closed.

    Args:
        libraries: the libraries that have the kernels. Other kernels are compiled.
    """
    from torch._inductor.async_compile import AsyncCompile

    kernels, compile = load_kernels(libraries), AsyncCompile.cpp_pybinding

    def load_or_compile(compiler: Any, argtypes: list[str], source: str) -> Any:
        found = kernels.get(name_of_kernel(argtypes, source))
        return compile(compiler, argtypes, source) if found is None else found

    set_attribute(stack, AsyncCompile, "cpp_pybinding", load_or_compile)


# -- libraries of compiles that were killed --------------------------------------------------------

_PREFIX = "partita-compiles-"


@contextmanager
def cleaning_up_libraries() -> Iterator[None]:
    """Deletes half-written libraries that killed compilations have left in torch's cache folder.

    Torch would load a half-written library as if it were complete, which crashes the process.
    Compile inside the `with` block. It holds a lock on a marker file during compilation. A marker
    without a lock belongs to a killed process. Half-written libraries that are newer than an
    unlocked marker are deleted.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    for marker in folder.glob(_PREFIX + "*"):
        _delete_stale_libraries(folder, marker)
    fd, name = tempfile.mkstemp(dir=folder)
    file = Path(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # until this process ends
        file = file.rename(folder / (_PREFIX + file.name))  # where others see it
        try:
            yield
        except BaseException:  # Ctrl-C reaches the compiler too
            _delete_incomplete(folder, file)
            raise
    finally:
        file.unlink(missing_ok=True)
        os.close(fd)


def _delete_stale_libraries(folder: Path, marker: Path) -> None:
    with suppress(OSError), marker.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its process still compiles
            return
        _delete_incomplete(folder, marker)
        marker.unlink()


def _delete_incomplete(folder: Path, marker: Path) -> None:
    """Deletes the half-written libraries that are not older than the marker."""
    with suppress(OSError):
        begin = marker.stat().st_mtime
        for library in folder.glob("*/*.so"):
            with suppress(OSError):
                if library.stat().st_mtime >= begin and not _is_complete(library):
                    library.unlink()


def _is_complete(library: Path) -> bool:
    """True if a library is complete: its table of sections, which is written last, exists."""
    with library.open("rb") as file:
        header = file.read(64)
    if not header.startswith(b"\x7fELF"):  # nor is one of zeros, which a killed linker may leave
        return header.startswith(b"\xcf\xfa\xed\xfe")  # on macOS libraries are of another kind
    if len(header) < 64:
        return False
    if not header.startswith(b"\x7fELF\x02\x01"):  # not 64 bits and little-endian: unchecked
        return True
    # e_shoff, and e_shentsize and e_shnum: https://refspecs.linuxfoundation.org/elf/gabi4+
    (start,) = struct.unpack_from("<Q", header, 40)
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(start) and start + size * count <= library.stat().st_size
