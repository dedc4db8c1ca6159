"""Reports: a training run, or a captured step, as one HTML page that works without a network.

In reading order: `run_facts` (the facts of a run: its log, the timeline of a step), `picture`
(which rank holds which part of a tensor, drawn), `page` (HTML, with figures by plotly).
"""

from .page import check_outputs, check_plotly, check_written_folder, write_report, written_file
from .run_facts import HasTimeline, RunFacts, TimelineEvent, read_log, read_logs, save_trace

__all__ = [
    "HasTimeline",
    "RunFacts",
    "TimelineEvent",
    "check_outputs",
    "check_plotly",
    "check_written_folder",
    "read_log",
    "read_logs",
    "save_trace",
    "write_report",
    "written_file",
]
