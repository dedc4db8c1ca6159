"""Is the site whole? `make docs` builds it; what can be checked without its builder is, here."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import partita as pt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
ABOUT_CODE = [ROOT / "CONTRIBUTING.md", DOCS / "how_it_works.md"]
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#)([^)#]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_link_of_a_page_leads_to_a_file(page: Path):
    links = LINK.findall(CODE.sub("", page.read_text()))
    assert [link for link in links if not (page.parent / link).exists()] == []


def list_anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_anchor_of_a_link_is_a_heading_of_its_page(page: Path):
    links = re.findall(r"\]\(([\w./]*\.md)?#([^)]+)\)", CODE.sub("", page.read_text()))
    pages = [(page.parent / link if link else page, anchor) for link, anchor in links]
    known = [(p, anchor) for p, anchor in pages if p.name != "api.md"]  # headings of docstrings
    assert [(p.name, a) for p, a in known if a not in list_anchors(p)] == []


def test_a_link_to_an_anchor_is_found():
    assert "what-is-refused" in list_anchors(DOCS / "compile_reference.md")
    assert "compile_reference.md#what-is-refused" in (DOCS / "limits.md").read_text()


def test_every_error_is_in_the_catalogue():
    sources = "".join(path.read_text() for path in (ROOT / "partita").rglob("*.py"))
    errors = re.findall(r"^class ((?!_)\w+)\(\w*(?:Error|Errors)\b", sources, re.MULTILINE)
    page = (DOCS / "errors.md").read_text()
    inner = {"Unkeyed"}  # caught where it is raised
    assert {e for e in errors if not re.search(rf"\b{e}`", page)} == inner


def test_the_first_line_of_every_error_is_on_the_page_of_errors():
    pytest.importorskip("mkdocs", reason="the site's builder is not installed")
    hook = runpy.run_path(str(DOCS / "hooks/pages.py"))
    page = hook["on_page_markdown"]((DOCS / "errors.md").read_text())
    for text in (
        "add: two meshes in one operation",
        "...: two meshes in one operation",
        "distribute_batch: the ranks have not read the same batch",
        "capture: the step calls ..., a custom operator",
        "zero: this model is sharded already",
        "the ranks pass different arguments",
        "...: its rule does not fit this call",
        "the recompute of ... makes a call that its forward did not make",
    ):
        assert text in page
    assert len(hook["list_messages"]()) > 200


def test_every_example_is_a_part_of_its_page():
    shown = re.findall(r"<!-- source: (\S+) -->", (DOCS / "examples.md").read_text())
    there = [p for p in (ROOT / "examples").rglob("*.*") if "__pycache__" not in p.parts]
    assert sorted(shown) == sorted(str(p.relative_to(ROOT)) for p in there)


@pytest.mark.parametrize("page", ABOUT_CODE, ids=lambda page: page.stem)
def test_what_a_page_names_of_the_code_is_there(page: Path):
    named = re.findall(r"`((?:partita/)?[a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", page.read_text())
    named += re.findall(
        r"`((?:layout|rules|comm|tensor|compile|parallel)/[a-z_/]+)`", page.read_text()
    )
    places = (ROOT, ROOT / "partita")
    assert named
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_the_pictures_are_those_that_the_script_draws():
    drawn = runpy.run_path(str(DOCS / "pictures/draw.py"))["PICTURES"]
    assert {n: (DOCS / "pictures" / n).read_text() for n in drawn} == {
        n: str(draw()) for n, draw in drawn.items()
    }


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {page.name for page in DOCS.glob("*.md")}
    assert pages - set(re.findall(r"\S+\.md", nav)) == set()


def test_every_public_name_is_in_the_reference():
    shown = re.findall(r"^::: partita\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    torchs = {"DeviceMesh"}
    assert sorted(shown) == sorted(set(pt.__all__) - torchs)


@pytest.mark.slow
def test_what_the_reference_shows_of_modules_can_be_imported_from_there():
    shown = re.findall(r"^::: (partita\.\S+\.\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert len(shown) > 10
    for path in shown:
        home, _, name = path.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(home), name)), path


def test_every_public_name_says_what_it_is():
    assert [name for name in pt.__all__ if not inspect.getdoc(getattr(pt, name))] == []
