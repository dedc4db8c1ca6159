"""The pictures of `how_it_works.md`. Run, this writes them beside itself."""

from __future__ import annotations

from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, SOFT, BLUE, GREEN, YELLOW, GREY = (
    "#0f172a", "#475569", "#bfdbfe", "#c7f0d2", "#fde68a", "#e2e8f0",
)  # fmt: skip


class Picture:
    def __init__(self, width: int, height: int):
        self.width, self.height, self.parts = width, height, []

    def text(self, x, y, said, size=12.0, bold=False, fill=INK, anchor="middle"):
        weight = "bold" if bold else "normal"
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
            f'font-weight="{weight}" fill="{fill}">{escape(said)}</text>'
        )

    def box(self, x, y, width, height, title, lines=(), fill=GREY):
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" '
            f'stroke="#334155" stroke-width="1.2"/>'
        )
        middle, top = x + width / 2, y + height / 2 - 8 * len(lines) + 4
        self.text(middle, top, title, 13, bold=True)
        for i, line in enumerate(lines):
            self.text(middle, top + 17 + 15 * i, line, 11, fill=SOFT)

    def arrow(self, x1, y1, x2, y2, said="", dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#334155" stroke-width="1.4" '
            f'marker-end="url(#tip)"{dash}/>'
        )
        if said:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, said, 11, fill=SOFT)

    def __str__(self) -> str:
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#334155"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" '
            f'font-family="Helvetica, Arial, sans-serif">'
        )
        back = f'<rect width="{self.width}" height="{self.height}" fill="white"/>'
        return "\n".join([head, tip, back, *self.parts, "</svg>", ""])


def draw_rooms() -> Picture:
    """The rooms, each on those that it may import."""
    p = Picture(940, 490)
    rows = [
        ("app, predict", "the trainer of `partita train`; plans and times without running", GREY),
        ("parallel, remat, checkpoint", "models on a mesh, ZeRO; recomputation; files", BLUE),
        (
            "compile, guards",
            "pt.compile; what a step reads of Python, and when it changes",
            BLUE,
        ),
        ("capture, graph", "a step as one graph; its passes, memory schedule and backends", BLUE),
        ("tensor", "DTensor, dispatch, plans of calls, autograd, aliasing", BLUE),
        ("comm", "wires, the ledger, agreement: the only room that sends", YELLOW),
    ]
    for i, (title, line, fill) in enumerate(rows):
        p.box(170, 16 + 66 * i, 600, 52, title, [line], fill)
        p.arrow(470, 68 + 66 * i, 470, 80 + 66 * i)
    p.box(170, 412, 190, 60, "rules", ["sentences, rows, the table"], GREEN)
    p.box(375, 412, 190, 60, "redistribute", ["moves, plans, their cost"], GREEN)
    p.box(580, 412, 190, 60, "layout", ["placements, duality, errors"], GREEN)
    p.text(855, 436, "without torch,", 11, fill=SOFT)
    p.text(855, 452, "but for kernels of rules", 11, fill=SOFT)
    return p


def draw_call() -> Picture:
    """x + y: the hot path, and what happens the first time."""
    p = Picture(940, 330)
    p.box(20, 40, 150, 60, "x + y", ["two DTensors"], GREY)
    p.box(215, 40, 190, 60, "key", ["specs, and what the rule reads"], BLUE)
    p.box(450, 40, 190, 60, "CallPlan", ["found in the op's cache"], BLUE)
    p.box(685, 40, 235, 60, "local kernel, then re-tag", ["aten::add on this rank's piece"], GREEN)
    p.arrow(170, 70, 213, 70)
    p.arrow(405, 70, 448, 70, "hit")
    p.arrow(640, 70, 683, 70)
    p.text(470, 22, "every call: tensor/dispatch.py and its twin in C", 12, bold=True)
    p.text(20, 142, "the first call of a key: tensor/plan_call.py", 12, bold=True, anchor="start")
    p.arrow(385, 100, 385, 158)
    p.text(394, 132, "miss", 11, fill=SOFT, anchor="start")
    p.box(20, 160, 240, 60, "rule", ['"... + ... -> ..."'], GREY)
    p.box(350, 160, 170, 60, "bind, rows", ["names to dimensions"], GREY)
    p.box(560, 160, 170, 60, "choose", ["the cheapest row"], GREY)
    p.box(770, 160, 150, 60, "redistribute", ["moves to get there"], GREY)
    p.arrow(260, 190, 348, 190)
    p.arrow(520, 190, 558, 190)
    p.arrow(730, 190, 768, 190)
    p.arrow(800, 160, 600, 102, dashed=True)
    p.text(760, 128, "remembered", 11, fill=SOFT)
    p.box(560, 258, 360, 54, "Wire.carry(move, piece)", ["what is sent, into the ledger"], YELLOW)
    p.arrow(845, 220, 845, 256)
    p.text(290, 282, "backward: plain autograd of the local kernels;", 12)
    p.text(290, 300, "a moved operand's node carries the transposed moves", 12)
    return p


def draw_gathers() -> Picture:
    """ZeRO-3 over time: which blocks' weights are there."""
    p = Picture(940, 250)
    blocks, width, left = 4, 92, 130
    for i in range(blocks):
        p.text(70, 70 + 42 * i, f"block {i}", 12, bold=True)
    order = [*range(blocks), *reversed(range(blocks))]
    for at, i in enumerate(order):
        x = left + at * width
        here = "backward" if at >= blocks else "forward"
        fill = YELLOW if at >= blocks else GREEN
        p.parts.append(
            f'<rect x="{x}" y="{50 + 42 * i}" width="{width - 4}" height="32" rx="4" '
            f'fill="{fill}" stroke="#334155"/>'
        )
        p.text(x + width / 2 - 2, 71 + 42 * i, here, 11)
        if at and order[at - 1] != i:  # under way while the one before computes
            p.parts.append(
                f'<rect x="{x - width}" y="{50 + 42 * i}" width="{width - 4}" height="32" rx="4" '
                f'fill="none" stroke="#334155" stroke-dasharray="4 3"/>'
            )
            p.text(x - width / 2 - 2, 71 + 42 * i, "under way", 10, fill=SOFT)
    p.text(left + blocks * width / 2, 32, "forward", 13, bold=True)
    p.text(left + blocks * width * 1.5, 32, "backward", 13, bold=True)
    p.text(470, 238, "In each column at most two blocks: one in use, one under way.", 12, fill=SOFT)
    return p


def draw_step() -> Picture:
    """A captured step: from Python to a program, and a later call."""
    p = Picture(940, 250)
    stages = [
        ("capture", ["fake tensors", "under guard"], BLUE),
        ("functionalize", ["writes become", "values"], BLUE),
        ("passes", ["dedupe ... overlap", "memory schedule"], BLUE),
        ("agree", ["one key on", "all ranks"], YELLOW),
        ("compile", ["Inductor, store;", "one rank a host"], GREEN),
        ("run", ["donated state,", "wires"], GREEN),
    ]
    for i, (title, lines, fill) in enumerate(stages):
        p.box(20 + 155 * i, 50, 125, 76, title, lines, fill)
        if i:
            p.arrow(-8 + 155 * i, 88, 18 + 155 * i, 88)
    p.text(470, 28, "the first call", 13, bold=True)
    p.box(20, 180, 280, 50, "a later call", ["the same tensors and guards?"], GREY)
    p.arrow(300, 205, 855, 205)
    p.text(560, 198, "yes: microseconds", 11, fill=SOFT)
    p.arrow(857, 205, 857, 128)
    p.arrow(82, 180, 82, 128)
    p.text(92, 158, "no: another program, and step.reasons says why", 11, fill=SOFT, anchor="start")
    return p


PICTURES = {
    "rooms.svg": draw_rooms,
    "call.svg": draw_call,
    "gathers.svg": draw_gathers,
    "step.svg": draw_step,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / name).write_text(str(draw()))
