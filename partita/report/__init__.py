"""Reports: a run of training, or a captured step, as one page that needs no network.

In reading order: run_facts (what is known of a run), timeline (of a step), page (the page), figures
(its pictures).
"""

from .page import check_plotly, write_report
from .run_facts import RunFacts, read_log
from .timeline import HasTimeline, TimelineEvent, save_trace

__all__ = [
    "HasTimeline",
    "RunFacts",
    "TimelineEvent",
    "check_plotly",
    "read_log",
    "save_trace",
    "write_report",
]
