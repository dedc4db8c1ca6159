"""The house in figures: `make house`. What its newcomers meet, counted in the code as it stands.

files and lines     of the runtime, without comments and docstrings
circles             of files that import one another, within a room or between rooms
names               functions named by one word, types that are defined twice
an addition         files of tensor/ and comm/ that `x + y` runs through, found and planned
its arguments       files that are given x or y as it is planned; returns to one; their names
lists               written by hand, of torch's functions, outside of the table of corrections
backends            files that name one, outside of comm/backends/
docstrings          that public names lack
rooms of a step     raw lines of graph, capture, guards and compile; imports that point up
"""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "partita"
NOT_RUNTIME = ("app", "cli", "__main__", "bench", "testing")
"""The app, what measures and what tests: the runtime never imports them."""
BACKENDS = re.compile(r"\b(gloo|nccl)\b", re.IGNORECASE)
DEVICES = ("cpu", "cuda", "gloo", "nccl", "xpu", "mps")
NAMES_DEVICES = ("comm/device.py", "comm/backends/")
"""Where what depends on a device is decided."""
CORRECTIONS = (
    "tensor/op_facts.py",
    "rules/table/",
    "rules/decompositions.py",
)
"""Where functions of torch are listed: the corrections of their facts, and the rules."""


@dataclass(frozen=True)
class Module:
    """A file of the package.

    Attributes:
        path: below the package, "tensor/spec.py".
        text: of the file.
    """

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """As it is imported."""
        dotted = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return "partita" if dotted == "__init__" else f"partita.{dotted}"

    @property
    def is_runtime(self) -> bool:
        return not any(
            self.path == f"{room}.py" or self.path.startswith(f"{room}/") for room in NOT_RUNTIME
        )

    def definitions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node


def read_modules() -> list[Module]:
    """All files of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [Module(str(p.relative_to(PACKAGE)), p.read_text()) for p in paths]


# -- lines -----------------------------------------------------------------------------------------


def count_lines_of_code(module: Module) -> int:
    """Lines that hold something else than a comment or a docstring."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENCODING, tokenize.ENDMARKER}  # fmt: skip
    told = set()
    for node in ast.walk(module.tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                told |= set(range(child.lineno, (child.end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - told)


# -- circles ---------------------------------------------------------------------------------------


def imports_of(module: Module, names: set[str]) -> set[str]:
    """The modules of the package that it imports: as it is loaded, later, or for its types alone. A
    reader follows them all. What a room's `__init__` offers counts as the room's."""
    package = module.name if module.path.endswith("__init__.py") else module.name.rpartition(".")[0]
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            continue
        start = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*(start if node.level else []), *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if alias.name != "_hot_path":  # a library in C imports nothing
                found.add(inner if inner in names else base)
    return (found & names) - {module.name}


def find_circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected parts of more than one (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(at: str) -> None:
        order[at] = low[at] = len(order)
        stack.append(at)
        for to in sorted(arrows[at]):
            if to not in order:
                visit(to)
                low[at] = min(low[at], low[to])
            elif to in stack:
                low[at] = min(low[at], order[to])
        if low[at] == order[at]:
            part = stack[stack.index(at) :]
            del stack[stack.index(at) :]
            if len(part) > 1:
                found.append(sorted(part))

    sys.setrecursionlimit(10_000)
    for name in sorted(arrows):
        if name not in order:
            visit(name)
    return found


# -- names -----------------------------------------------------------------------------------------


def one_word_functions(modules: list[Module]) -> tuple[int, int]:
    """How many functions are named by one word, and of how many; `__add__` is not counted."""
    names = [
        node.name.strip("_")
        for module in modules
        for node in module.definitions()
        if not isinstance(node, ast.ClassDef) and not node.name.startswith("__")
    ]
    return sum("_" not in name for name in names), len(names)


def types_defined_twice(modules: list[Module]) -> list[str]:
    """Names that several classes bear."""
    count = Counter(
        node.name for m in modules for node in m.definitions() if isinstance(node, ast.ClassDef)
    )
    return sorted(f"{name} x{n}" for name, n in count.items() if n > 1)


# -- an addition -----------------------------------------------------------------------------------


def files_of_an_addition() -> tuple[list[str], list[str]]:
    """The files of tensor/ and comm/ that `x + y` runs through: with a plan at hand, and without.

    In the Python of the hot path: in C, a call whose plan is at hand runs through none.
    """
    import torch

    import partita as pt

    def run(mesh: Any) -> tuple[list[str], list[str]]:
        x = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        y = pt.distribute_tensor(torch.ones(4, 4), mesh, [pt.Shard(0)])
        missed = _files_run(lambda: x + y)
        x + y
        return _files_run(lambda: x + y), missed

    with pt.ranks(dp=2) as world:
        return world.run(run)[0]


def _files_run(call: Callable[[], Any]) -> list[str]:
    seen: set[str] = set()

    def note(frame: Any, event: str, arg: Any) -> None:
        seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    below = [Path(f).relative_to(PACKAGE) for f in seen if Path(f).is_relative_to(PACKAGE)]
    return sorted(str(f) for f in below if f.parts[0] in ("tensor", "comm"))


@dataclass(frozen=True)
class WayOfArguments:
    """Where the operands of one call go until it is planned and done.

    Attributes:
        files: that have a function to which one is given, alone or in a tuple, list or dictionary.
        returns: how often a call leads back into one of these files that another has left.
        names: that parameters have which are given one.
    """

    files: list[str]
    returns: int
    names: list[str]


def follow_arguments() -> WayOfArguments:
    """The way of the operands of a first `x + y`, as it runs."""
    import torch

    import partita as pt

    def run(mesh: Any) -> WayOfArguments:
        x, y = (pt.distribute_tensor(torch.ones(4, 5), mesh, [pt.Shard(0)]) for _ in range(2))
        given = {id(x), id(y)}
        visited: list[str] = []
        names: set[str] = set()

        def holds(value: Any) -> bool:
            if type(value) in (tuple, list):
                return any(map(holds, value))
            return any(map(holds, value.values())) if type(value) is dict else id(value) in given

        def note(frame: Any, event: str, arg: Any) -> None:
            code = frame.f_code
            if event != "call" or not Path(code.co_filename).is_relative_to(PACKAGE):
                return
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
            found = [n for n in parameters if n in frame.f_locals and holds(frame.f_locals[n])]
            if found:
                names.update(found)
                visited.append(str(Path(code.co_filename).relative_to(PACKAGE)))

        sys.setprofile(note)
        try:
            x + y
        finally:
            sys.setprofile(None)
        seen: set[str] = set()
        returns = 0
        for before, now in zip(["", *visited], visited, strict=False):
            returns += now != before and now in seen
            seen.add(now)
        return WayOfArguments(sorted(seen), returns, sorted(names))

    with pt.ranks(dp=2) as world:
        return world.run(run)[0]


# -- lists, backends, docstrings -------------------------------------------------------------------


def lists_of_functions(modules: list[Module]) -> list[str]:
    """Lists, sets, tables and texts of names at the top of a module, of which two or more are
    functions of torch; of a text more than half."""
    found = []
    for module in modules:
        if module.path.startswith(CORRECTIONS):
            continue
        for node in module.tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            if any(_count_functions(n) > 1 for n in ast.walk(node.value)):
                found.append(f"{module.path}:{node.lineno}")
    return found


def _count_functions(node: ast.AST) -> int:
    """How many functions of torch's a list, a set, a table or a text of names holds."""
    match node:
        case (
            ast.Dict(keys=inner)
            | ast.List(elts=inner)
            | ast.Tuple(elts=inner)
            | ast.Set(elts=inner)
        ):
            texts = [ast.unparse(one) for one in inner if isinstance(one, ast.Attribute)]
            return sum(map(_is_function, texts))
        case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(names)))):
            found = sum(map(_is_name_of_function, names.split()))
            return found if found > len(names.split()) / 2 else 0
    return 0


_SHORT = {"_aten": "torch.ops.aten", "F": "torch.nn.functional", "T": "torch.Tensor"}
"""What modules call the homes of torch's functions."""


def _is_function(text: str) -> bool:
    """Is it a function of torch's, as `torch.add` or `_aten.add.Tensor`, and no type?"""
    import torch

    home, _, path = text.partition(".")
    found: Any = torch if home == "torch" else None
    if home in _SHORT:
        path, found = f"{_SHORT[home]}.{path}".removeprefix("torch."), torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return callable(found) and not isinstance(found, type)


def _is_name_of_function(name: str) -> bool:
    import torch

    homes = (torch.Tensor, torch, torch.nn.functional)
    return any(callable(getattr(home, name, None)) for home in homes) or (
        not name.startswith("__") and name in dir(torch.ops.aten)
    )


def files_that_name_a_backend(modules: list[Module]) -> list[str]:
    return [
        m.path
        for m in modules
        if BACKENDS.search(m.text) and not m.path.startswith("comm/backends/")
    ]


def lines_that_name_a_device(modules: list[Module]) -> list[str]:
    """Where code, of whatever room but what tests, decides by the kind of a device, or for one."""
    return [
        f"{m.path}:{node.lineno}"
        for m in modules
        if not m.path.startswith(("testing/", *NAMES_DEVICES))
        for node in ast.walk(m.tree)
        if _names_a_device(node)
    ]


def _names_a_device(node: ast.AST) -> bool:
    """Is it the name of a device or of a backend ("cpu", "cuda:0", "cpu:gloo"; "CUDA" and
    `DeviceType.CUDA`, as C++ has them), a question which device a tensor is on (`x.is_cuda`), or a
    call for one (`torch.cuda.device_count()`, `x.cpu()`)?

    Lists of what torch has, `torch.cuda.random` among others, are no decision.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " " not in node.value and node.value.split(":")[0].lower() in DEVICES
    if isinstance(node, ast.Attribute):
        in_cpp = node.attr.isupper() and node.attr.lower() in DEVICES
        return in_cpp or node.attr in {f"is_{kind}" for kind in DEVICES}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        home = ast.unparse(node.func.value)
        return node.func.attr in DEVICES or home in {f"torch.{kind}" for kind in DEVICES}
    return False


def names_without_docstring(modules: list[Module]) -> list[str]:
    """What `partita` and its public classes offer that says nothing of itself."""
    import torch

    import partita as pt

    found = []
    for name in pt.__all__:
        value = getattr(pt, name)
        if not (getattr(value, "__doc__", None) or "").strip():
            found.append(name)
        if isinstance(value, type) and value.__module__.startswith("partita"):
            for key, member in vars(value).items():
                of_torch = getattr(member, "__objclass__", None) is torch._C.TensorBase
                shown = callable(member) or (isinstance(member, property) and not of_torch)
                if not key.startswith("_") and shown:
                    found += [] if inspect.getdoc(getattr(value, key)) else [f"{name}.{key}"]
    return found


# -- the rooms of a compiled step ------------------------------------------------------------------

STEP_ROOMS = ("graph", "capture", "guards", "compile")
"""From the bottom."""


def count_raw_lines(modules: list[Module]) -> dict[str, int]:
    """By room of a compiled step, the lines of its files, with comments and docstrings."""
    return {
        room: sum(m.text.count("\n") for m in modules if m.path.startswith(f"{room}/"))
        for room in STEP_ROOMS
    }


def find_upward_imports(arrows: dict[str, set[str]]) -> list[str]:
    """The imports of a room of a compiled step from one above it."""

    def height(name: str) -> int:
        room = name.removeprefix("partita.").partition(".")[0]
        return STEP_ROOMS.index(room) if room in STEP_ROOMS else -1

    pairs = ((name, to) for name, found in arrows.items() for to in found)
    return sorted(f"{a} {b}" for a, b in pairs if 0 <= height(a) < height(b))


def find_flags_of_captures(modules: list[Module]) -> list[str]:
    """The places in other rooms that read an attribute of the trace hooks, and call no method."""
    others = [m for m in modules if m.is_runtime and not m.path.startswith(STEP_ROOMS)]
    return [f"{m.path} {flag}" for m in others for flag in _FLAG.findall(m.text)]


_FLAG = re.compile(r"HERE\.trace\.\w+\b(?!\()")


# -- the page --------------------------------------------------------------------------------------


def check_checkout(imported: str | Path) -> None:
    """Raises RuntimeError if the package that runs is not the one that is read.

    Args:
        imported: `partita.__file__`.
    """
    if not Path(imported).resolve().is_relative_to(PACKAGE.resolve()):
        raise RuntimeError(
            f"{imported} is imported, but the figures are to be of {PACKAGE}: "
            f"run it with PYTHONPATH={PACKAGE.parent}"
        )


def main() -> int:
    # Before partita is imported, which chooses its hot path then.
    os.environ["PARTITA_HOT_PATH"] = "python"
    import partita

    check_checkout(partita.__file__)
    modules = read_modules()
    runtime = [m for m in modules if m.is_runtime]
    names = {m.name for m in modules}
    arrows = {m.name: imports_of(m, names) for m in modules}
    circles, upward = find_circles(arrows), find_upward_imports(arrows)
    raw = count_raw_lines(modules)
    one, of = one_word_functions(runtime)
    twice = types_defined_twice(runtime)
    cached, missed = files_of_an_addition()
    way = follow_arguments()
    lists, backends = lists_of_functions(runtime), files_that_name_a_backend(runtime)
    devices = lines_that_name_a_device(modules)
    silent, flags = names_without_docstring(modules), find_flags_of_captures(modules)
    lines = sum(map(count_lines_of_code, runtime))
    rows: list[tuple[str, str, str, list[str]]] = [
        ("files of the runtime; lines of code", "~130; <= 20k", f"{len(runtime)}; {lines}", []),
        ("circles", "0", str(len(circles)), [" ".join(c) for c in circles]),
        ("functions named by one word", "<= 30 %", f"{one / of:.0%}", []),
        ("type names defined twice", "0", str(len(twice)), twice),
        ("files of a cached x + y", "<= 3", str(len(cached)), cached),
        ("files of one that is planned", "<= 6", str(len(missed)), missed),
        (
            "its arguments: files; returns; names",
            "10; 25; 30",
            f"{len(way.files)}; {way.returns}; {len(way.names)}",
            [*way.files, " ".join(way.names)],
        ),
        ("lists of functions by hand", "1 table", str(len(lists)), lists),
        ("files that name a backend", "0", str(len(backends)), backends),
        ("lines that name a device or a backend", "0", str(len(devices)), devices),
        ("public names without docstring", "0", str(len(silent)), silent),
        (
            "raw lines of the rooms of a step; capture",
            "20k; 7k",
            f"{sum(raw.values())}; {raw['capture']}",
            [f"{room} {lines}" for room, lines in raw.items()],
        ),
        ("imports between them that point up", "0", str(len(upward)), upward),
        ("flags of captures read in other rooms", "0", str(len(flags)), flags),
    ]
    for what, wanted, found, details in rows:
        print(f"{what:40} {wanted:>14} {found:>14}")
        if "-v" in sys.argv[1:]:
            for detail in details:
                print(f"    {detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
