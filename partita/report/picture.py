"""Pictures of layouts: a grid that shows which rank holds which part of a tensor, also as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import product

from partita.layout import Layout, Mesh
from partita.layout.text import escape_controls

_PIECES_SHOWN = 8
"""The most pieces of a dimension that are drawn. If there are more, the last one says how many."""
_PANELS_SHOWN = 8
_RANKS_SHOWN = 4
"""The most ranks along an axis that a cell names. If there are more: the first two and the last."""


@dataclass(frozen=True)
class DimPiece:
    """A shard of one dimension in a picture, and which ranks hold it.

    Attributes:
        offset, length: the position of the piece, in elements.
        at: (axis, coordinate) of the ranks that hold this piece, for each axis that splits the
            dimension.
        left_out: 0 for a piece that is drawn. If there are too many pieces, one of them represents
            several that are not drawn, and this is their number.
    """

    offset: int
    length: int
    at: tuple[tuple[str, int], ...] = ()
    left_out: int = 0

    def __str__(self) -> str:
        """`0:4`, in the notation of slices."""
        if self.left_out:
            return f"{self.left_out} more"
        return f"{self.offset}:{self.offset + self.length}"


@dataclass(frozen=True)
class PictureCell:
    """A cell of a picture: one shard of the tensor, and the ranks that hold it.

    Attributes:
        ranks: the ranks as text. "0, 1" is Replicate on these ranks, "0 = 1" Invariant, "0 + 1" a
            Partial sum, "max(0 1)" a Partial max, and "" is not drawn.
        color: the index of the cell's color.
        pending: True if the piece is Partial.
    """

    ranks: str
    color: int
    pending: bool


@dataclass(frozen=True)
class Panel:
    """A two-dimensional slice of the tensor in a picture.

    Attributes:
        where: the slice in the other dimensions, such as "dim 0 0:4"; "" if they are not split.
        rows, columns: the pieces of the two drawn dimensions.
        cells: the cells of each row.
    """

    where: str
    rows: tuple[DimPiece, ...]
    columns: tuple[DimPiece, ...]
    cells: tuple[tuple[PictureCell, ...], ...]


@dataclass(frozen=True)
class Picture:
    """A drawing that shows which rank holds which part of a tensor.

    Attributes:
        title: the layout and the mesh, as text.
        down, across: the dimensions that are drawn as rows and columns, or None.
        panels: one for each piece of the other dimensions that are split.
        panels_left_out: the number of panels that are not drawn.
        notes: the meaning of the symbols that occur, and the ranks that hold nothing.
    """

    title: str
    down: int | None
    across: int | None
    panels: tuple[Panel, ...]
    panels_left_out: int
    notes: tuple[str, ...]

    @property
    def corner(self) -> str:
        """The text in the picture's corner, which names the two drawn dimensions: `dim 0↓ 1→`."""
        if self.across is None:
            return ""
        down = "" if self.down is None else f"{self.down}↓ "
        return f"dim {down}{self.across}→"


def draw(layout: Layout, mesh: Mesh) -> Picture:
    """Returns the picture of a tensor with `layout` on `mesh`.

    Raises:
        LayoutError: an axis of the layout is not on the mesh.
    """
    layout.check_axes(mesh)
    pieces = [_find_dim_pieces(layout, mesh, dim) for dim in range(len(layout.shape))]
    down, across = _choose_drawn_dims(layout, mesh)
    others = [d for d in range(len(layout.shape)) if d not in (down, across)]
    rows = (DimPiece(0, 1),) if down is None else pieces[down]
    columns = (DimPiece(0, 1),) if across is None else pieces[across]
    label = _Label(layout, mesh)
    drawn: list[Panel] = []
    left_out = 0
    for place in product(*(pieces[d] for d in others)):
        if any(piece.left_out for piece in place) or len(drawn) >= _PANELS_SHOWN:
            left_out += max([1, *(piece.left_out for piece in place)])
            continue
        split = [(d, p) for d, p in zip(others, place, strict=True) if p.at]
        where = ", ".join(f"dim {d} {piece}" for d, piece in split)
        cells = tuple(
            tuple(label.cell((*place, row, column)) for column in columns) for row in rows
        )
        drawn.append(Panel(where, rows, columns, cells))
    notes = (*label.notes(), *_describe_empty_ranks(layout, mesh))
    return Picture(f"{layout} on {mesh}", down, across, tuple(drawn), left_out, notes)


def _choose_drawn_dims(layout: Layout, mesh: Mesh) -> tuple[int | None, int | None]:
    """Returns the dimensions to draw as rows and columns: the last two that are split, or one."""
    dims = range(len(layout.shape))
    split = [d for d in dims if any(mesh.size(a) > 1 for a in layout.shards[d])]
    whole = [d for d in dims if d not in split]
    plane = sorted((split[-2:] + whole[::-1])[:2])
    if len(plane) < 2:
        return None, plane[0] if plane else None
    return plane[0], plane[1]


def _find_dim_pieces(layout: Layout, mesh: Mesh, dim: int) -> tuple[DimPiece, ...]:
    """Returns the pieces of a dimension that have elements; the last may represent several."""
    if not layout.shape[dim] or not _splitting_axes(layout, mesh, dim):
        return (DimPiece(0, layout.shape[dim]),)
    found = [
        DimPiece(offset, length, tuple(at.items()))
        for at, offset, length in _find_dim_regions(layout, mesh, dim)
        if length
    ]
    if len(found) <= _PIECES_SHOWN:
        return tuple(found)
    shown, rest = found[: _PIECES_SHOWN - 1], found[_PIECES_SHOWN - 1 :]
    length = sum(piece.length for piece in rest)
    return (*shown, DimPiece(rest[0].offset, length, rest[0].at, left_out=len(rest)))


def _splitting_axes(layout: Layout, mesh: Mesh, dim: int) -> tuple[str, ...]:
    return tuple(a for a in layout.shards[dim] if mesh.size(a) > 1)


def _find_dim_regions(
    layout: Layout, mesh: Mesh, dim: int
) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yields each position along the axes that split a dimension, with its offset and length."""
    axes = _splitting_axes(layout, mesh, dim)
    for at in product(*(range(mesh.size(a)) for a in axes)):
        place = dict(zip(axes, at, strict=True))
        rank = tuple(place.get(a, 0) for a in mesh.names)
        yield place, *layout.local_region(mesh, rank)[dim]


def _describe_empty_ranks(layout: Layout, mesh: Mesh) -> Iterator[str]:
    """Yields which ranks hold no element: few by their numbers, many by their coordinates."""
    if 0 in layout.shape:
        yield "it has no element: every rank holds nothing of it"
        return
    holding, where = mesh.size(), []
    for dim in range(len(layout.shape)):
        regions = [*_find_dim_regions(layout, mesh, dim)]
        empty = [place for place, _, length in regions if not length]
        holding = holding // len(regions) * (len(regions) - len(empty))
        if empty:
            where.append(_describe_places(empty, len(regions)))
    count = mesh.size() - holding
    if count > _RANKS_SHOWN:
        yield f"nothing of it: {count:,} of {mesh.size():,} ranks, where {' or '.join(where)}"
    elif count:
        empty_ranks = [
            str(rank)
            for rank, at in enumerate(mesh.coordinates())
            if 0 in layout.local_shape(mesh, at)
        ]
        yield f"nothing of it: rank{'s' * (count > 1)} {', '.join(empty_ranks)}"


def _describe_places(places: Sequence[dict[str, int]], count: int) -> str:
    """Returns which of `count` coordinates these are: "dp=50…63", or the first of them."""
    if len(places[0]) > 1:
        texts = [" ".join(f"{a}={n}" for a, n in place.items()) for place in places]
        return f"{_join_shortened(texts, ', ')} ({len(places):,} of {count:,} places)"
    ((axis, first),), ((_, last),) = places[0].items(), places[-1].items()
    # Coordinates without elements follow all coordinates with elements, so these are a range.
    return f"{axis}={first}" + (f"…{last}" if last > first else "")


class _Label:
    """Writes the ranks of a picture's cells, and the notes on the signs that it has used."""

    def __init__(self, layout: Layout, mesh: Mesh):
        self.layout, self.mesh, self.count = layout, mesh, 0
        # All ranks that split a dimension without elements hold the same: nothing.
        pairs = zip(layout.shape, layout.shards, strict=True)
        split = {a for size, axes in pairs if size for a in axes}
        free = [a for a in mesh.names if a not in split and mesh.size(a) > 1]
        pending = dict(layout.partial)
        self.copies = [a for a in free if a not in pending and a not in layout.invariant]
        self.same = [a for a in free if a in layout.invariant]
        self.shares = [(a, pending[a]) for a in free if a in pending]

    def cell(self, place: Sequence[DimPiece]) -> PictureCell:
        if any(piece.left_out for piece in place):
            return PictureCell("", 0, False)
        at = dict(pair for piece in place for pair in piece.at)
        self.count += 1
        return PictureCell(self._format_ranks(at), self.count - 1, bool(self.shares))

    def _format_ranks(self, at: dict[str, int]) -> str:
        free = [(a, ", ") for a in self.copies] + [(a, " = ") for a in self.same]
        free += [(a, " + " if op == "sum" else op) for a, op in self.shares]
        return self._join_ranks(at, free)

    def _join_ranks(self, at: dict[str, int], free: Sequence[tuple[str, str]]) -> str:
        if not free:
            rank = 0
            for axis, n in zip(self.mesh.names, self.mesh.sizes, strict=True):
                rank = rank * n + at.get(axis, 0)
            return str(rank)
        (axis, sign), *rest = free
        n = self.mesh.size(axis)
        where = range(n) if n <= _RANKS_SHOWN else (0, 1, n - 1)
        parts = [self._join_ranks({**at, axis: i}, rest) for i in where]
        if n > _RANKS_SHOWN:
            parts.insert(2, "…")
        return f"{sign}({' '.join(parts)})" if sign in ("max", "min") else sign.join(parts)

    def notes(self) -> Iterator[str]:
        if self.copies:
            yield f"a, b: each rank along {' '.join(self.copies)} has all of it"
        if self.same:
            yield f"a = b: so along {' '.join(self.same)}, by the same computation on each"
        for axis, op in self.shares:
            sign = "a + b" if op == "sum" else f"{op}(a b)"
            yield f"{sign}: each rank along {axis} has a share of the {op}"


def _join_shortened(texts: Sequence[str], sign: str) -> str:
    if len(texts) > _RANKS_SHOWN:
        texts = [texts[0], texts[1], "…", texts[-1]]
    return sign.join(texts)


# -- as HTML ---------------------------------------------------------------------------------------

_HATCH = "repeating-linear-gradient(45deg, rgba(0,0,0,.09) 0 4px, rgba(255,255,255,0) 4px 9px), "
_FONT = "font: 12px/1.35 ui-monospace, Menlo, Consolas, monospace"
_RULER = "opacity:.65; white-space:nowrap; padding:2px 6px; text-align:center; align-self:center"


def html_of(picture: Picture, width: int = 560) -> str:
    """Returns the picture as an HTML `<div>` with inline styles. Its text is escaped.

    The drawing is at most `width` pixels wide, but a cell is never narrower than its text.
    """
    panels = "".join(_panel_html(one, picture, width) for one in picture.panels)
    notes = [*picture.notes]
    if picture.panels_left_out:
        notes.insert(0, f"{picture.panels_left_out} more of these are not drawn")
    below = "".join(f"<div>{escape(escape_controls(note))}</div>" for note in notes)
    title = escape(escape_controls(picture.title))
    return (
        f'<div class="partita-layout" style="{_FONT}; max-width:100%; overflow-x:auto">'
        f'<div style="font-weight:600; margin-bottom:4px">{title}</div>'
        f'<div style="display:flex; flex-wrap:wrap; gap:14px">{panels}</div>'
        f'<div style="opacity:.75; margin-top:4px">{below}</div></div>'
    )


def _panel_html(panel: Panel, picture: Picture, width: int) -> str:
    tracks = " ".join(
        f"minmax(max-content, {_fraction_of_dim(p, panel.columns)}fr)" for p in panel.columns
    )
    tall = min(260, 70 + 26 * len(panel.rows))  # pixels of all rows together
    heights = " ".join(
        f"minmax(2.2em, {round(_fraction_of_dim(p, panel.rows) * tall)}px)" for p in panel.rows
    )
    pixels = width if len(picture.panels) == 1 else max(220, width // 2 - 8)
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


def _fraction_of_dim(piece: DimPiece, of: Sequence[DimPiece]) -> float:
    """Returns the fraction of the width of a drawing that a piece gets."""
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
