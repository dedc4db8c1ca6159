"""Figures of a report, by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .run_facts import RunFacts
from .timeline import TimelineEvent, join_short_events

__all__ = [
    "COLLECTIVES",
    "loss_figure",
    "memory_figure",
    "moves_figure",
    "passes_figure",
    "timeline_figure",
]

CLASSES = (
    "weights",
    "optimizer",
    "gradients",
    "arguments",
    "gathered",
    "activations",
    "backward",
    "workspace",
)
"""Classes of memory, from the bottom of the figure to the top."""
_COLORS = (
    "#4269d0",
    "#9498a0",
    "#efb118",
    "#c9c9c9",
    "#6cc5b0",
    "#ff725c",
    "#a463f2",
    "#97bbf5",
)
_RUNS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#efb118")
_MIB = 1 << 20
_NO_LINE = "(no line of the program)"
_KINDS = {
    "forward": "#c6dbef",
    "backward": "#fdd0a2",
    "update": "#c7e9c0",
    "matmul": "#4269d0",
    "attention": "#a463f2",
    "elementwise": "#97bbf5",
    "other": "#9498a0",
}
_COLLECTIVES = {
    "all_gather": "#efb118",
    "reduce_scatter": "#ff725c",
    "all_reduce": "#e03a5b",
    "all_to_all": "#9c6b4e",
    "broadcast": "#3ca951",
    "send": "#6cc5b0",
}
_KINDS |= _COLLECTIVES
"""Colours of what streams do, in the order of the legend."""
COLLECTIVES = (*_COLLECTIVES,)
"""Kinds of collectives, as moves and timelines call them."""
_BARS = 400
"""Parts of a timeline that are told apart: two pixels each, as bars of less cover others."""
_POINTS = 2000
"""Places of a schedule that are drawn; of more, the highest of each few."""


def _figure_layout(height: int, **more: Any) -> dict[str, Any]:
    return {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 70, "r": 30, "t": 30, "b": 50},
        # Of more rows the legend grows away from what is drawn.
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
        **more,
    }


def loss_figure(runs: Sequence[RunFacts]) -> Any:
    """Loss and tokens per second of each step; the runs side by side."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("loss (nats per token)", "tokens per second")
    )
    for run, color in zip(runs, _RUNS * len(runs), strict=False):
        steps = [s["step"] for s in run.steps]
        rates = [s.get("tokens_per_second") for s in run.steps]
        for column, values in ((1, [s["loss"] for s in run.steps]), (2, rates)):
            figure.add_scatter(
                x=steps,
                y=values,
                name=run.name,
                mode="lines" if len(steps) > 40 else "lines+markers",
                line={"color": color},
                legendgroup=run.name,
                showlegend=column == 1 and len(runs) > 1,
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    below = {"orientation": "h", "y": -0.22, "yanchor": "top"}
    figure.update_layout(**_figure_layout(400, legend=below))
    return figure


def memory_figure(run: RunFacts) -> Any:
    """Memory over a step, stacked by class."""
    import plotly.graph_objects as go

    assert run.memory is not None
    places, live, held = run.memory["places"], run.memory["live"], run.memory["held"]
    kept = _places_shown([sum(at) for at in zip(*live.values(), strict=True)], len(places))
    figure = go.Figure()
    for name, color in zip(CLASSES, _COLORS, strict=True):
        bottom = held.get(name, 0)
        values = [bottom + (live[name][i] if name in live else 0) for i in kept]
        if any(values):
            figure.add_scatter(
                x=kept,
                y=[v / _MIB for v in values],
                name=name,
                stackgroup="memory",
                line={"width": 0.5, "color": color, "shape": "hv"},
                customdata=[places[i] for i in kept],
                hovertemplate="%{y:.2f} MiB at %{customdata}",
            )
    figure.update_xaxes(title_text="place in the step (forward, backward, update)")
    figure.update_yaxes(title_text="MiB on a rank")
    figure.update_layout(**_figure_layout(380))
    return figure


def timeline_figure(run: RunFacts) -> Any:
    """What each stream does when, in milliseconds; a bar of each kind of work."""
    import plotly.graph_objects as go

    events = join_short_events(run.timeline, _BARS)
    kinds = dict.fromkeys([*(k for k in _KINDS), *sorted({e.kind for e in events})])
    figure = go.Figure()
    for kind in kinds:
        mine = [e for e in events if e.kind == kind]
        if not mine:
            continue
        figure.add_bar(
            y=[e.stream for e in mine],
            base=[e.start * 1e3 for e in mine],
            x=[e.seconds * 1e3 for e in mine],
            orientation="h",
            name=kind.replace("_", "-"),
            marker={"color": _KINDS.get(kind, _KINDS["other"]), "line": {"width": 0}},
            width=0.8,
            customdata=[(_label_event(e), e.seconds * 1e3) for e in mine],
            hovertemplate="%{customdata[1]:.4g} ms: %{customdata[0]}<extra></extra>",
        )
    streams = dict.fromkeys(e.stream for e in run.timeline)
    figure.update_xaxes(title_text="milliseconds since the step began")
    figure.update_yaxes(
        categoryorder="array", categoryarray=[*streams], autorange="reversed", automargin=True
    )
    layout = _figure_layout(150 + 60 * len(streams), hovermode="closest", barmode="overlay")
    figure.update_layout(**layout)
    return figure


def _label_event(event: TimelineEvent) -> str:
    """What stands beside an event that one points at."""
    sent = [f"{event.nbytes / _MIB:.4g} MiB"] if event.nbytes else []
    parts = [event.kind, event.name, event.phase, *sent, event.source]
    return ", ".join(filter(None, parts))


def _places_shown(totals: Sequence[int], count: int) -> list[int]:
    """The places to draw: of each few that stand together the one at which most is held."""
    if count <= _POINTS:
        return list(range(count))
    few = -(-count // _POINTS)
    return [
        max(range(i, min(i + few, count)), key=lambda j: totals[j] if totals else 0)
        for i in range(0, count, few)
    ]


def moves_figure(run: RunFacts) -> Any:
    """Bytes that a rank sends in a step, by the line of the program that asks for them."""
    import plotly.graph_objects as go

    lines: dict[str, int] = {}
    for move in run.moves:
        line = move["source"] or _NO_LINE
        lines[line] = lines.get(line, 0) + move["nbytes"]
    top = sorted((n, line) for line, n in lines.items() if n)[-16:]
    shown = [line for _, line in top]
    figure = go.Figure()
    kinds = dict.fromkeys(f"{m['kind']} ({m['reason']})" for m in run.moves if m["nbytes"])
    for kind in kinds:
        total = dict.fromkeys(shown, 0)
        for move in run.moves:
            line = move["source"] or _NO_LINE
            if f"{move['kind']} ({move['reason']})" == kind and line in total:
                total[line] += move["nbytes"]
        figure.add_bar(
            y=shown, x=[total[line] / _MIB for line in shown], name=kind, orientation="h"
        )
    figure.update_xaxes(title_text="MiB sent by a rank in a step")
    figure.update_yaxes(automargin=True)
    beside = {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"}
    height = max(160 + 26 * len(shown), 120 + 20 * len(kinds))
    figure.update_layout(
        **_figure_layout(height, barmode="stack", hovermode="closest", legend=beside)
    )
    return figure


def passes_figure(run: RunFacts) -> Any:
    """The predicted peak above the inputs and the bytes that a rank sends, after each pass."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("peak above the inputs, MiB", "sent, MiB")
    )
    names = ["captured", *(p["name"] for p in run.passes)]
    for column, what in ((1, "peak"), (2, "sent")):
        values = [run.passes[0][what][0], *(p[what][1] for p in run.passes)]
        figure.add_scatter(
            x=names,
            y=[v / _MIB for v in values],
            mode="lines+markers",
            line={"shape": "hv", "color": _RUNS[0]},
            showlegend=False,
            row=1,
            col=column,
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_layout(**_figure_layout(340))
    return figure
