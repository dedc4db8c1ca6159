"""Pictures of layouts as HTML: self-contained, in a notebook or a report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .picture import DimPiece, Panel, Picture, PictureCell

__all__ = ["html_of"]

_HATCH = "repeating-linear-gradient(45deg, rgba(0,0,0,.09) 0 4px, rgba(255,255,255,0) 4px 9px), "
_FONT = "font: 12px/1.35 ui-monospace, Menlo, Consolas, monospace"
_RULER = "opacity:.65; white-space:nowrap; padding:2px 6px; text-align:center; align-self:center"


def html_of(picture: Picture, width: int = 560) -> str:
    """A `<div>` with inline styles alone. What stands in it is escaped.

    Args:
        width: in pixels, at the most; a cell is never narrower than what it says.
    """
    panels = "".join(_panel_html(one, picture, width) for one in picture.panels)
    notes = [*picture.notes]
    if picture.panels_left_out:
        notes.insert(0, f"{picture.panels_left_out} more of these are not drawn")
    below = "".join(f"<div>{escape(note)}</div>" for note in notes)
    return (
        f'<div class="partita-layout" style="{_FONT}; max-width:100%; overflow-x:auto">'
        f'<div style="font-weight:600; margin-bottom:4px">{escape(picture.title)}</div>'
        f'<div style="display:flex; flex-wrap:wrap; gap:14px">{panels}</div>'
        f'<div style="opacity:.75; margin-top:4px">{below}</div></div>'
    )


def _panel_html(panel: Panel, picture: Picture, width: int) -> str:
    tracks = " ".join(
        f"minmax(max-content, {_fraction_of_dim(p, panel.columns)}fr)" for p in panel.columns
    )
    heights = " ".join(
        f"minmax(2.2em, {round(_fraction_of_dim(p, panel.rows) * _choose_panel_height(panel))}px)"
        for p in panel.rows
    )
    pixels = _choose_panel_width(picture, width)
    grid = (
        f"display:grid; grid-template-columns:max-content {tracks}; "
        f"grid-template-rows:max-content {heights}; gap:2px; width:{pixels}px"
    )
    corner = escape(picture.corner)
    body = [f'<div style="{_RULER}">{corner}</div>']
    body += [f'<div style="{_RULER}">{_ruler_html(p, picture.across)}</div>' for p in panel.columns]
    for piece, cells in zip(panel.rows, panel.cells, strict=True):
        body.append(f'<div style="{_RULER}">{_ruler_html(piece, picture.down)}</div>')
        body += map(_cell_html, cells)
    where = f'<div style="margin-bottom:2px">{escape(panel.where)}</div>' if panel.where else ""
    return f'<div style="max-width:100%">{where}<div style="{grid}">{"".join(body)}</div></div>'


def _choose_panel_width(picture: Picture, width: int) -> int:
    return width if len(picture.panels) == 1 else max(220, width // 2 - 8)


def _choose_panel_height(panel: Panel) -> int:
    """Pixels of all rows together."""
    return min(260, 70 + 26 * len(panel.rows))


def _fraction_of_dim(piece: DimPiece, of: Sequence[DimPiece]) -> float:
    """How much of the dimension a piece is; what stands for many is drawn as one."""
    lengths = [of[0].length if p.left_out else p.length for p in of]
    length = of[0].length if piece.left_out else piece.length
    return round(length / max(sum(lengths), 1), 4) or 1


def _ruler_html(piece: DimPiece, dim: int | None) -> str:
    return "" if dim is None else escape(str(piece))


def _cell_html(cell: PictureCell) -> str:
    if not cell.ranks:
        return f'<div style="{_RULER}">…</div>'
    color = f"hsl({cell.color * 137.5 % 360:.0f} 62% 80%)"
    background = f"{_HATCH if cell.pending else ''}linear-gradient({color}, {color})"
    style = (
        f"background:{background}; color:#1b1b1b; border-radius:4px; padding:4px 8px; "
        "display:flex; align-items:center; justify-content:center; white-space:nowrap"
    )
    return f'<div style="{style}">{escape(cell.ranks)}</div>'
