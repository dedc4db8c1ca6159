"""The first lines of a rank that `launch` starts: `python -m partita` with another SIGINT handler.

SIGINT ends the rank at once, as SIGKILL does. An exception would wait for the end of a kernel or a
collective, and leave a traceback. The process that started the rank reports what happened. Run as a
script, before anything that takes long to import.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys


def start_rank() -> None:
    """Run the program that the arguments name."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    sys.path.insert(0, os.getcwd())
    runpy.run_module("partita", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    start_rank()
