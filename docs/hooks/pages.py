"""Pages of the site that stand in the repository's root, and where the public names are defined."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import partita

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def follow_link(link: re.Match) -> str:
    """A link as the site has it: between pages, or the text alone where a file is no page."""
    text, target = link.groups()
    if target in PAGES:
        return f"[{text}]({PAGES[target]})"
    return f"[{text}]({target.removeprefix('docs/')})" if target.startswith("docs/") else text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        if (ROOT / name).exists():
            content = LINK.sub(follow_link, (ROOT / name).read_text())
            files.append(File.generated(config, page, content=content))
    return files


def find_definition(named: re.Match) -> str:
    """The path at which mkdocstrings, reading sources, finds a public name: `partita.ranks` is a
    function for Python, but there is a module of that name, too."""
    value = getattr(partita, named[1])
    path = value.__name__ if inspect.ismodule(value) else f"{value.__module__}.{value.__name__}"
    return f"::: {path}"


def on_page_markdown(markdown: str, **_) -> str:
    return re.sub(r"^::: partita\.(\w+)$", find_definition, markdown, flags=re.MULTILINE)
