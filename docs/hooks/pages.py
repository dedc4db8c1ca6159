"""Pages of the site that stand in the repository's root, and where the public names are defined."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
EVERY_MESSAGE = "<!-- every message -->"
SOURCE = re.compile(r"^<!-- source: (\S+) -->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".sbatch": "sh", ".yaml": "yaml"}
LINKS = {**PAGES, "examples": "examples.md"}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")  # files of the sources, which the site lacks


def follow_link(link: re.Match) -> str:
    """A link as the site has it: between pages, or the text alone where a file is no page."""
    text, target = link.groups()
    if target in LINKS:
        return f"[{text}]({LINKS[target]})"
    return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        if (ROOT / name).exists():
            content = LINK.sub(follow_link, (ROOT / name).read_text())
            files.append(File.generated(config, page, content=content))
    return files


def find_definition(named: re.Match) -> str:
    """The path at which mkdocstrings, reading sources, finds what programs import from elsewhere:
    `partita.ranks` is a function for Python, but there is a module of that name, too."""
    home, _, name = named[1].rpartition(".")
    value = getattr(importlib.import_module(home), name)
    path = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__name__}"
    return f"::: {path}"


_PYTHONS = {"RuntimeError", "KeyError", "IndexError", "AssertionError", "ZeroDivisionError"}
_NO_PLACE = {"bench", "testing", "rules", "predict", "report"}  # of errors of the library itself


def list_messages() -> list[str]:
    """The first line of each error of the package, with `...` for what it puts in."""
    found = set()
    for path in sorted((ROOT / "partita").rglob("*.py")):
        if path.relative_to(ROOT / "partita").parts[0] in _NO_PLACE:
            continue
        tree = ast.parse(path.read_text())
        frames = {"not_captured": [ast.Constant("capture: "), None]} | _find_frames(tree)
        for node in ast.walk(tree):
            found |= set(map(_read_text, _find_messages(node, frames)))
    return sorted(text for text in found if re.search(r"[a-z]{3}.* .*[a-z]{3}", text))


def _find_frames(tree: ast.Module) -> dict[str, list[ast.expr | None]]:
    """The functions that make an error of a part of its first line, their first argument: the parts
    of that line, None where it stands."""
    frames = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.FunctionDef) and node.name.endswith("_error")):
            continue
        names = [arg.arg for arg in node.args.args if arg.arg != "self"][:1]
        for call in ast.walk(node):
            if not (isinstance(call, ast.Call) and call.args and _name_of(call).endswith("Error")):
                continue
            parts = [
                None if getattr(getattr(part, "value", None), "id", "") in names else part
                for part in _parts_of(call.args[0])
            ]
            if None in parts:
                frames[node.name] = parts
    return frames


def _find_messages(node: ast.AST, frames: dict[str, list[ast.expr | None]]) -> list[ast.expr]:
    if isinstance(node, ast.FunctionDef):  # where `fact` has a default
        defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return [default for arg, default in defaults if arg.arg == "fact" and default]
    if not isinstance(node, ast.Call):
        return []
    name = _name_of(node)
    facts = [k.value for k in node.keywords if k.arg == "fact"]
    if name in frames and node.args:
        said = _parts_of(node.args[0])
        parts = [said if part is None else [part] for part in frames[name]]
        facts.append(ast.JoinedStr([part for some in parts for part in some]))
    elif name.lower().endswith("error") and name not in _PYTHONS and node.args:
        facts.append(node.args[0])
    return facts


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _parts_of(text: ast.expr) -> list[ast.expr]:
    return text.values if isinstance(text, ast.JoinedStr) else [text]


def _read_text(text: ast.expr) -> str:
    parts = [p.value if isinstance(p, ast.Constant) else "..." for p in _parts_of(text)]
    return re.sub(r"(\.\.\. ?)+\.\.\.", "...", "".join(map(str, parts))).partition("\n")[0].strip()


def show_source(named: re.Match) -> str:
    path = ROOT / named[1]
    return f"```{LANGUAGES[path.suffix]}\n{path.read_text().rstrip()}\n```"


def on_page_markdown(markdown: str, **_) -> str:
    for name, page in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    markdown = SOURCE.sub(show_source, OUTSIDE.sub(r"`\1`", markdown))
    if EVERY_MESSAGE in markdown:
        lines = "\n".join(list_messages())
        markdown = markdown.replace(EVERY_MESSAGE, f"```text\n{lines}\n```")
    return re.sub(r"^::: (partita\S+)$", find_definition, markdown, flags=re.MULTILINE)
