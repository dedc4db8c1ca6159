"""What `make house` counts is held: circles of imports, names of types, backends, docstrings."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_PATH = Path(__file__).parents[2] / "bench" / "house.py"


@pytest.fixture(scope="module")
def house():
    spec = importlib.util.spec_from_file_location("house", _PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["house"] = module  # where its dataclasses look for their annotations
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules["house"]


@pytest.fixture(scope="module")
def modules(house):
    return house.read_modules()


@pytest.mark.slow
def test_no_files_import_one_another_in_a_circle(house, modules):
    names = {m.name for m in modules}
    arrows = {m.name: house.imports_of(m, names) for m in modules}
    assert len(arrows) > 100 and any(arrows.values())
    assert house.find_circles(arrows) == []


def test_a_circle_is_found(house):
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert [sorted(circle) for circle in house.find_circles(arrows)] == [["a", "b", "c"]]


def test_what_is_against_the_house_is_found(house):
    one = house.Module("comm/one.py", "class Wire: ...\nKIND = 'gloo'\n")
    other = house.Module("comm/backends/other.py", "class Wire: ...\nKIND = 'gloo'\n")
    assert one.is_runtime and other.is_runtime
    assert house.types_defined_twice([one, other]) == ["Wire x2"]
    assert house.files_that_name_a_backend([one, other]) == ["comm/one.py"]


def test_figures_of_another_checkout_are_refused(house, tmp_path):
    import partita

    house.check_checkout(partita.__file__)
    with pytest.raises(RuntimeError, match="is imported, but the figures are to be of"):
        house.check_checkout(tmp_path / "partita" / "__init__.py")


@pytest.mark.slow
def test_files_that_a_cached_addition_runs_through_are_found():
    # In a process of its own: partita chooses its hot path as it is imported.
    env = os.environ | {"PYTHONPATH": str(_PATH.parents[1])}
    command = [sys.executable, _PATH, "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert re.search(r"files of a cached x \+ y .*[1-9]\n    tensor/dispatch.py\n", done.stdout)


@pytest.mark.slow
def test_an_import_waits_for_neither_dynamo_nor_sympy_which_captures_alone_need():
    code = "import sys, partita; assert not {'sympy', 'torch._dynamo'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_type_name_means_one_thing(house, modules):
    assert house.types_defined_twice([m for m in modules if m.is_runtime]) == []


@pytest.mark.slow
def test_what_depends_on_a_device_is_decided_in_one_place(house, modules):
    decided = (
        'if x.device.type == "cuda": ...',
        "if x.is_cuda: ...",
        "n = torch.cuda.device_count()",
        "y = x.detach().cpu()",
        "kinds = [ProfilerActivity.CUDA]",
        "state = torch.autograd.ProfilerState.CPU",
        'library.impl(name, kernel, "CUDA")',
        'mesh = f"cuda:{n}", "cpu:gloo"',
    )
    lines = ['"""On "cpu"."""', *decided, "homes = (torch.random, torch.cuda.random)"]
    one = house.Module("remat/one.py", "\n".join(lines))
    other = house.Module("comm/device.py", 'KINDS = "cpu", "cuda"\n')
    found = {f"remat/one.py:{n}" for n in range(2, 2 + len(decided))}
    assert set(house.lines_that_name_a_device([one, other])) == found
    assert house.lines_that_name_a_device(modules) == []


def test_only_the_room_of_backends_names_one(house, modules):
    assert house.files_that_name_a_backend([m for m in modules if m.is_runtime]) == []


def test_what_is_public_says_what_it_is(house, modules):
    assert house.names_without_docstring(modules) == []


def test_a_room_lists_its_files_in_reading_order(modules):
    stated_elsewhere = ("rules/table", "rules/decompositions", "graph/passes", "bench")
    rooms = {m.path.rpartition("/")[0]: m for m in modules if m.path.endswith("/__init__.py")}
    unlisted = []
    for m in modules:
        room, _, name = m.path.removesuffix(".py").rpartition("/")
        if room.startswith(stated_elsewhere) or not rooms.get(room) or name == "__init__":
            continue
        said = ast.get_docstring(rooms[room].tree) or ""
        if "In reading order" in said and not re.search(rf"\b{name}\b", said):
            unlisted.append(m.path)
    assert len(rooms) > 15 and unlisted == []


def test_the_readme_of_a_room_names_files_that_are_there():
    package = Path(__file__).parents[2] / "partita"
    readmes = [*package.glob("*/README.md")]
    named = [
        (readme.parent, file)
        for readme in readmes
        for file in re.findall(r"`([\w/]+\.py)`", readme.read_text())
    ]
    assert len(readmes) >= 3 and len(named) > 30
    assert [f for at, f in named if not (at / f).exists() and not (package / f).exists()] == []


def test_no_room_of_a_compiled_step_imports_one_above_it(house, modules):
    names = {m.name for m in modules}
    arrows = {m.name: house.imports_of(m, names) for m in modules}
    assert house.find_upward_imports(arrows) == []
    arrows["partita.graph.memory"] |= {"partita.capture.fakes"}
    arrows["partita.capture.tracer"] |= {"partita.guards.record"}
    assert house.find_upward_imports(arrows) == [
        "partita.capture.tracer partita.guards.record",
        "partita.graph.memory partita.capture.fakes",
    ]


def imports_of_tests():
    """Each import of a test module: its path, the module and the name that it takes."""
    tests = Path(__file__).parents[1]
    for path in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    yield path.relative_to(tests).as_posix(), node.module or "", name.name
            elif isinstance(node, ast.Import):
                for name in node.names:
                    yield path.relative_to(tests).as_posix(), name.name, ""


@pytest.mark.slow
def test_what_tests_share_stands_in_no_test():
    found = list(imports_of_tests())
    assert len(found) > 1000
    assert [f for f in found if takes_from_a_test(*f[1:])] == []


def takes_from_a_test(module, name):
    """Is the module, or what is imported of it, a test module?"""
    return any(part.startswith("test_") for part in [*module.split("."), name])


def test_an_import_of_a_test_is_found_in_each_form():
    assert takes_from_a_test("tests.parallel.test_zero", "")
    assert takes_from_a_test("tests.parallel.test_zero", "model_of")
    assert takes_from_a_test("tests.parallel", "test_zero")
    assert not takes_from_a_test("tests.programs.steps", "squares")


def is_private(name):
    """Not `__name__` nor `_name_`, which are protocols of Python's and of others'."""
    return name.startswith("_") and not name.endswith("_")


@pytest.mark.slow
def test_tests_import_no_private_name_of_the_package():
    ours = [f for f in imports_of_tests() if f[1].split(".")[0] == "partita"]
    assert len(ours) > 100
    parts = {f: [*f[1].split("."), f[2]] for f in ours}
    assert [f for f, names in parts.items() if any(map(is_private, names))] == []


def names_of_members(tree):
    """What the classes of a module call their members, and what they give `self`."""
    for kind in ast.walk(tree):
        for node in kind.body if isinstance(kind, ast.ClassDef) else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            for part in ast.walk(node):
                match part:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        yield name
                    case ast.Name(id=name, ctx=ast.Store()) if not isinstance(
                        node, ast.FunctionDef | ast.AsyncFunctionDef
                    ):
                        yield name


def homes_of_names(tree):
    """From which package each name comes that a module imports."""
    homes = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0):
                found = {n.asname or n.name: module for n in node.names}
            case ast.Import():
                found = {n.asname or n.name.split(".")[0]: n.name for n in node.names}
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=module)]
                ),
            ):
                found = {name: module}
            case _:
                continue
        homes |= {name: module.split(".")[0] for name, module in found.items()}
    return homes


def private_attributes(text, of_package):
    """Where the text of a test takes or patches a private attribute: of what it imports from the
    package, or one that a class of the package has."""
    tree = ast.parse(text)
    homes, own = homes_of_names(tree), set(names_of_members(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=base, attr=name):
                pass
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[base, ast.Constant(value=str(name)), *_],
            ) if called in ("getattr", "setattr", "hasattr", "delattr"):
                pass
            case _:
                continue
        while isinstance(base, ast.Attribute):
            base = base.value
        home = homes.get(base.id) if isinstance(base, ast.Name) else None
        known = home == "partita" or (home is None and name in of_package - own)
        if is_private(name) and known:
            yield f"{node.lineno} {ast.unparse(node)}"


@pytest.fixture(scope="module")
def of_package(modules):
    found = {name for m in modules for name in names_of_members(m.tree) if is_private(name)}
    return found - {"_apply"}  # a method that torch's own classes have, which ours implement


@pytest.mark.slow
def test_tests_take_no_private_attribute_of_the_package(of_package):
    assert {"_spec", "_history"} <= of_package and len(of_package) > 500
    tests = Path(__file__).parents[1]
    found = [
        f"{path.relative_to(tests)}:{place}"
        for path in sorted(tests.rglob("*.py"))
        for place in private_attributes(path.read_text(encoding="utf-8"), of_package)
    ]
    assert found == []


def test_a_private_attribute_is_found_in_each_form(of_package):
    def found(text):
        return [place.split(" ", 1)[1] for place in private_attributes(text, of_package)]

    assert found("x._spec.wire") == ["x._spec"]
    assert found("x._spec = 3") == ["x._spec"]
    assert found("from partita.tensor import hot_path\nhot_path._any") == ["hot_path._any"]
    assert found("plan = importlib.import_module('partita.plan')\nplan._any") == ["plan._any"]
    assert found("patch.setattr(step, '_history', 1)") == ["patch.setattr(step, '_history', 1)"]
    assert found("import torch\ntorch._spec, x._of_torch") == []
    assert found("class Own:\n    def __init__(self):\n        self._spec = 1\nx._spec") == []
