"""How does a test run a script in a process of its own, without waiting for imports?

    ran = run_script(tmp_path / "block.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr

The process is forked from a server that has imported torch and partita, as those of `gloo_ranks`.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

__all__ = ["PRELOADED", "run_script"]

PRELOADED = ["torch", "torch.distributed.device_mesh", "partita", "partita.checkpoint.dcp_format"]
"""What the server has imported. There is one server in a process, so it is the same for all."""


def run_script(
    script: Path, *arguments: str, cwd: Path, ignored: Sequence[type[Warning]] = ()
) -> CompletedProcess[str]:
    """Runs a script as `python -W error script arguments` in the folder `cwd`.

    Args:
        ignored: warnings that are no errors.

    Returns:
        The exit code and the output, as `subprocess.run` does.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context.Process(
            target=_run, args=(str(script), arguments, str(cwd), str(out), str(err), ignored)
        )
        process.start()
        try:
            process.join()
        finally:  # the test's time is over
            process.kill()
        return CompletedProcess(
            [str(script), *arguments], process.exitcode, out.read_text(), err.read_text()
        )


def _run(
    script: str,
    arguments: Sequence[str],
    cwd: str,
    out: str,
    err: str,
    ignored: Sequence[type[Warning]],
) -> None:
    for file, fd in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), fd)
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    warnings.simplefilter("error")
    for category in ignored:
        warnings.simplefilter("ignore", category)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
