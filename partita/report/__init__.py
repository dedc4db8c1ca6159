"""Reports: a run of training, or a captured step, as one page that needs no network.

In reading order: `run_facts` (what is known of a run: its log, the timeline of a step), `picture`
(which rank holds what of a tensor, drawn), `page` (as HTML, with figures by plotly).
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
