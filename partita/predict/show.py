"""Pictures of tensors: `pt.show` on a terminal, HTML in a notebook."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TextIO

from torch import nn

from partita.comm import wire_of
from partita.layout import Layout
from partita.layout.text import describe_value, escape_controls
from partita.report.picture import Panel, Picture, draw, html_of
from partita.tensor.dtensor import DTensor

from .rehearsal import make_refusal

_BYTE_STREAMS = (io.RawIOBase, io.BufferedIOBase)
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


@dataclass(frozen=True)
class Shown:
    """What `pt.show` displays: pictures of one tensor, or of a model's parameters.

    `str` returns plain text; a notebook shows `_repr_html_()`.

    Attributes:
        pictures: the pictures, by name; the name is "" for a single tensor.
    """

    pictures: tuple[tuple[str, Picture], ...]

    def __str__(self) -> str:
        return "".join(text for text, _ in self._styled_parts()).rstrip("\n")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for name, picture in self.pictures:
            head = f"<div><b>{escape(escape_controls(name))}</b></div>" if name else ""
            parts.append(head + html_of(picture))
        return "".join(parts)

    def __rich__(self) -> Any:
        """Returns the same in colours, for rich."""
        from rich.text import Text

        whole = Text(no_wrap=True)
        for text, style in self._styled_parts():
            whole.append(text, style)
        whole.rstrip()
        return whole

    def _styled_parts(self) -> list[tuple[str, str]]:
        """Pieces of text, and the style of each. Names of parameters and of axes are a user's."""
        parts: list[tuple[str, str]] = []
        for name, picture in self.pictures:
            head = escape_controls(f"{name}  " * bool(name) + picture.title)
            parts.append((f"{head}\n", "bold"))
            for panel in picture.panels:
                parts += _format_panel(panel, picture)
            if picture.panels_left_out:
                parts.append((f"{picture.panels_left_out} more of these are not drawn\n", "dim"))
            parts += [(f"{escape_controls(note)}\n", "dim") for note in picture.notes]
        return parts


def show(x: Any, mesh: Any = None, *, out: TextIO | None = None) -> Shown | None:
    """Draws which rank holds which part of a tensor: colored text, or a picture in a notebook.

        pt.show(weight)
        pt.show(model)                                    # its parameters; equal pictures once
        pt.show(pt.Layout.parse("f32[8@dp, 16@tp]"), mesh)

    Args:
        x: a DTensor, a module with DTensor parameters, or a `Layout`. Characters in names that are
            not printable are escaped.
        mesh: the mesh of a `Layout`; it may be a dry mesh. Do not pass it for tensors.
        out: a text stream to write to; standard output by default. Colors need a terminal and the
            package rich.

    Returns:
        In a notebook: the picture. Otherwise None.

    Raises:
        LayoutError: `x` has another type; the mesh of a `Layout` is missing or lacks an axis; a
            mesh was passed for something that has one; or `out` cannot be written to.
    """
    if out is not None and (not hasattr(out, "write") or isinstance(out, _BYTE_STREAMS)):
        fix = 'with open("layouts.txt", "w") as out: pt.show(x, out=out)'
        raise make_refusal(f"out is {describe_value(out)}: a text stream", fix)
    shown = Shown(tuple(_draw_pictures(x, mesh)))
    if out is None and _in_notebook():
        return shown
    _write_shown(shown, sys.stdout if out is None else out)
    return None


def _draw_pictures(x: Any, mesh: Any) -> list[tuple[str, Picture]]:
    if mesh is not None and isinstance(x, DTensor | nn.Module):
        raise make_refusal(
            f"mesh has no effect on {describe_value(x)}, whose tensors have their own mesh",
            "pt.show(x)",
            "pt.show(layout, mesh)",
            reason="a tensor is drawn on its own mesh, and a layout by itself on any mesh",
        )
    if isinstance(x, DTensor):
        return [("", draw(x.layout_over_mesh, x._spec.wire.mesh))]
    if isinstance(x, Layout):
        if mesh is None:
            raise make_refusal("a layout by itself is on no mesh", "pt.show(x, mesh)")
        return [("", draw(x, wire_of(mesh).mesh))]
    if isinstance(x, nn.Module):
        alike: dict[Picture, list[str]] = {}
        for name, p in x.named_parameters():
            if isinstance(p, DTensor):
                found = draw(p.layout_over_mesh, p._spec.wire.mesh)
                alike.setdefault(found, []).append(name)
        if alike:
            return [(f"{names[0]}{_count_more(names)}", one) for one, names in alike.items()]
    raise make_refusal(
        f"show draws a DTensor, not {type(x).__name__}",
        "pt.distribute_tensor(x, mesh, placements)",
        "pt.parallelize(model, mesh)",
        reason="which rank holds what is known of tensors that are spread over a mesh",
    )


def _count_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _in_notebook() -> bool:
    """True in a notebook, which shows the value that a cell returns."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _write_shown(shown: Shown, out: TextIO) -> None:
    if getattr(out, "isatty", bool)():
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            pass
        else:
            Console(file=out, highlight=False).print(shown, soft_wrap=True)
            return
    print(_make_encodable(str(shown), out), file=out)


def _make_encodable(text: str, out: TextIO) -> str:
    """Returns text in characters that the stream can write; if needed, lines are drawn in ASCII."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


_ASCII = str.maketrans("┌┬┐├┼┤└┴┘─│…↓→", "+++++++++-|~v>")


# -- a panel as text -------------------------------------------------------------------------------


def _format_panel(panel: Panel, picture: Picture) -> list[tuple[str, str]]:
    head = ["" if picture.across is None else str(piece) for piece in panel.columns]
    side = ["" if picture.down is None else str(piece) for piece in panel.rows]
    corner = picture.corner
    left = max(map(len, [corner, *side]))
    columns = zip(head, *([cell.ranks for cell in row] for row in panel.cells), strict=True)
    widths = [max(map(len, texts)) + 2 for texts in columns]
    parts = [(f"{panel.where}\n", "bold")] if panel.where else []
    top = " ".join(text.center(w) for text, w in zip(head, widths, strict=True))
    parts.append((f"{corner.rjust(left)}  {top.rstrip()}\n" if corner else "", "dim"))
    parts.append((f"{' ' * left} {_format_line('┌┬┐', widths)}\n", "dim"))
    for i, (text, cells) in enumerate(zip(side, panel.cells, strict=True)):
        if i:
            parts.append((f"{' ' * left} {_format_line('├┼┤', widths)}\n", "dim"))
        parts.append((f"{text.rjust(left)} │", "dim"))
        for cell, width in zip(cells, widths, strict=True):
            style = f"bold black on {_COLORS[cell.color % len(_COLORS)]}" if cell.ranks else "dim"
            parts += [((cell.ranks or "…").center(width), style), ("│", "dim")]
        parts.append(("\n", ""))
    parts.append((f"{' ' * left} {_format_line('└┴┘', widths)}\n", "dim"))
    return parts


def _format_line(corners: str, widths: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * w for w in widths) + corners[2]
