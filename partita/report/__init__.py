"""Reports: a run of training, or a captured step, as one page that needs no network.

In reading order: run_facts (what is known of a run), page (the page), figures (its pictures).
"""

from .page import check_plotly, write_report
from .run_facts import RunFacts, read_log

__all__ = ["RunFacts", "check_plotly", "read_log", "write_report"]
