"""Report pages: self-contained HTML about one run or several, with figures by plotly.

Text from other sources is escaped. Before any work, output files are checked to be writable.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from partita.layout import Layout
from partita.layout.text import escape_controls, human

from .picture import draw, html_of
from .run_facts import RunFacts, TimelineEvent, join_short_events, parse_mesh, trace_bytes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_TIMES = ("s", "ms", "us")
_LAYOUTS_SHOWN = 24
_BREAKS = re.compile(r"([\n\t])")
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d1d1f; margin: 0 auto; max-width: 1180px;
       padding: 24px; background: #fff; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 34px 0 8px; }
table { border-collapse: collapse; font-size: 13px; } th { text-align: left; color: #555; }
td, th { padding: 3px 12px 3px 0; border-bottom: 1px solid #eee; vertical-align: top;
         white-space: pre-wrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { background: #f6f6f8; padding: 12px; border-radius: 6px; overflow-x: auto; }
.runs { display: grid; gap: 28px; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); }
.runs > div { min-width: 0; } .layout { margin: 14px 0; } .note { color: #666; font-size: 13px; }
.table { overflow-x: auto; } .warning { color: #a3301c; white-space: pre-wrap; margin: 4px 0; }
"""
# This is at the end of the page, because a browser that has not read the next column makes this one
# as wide as the page. A picture is drawn again if its column gets another width.
_DRAW = """
const places = new ResizeObserver(found => found.forEach(one => Plotly.Plots.resize(one.target)));
for (const place of document.querySelectorAll(".figure")) {
  const {data, layout} = JSON.parse(place.nextElementSibling.textContent);
  Plotly.newPlot(place, data, layout, {displayModeBar: false}).then(() => places.observe(place));
}
"""


def check_plotly() -> None:
    """Raises ValueError if plotly, which draws the figures, is not installed."""
    if importlib.util.find_spec("plotly") is None:
        raise ValueError("a report needs plotly: pip install plotly")


def write_report(path: str | Path, *runs: RunFacts) -> None:
    """Writes an HTML page about one training run, or about several side by side.

    Args:
        path: the HTML file to write, about 5 MB: it includes plotly.
        runs: the facts of each run.

    Raises:
        ValueError: plotly is not installed.
        OSError: the file cannot be written.
    """
    check_plotly()
    # JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
    page = _page_html(_tell_apart(runs))
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")


def _tell_apart(runs: Sequence[RunFacts]) -> list[RunFacts]:
    """Returns the runs with distinct names: "name (2)" for the second run of a name."""
    found: list[RunFacts] = []
    for i, run in enumerate(runs):
        before = sum(one.name == run.name for one in runs[:i])
        found.append(replace(run, name=f"{run.name} ({before + 1})") if before else run)
    return found


def _page_html(runs: Sequence[RunFacts]) -> str:
    from plotly.offline import get_plotlyjs

    title = _escape(", ".join(run.name for run in runs))
    body = "\n".join(_make_sections(runs))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n"
        f"<body><h1>{title}</h1>\n{body}\n<script>{_DRAW}</script></body></html>\n"
    )


def _make_sections(runs: Sequence[RunFacts]) -> Iterator[str]:
    yield _side_by_side("", runs, _summary_html)
    if any(run.steps for run in runs):
        yield f"<h2>Loss and speed</h2>{_figure_html(_loss_figure(runs))}"
    yield _side_by_side("Timeline of a step", runs, _timeline_html)
    yield _side_by_side("Memory over a step", runs, _memory_html)
    yield _side_by_side("Bytes by line of the program", runs, _moves_html)
    yield _side_by_side("What the passes did", runs, _passes_html)
    yield _side_by_side("Layouts of the parameters", runs, _layouts_html)
    yield _side_by_side("What the model writes", runs, _sample_html)


def _side_by_side(title: str, runs: Sequence[RunFacts], section: Callable[[RunFacts], str]) -> str:
    """Returns one section of each run; nothing if no run has it."""
    found = [(run, section(run)) for run in runs]
    if not any(text for _, text in found):
        return ""
    name = (lambda run: f"<h3>{_escape(run.name)}</h3>") if len(runs) > 1 else (lambda run: "")
    cells = "".join(f"<div>{name(run)}{text}</div>" for run, text in found)
    return (f"<h2>{title}</h2>" if title else "") + f'<div class="runs">{cells}</div>'


def _escape(text: str) -> str:
    """Returns text from outside as HTML, with its line breaks and tabs.

    Other control characters are replaced by their escapes.
    """
    parts = _BREAKS.split(text)
    return escape("".join(p if p in ("\n", "\t") else escape_controls(p) for p in parts))


def _figure_html(figure: Any) -> str:
    """Returns the HTML of a figure: an empty element and its data, which `_DRAW` draws in it."""
    facts = figure.to_json().replace("<", "\\u003c")  # which would end the script
    return (
        f'<div class="figure" style="height:{figure.layout.height}px"></div>'
        f'<script type="application/json">{facts}</script>'
    )


def _table_html(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Returns a table. Cells that begin with a digit are aligned to the right."""
    cells = "".join(f"<th>{_escape(h)}</th>" for h in head)
    lines = [f"<tr>{cells}</tr>"] if head else []
    for row in rows:
        texts = [_escape(str(value)) for value in row]
        kinds = [' class="number"' if _is_figure(t) else "" for t in texts]
        cells = "".join(f"<td{k}>{t}</td>" for k, t in zip(kinds, texts, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="table"><table>{"".join(lines)}</table></div>'


def _table_of(head: Sequence[str], rows: Iterable[Mapping[str, Any]], *keys: str) -> str:
    """Returns a table with a row for each of `rows`: a size, and then other values.

    Args:
        keys: the key of the size, and the keys of the other values.
    """
    size, *others = keys
    cells = [(_format_size(row[size]), *(row[key] or "-" for key in others)) for row in rows]
    return _table_html(head, cells)


def _note_html(text: str) -> str:
    return f'<p class="note">{text}</p>'


def _is_figure(text: str) -> bool:
    number, _, unit = text.replace(",", "").partition(" ")
    return number.rstrip("%").replace(".", "", 1).isdigit() and unit in ("", *_UNITS, *_TIMES)


def _format_size(nbytes: float) -> str:
    return human(nbytes, "0 B")


# -- the sections of a run -------------------------------------------------------------------------


def _summary_html(run: RunFacts) -> str:
    rows: list[tuple[str, Any]] = [*_describe_run(run)]
    if run.steps:
        last, late = run.steps[-1], run.steps[1:] or run.steps
        seconds = sorted(s["seconds"] for s in late)[len(late) // 2]
        rows += [
            ("steps", _describe_steps(run)),
            ("last loss", f"{last['loss']:.4f}"),
            ("a step, median", f"{seconds * 1e3:.1f} ms"),
            ("sent by a rank in a step", _format_size(last["nbytes"])),
        ]
        shares = sorted(s["mfu"] for s in late if "mfu" in s)
        if shares:
            rows.append(("MFU, median", f"{shares[len(shares) // 2]:.1%}"))
    if run.memory is not None and not run.figures:
        peak = _format_size(_find_peak(run.memory))
        rows.append(("peak of a step, predicted, with what is held", peak))
    given = [(f"--{name}", value) for name, value in run.options.items() if value is not False]
    options = ""
    if given:
        options = f"<details><summary>options</summary>{_table_html((), given)}</details>"
    tables = "".join(_table_html((), table) for table in (rows, run.figures) if table)
    notes = [f"The run did not reach its end: {run.stopped}"] * bool(run.stopped)
    notes += [f"{note[:1].upper()}{note[1:]}." for note in run.notes]
    warnings = (f'<p class="warning">{_escape(note)}</p>' for note in notes)
    return "".join(warnings) + tables + options


def _describe_run(run: RunFacts) -> Iterator[tuple[str, Any]]:
    """Yields what was trained, on what, and when."""
    options = run.options
    if run.began is not None:
        with suppress(ValueError, OverflowError, OSError):  # a year out of range
            began = datetime.fromtimestamp(run.began, UTC)
            yield "began", f"{began:%Y-%m-%d %H:%M} UTC"
    if "mesh" in options:
        stage = f", ZeRO-{options['zero']}" if options.get("zero") else ""
        yield "mesh", f"{options['mesh'] or 'one rank'}{stage}"
    sizes = ("layers", "width", "heads", "context")
    if any(size in options for size in sizes):
        yield "model", ", ".join(f"{size} {options[size]}" for size in sizes if size in options)
    if "parameters" in run.about:
        yield "parameters", f"{run.about['parameters']:,}"


def _describe_steps(run: RunFacts) -> str:
    """Returns how many steps ran; also which, if they are not all that were requested."""
    first, last, requested = run.steps[0]["step"], run.steps[-1]["step"], run.options.get("steps")
    count = f"{len(run.steps):,}"
    if first == 0 and requested in (None, len(run.steps)):
        return count
    of = f" of {requested}" if requested is not None else ""
    return f"{count}{of}: {first} to {last}"


def _find_peak(memory: dict[str, Any]) -> int:
    """Returns the most bytes that a rank holds at any place of the step."""
    totals = [sum(at) for at in zip(*memory["live"].values(), strict=True)]
    return int(sum(memory["held"].values()) + max(totals, default=0))


def _timeline_html(run: RunFacts) -> str:
    if not run.timeline:
        return ""
    trace = base64.b64encode(trace_bytes(run.timeline)).decode()
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in run.name)
    link = (
        f'<a download="{name}.json.gz" href="data:application/gzip;base64,{trace}">all '
        f"{len(run.timeline):,} events as a trace</a>, for ui.perfetto.dev"
    )
    note = f"{_escape(run.timeline_source)}. Work that is shorter than the picture tells apart is "
    note += f"joined; {link}.{_escape(_describe_other_ways(run))}"
    return _figure_html(_timeline_figure(run)) + _note_html(note)


def _describe_other_ways(run: RunFacts) -> str:
    """Returns which collectives the timeline has in place of those in the ledger; "" if none."""
    requested = {move["kind"] for move in run.moves if move["nbytes"]}
    run_there = {e.kind for e in run.timeline} & {*_COLLECTIVES}
    others, gone = (
        ", ".join(sorted(a - b)) for a, b in ((run_there, requested), (requested, run_there))
    )
    if not others or not gone:  # extra collectives alone may be reads of values
        return ""
    return f" Collectives are named by what the backend runs: {others}, to do {gone}."


def _memory_html(run: RunFacts) -> str:
    if run.memory is None:
        return ""
    head = ("at the peak", "what", "class", "line")
    note = "Predicted from the schedule of the captured step, on one rank; what an allocator keeps "
    table = _table_of(head, run.memory["holders"], "nbytes", "name", "kind", "source")
    return _figure_html(_memory_figure(run)) + _note_html(f"{note}beyond it is not in it.") + table


def _moves_html(run: RunFacts) -> str:
    sending = sorted((m for m in run.moves if m["nbytes"]), key=lambda m: -m["nbytes"])
    if not sending:
        return ""
    head = ("sent", "times", "move", "axes", "why", "line")
    keys = ("nbytes", "count", "kind", "axes", "reason", "source")
    return _figure_html(_moves_figure(run)) + _table_of(head, sending[:24], *keys)


def _passes_html(run: RunFacts) -> str:
    if not run.passes:
        return ""
    head = ("pass", "what it did", "collectives", "sent", "peak above the inputs")
    rows = []
    for one in run.passes:
        sizes = ([_format_size(n) for n in one[what]] for what in ("sent", "peak"))
        pairs = [one["collectives"], *sizes]
        figures = [f"{a} → {b}" if a != b else "=" for a, b in pairs]
        rows.append((one["name"], one["did"] or one["promise"], *figures))
    note = "Peaks here are of the graph, run node by node, above what is held between steps. That "
    note += "of the memory over a step is of the code that was made of it, where fewer results are "
    note += "kept, and with what is held."
    return _figure_html(_passes_figure(run)) + _note_html(note) + _table_html(head, rows)


def _draw_layout(layout: str, mesh: str) -> str:
    try:
        return html_of(draw(Layout.parse(layout), parse_mesh(mesh)), width=460)
    except ValueError:  # the name of an axis has blanks, so the text cannot be parsed
        return f"<div>{_escape(layout)} over {_escape(mesh)}</div>"


def _layouts_html(run: RunFacts) -> str:
    alike: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for name, layout, mesh, nbytes in run.layouts:
        alike.setdefault((layout, mesh), []).append((name, nbytes))
    found = []
    for (layout, mesh), members in [*alike.items()][:_LAYOUTS_SHOWN]:
        picture = _draw_layout(layout, mesh)
        names = ", ".join(name for name, _ in members[:3])
        more = f" and {len(members) - 3} more" if len(members) > 3 else ""
        held = _format_size(sum(nbytes for _, nbytes in members))
        about = f"{_escape(names)}{more}: {held} on a rank"
        found.append(f'<div class="layout"><div>{about}</div>{picture}</div>')
    left = len(alike) - _LAYOUTS_SHOWN
    return "".join(found) + (_note_html(f"and {left} more layouts") if left > 0 else "")


def _sample_html(run: RunFacts) -> str:
    return f"<pre>{_escape(run.sample)}</pre>" if run.sample else ""


# -- figures ---------------------------------------------------------------------------------------

_CLASSES = {
    "weights": "#4269d0",
    "optimizer": "#9498a0",
    "gradients": "#efb118",
    "arguments": "#c9c9c9",
    "gathered": "#6cc5b0",
    "activations": "#ff725c",
    "backward": "#a463f2",
    "workspace": "#97bbf5",
}
"""Colours of classes of memory, from the bottom of the figure to the top."""
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
_BARS = 400
"""The number of parts of a timeline that are drawn separately. Each is two pixels wide, because
narrower bars would cover each other.
"""
_POINTS = 2000
"""The most places of a schedule that are drawn. Of several adjacent ones, the highest is drawn."""


def _figure_layout(height: int, **more: Any) -> dict[str, Any]:
    return {
        "template": "plotly_white",
        "height": height,
        "margin": {"l": 70, "r": 30, "t": 30, "b": 50},
        # Above the picture, so that a legend of several rows does not cover it.
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
        **more,
    }


def _new_figure(*titles: str) -> Any:
    """Returns an empty figure with a column for each title; with one column without titles."""
    from plotly.subplots import make_subplots

    return make_subplots(rows=1, cols=len(titles) or 1, subplot_titles=titles or None)


def _label(text: str) -> str:
    """Returns text from outside for a figure, without the tags and entities that plotly reads."""
    return escape(escape_controls(text), quote=False)


def _loss_figure(runs: Sequence[RunFacts]) -> Any:
    """Returns a figure of loss and tokens per second of each step, with the runs side by side."""
    figure = _new_figure("loss (nats per token)", "tokens per second")
    for run, color in zip(runs, _RUNS * len(runs), strict=False):
        steps = [s["step"] for s in run.steps]
        rates = [s.get("tokens_per_second") for s in run.steps]
        for column, values in ((1, [s["loss"] for s in run.steps]), (2, rates)):
            figure.add_scatter(
                x=steps,
                y=values,
                name=_label(run.name),
                mode="lines" if len(steps) > 40 else "lines+markers",
                line={"color": color},
                legendgroup=_label(run.name),
                showlegend=column == 1 and len(runs) > 1,
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    below = {"orientation": "h", "y": -0.22, "yanchor": "top"}
    figure.update_layout(**_figure_layout(400, legend=below))
    return figure


def _memory_figure(run: RunFacts) -> Any:
    """Returns a figure of memory over a step, stacked by class."""
    assert run.memory is not None
    places, live, held = run.memory["places"], run.memory["live"], run.memory["held"]
    kept = _places_shown([sum(at) for at in zip(*live.values(), strict=True)], len(places))
    figure = _new_figure()
    for name, color in _CLASSES.items():
        bottom = held.get(name, 0)
        values = [bottom + (live[name][i] if name in live else 0) for i in kept]
        if any(values):
            figure.add_scatter(
                x=kept,
                y=[v / _MIB for v in values],
                name=_label(name),
                stackgroup="memory",
                line={"width": 0.5, "color": color, "shape": "hv"},
                customdata=[_label(places[i]) for i in kept],
                hovertemplate="%{y:.2f} MiB at %{customdata}",
            )
    figure.update_xaxes(title_text="place in the step (forward, backward, update)")
    figure.update_yaxes(title_text="MiB on a rank")
    figure.update_layout(**_figure_layout(380))
    return figure


def _timeline_figure(run: RunFacts) -> Any:
    """Returns the timeline of each stream, in milliseconds, with a bar for each kind of work."""
    events = join_short_events(run.timeline, _BARS)
    kinds = dict.fromkeys([*_KINDS, *sorted({e.kind for e in events})])
    figure = _new_figure()
    for kind in kinds:
        mine = [e for e in events if e.kind == kind]
        if not mine:
            continue
        figure.add_bar(
            y=[_label(e.stream) for e in mine],
            base=[e.start * 1e3 for e in mine],
            x=[e.seconds * 1e3 for e in mine],
            orientation="h",
            name=_label(kind.replace("_", "-")),
            marker={"color": _KINDS.get(kind, _KINDS["other"]), "line": {"width": 0}},
            width=0.8,
            customdata=[(_label(_describe_event(e)), e.seconds * 1e3) for e in mine],
            hovertemplate="%{customdata[1]:.4g} ms: %{customdata[0]}<extra></extra>",
        )
    streams = dict.fromkeys(_label(e.stream) for e in run.timeline)
    figure.update_xaxes(title_text="milliseconds since the step began")
    figure.update_yaxes(
        categoryorder="array", categoryarray=[*streams], autorange="reversed", automargin=True
    )
    layout = _figure_layout(150 + 60 * len(streams), hovermode="closest", barmode="overlay")
    figure.update_layout(**layout)
    return figure


def _describe_event(event: TimelineEvent) -> str:
    """Returns the text of an event under the mouse pointer."""
    sent = [f"{event.nbytes / _MIB:.4g} MiB"] if event.nbytes else []
    parts = [event.kind, event.name, event.phase, *sent, event.source]
    return ", ".join(filter(None, parts))


def _places_shown(totals: Sequence[int], count: int) -> list[int]:
    """Returns at most `_POINTS` of the places to draw: of each few adjacent places the highest.

    Args:
        totals: the bytes at each place.
    """
    if count <= _POINTS:
        return list(range(count))
    few = -(-count // _POINTS)
    return [
        max(range(i, min(i + few, count)), key=lambda j: totals[j] if totals else 0)
        for i in range(0, count, few)
    ]


def _moves_figure(run: RunFacts) -> Any:
    """Returns the bytes that a rank sends in a step, by line of the program."""
    sent: dict[str, Counter[str]] = {}  # by kind and then by line
    lines = Counter[str]()
    for move in run.moves:
        line = move["source"] or _NO_LINE
        lines[line] += move["nbytes"]
        if move["nbytes"]:
            kind = f"{move['kind']} ({move['reason']})"
            sent.setdefault(kind, Counter())[line] += move["nbytes"]
    shown = [line for _, line in sorted((n, line) for line, n in lines.items() if n)[-16:]]
    figure = _new_figure()
    for kind, by_line in sent.items():
        figure.add_bar(
            y=[_label(line) for line in shown],
            x=[by_line[line] / _MIB for line in shown],
            name=_label(kind),
            orientation="h",
        )
    figure.update_xaxes(title_text="MiB sent by a rank in a step")
    figure.update_yaxes(automargin=True)
    beside = {"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"}
    height = max(160 + 26 * len(shown), 120 + 20 * len(sent))
    figure.update_layout(
        **_figure_layout(height, barmode="stack", hovermode="closest", legend=beside)
    )
    return figure


def _passes_figure(run: RunFacts) -> Any:
    """Returns a figure of the predicted peak and the bytes that a rank sends, after each pass."""
    figure = _new_figure("peak above the inputs, MiB", "sent, MiB")
    names = ["captured", *(p["name"] for p in run.passes)]
    for column, what in ((1, "peak"), (2, "sent")):
        values = [run.passes[0][what][0], *(p[what][1] for p in run.passes)]
        figure.add_scatter(
            x=[_label(name) for name in names],
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


# -- files to be written ---------------------------------------------------------------------------


def check_outputs(outputs: Mapping[str, str | Path | None], inputs: Iterable[Path] = ()) -> None:
    """Raises ValueError if a file cannot be written, is named twice, or is also read.

    Args:
        outputs: maps each option to the file that it writes, or to None.
        inputs: files that the command reads.
    """
    paths = {option: Path(path) for option, path in outputs.items() if path is not None}
    for option, path in paths.items():
        folder = path.absolute().parent
        if not folder.is_dir() or path.is_dir():
            raise ValueError(f"{option}: {path} is not a file in an existing folder")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise ValueError(f"{option}: {path} may not be written by this user")
    taken = {os.path.realpath(path): "is also an input" for path in inputs}
    for option, path in paths.items():
        if path.exists() and not path.is_file():  # a terminal or a pipe: nothing is replaced
            continue
        if os.path.realpath(path) in taken:
            raise ValueError(f"{option}: {path} {taken[os.path.realpath(path)]}: name another file")
        taken[os.path.realpath(path)] = f"is also the output of {option}"


def written_file(text: str) -> Path:
    """Returns the path `text` of an output file, after a check that it can be written.

    Use it as the `type` of an argparse argument. If the check fails, argparse shows the error.
    """
    try:
        check_outputs({"": text})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
    return Path(text)


def check_written_folder(path: Path, option: str) -> None:
    """Raises ValueError unless `path` is a folder in which this user may write, or can become one.

    `option` is the name of the option in the message.
    """
    above = path.absolute()
    while not above.exists() and above.parent != above:
        above = above.parent
    if not above.is_dir():
        what = "is no folder" if above == path.absolute() else f"is in no folder: {above} is a file"
        raise ValueError(f"{option}: {path} {what}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: this user may not create files in {above}")
