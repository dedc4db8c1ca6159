"""The script that `launch` runs for each rank: `python -m partita` with another SIGINT handler.

SIGINT ends the rank immediately, as SIGKILL does. A KeyboardInterrupt would wait for the end of a
kernel or a collective, and print a traceback. The parent process reports what happened. The handler
is set before anything that takes long to import.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def start_rank() -> None:
    """Runs `python -m partita` with this process's arguments, as one rank of a job."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.path.insert(0, os.getcwd())
    runpy.run_module("partita", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    start_rank()
