"""What `make house` counts is held: circles of imports, names of types, backends, docstrings."""

from __future__ import annotations

import ast
import importlib.util
import re
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
    assert len(arrows) > 300 and any(arrows.values())
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


def test_a_type_name_means_one_thing(house, modules):
    assert house.types_defined_twice([m for m in modules if m.is_runtime]) == []


def test_only_the_room_of_backends_names_one(house, modules):
    assert house.files_that_name_a_backend([m for m in modules if m.is_runtime]) == []


def test_what_is_public_says_what_it_is(house, modules):
    assert house.names_without_docstring(modules) == []


def test_a_room_lists_its_files_in_reading_order(modules):
    stated_elsewhere = ("rules/table", "rules/decompositions", "compile/passes", "bench")
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


def test_what_tests_share_stands_in_no_test():
    found = list(imports_of_tests())
    assert len(found) > 1000
    assert [f for f in found if takes_from_a_test(*f[1:])] == []


def takes_from_a_test(module, name):
    """Is the module, or what is imported of it, a test module?"""
    return any(part.startswith("test_") for part in [*module.split("."), name])


def test_an_import_of_a_test_is_found_in_each_form():
    assert takes_from_a_test("tests.ranks.test_zero", "")
    assert takes_from_a_test("tests.ranks.test_zero", "model_of")
    assert takes_from_a_test("tests.ranks", "test_zero")
    assert not takes_from_a_test("tests.programs.steps", "squares")


def test_tests_import_no_private_name_of_the_package():
    def is_private(name):
        return name.startswith("_") and not name.startswith("__")

    ours = [f for f in imports_of_tests() if f[1].split(".")[0] == "partita"]
    assert len(ours) > 100
    parts = {f: [*f[1].split("."), f[2]] for f in ours}
    assert [f for f, names in parts.items() if any(map(is_private, names))] == []
